"""Other formats become traces row by row; what is bad in them is refused with its row, or dropped and counted."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraledger.errors import InputFileError
from loraledger.gateway.paths import FORMS
from loraledger.record.lines import BadRows
from loraledger.record.parquet import write_parquet
from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row
from loraledger.replay.traces.importers import azure, from_first, mooncake, salted, utc_ns, vidur
from loraledger.replay.traces.recorded import Recorded, recorded_adapters
from loraledger.replay.traces.trace import Adapter, Header, Request
from loraledger.replay.traces.tracev2 import COLUMNS, adapters_in, check_header, header_path, tracev2, write_tracev2
from loraledger.replay.workloads.generate import Rows

DATA = Path(__file__).parents[1] / "data"
MS = 1_000_000
SALT = salted(b"sixteen bytes or more")


def put(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_times_are_utc_with_100_ns_and_count_from_the_first_row() -> None:
    found = list(azure(DATA / "azure_conv_50.csv", BadRows("x")))
    assert len(found) == 50
    assert found[0] == (2, Request(0, "t0", None, 374, 44))
    assert found[1] == (3, Request(4_314_579_000, "t0", None, 396, 109))
    assert utc_ns("2023-11-16 18:15:46.6805900") == 1_700_158_546_680_590_000
    assert utc_ns("2024-05-10 00:00:00.009930+00:00") == 1_715_299_200_009_930_000


def test_azure_s_last_line_needs_no_end_and_may_have_a_carriage_return(tmp_path: Path) -> None:
    text = "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:00:00,1,2\r\n2023-11-16 18:00:01.5,3,4"
    rows = list(azure(put(tmp_path / "a.csv", text), BadRows("x")))
    assert [row for _, row in rows] == [Request(0, "t0", None, 1, 2), Request(1500 * MS, "t0", None, 3, 4)]


def test_mooncake_keeps_the_names_of_prefix_blocks() -> None:
    found = list(mooncake(DATA / "mooncake_conversation_50.jsonl", BadRows("x")))
    assert len(found) == 50
    number, first = found[0]
    assert (number, first.at, first.prompt_tokens, first.output_tokens) == (1, 0, 6758, 500)
    assert first.blocks == tuple(range(14))
    assert found[-1][1].at % MS == 0
    assert found[-1][1].at > 0


def test_a_salt_hides_the_names_of_blocks_and_keeps_which_are_equal() -> None:
    def blocks(rename: Callable[[str], int] | None) -> list[tuple[int, ...]]:
        return [row.blocks for _, row in mooncake(DATA / "mooncake_conversation_50.jsonl", BadRows("x"), rename)]

    plain, hidden, other = blocks(None), blocks(SALT), blocks(salted(b"another salt of 20 b"))
    flat, flat_hidden = [b for row in plain for b in row], [b for row in hidden for b in row]
    assert len(set(flat)) == len(set(flat_hidden)) == len(set(zip(flat, flat_hidden, strict=True)))
    assert not set(flat) & set(flat_hidden)
    assert not set(flat_hidden) & {b for row in other for b in row}
    assert all(0 <= block < 2**63 for block in flat_hidden)
    assert hidden == blocks(SALT)


def test_a_salt_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(InputFileError, match="5 bytes"):
        salted(b"short")


def test_vidur_times_are_seconds(tmp_path: Path) -> None:
    path = put(tmp_path / "v.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,10,20\n1e1,30,40\n")
    rows = list(vidur(path, BadRows("x")))
    assert rows == [(2, Request(250 * MS, "t0", None, 10, 20)), (3, Request(10_000 * MS, "t0", None, 30, 40))]
    assert [row.at for _, row in from_first(iter(rows))] == [0, 9750 * MS]


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1,2\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,2\n"
MOONCAKE = '{"timestamp": 0, "input_length": 1, "output_length": 2, "hash_ids": [0]}\n'
Reader = Callable[[Path, BadRows], Rows]
BAD: list[tuple[Reader, str, str, str]] = [
    (azure, AZURE, "2023-11-16 18:00:01,3", "a hole: 2 cells of 3"),
    (azure, AZURE, "", "a hole"),
    (azure, AZURE, "2023-11-16 18:00:01,,4", "not a request: a number is missing"),
    (azure, AZURE, "2023-11-16 18:00:01,3.5,4", "not a request: '3.5' is not a whole number"),
    (azure, AZURE, "2023-11-16 18:00:01,NaN,4", "not a request: 'NaN'"),
    (azure, AZURE, "2023-13-16 18:00:01,3,4", "not a request: month"),
    (azure, AZURE, "yesterday,3,4", "not a request: 'yesterday' is not a time"),
    (azure, AZURE, '"2023-11-16 18:00:01,3,4', "not CSV in UTF-8"),
    (azure, AZURE, "2023-11-16 18:00:01," + "9" * 5000 + ",4", "not a request"),
    (vidur, VIDUR, "nan,3,4", "not a request: 'nan' is not a time"),
    (vidur, VIDUR, "1e300,3,4", "not a request: '1e300' is not a time"),
    (vidur, VIDUR, ",3,4", "not a request"),
    (mooncake, MOONCAKE, '{"timestamp": 0, "input_length": 1}', "not a request: Object missing required field"),
    (mooncake, MOONCAKE, '{"timestamp": NaN, "input_length": 1, "output_length": 2}', "not a request: JSON"),
    (mooncake, MOONCAKE, '{"timestamp": 0, "input_length": "1", "output_length": 2}', "not a request: Expected `int`"),
    (mooncake, MOONCAKE, "[" * 5000, "not a request"),
    (mooncake, MOONCAKE, "", "a hole"),
]


@pytest.mark.parametrize(("read", "good", "row", "reason"), BAD)
def test_a_bad_row_is_refused_with_its_number_or_counted(
    tmp_path: Path, read: Reader, good: str, row: str, reason: str
) -> None:
    path = put(tmp_path / "a", good + row + "\n")
    number = good.count("\n") + 1
    with pytest.raises(InputFileError) as caught:
        list(read(path, BadRows(path)))
    assert f"a: row {number}: {reason}" in caught.value.message
    skipping = BadRows(path, skip=True)
    assert len(list(read(path, skipping))) == 1
    assert dict(skipping.dropped) == {reason.split(":")[0]: 1}


def test_the_first_good_azure_row_is_the_start_when_one_before_it_is_dropped(tmp_path: Path) -> None:
    path = put(tmp_path / "a", AZURE.replace("18:00:00,1", "17:00:00,x") + "2023-11-16 18:00:05,3,4\n")
    assert [row.at for _, row in azure(path, BadRows(path, skip=True))] == [0]


@pytest.mark.parametrize("read", [azure, vidur])
@pytest.mark.parametrize("text", ["", "a,b,c\n1,2,3\n", MOONCAKE])
def test_a_file_of_another_format_is_refused(tmp_path: Path, read: Reader, text: str) -> None:
    with pytest.raises(InputFileError, match=r"no column|is empty"):
        list(read(put(tmp_path / "a", text), BadRows("a", skip=True)))


# --- TraceV2 ------------------------------------------------------------------------------------------------------------------

ABOUT = Header(name="n", source="s", licence="l", seed=5, digest="sha256:ab", adapters=(Adapter("a0"), Adapter("a,1")))


def test_what_is_exported_as_tracev2_comes_back(tmp_path: Path) -> None:
    requests = [
        Request(1_500, "t0", "a0", 10, 20),
        Request(2_000_999, "t 1", None, 1, 1),
        Request(9 * MS, "t0", "a,1", 5, 6, (1,)),
    ]
    assert write_tracev2(tmp_path / "x.csv", ABOUT, requests) == 1
    check_header(header_path(tmp_path / "x.csv"))
    assert adapters_in(tmp_path / "x.csv", BadRows("x")) == (Adapter("a,1"), Adapter("a0"))
    found = list(tracev2(tmp_path / "x.csv", BadRows("x")))
    assert found == [
        (2, Request(1_000, "t0", "a0", 10, 20)),
        (3, Request(2_000_000, "t 1", None, 1, 1)),
        (4, Request(9 * MS, "t0", "a,1", 5, 6)),
    ]


def test_the_export_has_every_column_that_the_other_simulator_reads_in_its_order(tmp_path: Path) -> None:
    write_tracev2(tmp_path / "x.csv", ABOUT, [Request(7_000, "t0", "a0", 10, 20)])
    rows = list(csv.DictReader((tmp_path / "x.csv").read_text(encoding="utf-8").splitlines()))
    assert list(rows[0]) == COLUMNS.split()
    assert len(rows[0]) == 28
    told = {
        "arrival_time_us": "7",
        "input_tokens": "10",
        "text_tokens": "10",
        "prefix_length": "0",
        "streaming": "true",
        "adapter": "a0",
    }
    assert {name: rows[0][name] for name in told} == told
    numbers = (
        "request_id",
        "round_index",
        "prefix_length",
        "deadline_us",
        "server_input_tokens",
        "send_time_us",
        "num_chunks",
    )
    assert all(rows[0][name] == "0" for name in numbers)
    assert "trace_version: 2\ntime_unit: microseconds\n" in header_path(tmp_path / "x.csv").read_text(encoding="utf-8")


V2 = "request_id,client_id,tenant_id,prefix_group,prefix_length,input_tokens,output_tokens,arrival_time_us"


def test_a_prompt_is_prefix_and_input_and_a_salt_names_its_full_blocks(tmp_path: Path) -> None:
    path = put(
        tmp_path / "x.csv", f"{V2}\n0,c,t,chat,40,2,3,0\n1,c,,chat,33,2,3,1\n2,c,t,code,32,2,3,1\n3,,,,0,2,3,1\n"
    )
    plain = [row for _, row in tracev2(path, BadRows("x"))]
    assert [row.prompt_tokens for row in plain] == [42, 35, 34, 2]
    assert [row.tenant for row in plain] == ["t", "c", "t", "t0"]
    assert all(row.blocks == () and row.adapter is None for row in plain)
    first, second, third, none = (row.blocks for _, row in tracev2(path, BadRows("x"), SALT))
    assert len(first) == 2
    assert first == second
    assert not set(first) & set(third)
    assert none == ()


@pytest.mark.parametrize(
    "row", ["0,c,t,g,-1,2,3,0", "0,c,t,g,0,-2,3,0", "0,c,t,g,0,2,3,", "0,c,t,g,0,2,3,1.5", "0,c,t,g,x,2,3,0", "0,c,t"]
)
def test_a_bad_row_of_tracev2_is_refused(tmp_path: Path, row: str) -> None:
    path = put(tmp_path / "x.csv", f"{V2}\n{row}\n")
    with pytest.raises(InputFileError, match=r"x\.csv: row 2"):
        list(tracev2(path, BadRows(path)))
    assert adapters_in(path, BadRows(path)) == ()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("unit", ["microseconds", "us"])
def test_two_versions_of_tracev2_and_two_names_of_its_unit_are_read(tmp_path: Path, version: int, unit: str) -> None:
    check_header(put(tmp_path / "x.yaml", f"trace_version: {version}\ntime_unit: {unit}\n"))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "trace_version: 1\ntime_unit: microseconds\n", "trace_version: 2\ntime_unit: ms\n", "a: b: c", "\x00",
        "trace_version: !!python/object/apply:os.system [ls]\n", "[" * 3000, "a: &a [*a]",
    ],
)  # fmt: skip
def test_a_bad_header_of_tracev2_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputFileError, match=r"x\.yaml: "):
        check_header(put(tmp_path / "x.yaml", text))
    with pytest.raises(InputFileError, match="cannot be read"):
        check_header(tmp_path / "missing.yaml")


# --- our record ---------------------------------------------------------------------------------------------------------------

NOON = 1_789_992_000 * 10**9


def row(number: int, **other: Any) -> Row:
    known = {"id": f"q{number:03}", "arrived_ns": NOON + number * MS, "tenant": "acme", "status": "ok", "adapter": "a0"}
    return {**known, "prompt_tokens": 100 + number, "generated_tokens": 10, **other}


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., RecordReader]:
    def made(*rows: Row) -> RecordReader:
        write_parquet({"requests": list(rows)}, tmp_path, "s1")
        return RecordReader(tmp_path)

    return made


def test_a_record_is_read_in_order_with_tenant_adapter_and_tokens(record: Callable[..., RecordReader]) -> None:
    with record(
        row(2, tenant="b"), row(1, adapter=None), row(3, status="client_gone"), row(0, status="client_error")
    ) as reader:
        assert list(Recorded(reader, BadRows("x"))) == [
            (1, Request(0, "acme", None, 101, 10)),
            (2, Request(MS, "b", "a0", 102, 10)),
            (3, Request(2 * MS, "acme", "a0", 103, 10)),
        ]
        assert recorded_adapters(reader) == (Adapter("a0"),)


def test_a_long_record_is_read_page_by_page_without_loss(
    record: Callable[..., RecordReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraledger.replay.traces.recorded._PAGE", 7)
    rows = [row(number, arrived_ns=NOON + number // 5) for number in range(50)]
    with record(*rows) as reader:
        found = list(Recorded(reader, BadRows("x")))
    assert [request.prompt_tokens for _, request in found] == [100 + number for number in range(50)]
    assert [number for number, _ in found] == list(range(1, 51))


def test_calls_that_only_turn_tokens_are_no_demand_and_an_embedding_is_one_step(
    record: Callable[..., RecordReader],
) -> None:
    tokenizer_only = [path for path, form in FORMS.items() if not form.computes]
    rows = [row(n, path=path.decode(), adapter="only", generated_tokens=0) for n, path in enumerate(tokenizer_only)]
    later = [row(8, path="/v1/embeddings", generated_tokens=None), row(9, path=None)]
    with record(*rows, *later) as reader:
        assert [request.output_tokens for _, request in Recorded(reader, BadRows("x"))] == [1, 10]
        assert recorded_adapters(reader) == (Adapter("a0"),)


FAILED: dict[str, Any] = {"status": "rejected", "prompt_tokens": None, "generated_tokens": None}


def test_unknown_tokens_are_refused_unless_a_rule_is_named(record: Callable[..., RecordReader]) -> None:
    with record(row(1), row(2, **FAILED)) as reader:
        with pytest.raises(InputFileError, match="request q002: no token counts"):
            list(Recorded(reader, BadRows("x", skip=True)))
        bad = BadRows("x")
        assert len(list(Recorded(reader, bad, "drop"))) == 1
        assert bad.dropped == {"no token counts": 1}


def test_unknown_tokens_are_estimated_by_the_gateway_then_the_adapter_then_all(
    record: Callable[..., RecordReader],
) -> None:
    rows = [
        *(row(n, prompt_tokens=10 * n, generated_tokens=n) for n in (1, 2, 3)),
        row(4, adapter="b", prompt_tokens=990, generated_tokens=77),
        row(5, adapter="b", status="client_gone", prompt_tokens=990, generated_tokens=1),
        row(6, predicted_prompt_tokens=15, **FAILED),
        row(7, **FAILED),
        row(8, adapter="new", **FAILED),
        row(9, adapter="b", **FAILED),
    ]
    with record(*rows) as reader:
        recorded = Recorded(reader, BadRows("x"), "estimate")
        tokens = {request.at // MS + 1: (request.prompt_tokens, request.output_tokens) for _, request in recorded}
    assert [tokens[n] for n in (6, 7, 8, 9)] == [(15, 2), (20, 2), (30, 3), (990, 77)]
    assert recorded.filled == Counter(prompt_tokens=4, generated_tokens=4)


def test_what_nothing_is_known_of_cannot_be_estimated_and_is_dropped(record: Callable[..., RecordReader]) -> None:
    bad = BadRows("x")
    with record(row(1, **FAILED)) as reader:
        assert list(Recorded(reader, bad, "estimate")) == []
    assert bad.dropped == {"no token counts": 1}
