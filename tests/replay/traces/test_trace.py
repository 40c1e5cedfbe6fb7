"""The trace file: what comes back is what was written, and nothing else gets through."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraledger.errors import InputFileError
from loraledger.record import lines as reading
from loraledger.record.lines import BadRows
from loraledger.replay.traces.trace import Adapter, Header, Request, Trace, write_trace
from replay.fleets import adapters as fleet_adapters
from replay.fleets import settings_for, virtual

HEADER = Header(
    name="little",
    source="by hand",
    licence="none",
    seed=7,
    block_tokens=16,
    adapters=(Adapter("a0", 8, 1 << 20), Adapter("a1")),
)
REQUESTS = [
    Request(0, "t0", "a0", 100, 10, (1, 2, 3)),
    Request(5, "t1", None, 1, 1),
    Request(5, "t0", "a1", 33, 2, (2**63 - 1,)),
    Request(1_000_000_000, "tenant", "a0", 4_000, 500),
]
DIGEST = "sha256:444e8623f5d4eddaf83be759b98375c7e0d7694a98fb1bbf6ae20d1eda56343f"


def write(path: Path, requests: list[Request] | None = None, header: Header = HEADER) -> Header:
    return write_trace(path, header, enumerate(REQUESTS if requests is None else requests, 1))


def edit(path: Path, change: Callable[[list[str]], list[str]]) -> Path:
    path.write_text("\n".join(change(path.read_text(encoding="utf-8").splitlines())) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_is_written_comes_back(tmp_path: Path, name: str) -> None:
    written = write(tmp_path / name)
    trace = Trace(tmp_path / name)
    assert list(trace) == REQUESTS
    assert list(trace) == REQUESTS
    assert trace.header == written
    assert (written.requests, written.digest) == (4, trace.digest)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
    text = (tmp_path / name).read_bytes()
    assert (gzip.decompress(text) if name.endswith(".gz") else text).endswith(b"}\n")


def test_a_gzip_is_told_by_its_bytes_and_is_the_same_twice(tmp_path: Path) -> None:
    write(tmp_path / "a.gz")
    write(tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert (tmp_path / "a.gz").read_bytes()[4:8] == bytes(4)  # no time of writing
    (tmp_path / "a.gz").rename(tmp_path / "plain.jsonl")
    assert list(Trace(tmp_path / "plain.jsonl")) == REQUESTS


def test_the_digest_of_a_known_trace_never_changes(tmp_path: Path) -> None:
    assert write(tmp_path / "a.jsonl").digest == DIGEST


def test_the_digest_is_the_same_in_another_process_with_another_hash_seed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from loraledger.replay.traces.trace import Trace\n"
        "trace = Trace(Path(sys.argv[1])); list(trace); print(trace.digest)"
    )
    write(tmp_path / "a.jsonl.gz")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl.gz")],
        env={"PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == DIGEST


def test_the_digest_takes_no_notice_of_name_source_licence_seed_and_white_space(tmp_path: Path) -> None:
    other = write(tmp_path / "a", header=msgspec.structs.replace(HEADER, name="x", source="y", licence="z", seed=1))
    assert other.digest == DIGEST
    edit(tmp_path / "a", lambda rows: [rows[0], *(f" {row}  ".replace(":", ": ") for row in rows[1:])])
    trace = Trace(tmp_path / "a")
    assert list(trace) == REQUESTS
    assert trace.digest == DIGEST


@pytest.mark.parametrize("field", [*Request.__struct_fields__, "adapters", "block_tokens"])
def test_the_digest_changes_with_everything_that_a_replay_sees(tmp_path: Path, field: str) -> None:
    other: dict[str, Any] = {
        "at": 1, "tenant": "t9", "adapter": "a1", "prompt_tokens": 101, "output_tokens": 11, "blocks": (1, 2, 4),
        "adapters": (Adapter("a0", 8, 1 << 21), Adapter("a1")), "block_tokens": 32,
    }  # fmt: skip
    if field in Request.__struct_fields__:
        requests = [msgspec.structs.replace(REQUESTS[0], **{field: other[field]}), *REQUESTS[1:]]
        written = write(tmp_path / "a", requests)
    else:
        written = write(tmp_path / "a", header=msgspec.structs.replace(HEADER, **{field: other[field]}))
    assert written.digest != DIGEST


ROW: dict[str, Any] = {"at": 5, "tenant": "t0", "adapter": "a0", "prompt_tokens": 10, "output_tokens": 2}
BAD = {
    "a hole": "",
    "not a request: Input data was truncated": '{"at": 5, "tenant": "t0"',
    "not a request: JSON is malformed": json.dumps(ROW).replace("5", "NaN"),
    "not a request: Expected `int`, got `float`": json.dumps(ROW | {"at": 5.5}),
    "not a request: Expected `int`, got `null`": json.dumps(ROW | {"prompt_tokens": None}),
    "not a request: Object missing required field `output_tokens`": json.dumps(
        {k: v for k, v in ROW.items() if k != "output_tokens"}
    ),
    "not a request: Object contains unknown field `prompt`": json.dumps(ROW | {"prompt": "what was said"}),
    "a doubled key: 'at' is given twice: keep one": json.dumps(ROW)[:-1] + ', "at": 7}',
    "a doubled key: 'adapter' is": json.dumps(ROW)[:-1] + ', "adapter": null}',
    "a doubled key: 'blocks' is": json.dumps(ROW)[:-1] + ', "blocks": [1], "blocks": []}',
    "a doubled key: 'tenant' is": json.dumps(ROW)[:-1] + r', "\u0074enant": "\u0022\u0022\u0022\u0022"}',
    "unsorted time: 4 ns, after 5 ns": json.dumps(ROW | {"at": 4}),
    "negative time": json.dumps(ROW | {"at": -1}),
    "time out of range": json.dumps(ROW | {"at": 1_789_992_000 * 10**9}),
    "no tokens: prompt -1": json.dumps(ROW | {"prompt_tokens": -1}),
    "no tokens: prompt 10, output 0": json.dumps(ROW | {"output_tokens": 0}),
    "request too large": json.dumps(ROW | {"prompt_tokens": 4096}),
    "unknown adapter: 'a9'": json.dumps(ROW | {"adapter": "a9"}),
    "bad tenant": json.dumps(ROW | {"tenant": ""}),
    "bad blocks: 2 of 16 tokens, the prompt has 1": json.dumps(ROW | {"blocks": [1, 2]}),
    "bad blocks: a block": json.dumps(ROW | {"blocks": [-1]}),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_refused_with_its_number_and_the_reason(tmp_path: Path, reason: str) -> None:
    write(tmp_path / "a", REQUESTS[:3])
    edit(tmp_path / "a", lambda rows: [*rows, BAD[reason]])
    with pytest.raises(InputFileError) as caught:
        list(Trace(tmp_path / "a", max_tokens=4096))
    assert f"a: row 5: {reason}" in caught.value.message
    assert "--skip-bad" in caught.value.message


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_dropped_and_counted_if_that_is_allowed(tmp_path: Path, reason: str) -> None:
    write(tmp_path / "a", REQUESTS[:3])
    edit(tmp_path / "a", lambda rows: [*rows, BAD[reason], BAD[reason], json.dumps(ROW | {"at": 6})])
    trace = Trace(tmp_path / "a", max_tokens=4096, skip_bad=True)
    for _ in range(2):
        assert list(trace) == [*REQUESTS[:3], Request(6, "t0", "a0", 10, 2)]
        assert trace.dropped == {reason.split(":")[0]: 2}


def test_a_request_may_be_as_large_as_the_limit_and_no_larger(tmp_path: Path) -> None:
    write(tmp_path / "a", REQUESTS[3:])
    assert list(Trace(tmp_path / "a", max_tokens=4500)) == REQUESTS[3:]
    with pytest.raises(InputFileError, match="request too large: 4,500 tokens, limit 4,499"):
        list(Trace(tmp_path / "a", max_tokens=4499))


def test_blocks_need_their_size_in_the_header(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="row 1: bad blocks: the header has no block_tokens"):
        write(tmp_path / "a", header=msgspec.structs.replace(HEADER, block_tokens=None))


def test_a_cut_or_edited_file_is_found_out_and_may_be_read_all_the_same(tmp_path: Path) -> None:
    write(tmp_path / "cut")
    edit(tmp_path / "cut", lambda rows: rows[:-1])
    with pytest.raises(InputFileError, match=r"cut: 3 requests, its header says 4: .*import trace"):
        list(Trace(tmp_path / "cut"))
    assert list(Trace(tmp_path / "cut", verify=False)) == REQUESTS[:3]
    write(tmp_path / "edited")
    edit(tmp_path / "edited", lambda rows: [*rows[:-1], rows[-1].replace("500", "501")])
    with pytest.raises(InputFileError, match=r"edited: its content is not what its header's digest says"):
        list(Trace(tmp_path / "edited"))


def test_a_header_written_by_hand_needs_neither_count_nor_digest(tmp_path: Path) -> None:
    head = {"loraledger_trace": 1, "name": "n", "source": "s", "licence": "l", "adapters": [{"name": "a0"}]}
    (tmp_path / "a").write_text(f"{json.dumps(head)}\n{json.dumps(ROW)}", encoding="utf-8")
    assert list(Trace(tmp_path / "a")) == [Request(5, "t0", "a0", 10, 2)]


HEAD: dict[str, Any] = {"loraledger_trace": 1, "name": "n", "source": "s", "licence": "l"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loraledger_trace": 2}, "not the header of a trace of version 1"),
        ({"time_unit": "s"}, "not the header of a trace"),
        ({"prompts": ["what was said"]}, "unknown field"),
        ({"adapters": [{"name": "a"}, {"name": "a"}]}, "adapter 'a' is there twice: keep one"),
        ({"adapters": [{"name": ""}]}, "the name of an adapter"),
        ({"adapters": [{"name": "a", "rank": 0}]}, "rank and bytes"),
        ({"adapters": [{"name": "a", "bytes": -1}]}, "rank and bytes"),
        ({"adapters": [{"name": f"a{n}"} for n in range(100_001)]}, "100,001 adapters, limit 100,000"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"source": "s" * 5000}, "up to 4,096 characters"),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (tmp_path / "a").write_text(json.dumps(HEAD | change), encoding="utf-8")
    with pytest.raises(InputFileError, match=f"row 1: .*{said}"):
        Trace(tmp_path / "a")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (json.dumps(HEAD)[:-1] + ', "seed": 1, "seed": null}', "'seed' is given twice: keep one"),
        (json.dumps(HEAD)[:-1] + ', "adapters": [{"name": "a", "rank": 8, "rank": 9}]}', "'rank' is given twice"),
        (json.dumps(HEAD)[:-1] + ', "adapters": [{"name": "a", "x": %s}]}' % ("1" * 5000), "4300 digits"),
    ],
)
def test_a_header_with_a_doubled_key_or_one_that_no_parser_agrees_on_is_refused(
    tmp_path: Path, line: str, said: str
) -> None:
    (tmp_path / "a").write_text(line, encoding="utf-8")
    with pytest.raises(InputFileError, match=f"a: row 1: .*{said}"):
        Trace(tmp_path / "a")


def test_keys_that_stand_once_pass_however_they_are_written(tmp_path: Path) -> None:
    rows = [json.dumps(HEAD), json.dumps(ROW | {"adapter": None, "blocks": []}), json.dumps({**ROW, "adapter": None})]
    rows.append(rows[-1].replace("t0", r"\"\u0074\\"))
    (tmp_path / "a").write_text("\n".join(rows), encoding="utf-8")
    assert [request.tenant for request in Trace(tmp_path / "a")] == ["t0", "t0", '"t\\']


def test_a_doubled_key_is_refused_when_a_trace_is_written_anew_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(f'{json.dumps(HEAD)}\n{json.dumps(ROW)[:-1]}, "at": 7}}\n', encoding="utf-8")
    with pytest.raises(InputFileError, match="row 2: a doubled key: 'at'"):
        list(Trace(tmp_path / "a").numbered(BadRows(tmp_path / "a")))


@pytest.mark.parametrize(("size", "said"), [(-20, "cut short"), (60, "cut short"), (None, "damaged gzip data")])
def test_a_cut_or_damaged_archive_is_refused_with_what_to_do(tmp_path: Path, size: int | None, said: str) -> None:
    write(tmp_path / "a.gz")
    whole = (tmp_path / "a.gz").read_bytes()
    (tmp_path / "a.gz").write_bytes(whole[:size] if size else whole[:12] + b"\xff" * 40)
    with pytest.raises(InputFileError, match=rf"a\.gz: cannot be read: .*{said}.*: get the file again$"):
        list(Trace(tmp_path / "a.gz"))


def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path) -> None:
    write(tmp_path / "whole.gz")
    (tmp_path / "cut.gz").write_bytes((tmp_path / "whole.gz").read_bytes()[:-20])
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b\x08" + b"x" * 50)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "csv").write_text("at,tenant\n1,2\n", encoding="utf-8")
    for name in ("cut.gz", "broken.gz", "empty", "csv", "missing", "."):
        with pytest.raises(InputFileError) as caught:
            list(Trace(tmp_path / name))
        assert str(tmp_path / name) in caught.value.message
        assert "\n" not in caught.value.message


def test_a_line_without_end_is_refused_before_it_is_held(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "bomb.gz", "wb") as file:
        for _ in range(64):
            file.write(b"[" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(InputFileError, match="row 1: longer than 16,777,216 bytes"):
        Trace(tmp_path / "bomb.gz")
    assert tracemalloc.get_traced_memory()[1] < 3 * reading.MAX_LINE
    tracemalloc.stop()


@settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data())
def test_hostile_bytes_are_never_another_error(tmp_path: Path, data: st.DataObject) -> None:
    write(tmp_path / "good.gz")
    write(tmp_path / "good")
    whole = bytearray((tmp_path / data.draw(st.sampled_from(["good", "good.gz"]))).read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    (tmp_path / "bad").write_bytes(whole)
    for skip in (False, True):
        with suppress(InputFileError):
            list(Trace(tmp_path / "bad", skip_bad=skip))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(InputFileError, match="row 2: unsorted time"):
        write(tmp_path / "a", [REQUESTS[3], REQUESTS[0]])
    with pytest.raises(InputFileError, match="no request in it: give a file that holds at least one"):
        write(tmp_path / "a", [])
    late = msgspec.structs.replace(REQUESTS[0], at=-1)
    with pytest.raises(
        InputFileError, match=r"there: no request in it, all were dropped \(1 negative time\): mend them"
    ):
        write_trace(tmp_path / "a", HEADER, [(3, late)], BadRows("there", skip=True))
    assert list(Trace(tmp_path / "a")) == REQUESTS
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(InputFileError, match="cannot be written: No such file"):
        write(tmp_path / "nowhere" / "a")


def test_rows_that_may_be_dropped_are_not_written(tmp_path: Path) -> None:
    bad = BadRows("there", skip=True)
    written = write_trace(tmp_path / "a", HEADER, [(3, REQUESTS[3]), (9, REQUESTS[0])], bad)
    assert (written.requests, dict(bad.dropped)) == (1, {"unsorted time": 1})
    assert list(Trace(tmp_path / "a")) == REQUESTS[3:]


def many(count: int) -> Iterator[tuple[int, Request]]:
    for number in range(count):
        yield number, Request(number * 1000, f"t{number}", "a0", 100 + number % 7, 10)


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    tracemalloc.start()
    write_trace(tmp_path / "a.gz", HEADER, many(50_000))
    assert sum(1 for _ in Trace(tmp_path / "a.gz")) == 50_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20  # one piece of 1 MiB, cut into lines; the requests as a list are over 12 MiB


def test_a_fleet_plays_a_trace(tmp_path: Path) -> None:
    write(tmp_path / "a")
    fleet = virtual(settings_for(1, fleet_adapters(2)))
    trace = Trace(tmp_path / "a")
    fleet.run(msgspec.structs.replace(request, tenant="acme") for request in trace)
    assert [row["adapter"] for row in fleet.rows["requests"]].count("a0") == 2
    assert {row["status"] for row in fleet.rows["requests"]} == {"ok"}
