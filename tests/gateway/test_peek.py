from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.errors import BadRequestError
from loraledger.gateway.paths import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, TOKENIZE, Form
from loraledger.gateway.peek import REFUSED, STEERING, Peek
from loraledger.gateway.peek import peek as peek_at
from support import bodies


def peek(body: bytes, form: Form = CHAT) -> Peek:
    return peek_at(body, form)


def test_what_is_not_looked_at_arrives_byte_for_byte() -> None:
    body = (
        b'{ "messages" : [ {"role": "user",  "content":"\\u00e9\\n"} ],"model":"alpaca", "seed":'
        b'123456789012345678901234567890 ,"temperature":1.0e-1,"future":{"x" : [1, 2.50]},"cache_salt":"s" }'
    )
    assert peek(body).rewrite("alpaca@3fa9c1d20b7e") == (
        b'{"messages":[ {"role": "user",  "content":"\\u00e9\\n"} ],"model":"alpaca@3fa9c1d20b7e","seed":'
        b'123456789012345678901234567890,"temperature":1.0e-1,"future":{"x" : [1, 2.50]},"cache_salt":"s"}'
    )


def test_of_a_name_that_comes_twice_the_last_one_counts_here_and_for_the_engine() -> None:
    looked = peek(b'{"model":"mine","stream":true,"model":"other","stream":false,"\\u006dodel":"last"}')
    assert (looked.model, looked.stream) == ("last", False)
    assert looked.rewrite("e") == b'{"model":"e","stream":false}'


def test_the_same_body_can_be_written_for_a_second_replica() -> None:
    looked = peek(b'{"model":"a","prompt":"x"}', COMPLETIONS)
    assert (looked.rewrite("one"), looked.rewrite("two")) == (
        b'{"model":"one","prompt":"x"}',
        b'{"model":"two","prompt":"x"}',
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"a"',
        b'{"model":"a",}',
        b'{"model":"a"} x',
        b"\xef\xbb\xbf{}",
        '{"model":"a"}'.encode("utf-16"),
        '{"model":"a"}'.encode("utf-16-le"),
        '{"model":"a"}'.encode("utf-32-be"),
        b"[1]",
        b"null",
        b'"model"',
        b'{"model":"a","x":01}',
        b'{"model":"a","x":NaN}',
        b'{"model":"a","x":-Infinity}',
        b'{"model":"a","x":"\xff"}',
        b'{"model":"a","x":"\xed\xa0\x80"}',
        b'{"model":"a","x":"\xc0\x80"}',
        b'{"model":"a","x":"\\ud800 half a pair"}',
        b'{"model":"a","\\udc00 half a pair":1}',
        b'{"model":"a","x":"\x01"}',
        b'{"model":"a","x":"\\x41"}',
        b'{"model":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="the body"):
        peek(body)


@pytest.mark.parametrize("model", [b"null", b"1", b'["a"]', b'{"a":1}', b"true"])
def test_a_model_that_is_not_a_string_is_refused(model: bytes) -> None:
    with pytest.raises(BadRequestError, match="model") as caught:
        peek(b'{"model":' + model + b"}")
    assert caught.value.param == "model"


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(BadRequestError, match="model is missing"):
        peek(b"{}")


@pytest.mark.parametrize(
    "field",
    [b'"stream":null', b'"max_tokens":"x"', b'"max_tokens":1.5', b'"n":null', b'"messages":7', b'"future":"yes"'],
)
def test_a_wrong_type_in_a_field_that_is_passed_on_is_for_the_engine_to_answer(field: bytes) -> None:
    looked = peek(b'{"model":"a",' + field + b"}")
    assert looked.rewrite("a") == b'{"model":"a",' + field + b"}"
    assert (looked.stream, looked.max_tokens) == (False, None)


@pytest.mark.parametrize(
    "name", [*sorted(STEERING), "lora_path", "lora_request", "lora_adapter", "lora_anything", "lora"]
)
def test_fields_that_steer_an_engine_never_pass(name: str) -> None:
    body = json.dumps({name: {"x": 1}, "model": "a", "prompt": "p"}).encode()
    assert json.loads(peek(body).rewrite("a")) == {"model": "a", "prompt": "p"}


@pytest.mark.parametrize("said", [b"1", b"0", b'"yes"', b'"true"', b"1.0", b"[]", b"{}"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"a","stream":%b}', "stream"),
        (b'{"model":"a","stream":true,"stream_options":{"include_usage":%b}}', "stream_options.include_usage"),
    ],
)
def test_a_flag_that_engines_would_read_in_their_own_way_is_refused(body: bytes, param: str, said: bytes) -> None:
    with pytest.raises(BadRequestError, match="must be true or false") as caught:
        peek(body % said)
    assert caught.value.param == param


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_if_it_were_dropped_is_refused_by_name(name: str) -> None:
    for said in ('{"a":1}', '"x"', "true", "[]"):
        with pytest.raises(BadRequestError, match="not taken from clients") as caught:
            peek(f'{{"model":"a","{name}":{said}}}'.encode())
        assert caught.value.param == name
    for nothing in ("null", "{}", '""', "false"):
        assert peek(f'{{"model":"a","{name}":{nothing}}}'.encode()).rewrite("a") == b'{"model":"a"}'


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "chat_templat\\u0065"])
def test_arguments_for_the_template_are_no_way_to_the_renderer(name: str) -> None:
    body = f'{{"model":"a","chat_template_kwargs":{{"enable_thinking":true,"{name}":null}}}}'
    with pytest.raises(BadRequestError, match="chat_template_kwargs"):
        peek(body.encode())


@pytest.mark.parametrize("said", [b'{"enable_thinking":false}', b"null", b'"x"', b"[]"])
def test_other_arguments_for_the_template_pass(said: bytes) -> None:
    body = b'{"model":"a","chat_template_kwargs":%b}' % said
    assert peek(body).rewrite("a") == body


def test_what_an_engine_would_keep_of_an_answer_is_neither_asked_for_nor_read() -> None:
    body = b'{"model":"a","input":"x","store":true,"background":false,"previous_response_id":null,"store":true}'
    assert peek(body, RESPONSES).rewrite("a") == b'{"model":"a","input":"x","store":false}'
    for field in (b'"background":true', b'"background":1', b'"previous_response_id":"resp_1"'):
        with pytest.raises(BadRequestError, match="nothing of an answer is kept"):
            peek(b'{"model":"a","input":"x",%b}' % field, RESPONSES)
    assert b"store" not in peek(b'{"model":"a"}', CHAT).rewrite("a")


@pytest.mark.parametrize("form", [RESPONSES, MESSAGES])
def test_a_stream_that_reports_usage_unasked_is_not_asked(form: Form) -> None:
    looked = peek(b'{"model":"a","stream":true,"stream_options":{"include_usage":"?"},"store":false}', form)
    assert (looked.stream, looked.asked_usage) == (True, True)
    assert json.loads(looked.rewrite("a"))["stream_options"] == {"include_usage": "?"}


@pytest.mark.parametrize("form", [EMBEDDINGS, TOKENIZE])
def test_where_nothing_is_generated_there_is_no_stream_and_no_token(form: Form) -> None:
    looked = peek(b'{"model":"a","input":"xyz","prompt":"xyz","stream":"?","max_tokens":7,"n":3}', form)
    assert (looked.stream, looked.max_tokens, looked.prompt_bytes) == (False, 0, 5)


@pytest.mark.parametrize(
    ("form", "fields", "tokens"),
    [
        (RESPONSES, {"max_output_tokens": 5, "max_tokens": 7, "n": 3}, 5),
        (RESPONSES, {"max_tokens": 7}, None),
        (MESSAGES, {"max_tokens": 7, "max_completion_tokens": 5, "n": 3}, 7),
        (COMPLETIONS, {"max_tokens": 7, "max_completion_tokens": 5, "n": 3}, 21),
    ],
)
def test_each_path_has_its_own_limit_of_tokens(form: Form, fields: dict[str, object], tokens: int | None) -> None:
    assert peek(json.dumps({"model": "a", **fields}).encode(), form).max_tokens == tokens


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_tokens": 5, "n": 3}, 15),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 10**30}, None),
        ({"max_tokens": True}, None),
        ({}, None),
    ],
)
def test_the_most_tokens_that_may_come_are_known_if_stated(fields: dict[str, object], tokens: int | None) -> None:
    assert peek(json.dumps({"model": "a", **fields}).encode()).max_tokens == tokens


@pytest.mark.parametrize(
    ("options", "asked", "sent"),
    [
        ("", False, {"include_usage": True}),
        ("null", False, {"include_usage": True}),
        ("{}", False, {"include_usage": True}),
        ('{"include_usage":null}', False, {"include_usage": True}),
        ('{"include_usage":false,"continuous_usage_stats":true,"x":1}', False, {"include_usage": True, "x": 1}),
        (
            '{"include_usage":true,"continuous_usage_stats":true}',
            True,
            {"include_usage": True, "continuous_usage_stats": True},
        ),
        ('"nonsense"', True, "nonsense"),
    ],
)
def test_a_stream_is_made_to_report_usage(options: str, asked: bool, sent: object) -> None:
    given_options = f',"stream_options":{options}' if options else ""
    looked = peek(f'{{"model":"a","stream":true{given_options}}}'.encode())
    assert looked.asked_usage is asked
    assert json.loads(looked.rewrite("a"))["stream_options"] == sent


def test_what_is_not_a_stream_is_not_asked_for_usage() -> None:
    assert peek(b'{"model":"a","stream":false}').rewrite("a") == b'{"model":"a","stream":false}'


def test_the_prompts_size_is_that_of_what_the_model_reads() -> None:
    assert peek(b'{"model":"a","prompt":"xyz","user":"uuuuuuu"}', COMPLETIONS).prompt_bytes == 5
    assert peek(b'{"model":"a","messages":[1,2],"tools":[3]}').prompt_bytes == 8


BLOB = "iVBORw0KGgo" * 10_000


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + BLOB}},
        {"type": "input_image", "image_url": "data:image/png;base64," + BLOB},
        {"type": "input_audio", "input_audio": {"data": BLOB, "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "data": BLOB}},
    ],
)
def test_images_and_sounds_are_no_text(part: dict[str, object]) -> None:
    text = {"type": "text", "text": "x" * 70_000}
    body = json.dumps({"model": "a", "messages": [{"role": "user", "content": [text, part]}]}).encode()
    assert 70_000 < peek(body).prompt_bytes < 70_300


@pytest.mark.parametrize("text", ["x" * 100_000, "data:" + BLOB, 'say "data":"' + BLOB + '"'])
def test_text_is_text_however_it_looks(text: str) -> None:
    assert peek(json.dumps({"model": "a", "messages": [{"content": text}]}).encode()).prompt_bytes > len(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.text(max_size=6), _JSON, max_size=6))
def test_unknown_fields_survive_whatever_they_hold(fields: dict[str, object]) -> None:
    dropped = {*STEERING, *REFUSED, "chat_template_kwargs"}
    kept = {name: value for name, value in fields.items() if name not in dropped and not name.startswith("lora")}
    body = {**kept, "model": "alpaca", "stream": False}
    assert json.loads(peek(json.dumps({**fields, **body}).encode()).rewrite("e")) == {**body, "model": "e"}


def same(one: object, other: object) -> bool:
    """Equal in value and kind: 1 is neither 1.0 nor true."""
    return repr(one) == repr(other)


def read(body: bytes) -> Any:
    """As an engine reads it."""
    return json.loads(body)


@settings(max_examples=1500)
@given(seed=st.integers(0, 2**64))
def test_no_body_is_routed_by_another_model_than_the_one_that_an_engine_reads(seed: int) -> None:
    body = bodies.body(seed, {"messages": [{"role": "user", "content": "Hi"}]})
    try:
        looked = peek(body, MESSAGES)
    except BadRequestError:
        return
    theirs = read(body)
    assert theirs["model"] == looked.model
    sent = read(looked.rewrite("engine's"))
    assert sent.pop("model") == "engine's"
    kept = {name: value for name, value in theirs.items() if name not in STEERING and not name.startswith("lora")}
    del kept["model"]
    assert same(sent, kept)


def test_bodies_that_are_drawn_are_of_every_kind() -> None:
    ours, theirs, both, twice = 0, 0, 0, 0
    for seed in range(600):
        body = bodies.body(seed, {})
        try:
            mine: str | None = peek(body, MESSAGES).model
        except BadRequestError:
            mine = None
        try:
            pairs = json.loads(body, object_pairs_hook=list)
        except (ValueError, RecursionError):
            pairs = []
        models = [value for name, value in pairs if name == "model"] if isinstance(pairs, list) else []
        ours += mine is not None
        both += mine is not None and mine == models[-1]
        theirs += bool(models) and mine is None
        twice += len(set(map(repr, models))) > 1 and mine is not None
    assert ours == both > 300
    assert theirs > 20  # what Python's reader takes beyond JSON, and flags that are none
    assert twice > 50
