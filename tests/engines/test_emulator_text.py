from hypothesis import given
from hypothesis import strategies as st

from loraledger.engines.emulator_text import Speech, count_tokens, speaker_of


def test_speech_is_the_same_in_every_version() -> None:
    assert Speech("support@0123456789ab", "hello").text(4) == "gata meso hesa lone"


def test_any_part_of_the_question_changes_the_answer() -> None:
    said = {Speech(speaker, prompt).text(8) for speaker in ("base", "a", "b") for prompt in ("", "x", "y")}
    assert len(said) == 9


@given(st.text(), st.integers(1, 200))
def test_tokens_are_words_that_need_no_escaping(prompt: str, tokens: int) -> None:
    words = Speech("base", prompt).text(tokens).split(" ")
    assert len(words) == tokens
    assert all(word.isascii() and word.isalpha() for word in words)


def test_tokens_do_not_depend_on_the_order_of_asking() -> None:
    forward, backward = Speech("base", "x"), Speech("base", "x")
    assert [forward.token(i) for i in range(100)] == [backward.token(i) for i in reversed(range(100))][::-1]


def test_speaker_is_adapter_and_digest_without_the_generation() -> None:
    assert speaker_of(None) == "base"
    assert speaker_of("support@0123456789ab~3") == speaker_of("support@0123456789ab") == "support@0123456789ab"
    assert speaker_of("plain") == "plain"


def test_prompt_tokens_are_a_quarter_of_the_bytes_and_one() -> None:
    assert [count_tokens(text) for text in ("", "abc", "abcd", "ééé")] == [1, 1, 2, 2]
