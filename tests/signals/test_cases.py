"""Cases from the field (``tests/cases``): what the gateway makes of these transcripts, as figures of a window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraledger import events as ev
from loraledger.conductor.fold import FoldState, RowFold
from loraledger.gateway.answers import Renamer, body_usage
from loraledger.gateway.sse import SseReader
from loraledger.record.tables import Row
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Signals, Window
from loraledger.signals.measure import measure

from .records import MINUTE, NOON, SECOND, record, request

CASES = Path(__file__).parents[1] / "cases"
WINDOW = Window(NOON, NOON + MINUTE)
DECISION = ev.Decision(1, "bounded", "r1", "affinity", "gpu", "believed", 1, ())


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expect.json").read_text())


def row_of(transcript: Path) -> Row:
    """The row that the gateway's reader and the fold make of a transcript (seconds, tab, line) that began at noon."""
    said = [line.split("\t", 1) for line in transcript.read_text().splitlines()]
    lines = [(NOON + round(float(at) * SECOND), text) for at, text in said[1:]]
    end, last = lines[-1]
    status: ev.Status = "upstream_reset" if last == "<upstream reset>" else "ok"
    streamed = "stream=false" not in said[0][1]
    reader = SseReader(Renamer("alpha", "alpha"), hide_usage=True)
    for at, text in lines if streamed else []:
        if not text.startswith("<"):
            reader.feed(text.encode() + b"\n\n", at)
    usage = reader.usage if streamed else body_usage(last.encode())
    measured = ev.Measured(
        first_byte=lines[0][0],
        first_token=reader.first_token,
        last_token=reader.last_token,
        prompt_tokens=usage.prompt_tokens if usage is not None else None,
        generated_tokens=usage.completion_tokens if usage is not None else None,
        itl_mean=reader.gap_mean,
        itl_max=reader.gap_max,
        itl_sketch=reader.gaps.counts or None,
        tokens_seen=reader.tokens_seen,
        first_answer=reader.first_answer,
    )
    fold = RowFold(FoldState("base-8b", "sha256:cc", "0.1.0"))
    arrived = ev.RequestArrived(NOON, "req-1", "acme", "alpha", 5, None, streamed, "/v1/chat/completions")
    fold.step(arrived, [ev.Dispatch("req-1", 1, "r1", "alpha", DECISION)], [])
    ((_, row),) = fold.step(ev.RequestFinished(end, "req-1", status, 200, None, measured), [], [])
    return row


def measured(tmp_path: Path, *rows: Row) -> Signals:
    with record(tmp_path, rows) as reader:
        return measure(reader, WINDOW, Facts())


@pytest.mark.parametrize("name", ["asked_plain", "cut"])
def test_a_stream_that_told_no_usage_has_unknown_tokens_and_not_none(tmp_path: Path, name: str) -> None:
    signals = measured(tmp_path, row_of(CASES / "stream-no-usage" / f"{name}.tsv"))
    assert signals.total is not None
    assert (signals.total.prompt_tokens, signals.total.generated_tokens) == (None, None)
    assert signals.total.active_tokens is None
    assert signals.quality.no_tokens == (1 if name == "asked_plain" else 0)
    assert any("unknown, not 0" in note for note in signals.quality.notes) is (name == "asked_plain")
    assert signals.total.ttft is not None
    assert signals.total.ttft.p50 == 0.4


def test_usage_that_was_told_counts_and_one_that_was_not_is_not_mixed_in(tmp_path: Path) -> None:
    case = CASES / "stream-no-usage"
    untold = row_of(case / "asked_plain.tsv") | {"id": "req-2"}
    total = measured(tmp_path, row_of(case / "asked_usage.tsv"), untold).total
    assert total is not None
    right = expected("stream-no-usage")["asked_usage"]
    assert (total.prompt_tokens, total.generated_tokens) == (right["prompt"], right["completion"])


@pytest.mark.parametrize("name", ["reasoning", "tool_only", "capped_in_reasoning", "not_streamed"])
def test_the_first_token_is_the_first_content_and_a_whole_answer_has_none(tmp_path: Path, name: str) -> None:
    total = measured(tmp_path, row_of(CASES / "ttft-first-content" / f"{name}.tsv")).total
    assert total is not None
    right = expected("ttft-first-content")[name]["first_token"]
    if right is None:
        assert (total.ttft, total.split, total.attainment, total.oldest_wait) == (None, None, None, None)
        assert total.generated_tokens == 40
    else:
        assert total.ttft is not None
        assert (total.ttft.n, total.ttft.p50, total.oldest_wait) == (1, right, right)


def test_a_whole_answer_never_counts_its_total_time_as_first_token(tmp_path: Path) -> None:
    row = request(
        stream=False, first_token_ns=NOON + 3 * SECOND, last_token_ns=NOON + 3 * SECOND, finished_ns=NOON + 3 * SECOND
    )
    total = measured(tmp_path, row, request()).total
    assert total is not None
    assert total.ttft is not None
    assert (total.ttft.n, total.ttft.p99, total.oldest_wait) == (1, 0.2, 0.2)


def test_tenants_get_their_own_totals_whatever_name_the_engine_answers_with(tmp_path: Path) -> None:
    case = CASES / "base-name-metrics"
    told = [json.loads(line) for line in (case / "gateway_events.jsonl").read_text().splitlines()]
    rows = [
        request(
            tenant=each["tenant"],
            adapter=each["adapter"],
            prompt_tokens=each["prompt_tokens"],
            generated_tokens=each["completion_tokens"],
        )
        for each in told
    ]
    signals = measured(tmp_path, *rows)
    right = expected("base-name-metrics")
    assert {name: group.requests for name, group in signals.tenants.items()} == right["per_tenant_requests"]
    tokens = {name: group.generated_tokens for name, group in signals.tenants.items()}
    assert tokens == right["per_tenant_completion_tokens"]
    assert signals.total is not None
    assert (signals.total.requests, signals.total.prompt_tokens, signals.total.generated_tokens) == (30, 9000, 3000)
