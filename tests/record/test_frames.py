from __future__ import annotations

import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.errors import InputFileError
from loraledger.record.frames import HEADER, OVERHEAD, Kind, read_segment, segment_path, segments, sequence_of


def frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload) + 1, zlib.crc32(bytes([kind]) + payload), kind) + payload


FIRST = frame(Kind.EVENT, b"first event")
LAST = frame(Kind.COMMANDS, b"\0\0last\0commands")
ROOM = bytes(5000)


@pytest.mark.parametrize("room", [b"", ROOM], ids=["cut", "preallocated"])
def test_a_frame_torn_at_any_byte_is_left_out_and_those_before_it_are_kept(tmp_path: Path, room: bytes) -> None:
    path = tmp_path / "segment"
    for kept in range(len(LAST)):
        path.write_bytes(FIRST + LAST[:kept] + room)
        reader = read_segment(path)
        assert [found.payload for found in reader] == [b"first event"], kept
        assert reader.offset == len(FIRST)
        assert reader.torn == (kept > 0), kept
    path.write_bytes(FIRST + LAST + room)
    reader = read_segment(path)
    assert [(found.kind, found.offset) for found in reader] == [(Kind.EVENT, 0), (Kind.COMMANDS, len(FIRST))]
    assert not reader.torn


def test_any_flipped_bit_ends_the_segment_before_its_frame(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    whole = FIRST + LAST + FIRST + ROOM
    for bit in range(8 * len(FIRST), 8 * (len(FIRST) + len(LAST))):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        reader = read_segment(path)
        assert [found.payload for found in reader] == [b"first event"], bit
        assert reader.torn, bit


def test_a_length_beyond_the_file_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(FIRST + HEADER.pack(2**32 - 1, 0, Kind.EVENT) + ROOM)
    tracemalloc.start()
    assert len(list(read_segment(path))) == 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_frames_behind_a_lost_page_make_the_segment_torn(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(FIRST + bytes(3 << 20) + LAST + ROOM)
    reader = read_segment(path)
    assert len(list(reader)) == 1
    assert reader.torn


def test_a_live_segment_is_read_on_from_where_the_last_reader_stopped(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(FIRST + ROOM)
    reader = read_segment(path)
    assert len(list(reader)) == 1
    with path.open("r+b") as file:
        file.seek(len(FIRST))
        file.write(LAST)
    assert not reader.torn
    again = read_segment(path, reader.offset)
    assert [found.payload for found in again] == [LAST[OVERHEAD:]]
    assert list(read_segment(path, again.offset)) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=30), st.integers(0, 64))
def test_whatever_was_framed_reads_back(
    tmp_path_factory: pytest.TempPathFactory, words: list[tuple[int, bytes]], room: int
) -> None:
    path = tmp_path_factory.mktemp("frames") / "segment"
    path.write_bytes(b"".join(frame(kind, payload) for kind, payload in words) + bytes(room))
    reader = read_segment(path)
    assert [(found.kind, found.payload) for found in reader] == words
    assert not reader.torn


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_were_never_framed_do_not_raise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("frames") / "segment"
    path.write_bytes(data)
    reader = read_segment(path)
    assert sum(OVERHEAD + len(found.payload) for found in reader) == reader.offset
    assert reader.torn == any(data[reader.offset :])


def test_segments_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (100_000_000, 2, 99_999_999):
        segment_path(tmp_path, number).touch()
    (tmp_path / "journal.lock").touch()
    (tmp_path / "journal-00000001.log.bak").touch()
    assert [sequence_of(path) for path in segments(tmp_path)] == [2, 99_999_999, 100_000_000]
    assert segments(tmp_path / "missing") == []


def test_a_file_that_is_no_segment_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"journal-00000007\.log cannot be read: No such file"):
        next(read_segment(segment_path(tmp_path, 7)))
    with pytest.raises(InputFileError, match=r"notes\.txt is not a journal segment"):
        sequence_of(tmp_path / "notes.txt")
