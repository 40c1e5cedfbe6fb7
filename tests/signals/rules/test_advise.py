from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from loraledger.record.tables import TABLES, Row
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import Window
from loraledger.signals.rules import Advice, Targets, advise
from loraledger.signals.rules import sample as sample_module
from loraledger.signals.rules.weeks import HOUR_NS, WEEK_NS
from signals.records import MINUTE, NOON, SECOND, base_request, record, request

UNTIL = NOON + 30 * MINUTE
AT = UNTIL - 3 * HOUR_NS
FACTS = Facts(replicas={"r1": ReplicaFacts(slots=2)}, adapter_bytes={"acme/support": 2**24})


def advice(tmp_path: Path, rows: Sequence[Row], pool: bool = False) -> Advice:
    with record(tmp_path, rows) as reader:
        return advise(reader, UNTIL, FACTS, Targets(), pool_versions=pool)


def numbers(value: object) -> Iterator[float]:
    """Every number within."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, int | float):
        yield value


NULLS: Row = {column.name: None for column in TABLES["requests"].columns} | {"arrived_ns": AT}


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [NULLS] * 9,
        [request(arrived_ns=AT)],
        [base_request(arrived_ns=AT + n) for n in range(9)],
        [request(arrived_ns=AT, first_token_ns=AT - 5, last_token_ns=AT - 9, finished_ns=AT - 99)] * 9,
        [request(arrived_ns=AT, first_token_ns=AT, last_token_ns=AT, finished_ns=AT, dispatched_ns=AT, id=None)] * 40,
        [request(arrived_ns=AT, status=None, finished_ns=None, first_token_ns=None, last_token_ns=None)] * 9,
        [request(arrived_ns=AT, replica=None, hit_class=None, status="rejected")] * 9,
        [request(arrived_ns=AT + n, hit_class="disk", engine_stall_ns=-5, preemptions=0) for n in range(9)],
        [request(arrived_ns=AT - WEEK_NS)],
        [request(arrived_ns=UNTIL)],
    ],
)
def test_bad_input_gives_an_answer_without_nan(tmp_path: Path, rows: list[Row]) -> None:
    found = advice(tmp_path, rows)
    assert all(map(math.isfinite, numbers(msgspec.to_builtins(found))))
    assert found.slots.verdict == "holds back"
    assert found.slots.missing


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert advice(tmp_path, []).notes == ("no request arrived in the three weeks",)
    old = advice(tmp_path, [request(arrived_ns=AT - WEEK_NS)])
    assert any("no request arrived in the last week" in note for note in old.notes)
    assert (old.ranking, old.sample) == (None, None)


def test_the_version_with_most_requests_is_judged_and_others_are_listed(tmp_path: Path) -> None:
    rows = [request(arrived_ns=AT + n) for n in range(3)]
    rows += [request(arrived_ns=AT + n, hit_class="disk", config_digest="sha256:dd") for n in range(2)]
    rows += [
        request(arrived_ns=AT, replica=None, hit_class=None, engine_version=None, config_digest="sha256:dd")
        for _ in range(5)
    ]
    found = advice(tmp_path, rows)
    assert found.version is not None
    assert [(one.config_digest, one.requests) for one in found.versions] == [("sha256:cc", 3), ("sha256:dd", 2)]
    assert found.version.config_digest == "sha256:cc"
    # those that were sent nowhere belong to every version
    week = found.slots.weeks[-1]
    assert (week.requests, week.peak_arrivals, week.peak_known, week.hit_rate) == (8, 8, 3, 1.0)
    assert found.ranking is not None
    assert found.ranking.worths[0].requests == 3
    assert any("1 other version with 2 requests is left out" in note for note in found.notes)


def test_versions_are_pooled_when_asked(tmp_path: Path) -> None:
    rows = [request(arrived_ns=AT + n, hit_class="gpu" if n else "disk", config_digest=f"sha256:{n}") for n in range(4)]
    found = advice(tmp_path, rows, pool=True)
    assert found.version is None
    assert len(found.versions) == 4
    assert found.slots.weeks[-1].hit_rate == 0.75


def test_the_sample_is_the_busiest_hour_of_the_last_week(tmp_path: Path) -> None:
    busy = AT - AT % HOUR_NS
    rows = [request(arrived_ns=busy + n * MINUTE) for n in range(5)] + [
        base_request(arrived_ns=busy + 3 * HOUR_NS + n) for n in range(9)
    ]
    rows += [request(arrived_ns=busy - WEEK_NS + n) for n in range(20)]
    assert advice(tmp_path, rows).sample == Window(busy, busy + HOUR_NS)
    alone = [row for row in rows if row["adapter"] is None]
    assert advice(tmp_path, alone).sample == Window(busy + 3 * HOUR_NS, UNTIL)  # cut where the week ends


def test_an_hour_that_the_record_began_in_is_sampled_from_its_first_request_on(tmp_path: Path) -> None:
    """A steady tenant of a young record is no burst after a long silence."""
    busy = AT - AT % HOUR_NS
    began = busy + 50 * MINUTE
    found = advice(tmp_path, [request(arrived_ns=began + n * SECOND) for n in range(600)])
    assert found.sample == Window(began, busy + HOUR_NS)
    assert found.bursts == ()


def test_an_id_that_comes_twice_is_sampled_once(tmp_path: Path) -> None:
    found = advice(tmp_path, [request(arrived_ns=AT + n, id="same") for n in range(3)] + [request(arrived_ns=AT + 9)])
    assert found.ranking is not None
    assert found.ranking.total is not None
    assert found.ranking.total.uses == 2


def test_a_sample_that_is_too_large_ends_early_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_module, "LIMIT", 10)
    start = AT - AT % HOUR_NS
    found = advice(tmp_path, [request(arrived_ns=start + n * SECOND) for n in range(30)])
    assert found.sample == Window(start, start + 10 * SECOND)
    assert found.ranking is not None
    assert found.ranking.total is not None
    assert found.ranking.total.uses == 10
    assert any("first 10 requests were read" in note for note in found.notes)


def test_bursts_slow_hits_and_harmless_misses_come_from_the_record(tmp_path: Path) -> None:
    start = AT - AT % HOUR_NS
    rows = [request(arrived_ns=start + n * 3 * SECOND, tenant="steady") for n in range(1000)]
    for n in range(200):
        at = start + 10 * MINUTE + n * SECOND // 20
        late = {"first_token_ns": at + 9 * SECOND, "last_token_ns": at + 10 * SECOND, "finished_ns": at + 10 * SECOND}
        rows.append(request(arrived_ns=at, tenant="bursty", adapter="acme/slow", **late))
        rows.append(
            request(arrived_ns=at, tenant="steady", adapter="acme/harmless", hit_class="host", engine_stall_ns=0)
        )
    found = advice(tmp_path, rows)
    assert "bursty" in [one.tenant for one in found.bursts]
    assert [(one.adapter, one.n) for one in found.slow_hits] == [("acme/slow", 200)]
    assert [(one.adapter, one.n) for one in found.harmless_misses] == [("acme/harmless", 200)]
