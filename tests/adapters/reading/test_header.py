"""safetensors headers: what is taken, what is refused, and that two parsers give one verdict."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.conftest import LFS_POINTER
from adapters.conftest import safetensors as weights_of
from loraledger.adapters.reading.header import (
    BITS,
    MAX_HEADER,
    MAX_NAME,
    MAX_PARTS,
    MAX_TENSORS,
    RawHeader,
    Tensor,
    parse_header,
    quick_parse,
    read_header,
    strict_parse,
)
from loraledger.errors import InputFileError


def entry(
    dtype: str = "U8", shape: object = (1,), begin: object = 0, end: object = 1, **more: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def parse(header: object, data_bytes: int) -> dict[str, Tensor]:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return dict(parse_header(RawHeader("w", raw, data_bytes)).tensors)


def refused(header: object, data_bytes: int = 1) -> str:
    with pytest.raises(InputFileError) as caught:
        parse(header, data_bytes)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300
    return caught.value.message


def test_a_header_gives_types_shapes_and_sizes(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(weights_of())
    header = read_header(path)
    assert list(header.tensors.values())[3] == Tensor("BF16", (2, 4), (192, 208))
    assert (header.dtypes, header.data_bytes, header.parameters) == (frozenset({"BF16"}), 208, 104)
    assert [tensor.nbytes for tensor in header.tensors.values()] == [64, 64, 64, 16]


def test_only_the_header_is_read(tmp_path: Path) -> None:
    raw = json.dumps({"a": entry("BF16", [2**20, 2**19], 0, 2**40)}).encode()
    path = tmp_path / "w.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + 2**40)  # a tebibyte of hole
    assert read_header(path).parameters == 2**39


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_each_type_is_as_wide_as_the_library_takes_it(dtype: str) -> None:
    end = BITS[dtype]  # eight values
    raw = json.dumps({"a": entry(dtype, [8], 0, end)}).encode()
    ((name, theirs),) = safetensors.deserialize(struct.pack("<Q", len(raw)) + raw + bytes(end))  # type: ignore[no-untyped-call]
    assert parse(raw, end) == {name: Tensor(theirs["dtype"], tuple(theirs["shape"]), (0, len(theirs["data"])))}


def test_mixed_types_are_summed_by_tensor() -> None:
    raw = json.dumps({"a": entry("F32", [3], 0, 12), "b": entry("BF16", [2, 2], 12, 20)}).encode()
    header = parse_header(RawHeader("w", raw, 20))
    assert (header.parameters, header.dtypes) == (7, frozenset({"F32", "BF16"}))


def test_tensors_may_be_listed_in_another_order_than_they_lie() -> None:
    assert list(parse({"b": entry(begin=1, end=2), "a": entry()}, 2)) == ["b", "a"]


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({}, 0, "holds no tensors"),
        ({"__metadata__": {"format": "pt"}}, 0, "holds no tensors"),
        ([1], 0, "not a JSON object"),
        (b' {"a": 1}', 1, "not a JSON object"),
        (b"{]", 1, "the header of w is not JSON"),
        (b'{"a":' + b"[" * 200_000, 1, "nested too deeply"),
        ({"a": entry("Q4")}, 1, "tensor 'a' has the type 'Q4', which the format does not know"),
        ({"a": entry("bf16")}, 1, "has the type 'bf16'"),
        ({"a": {"shape": [1]}}, 1, "tensor 'a' has no valid dtype, shape and data_offsets"),
        ({"a": 5}, 1, "tensor 'a' has no valid"),
        ({"a": entry(shape=[1.0])}, 1, "tensor 'a' has no valid"),
        ({"a": entry(shape=[True])}, 1, "tensor 'a' has no valid"),
        ({"a": {**entry(), "data_offsets": [0, 1, 1]}}, 1, "tensor 'a' has no valid"),
        ({"a": entry(shape=[-1, -1])}, 1, "tensor 'a' of shape [-1, -1] and type U8 cannot lie at 0 to 1"),
        ({"a": entry(shape=[2])}, 1, "tensor 'a' of shape [2] and type U8 cannot lie at 0 to 1"),
        ({"a": entry(begin=1, end=0)}, 1, "cannot lie at 1 to 0"),
        ({"a": entry("F4", [3], 0, 1)}, 1, "cannot lie at 0 to 1"),
        ({"a": entry(shape=[2**64, 2**64, 2**64], end=8)}, 8, "cannot lie at 0 to 8"),
        ({"a": entry(shape=[0], end=0)}, 0, "tensor 'a' of shape [0] is empty: it was saved while split over GPUs"),
        ({"a": entry(shape=[4, 0], end=0)}, 0, "is empty"),
        ({"a": entry(shape=[2], end=2), "b": entry(begin=1, end=2)}, 2, "tensor 'b' overlaps the one before it"),
        ({"a": entry(), "b": entry(begin=3, end=4)}, 4, "tensor 'b' leaves 2 bytes before it unused"),
        ({"a": entry(begin=1, end=2)}, 2, "tensor 'a' leaves 1 bytes before it unused"),
        ({"a": entry()}, 0, "should hold 1 bytes of data and holds 0: fetch it again"),
        ({"a": entry()}, 2, "should hold 1 bytes of data and holds 2: fetch it again"),
        ({"__metadata__": {"a": 1}, "a": entry()}, 1, "__metadata__ must map names to text"),
        ({"__metadata__": ["x"], "a": entry()}, 1, "__metadata__ must map names to text"),
        ({"": entry()}, 1, "'' is no tensor's name"),
        ({"a\n": entry()}, 1, "is no tensor's name"),
        (b'{"a\x7f":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, "is no tensor's name"),
        ('{"a\u0085":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.encode(), 1, "is no tensor's name"),
        ({"a": entry(), "__metadata__": entry(begin=1, end=2)}, 2, "__metadata__ must map names to text"),
        ({"x" * (MAX_NAME + 1): entry()}, 1, "a name of over 256 characters"),
        ({".".join("x" * (MAX_PARTS + 1)): entry()}, 1, "a name of over 32 parts"),
        ({"x" * 100_000: 1}, 1, "has no valid"),
    ],
)
def test_what_the_format_does_not_allow_is_refused(header: object, data_bytes: int, message: str) -> None:
    assert message in refused(header, data_bytes)


def test_a_shape_of_many_dimensions_is_not_multiplied_out() -> None:
    begin = time.process_time()
    assert "cannot lie at 0 to 1" in refused({"a": entry(shape=[10**9] * 100_000)})
    assert time.process_time() - begin < 1.0


ONE = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(
    "raw",
    [
        b"{" + ONE + b"," + ONE + b"}",
        b"{" + ONE + b"," + ONE.replace(b'"a"', b'"\\u0061"') + b"}",
        b'{"a":{},' + ONE + b"}",
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"x":"1","x":"2"},' + ONE + b"}",
        b'{"__metadata__":{},"__metadata__":{},' + ONE + b"}",
        b'{"__metadata__":{},' + ONE + b',"__metadata__":{}}',
    ],
)
def test_nothing_may_be_there_twice(raw: bytes) -> None:
    assert "twice" in refused(raw)


@pytest.mark.parametrize("number", [b"-0", b"1e0", b"1.0", b"NaN", b"01", b"1" + b"0" * 5000])
def test_a_number_that_other_parsers_read_differently_is_refused(number: bytes) -> None:
    refused(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[' + number + b",1]}}")


def test_the_number_of_tensors_is_bounded_exactly() -> None:
    many = {f"t{i}": entry(begin=i, end=i + 1) for i in range(MAX_TENSORS)}
    assert len(parse(many, MAX_TENSORS)) == MAX_TENSORS
    many["one more"] = entry(begin=MAX_TENSORS, end=MAX_TENSORS + 1)
    assert f"over {MAX_TENSORS:,} tensors" in refused(many, MAX_TENSORS + 1)


def test_the_longest_name_and_the_most_parts_are_read() -> None:
    assert parse({"x" * MAX_NAME: entry(), ".".join("x" * MAX_PARTS): entry(begin=1, end=2)}, 2)


def test_a_header_of_too_many_tensors_is_refused_before_it_is_decoded() -> None:
    assert f"over {MAX_TENSORS:,} tensors" in refused(b"{" + b'"",' * (6 * MAX_TENSORS) + b" " * 10_000_000)
    assert f"over {MAX_TENSORS:,} tensors" in refused(b'{"a":[' + b"1," * (9 * MAX_TENSORS) + b" " * 10_000_000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "w has 0 bytes, less than the 8 of a header's length"),
        (b"1234567", "w has 7 bytes"),
        (LFS_POINTER, "w is a Git LFS pointer for a file of 83,945,072 bytes that was not fetched: run `git lfs pull`"),
        (b"version https://git-lfs.github.com/spec/v1\nsize x", "w is a Git LFS pointer that was not fetched"),
        (struct.pack("<Q", 2**63) + b"{}", "w claims a header of 9,223,372,036,854,775,808 bytes in 10"),
        (struct.pack("<Q", MAX_HEADER + 1) + bytes(100), "w claims a header of 100,000,001 bytes"),
        (struct.pack("<Q", 3) + b"{}", "w claims a header of 3 bytes in 10: it is cut off or no safetensors"),
    ],
)
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "w"
    path.write_bytes(content)
    with pytest.raises(InputFileError) as caught:
        read_header(path)
    assert message in caught.value.message


def test_only_regular_files_are_read_and_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(InputFileError, match="is not a regular file"):
            read_header(path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w"
    path.write_bytes(weights_of())
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: pread(*args)[:20])
    with pytest.raises(InputFileError, match="changed its length while it was read"):
        read_header(path)


NAMES = st.sampled_from(["a", "b", "dtype", "shape", "data_offsets", "__metadata__", "x-1", "\u00e9", 'q"', "\\", ""])
VALUES = st.one_of(
    st.none(), st.text(max_size=2), st.integers(-2, 3), st.just([]), st.just({}), st.lists(st.integers(-1, 4), max_size=3),
    st.just(1.0), st.sampled_from(["U8", "BF16", "F4", "Q"]), st.dictionaries(st.text(max_size=1), st.text(max_size=1)),
)  # fmt: skip


@st.composite
def objects(draw: st.DrawFn, keys: st.SearchStrategy[str], values: st.SearchStrategy[str]) -> str:
    """JSON objects with names that repeat, in varied spelling."""
    pairs = draw(st.lists(st.tuples(keys, values), max_size=4))
    comma, colon = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:")]))
    return (
        "{"
        + comma.join(f"{json.dumps(key, ensure_ascii=draw(st.booleans()))}{colon}{value}" for key, value in pairs)
        + "}"
    )


GOOD = st.builds(
    lambda dtype, shape, begin, size: json.dumps(entry(dtype, shape, begin, begin + size), separators=(",", ":")),
    st.sampled_from(["U8", "BF16", "F4"]), st.lists(st.integers(1, 3), max_size=3), st.integers(0, 3), st.integers(0, 6),
)  # fmt: skip
ENTRY = objects(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), VALUES.map(json.dumps))
HEADERS = objects(NAMES, GOOD | GOOD | GOOD | ENTRY | VALUES.map(json.dumps)).map(str.encode)


def verdict(parser: Any, *args: object) -> dict[str, Tensor] | None:
    try:
        tensors = parser(*args)
    except InputFileError:
        return None
    return None if tensors is None else dict(tensors)


@settings(max_examples=500, deadline=None)
@given(HEADERS | st.binary(max_size=30))
def test_what_the_quick_parser_takes_the_strict_one_takes_alike(raw: bytes) -> None:
    quick = verdict(quick_parse, raw)
    if quick is not None:
        assert quick == verdict(strict_parse, "w", raw)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text("abc.", min_size=1, max_size=5), GOOD, min_size=1, max_size=5), st.booleans())
def test_the_quick_parser_takes_every_plain_header(entries: dict[str, str], with_metadata: bool) -> None:
    metadata = '"__metadata__":{"format":"pt"},' if with_metadata else ""
    body = ",".join(f'"{name}":{value}' for name, value in entries.items())
    quick = quick_parse(f"{{{metadata}{body}}}".encode())
    assert quick is not None
    assert list(quick) == list(entries)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HEADERS, st.integers(0, 8))
def test_what_is_accepted_the_library_accepts(raw: bytes, data_bytes: int) -> None:
    ours = verdict(parse, raw, data_bytes)
    if ours is not None:
        theirs = safetensors.deserialize(struct.pack("<Q", len(raw)) + raw + bytes(data_bytes))  # type: ignore[no-untyped-call]
        assert {name: (info["dtype"], tuple(info["shape"])) for name, info in theirs} == {
            name: (tensor.dtype, tensor.shape) for name, tensor in ours.items()
        }
