from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.errors import InputFileError
from loraledger.record.importing import keys, parse_map, rows_of
from loraledger.record.lines import BadRows
from loraledger.record.parquet import write_parquet
from loraledger.record.reader import RecordReader
from loraledger.record.tables import TABLES, Row

from .rows import NOON

SECOND = 10**9
ISO = "2026-09-21T12:00:00Z"
PLAIN = ("id=request", "arrived=ts:ms", "adapter=model", "prompt_tokens=tokens_in")


def read(path: Path, entries: Sequence[str], *, base: str | None = None, skip: bool = False) -> list[Row]:
    return list(rows_of(path, parse_map(entries), BadRows(path, skip=skip), base))


def put(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def table(tmp_path: Path, *lines: str, end: str = "\n") -> Path:
    return put(tmp_path / "log.csv", "\n".join(lines) + end)


def objects(tmp_path: Path, *found: object) -> Path:
    return put(tmp_path / "log.jsonl", "".join(json.dumps(one) + "\n" for one in found))


def cell(tmp_path: Path, entry: str, text: str) -> object:
    """What ``text`` becomes in the one mapped column besides the time."""
    (row,) = read(objects(tmp_path, {"t": ISO, "x": text}), ["arrived=t", entry])
    (value,) = (value for column, value in row.items() if column != "arrived_ns")
    return value


def test_a_csv_and_json_lines_give_the_same_rows_and_nothing_that_was_not_mapped(tmp_path: Path) -> None:
    at = NOON // 10**6
    flat = table(tmp_path, "request,ts,model,tokens_in,secret", f"a,{at},acme/sql,12,x", f"b,{at + 1},,,y")
    nested = objects(
        tmp_path,
        {"request": "a", "ts": at, "model": "acme/sql", "tokens_in": 12, "secret": [1]},
        {"request": "b", "ts": at + 1, "model": None},
    )
    assert (
        read(flat, PLAIN)
        == read(nested, PLAIN)
        == [
            {"id": "a", "arrived_ns": NOON, "adapter": "acme/sql", "prompt_tokens": 12},
            {"id": "b", "arrived_ns": NOON + 10**6, "adapter": None, "prompt_tokens": None, "hit_class": "base"},
        ]
    )


def test_a_file_may_be_gzip_and_begin_with_a_mark_of_utf_8(tmp_path: Path) -> None:
    text = f"\ufeffrequest,ts,model,tokens_in\na,{NOON // 10**6},m,1\n".encode()
    assert read(put(tmp_path / "a", gzip.compress(text)), PLAIN) == read(put(tmp_path / "b", text), PLAIN)
    line = b'\xef\xbb\xbf{"t": "' + ISO.encode() + b'"}\n'
    assert read(put(tmp_path / "c", line), ["arrived=t"]) == [{"arrived_ns": NOON}]


def test_inner_keys_are_reached_with_dots_and_a_key_with_dots_comes_first(tmp_path: Path) -> None:
    found = objects(tmp_path, {"t": ISO, "usage": {"prompt": 7}, "usage.total": 9})
    entries = ["arrived=t", "prompt_tokens=usage.prompt", "generated_tokens=usage.total"]
    assert read(found, entries) == [{"arrived_ns": NOON, "prompt_tokens": 7, "generated_tokens": 9}]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (ISO, NOON),
        ("2026-09-21 12:00:00", NOON),
        ("2026-09-21T14:00:00+02:00", NOON),
        ("2026-09-21T06:30:00.25-0530", NOON + SECOND // 4),
        ("2026-09-21 12:00:00.123456789 UTC", NOON + 123_456_789),
        ("2026-09-21 12:00:00,5Z", NOON + SECOND // 2),
        ("2026-09-21T12:00:00.1234567891Z", NOON + 123_456_789),
    ],
)
def test_moments_in_iso_8601_are_utc_unless_they_say_otherwise(tmp_path: Path, text: str, ns: int) -> None:
    assert read(objects(tmp_path, {"t": text}), ["arrived=t"]) == [{"arrived_ns": ns}]


@given(ns=st.integers(10**18, 4 * 10**18), unit=st.sampled_from([("s", 9), ("ms", 6), ("us", 3), ("ns", 0)]))
def test_numbers_are_read_to_the_nanosecond_in_every_unit(
    tmp_path_factory: pytest.TempPathFactory, ns: int, unit: tuple[str, int]
) -> None:
    name, digits = unit
    text = str(ns) if not digits else f"{ns // 10**digits}.{ns % 10**digits:0{digits}d}"
    path = put(tmp_path_factory.getbasetemp() / "numbers.jsonl", f'{{"t": {text}}}\n')
    assert read(path, [f"arrived=t:{name}"]) == [{"arrived_ns": ns}]


def test_times_after_the_arrival(tmp_path: Path) -> None:
    entries = ["ttft=f:ms", "duration=d:s", "last_token=l:+us", "arrived=t", "queued=q:ms"]
    (row,) = read(objects(tmp_path, {"t": ISO, "f": 212.5, "d": "1.9", "l": 1e6, "q": 0}), entries)
    assert row == {
        "arrived_ns": NOON,
        "first_token_ns": NOON + 212_500_000,
        "finished_ns": NOON + 1_900_000_000,
        "last_token_ns": NOON + SECOND,
        "queued_ns": 0,
    }
    (row,) = read(objects(tmp_path, {"t": ISO, "f": None, "d": 1, "l": 1, "q": 1}), entries)
    assert row["first_token_ns"] is None


@pytest.mark.parametrize(
    ("entry", "text", "value"),
    [
        ("prompt_tokens=x", "12", 12),
        ("prompt_tokens=x", "12.0", 12),
        ("prompt_tokens=x", " ", None),
        ("stream=x", "TRUE", True),
        ("stream=x", "0", False),
        ("tenant=x", " acme ", "acme"),
        ("hit_class=x", "disk", "disk"),
        ("status=x", "ok", "ok"),
        ("status=x", "200", "ok"),
        ("status=x", "404", "client_error"),
        ("status=x", "429", "rejected"),
        ("status=x", "499", "client_gone"),
        ("status=x", "500", "engine_error"),
        ("status=x", "502", "upstream_failed"),
        ("status=x", "504", "upstream_timeout"),
        ("http_status=x", "200", 200),
    ],
)
def test_a_cell_becomes_a_value_of_its_column(tmp_path: Path, entry: str, text: str, value: object) -> None:
    assert cell(tmp_path, entry, text) == value


@pytest.mark.parametrize(
    ("entry", "text", "complaint"),
    [
        ("prompt_tokens=x", "1.5", "prompt_tokens (x): '1.5' is not a whole number of 0 or more"),
        ("prompt_tokens=x", "-1", "is not a whole number of 0 or more"),
        ("prompt_tokens=x", "NaN", "is not a whole number of 0 or more"),
        ("prompt_tokens=x", "9" * 19, "is not a whole number of 0 or more"),
        ("stream=x", "yes", "is neither true nor false"),
        ("hit_class=x", "warm", "'warm' is not one of gpu, host, disk"),
        ("status=x", "fine", "'fine' is not one of ok, client_gone"),
        ("status=x", "302", "'302' is no HTTP status of an answer"),
        ("status=x", "777", "'777' is no HTTP status of an answer"),
        ("tenant=x", "a\x1b[2J", "has some that cannot be printed"),
        ("tenant=x", "\ud800", "has some that cannot be printed"),
        ("tenant=x", "a" * 1025, "is over 1024 characters"),
        ("first_token=x", "soon", "first_token (x): 'soon' is not a time such as 2026-09-21T12:00:00.250Z"),
        ("first_token=x", "1789992000", "it is a number, so say its unit"),
        ("first_token=x", "2026-02-30T12:00:00Z", "day is out of range"),
        ("first_token=x", "٢٠٢٦-02-20T12:00:00Z", "is not a time such as"),
        ("first_token=x:s", "1789992000000", "is not between the years 2000 and 2099: is its unit right?"),
        ("first_token=x:ns", "0", "is not between the years 2000 and 2099"),
        ("first_token=x:s", "Infinity", "is not a number"),
        ("first_token=x:s", "1e999", "is not a number"),
        ("ttft=x:ms", "-1", "ttft (x): '-1' is negative"),
        ("ttft=x:s", "1e9", "is over a year"),
        ("itl_mean=x:ms", "fast", "itl_mean (x): 'fast' is not a number"),
    ],
)
def test_a_cell_that_is_no_value_of_its_column_names_line_and_column(
    tmp_path: Path, entry: str, text: str, complaint: str
) -> None:
    path = objects(tmp_path, {"t": ISO, "x": None}, {"t": ISO, "x": text})
    with pytest.raises(InputFileError) as refused:
        read(path, ["arrived=t", entry])
    assert refused.value.message.startswith(f"{path}: row 2: not a request: ")
    assert complaint in refused.value.message
    assert "\x1b" not in refused.value.message
    assert len(read(path, ["arrived=t", entry], skip=True)) == 1


def test_the_base_model_is_an_empty_adapter_or_the_name_that_is_given(tmp_path: Path) -> None:
    path = objects(
        tmp_path,
        {"t": ISO, "m": "llama", "h": "gpu"},
        {"t": ISO, "m": "", "h": None},
        {"t": ISO, "m": "acme/sql", "h": "disk"},
    )
    rows = read(path, ["arrived=t", "adapter=m", "hit_class=h"], base="llama")
    assert [(row["adapter"], row["hit_class"], row["base"]) for row in rows] == [
        (None, "base", "llama"),
        (None, "base", "llama"),
        ("acme/sql", "disk", "llama"),
    ]
    named = read(path, ["arrived=t", "adapter=m"])
    assert [row["adapter"] for row in named] == ["llama", None, "acme/sql"]
    assert all("base" not in row for row in named)
    assert "hit_class" not in read(path, ["arrived=t", "tenant=m"])[1], "which adapter it was is not known"
    wrong = objects(tmp_path, {"t": ISO, "m": "acme/sql", "h": "base"})
    with pytest.raises(InputFileError, match="row 1: not a request: hit_class is base, and the adapter is 'acme/sql'"):
        read(wrong, ["arrived=t", "adapter=m", "hit_class=h"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"t": "2026-09-21T12:0', "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"t": "x", "t": "y"}', "not a JSON object"),
        ('{"t": "2026-09-21T12:00:00Z", "x": NaN}', "not a JSON object"),
        ('{"t": {"u": 1}}', "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("", "a hole"),
        ('{"t": null}', "not a request"),
    ],
)
def test_a_line_that_is_no_request_is_refused_or_dropped_and_counted(tmp_path: Path, line: str, reason: str) -> None:
    path = put(tmp_path / "log", f'{{"t": "{ISO}"}}\n{line}\n{{"t": "{ISO}"}}\n')
    with pytest.raises(InputFileError) as refused:
        read(path, ["arrived=t"])
    assert f": row 2: {reason}" in refused.value.message
    bad = BadRows(path, skip=True)
    assert len(list(rows_of(path, parse_map(["arrived=t"]), bad))) == 2
    assert dict(bad.dropped) == {reason: 1}


def test_a_csv_that_was_cut_or_put_together_from_two_is_found_out(tmp_path: Path) -> None:
    path = table(tmp_path, "t,id", f"{ISO},a", "t, id", f"{ISO},b", "2026-09-2", end="")
    entries = ["arrived=t", "id=id"]
    with pytest.raises(InputFileError, match=r"row 3: a heading: .* put together from several"):
        read(path, entries)
    bad = BadRows(path, skip=True)
    assert [row["id"] for row in rows_of(path, parse_map(entries), bad)] == ["a", "b"]
    assert dict(bad.dropped) == {"a heading": 1, "a hole": 1}


def test_headings_that_are_missing_or_ambiguous_are_told(tmp_path: Path) -> None:
    path = table(tmp_path, "t,id,id,other,other", f"{ISO},a,b,c,d")
    with pytest.raises(InputFileError, match="row 1: 2 columns are named 'id': rename all but one"):
        read(path, ["arrived=t", "id=id"])
    with pytest.raises(
        InputFileError, match=r"nothing in it is named 'x' \(mapped to tenant\); it has 't', 'id', 'id'"
    ):
        read(path, ["arrived=t", "tenant=x"])
    assert read(path, ["arrived=t"]) == [{"arrived_ns": NOON}]
    lines = objects(tmp_path, {"t": ISO, "id": 1}, {"t": ISO, "id": 2})
    with pytest.raises(InputFileError, match=r"nothing in it is named 'user' \(mapped to tenant\); it has 'id', 't'"):
        read(lines, ["arrived=t", "tenant=user"])


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    for text in ("", "\n", "t\n"):
        with pytest.raises(InputFileError, match=r"no request in it|a hole"):
            read(put(tmp_path / "log", text), ["arrived=t"])
    with pytest.raises(InputFileError, match="no request in it: all 2 rows were bad"):
        read(put(tmp_path / "log", "t\nx\ny\n"), ["arrived=t"], skip=True)


def test_lines_are_bounded(tmp_path: Path) -> None:
    for text in ("t,id\n" + "a" * (1 << 17) + "\n", '{"t": "' + "a" * (1 << 21) + '"}\n'):
        with pytest.raises(InputFileError, match="longer than"):
            read(put(tmp_path / "log", text), ["arrived=t"])


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        (["arrived"], "'arrived' is no entry of a map: write COLUMN=THEIR_NAME"),
        (["=x"], "is no entry of a map"),
        (["arrived="], "is no entry of a map"),
        (["id=x"], "no entry says when a request arrived: add arrived=NAME"),
        (["arrivd=t"], "'arrivd' is no column of table requests: is arrived meant?"),
        (["zzz=t"], "'zzz' is no column of table requests: id, client_id, tenant"),
        (["itl_sketch=t"], "is no column of table requests"),
        (["arrived=t", "ttft=x"], "ttft is a duration: say its unit, as in ttft=x:ms"),
        (["arrived=t", "itl_mean=x"], "itl_mean is a duration: say its unit"),
        (["arrived=t:+ms"], "arrived cannot count from the arrival"),
        (["arrived=t", "queued=x:+ms"], "queued cannot count from the arrival"),
        (["arrived=t", "tenant=x:ms"], "tenant has no unit"),
        (["arrived=t", "ttft=x:ms", "first_token=y"], "ttft: its column is mapped twice"),
    ],
)
def test_a_map_that_cannot_be_is_told(entries: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse_map(entries)


def test_every_column_but_those_of_the_gateway_alone_may_be_mapped_by_either_name() -> None:
    for column in TABLES["requests"].columns:
        key = column.name.removesuffix("_ns")
        assert (key in keys()) == (column.name not in ("decision_id", "itl_sketch")), key
    (one,) = parse_map(["arrived_ns=when:at:ms"])
    assert (one.column, one.name) == ("arrived_ns", "when:at")


def test_what_was_read_fits_the_record(tmp_path: Path) -> None:
    path = objects(tmp_path, {"t": ISO, "i": "a", "s": True, "c": 200}, {"t": ISO, "i": "b", "s": False, "c": 500})
    rows = read(path, ["arrived=t", "id=i", "stream=s", "status=c"])
    write_parquet({"requests": rows}, tmp_path / "record", "import-a")
    with RecordReader(tmp_path / "record") as reader:
        assert reader.query("SELECT id, stream, status FROM requests ORDER BY id") == [
            {"id": "a", "stream": True, "status": "ok"},
            {"id": "b", "stream": False, "status": "engine_error"},
        ]
