from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.gateway.answers import Renamer, Usage
from loraledger.gateway.sse import SseReader, StreamError
from loraledger.record.sketch import ZERO

from .support import DONE, ENGINE_NAME, event, usage_event

SHOWN = [
    {"role": "assistant", "content": ""},
    {"content": "Hé\r\n"},
    {"reasoning_content": 'quote " and {"model":"' + ENGINE_NAME + '"}'},
    {"content": "\U0001f600"},
    {},
]
STREAM = (
    b": hello\n\n"
    + event(ENGINE_NAME, SHOWN[0], usage=None)
    + event(ENGINE_NAME, SHOWN[1], usage=None)
    + b": keep-alive\n\n"
    + event(ENGINE_NAME, SHOWN[2])
    + b"event: x\nid: 7\ndata:"
    + json.dumps({"model": ENGINE_NAME, "choices": [{"delta": SHOWN[3]}]}).encode()
    + b"\n\n"
    + b'data: {"model":"'
    + ENGINE_NAME.encode()
    + b'",\ndata: "choices":[]}\n\n'
    + event(ENGINE_NAME, SHOWN[4])
    + usage_event(ENGINE_NAME)
    + DONE
)


def reader(*, hide_usage: bool = True) -> SseReader:
    return SseReader(Renamer(ENGINE_NAME, "alpaca"), hide_usage=hide_usage)


def documents(shown: bytes) -> list[Any]:
    found = []
    for frame in shown.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line[6:] for line in frame.split(b"\n") if line.startswith(b"data: ")]
        if lines and lines != [b"[DONE]"]:
            found.append(json.loads(b"\n".join(lines)))
    return found


def check(read: SseReader, shown: bytes) -> None:
    assert read.done
    assert read.pending == 0
    assert read.tokens_seen == 3
    assert read.usage is not None
    assert read.usage.prompt_tokens == 11
    frames = documents(shown)
    assert [frame["model"] for frame in frames] == ["alpaca"] * 6
    deltas = [frame["choices"][0]["delta"] for frame in frames if frame["choices"]]
    assert deltas == SHOWN
    assert not any("usage" in frame for frame in frames)
    assert shown.count(b": keep-alive\n\n") == 1
    assert b"event: x\nid: 7\ndata: {" in shown
    assert shown.endswith(DONE)


def test_a_stream_cut_at_every_byte_reads_the_same() -> None:
    whole = reader()
    expected = whole.feed(STREAM, 5)
    check(whole, expected)
    for at in range(1, len(STREAM)):
        read = reader()
        shown = read.feed(STREAM[:at], 1) + read.feed(STREAM[at:], 2)
        assert shown == expected, at
        check(read, shown)


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_other_line_ends_read_the_same_wherever_they_are_cut(end: bytes) -> None:
    expected = reader().feed(STREAM, 5)
    stream = STREAM.replace(b"\n", end)
    for at in range(1, len(stream)):
        read = reader()
        shown = read.feed(stream[:at], 1) + read.feed(stream[at:], 2) + read.finish(3)
        assert documents(shown) == documents(expected), at
        check(read, shown.replace(b"\n\n\n", b"\n\n"))


FRAMES = STREAM.removesuffix(b"\n\n").split(b"\n\n")


@given(
    cuts=st.lists(st.integers(1, len(STREAM) - 1), max_size=40),
    ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=len(FRAMES), max_size=len(FRAMES)),
)
def test_mixed_line_ends_and_any_cuts_read_the_same(cuts: list[int], ends: list[bytes]) -> None:
    mixed = b"".join((frame + b"\n\n").replace(b"\n", end) for frame, end in zip(FRAMES, ends, strict=True))
    read = reader()
    shown, start = b"", 0
    for cut in [*sorted(set(cuts)), len(mixed)]:
        if start < cut:
            shown += read.feed(mixed[start:cut], 1)
            start = cut
    shown += read.finish(1)
    assert documents(shown) == documents(reader().feed(STREAM, 1))


def test_one_byte_at_a_time_is_measured_at_the_byte_that_ends_the_frame() -> None:
    read = reader()
    stream = event(ENGINE_NAME, {"content": "a"}) + event(ENGINE_NAME, {"content": "b"})
    for now in range(len(stream)):
        read.feed(stream[now : now + 1], now)
    assert (read.first_token, read.last_token) == (len(stream) // 2 - 1, len(stream) - 1)
    assert read.gap_mean == read.gap_max == len(stream) // 2


def test_frames_of_one_read_have_no_gap_between_them() -> None:
    read = reader()
    token = event(ENGINE_NAME, {"content": "a"})
    read.feed(token * 3, 1000)
    read.feed(token, 4000)
    assert (read.tokens_seen, read.gap_mean, read.gap_max) == (4, 1000, 3000)
    assert read.gaps.counts == {ZERO: 2, 369: 1}  # floor(32 * log2(3000))


def test_without_two_tokens_there_is_no_gap() -> None:
    read = reader()
    assert (read.gap_mean, read.gap_max) == (None, None)
    read.feed(event(ENGINE_NAME, {"content": "a"}), 1)
    assert (read.gap_mean, read.gap_max, read.gaps.counts) == (None, None, {})


def test_usage_passes_to_a_client_that_asked() -> None:
    read = reader(hide_usage=False)
    shown = read.feed(STREAM, 1)
    assert b'"usage":null' in shown
    assert documents(shown)[-1]["usage"]["completion_tokens"] == 2


def test_usage_in_frames_with_content_is_removed_and_known() -> None:
    read = reader()
    shown = read.feed(
        event(ENGINE_NAME, {"content": "a"}, usage={"prompt_tokens": 3, "completion_tokens": 1}, after=1), 1
    )
    assert documents(shown) == [
        {**documents(event("alpaca", {"content": "a"}))[0], "after": 1},
    ]
    assert read.usage is not None
    assert read.usage.completion_tokens == 1


def test_an_error_inside_the_stream_is_noted_and_shown() -> None:
    read = reader()
    frame = {"error": {"message": f"The model `{ENGINE_NAME}` is gone", "type": "InternalServerError", "code": 500}}
    shown = read.feed(b"data: " + json.dumps(frame).encode() + b"\n\n" + DONE, 1)
    assert read.error == StreamError("The model `alpaca` is gone", 500)
    assert not read.error.blames_client
    assert documents(shown)[0]["error"]["message"] == "The model `alpaca` is gone"
    assert StreamError("too long", 400).blames_client
    assert not StreamError("", None).blames_client


def named(*events: dict[str, Any]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)


OPENING = {"type": "response.created", "response": {"model": ENGINE_NAME, "usage": None}}
DELTA = {"type": "response.output_text.delta", "delta": "Hi"}
COMPLETED = {
    "response": {"model": ENGINE_NAME, "usage": {"input_tokens": 4, "output_tokens": 1}},
    "type": "response.completed",
}
START = {"type": "message_start", "message": {"model": ENGINE_NAME, "usage": {"input_tokens": 4, "output_tokens": 0}}}
BLOCK = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}}
STOP = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}
FORMS = [
    named(OPENING, OPENING, DELTA, COMPLETED),
    named(START, {"type": "ping"}, BLOCK, STOP, {"type": "message_stop"}),
]


@pytest.mark.parametrize("stream", FORMS)
def test_events_cut_at_every_byte_read_the_same(stream: bytes) -> None:
    expected = reader().feed(stream, 5)
    assert ENGINE_NAME.encode() not in expected
    assert len(documents(expected)) == stream.count(b"data: ")
    for at in range(1, len(stream)):
        read = reader()
        assert read.feed(stream[:at], 1) + read.feed(stream[at:], 2) == expected, at
        assert (read.done, read.pending, read.tokens_seen) == (True, 0, 1)
        assert read.usage == Usage(4, 1)


@pytest.mark.parametrize("stream", FORMS)
def test_what_opens_an_answer_is_held_until_it_has_content(stream: bytes) -> None:
    read = reader()
    first, second, content, rest, *_ = [frame + b"\n\n" for frame in stream.split(b"\n\n")]
    assert read.feed(first, 1) + read.feed(second, 1) == b""
    assert read.pending >= len(named(OPENING)) // 2
    assert len(documents(read.feed(content, 7))) == 3
    assert (read.first_token, read.pending) == (7, 0)
    assert len(documents(read.feed(rest, 8))) == 1


def test_an_answer_without_content_is_shown_at_its_end() -> None:
    read = reader()
    assert read.feed(named(OPENING), 1) == b""
    assert len(documents(read.feed(named(COMPLETED), 2))) == 2
    assert (read.done, read.first_token) == (True, None)
    cut = reader()
    assert cut.feed(named(OPENING), 1) == b""
    assert len(documents(cut.finish(2))) == 1


def test_a_stream_that_is_cut_has_not_counted_its_output() -> None:
    read = reader()
    read.feed(named(START, BLOCK), 1)
    assert read.usage == Usage(4, None)


@pytest.mark.parametrize(
    "frame",
    [b"data: not json\n\n", b"data\n\n", b'data: {"choices":7}\n\n', b"data: [1]\n\n", b"retry: 5\n\n", b"data:\n\n"],
)
def test_what_is_not_understood_passes(frame: bytes) -> None:
    shown = reader().feed(frame, 1)
    assert shown.replace(b"data: ", b"data:") == frame.replace(b"data: ", b"data:")


def test_a_last_frame_without_its_empty_line_still_counts() -> None:
    read = reader()
    assert read.feed(b"data: [DONE]", 1) == b""
    assert read.pending == 12
    assert not read.done
    assert read.finish(1) == DONE
    assert read.done
    assert read.finish(1) == b""


def test_a_frame_costs_microseconds() -> None:
    token = event(ENGINE_NAME, {"content": " there"}, logprobs=None)
    read = reader()
    best = min(_per_frame(read, token) for _ in range(5))
    assert best < 200e-6


def _per_frame(read: SseReader, token: bytes) -> float:
    started = time.process_time()
    for now in range(2000):
        read.feed(token, now)
    return (time.process_time() - started) / 2000
