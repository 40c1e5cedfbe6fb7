from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.errors import BadRequestError
from loraledger.gateway.peek import STEERING, peek


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
    looked = peek(b'{"model":"a","prompt":"x"}')
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
        b"[1]",
        b"null",
        b'"model"',
        b'{"model":"a","x":01}',
        b'{"model":"a","x":NaN}',
        b'{"model":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="the body"):
        peek(body)


@pytest.mark.parametrize("model", [b"null", b"1", b'["a"]', b'{"a":1}', b"true", b'"\xff"'])
def test_a_model_that_is_not_a_string_is_refused(model: bytes) -> None:
    with pytest.raises(BadRequestError, match="model") as caught:
        peek(b'{"model":' + model + b"}")
    assert caught.value.param == "model"


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(BadRequestError, match="model is missing"):
        peek(b"{}")


@pytest.mark.parametrize(
    "field",
    [b'"stream":null', b'"stream":"yes"', b'"max_tokens":"x"', b'"max_tokens":1.5', b'"n":null', b'"messages":7'],
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
        ('{"include_usage":"yes"}', True, {"include_usage": "yes"}),
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
    assert peek(b'{"model":"a","prompt":"xyz","user":"uuuuuuu"}').prompt_bytes == 5
    assert peek(b'{"model":"a","messages":[1,2],"tools":[3]}').prompt_bytes == 8


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.text(max_size=6), _JSON, max_size=6))
def test_unknown_fields_survive_whatever_they_hold(fields: dict[str, object]) -> None:
    kept = {name: value for name, value in fields.items() if name not in STEERING and not name.startswith("lora")}
    body = {**kept, "model": "alpaca", "stream": False}
    assert json.loads(peek(json.dumps({**fields, **body}).encode()).rewrite("e")) == {**body, "model": "e"}
