from __future__ import annotations

import json

import pytest

from loraledger.gateway.answers import Renamer, Usage, body_usage, error_text, is_json, read_chunk

NAME = "alpaca@3fa9c1d20b7e"
RENAMER = Renamer(NAME, "alpaca")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"id":"1","model":"alpaca@3fa9c1d20b7e","choices":[]}', b'{"id":"1","model":"alpaca","choices":[]}'),
        (b'{"id": "1", "model": "alpaca@3fa9c1d20b7e", "x": 1.0}', b'{"id":"1","model":"alpaca","x":1.0}'),
        (b'{"model":"something else","x":[]}', b'{"model":"alpaca","x":[]}'),
        (b'{"object":"x"}', b'{"object":"x"}'),
        (b"not json", b"not json"),
        (b"[1]", b"[1]"),
        (
            b'{"x":{"model":"alpaca@3fa9c1d20b7e"},"model":"alpaca@3fa9c1d20b7e"}',
            b'{"x":{"model":"alpaca@3fa9c1d20b7e"},"model":"alpaca"}',
        ),
        (
            b'{"model":"alpaca@3fa9c1d20b7e","choices":[{"model":"alpaca@3fa9c1d20b7e"}]}',
            b'{"model":"alpaca","choices":[{"model":"alpaca@3fa9c1d20b7e"}]}',
        ),
        (
            b'{"text":"\\"model\\":\\"alpaca@3fa9c1d20b7e\\"","model":"alpaca@3fa9c1d20b7e"}',
            b'{"text":"\\"model\\":\\"alpaca@3fa9c1d20b7e\\"","model":"alpaca"}',
        ),
    ],
)
def test_the_name_is_changed_at_the_top_level_and_nowhere_else(before: bytes, after: bytes) -> None:
    assert RENAMER.document(before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            b'{"response":{"id":"1","model":"alpaca@3fa9c1d20b7e","output":[{"model":"alpaca@3fa9c1d20b7e"}]},"type":"response.created"}',
            b'{"response":{"id":"1","model":"alpaca","output":[{"model":"alpaca@3fa9c1d20b7e"}]},"type":"response.created"}',
        ),
        (
            b'{"type":"message_start","message":{"content":[],"model":"alpaca@3fa9c1d20b7e"}}',
            b'{"type":"message_start","message":{"content":[],"model":"alpaca"}}',
        ),
        (
            b'{"response":"x","message":[1],"model":"alpaca@3fa9c1d20b7e"}',
            b'{"response":"x","message":[1],"model":"alpaca"}',
        ),
        (
            b'{"output":[{"response":{"model":"alpaca@3fa9c1d20b7e"}}],"model":"m"}',
            b'{"output":[{"response":{"model":"alpaca@3fa9c1d20b7e"}}],"model":"alpaca"}',
        ),
    ],
)
def test_the_name_of_an_answer_inside_an_event_is_changed_too(before: bytes, after: bytes) -> None:
    assert RENAMER.document(before) == after


@pytest.mark.parametrize(
    "payload",
    [
        b'[{"model":"alpaca@3fa9c1d20b7e"}]',
        b'{"response":{"\xe0":1,"model":1}}',
        b'{"message":{"model":1}x}',
        b'{"model":1',
    ],
)
def test_what_is_no_object_or_cannot_be_read_is_passed_as_it_is(payload: bytes) -> None:
    assert RENAMER.document(payload) == payload


def test_a_document_without_the_word_is_passed_as_it_is() -> None:
    payload = b'{"delta": "a \\"model\\": alpaca@3fa9c1d20b7e", "type": "response.output_text.delta"}'
    assert RENAMER.document(payload) is payload


def test_in_messages_a_name_is_replaced_only_as_a_word_of_its_own() -> None:
    renamer = Renamer("base", "acme/base")
    assert renamer.text("base, `base` and database, base-8b, base@2") == (
        "acme/base, `acme/base` and database, base-8b, base@2"
    )
    assert RENAMER.message(b"\xff `alpaca@3fa9c1d20b7e`: alpaca@3fa9c1d20b7e.") == b"\xff `alpaca`: alpaca."


def test_a_name_that_json_must_escape_is_found_and_written_escaped() -> None:
    renamer = Renamer('a"b@1', 'a"b')
    assert renamer.document(b'{"model":"a\\"b@1"}') == b'{"model":"a\\"b"}'


def test_equal_names_change_nothing() -> None:
    payload = b'{ "model" : "base" }'
    assert Renamer("base", "base").document(payload) is payload
    assert Renamer("base", "base").document(b'{"model":"base","usage":{}}', drop_usage=True) == b'{"model":"base"}'


def test_usage_is_read_or_unknown() -> None:
    body = {
        "model": "x",
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
    }
    usage = body_usage(json.dumps(body).encode())
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (1, 2, 3)
    for none in (b"{}", b'{"usage":null}', b'{"usage":[]}', b'{"usage":{"prompt_tokens":"x"}}', b"x", b"[" * 100_000):
        assert body_usage(none) is None
    part = body_usage(b'{"usage":{"completion_tokens":0}}')
    assert part is not None
    assert (part.prompt_tokens, part.completion_tokens, part.cached_tokens) == (None, 0, None)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}, (5, 2, 4)),
        ({"input_tokens": 5, "output_tokens": 2}, (5, 2, None)),
        (
            {"input_tokens": 1, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 1, "output_tokens": 2},
            (5, 2, 3),
        ),
        ({"input_tokens": 1, "cache_read_input_tokens": 0, "output_tokens": 2}, (1, 2, 0)),
        ({"output_tokens": 2}, (None, 2, None)),
        ({"prompt_tokens": 5, "total_tokens": 5}, (5, None, None)),
    ],
)
def test_usage_is_read_in_the_words_of_each_path(usage: dict[str, object], counts: tuple[int | None, ...]) -> None:
    read = body_usage(json.dumps({"usage": usage}).encode())
    assert read is not None
    assert (read.prompt_tokens, read.completion_tokens, read.cached_tokens) == counts


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        ({"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}, (5, None, None)),
        ({"type": "message_start", "message": {"usage": None}}, None),
        ({"type": "message_delta", "usage": {"output_tokens": 7}}, (None, 7, None)),
        ({"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": 7}}}, (5, 7, None)),
        ({"type": "response.created", "response": {"usage": None}}, None),
        ({"type": "error", "message": "usage"}, None),
    ],
)
def test_an_event_counts_what_has_been_counted_by_then(event: object, counts: tuple[int | None, ...] | None) -> None:
    chunk = read_chunk(json.dumps(event).encode())
    assert chunk is not None
    assert chunk.counts == (None if counts is None else Usage(*counts))


def test_later_counts_stand_and_earlier_ones_fill_the_gaps() -> None:
    assert Usage(None, 7).after(Usage(5, 1, 3)) == Usage(5, 7, 3)
    assert Usage(None, 7).after(None) == Usage(None, 7)


@pytest.mark.parametrize(
    ("event", "speaks", "answers"),
    [
        ({"type": "response.output_text.delta", "delta": "x"}, True, True),
        ({"type": "response.output_text.delta", "delta": ""}, False, False),
        ({"type": "response.reasoning_text.delta", "delta": "x"}, True, False),
        ({"type": "response.function_call_arguments.delta", "delta": "{"}, True, False),
        ({"type": "response.output_text.done", "text": "x"}, False, False),
        ({"type": "response.created", "response": {}}, False, False),
        ({"type": "response.content_part.added", "part": {"text": ""}}, False, False),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}, True, True),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}}, False, False),
        ({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "x"}}, True, False),
        ({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}, True, False),
        ({"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "x"}}, False, False),
        ({"type": "content_block_delta", "delta": "x"}, False, False),
        ({"type": "content_block_delta"}, False, False),
        ({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, False, False),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, False, False),
        ({"type": "ping"}, False, False),
    ],
)
def test_content_of_an_event_is_what_its_delta_adds(event: object, speaks: bool, answers: bool) -> None:
    chunk = read_chunk(json.dumps(event).encode())
    assert chunk is not None
    assert (chunk.has_content, chunk.has_answer) == (speaks, answers)


@pytest.mark.parametrize(
    ("choice", "speaks"),
    [
        ({"text": "x"}, True),
        ({"text": ""}, False),
        ({"text": " "}, True),
        ({"delta": {"content": "x"}}, True),
        ({"delta": {"content": ""}}, False),
        ({"delta": {"content": None, "role": "assistant"}}, False),
        ({"delta": {"reasoning_content": "x"}}, True),
        ({"delta": {"reasoning": "x"}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {"tool_calls": []}}, False),
        ({"delta": {"function_call": {"name": "f"}}}, True),
        ({"delta": {"content": [{"type": "text"}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({}, False),
    ],
)
def test_content_is_what_was_generated_on_any_channel(choice: dict[str, object], speaks: bool) -> None:
    chunk = read_chunk(json.dumps({"choices": [{"index": 0}, choice]}).encode())
    assert chunk is not None
    assert chunk.has_content is speaks


@pytest.mark.parametrize(
    ("body", "text", "code"),
    [
        (b'{"error":{"message":"too  long\\n","type":"x","code":400}}', "too long", 400),
        (b'{"error":{"message":"dead","code":"500"}}', "dead", 500),
        (b'{"error":{"message":"dead","code":"oops"}}', "dead", None),
        (b'{"error":"plain"}', '"plain"', None),
        (b'{"object":"error","message":"old style","code":404}', "old style", 404),
        (b'{"detail":"Not Found"}', '"Not Found"', None),
        (b"Internal Server Error", "Internal Server Error", None),
        (b"\xff\xfe", "��", None),
        (b"", "", None),
    ],
)
def test_an_engines_own_words_are_found(body: bytes, text: str, code: int | None) -> None:
    assert error_text(body) == (text, code)


def test_long_words_are_cut() -> None:
    assert len(error_text(b"x" * 10_000)[0]) == 200


def test_half_a_document_is_not_json() -> None:
    assert is_json(b'{"a":1}')
    assert not is_json(b'{"a":1')
    assert not is_json(b"")
