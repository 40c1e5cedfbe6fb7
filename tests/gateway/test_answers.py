from __future__ import annotations

import json

import pytest

from loraledger.gateway.answers import Renamer, body_usage, error_text, is_json, read_chunk

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
