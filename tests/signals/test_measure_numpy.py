"""Every figure of requests against numpy on the raw rows: written apart from the SQL, and by other means."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.record.reader import RecordReader
from loraledger.record.sketch import Sketch
from loraledger.record.tables import Row
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import Group, Signals, Split, Spread, Window
from loraledger.signals.measure import measure

from .records import MINUTE, NOON, SECOND

WINDOW = Window(NOON, NOON + 2 * MINUTE)
FACTS = Facts(
    replicas={"r1": ReplicaFacts(slots=1), "r2": ReplicaFacts(slots=2)},
    adapter_bytes={f"a{number}": 1000 + number for number in range(7)},
)
SLO = 0.8
CLASSES = ("gpu", "host", "disk", "remote", "base", "unknown", None)
Gaps = dict[str, list[int]]
"""By request id the times between its tokens, in ns: what its sketch was made of."""


def history(seed: int, count: int) -> tuple[list[Row], Gaps]:
    """Rows of all kinds: probed and not, refused, open, failed, twice there, with clocks that go back."""
    chance = random.Random(seed)
    gaps: Gaps = {}
    rows = [_row(chance, f"req-{number}", gaps) for number in range(count)]
    rows += [{**row, "finished_ns": NOON - SECOND, "tenant": "ghost"} for row in rows if chance.random() < 0.02]
    chance.shuffle(rows)
    return rows, gaps


def _row(chance: random.Random, name: str, gaps: Gaps) -> Row:
    def maybe(value: Any, known: float = 0.8) -> Any:
        return value if chance.random() < known else None

    arrived = NOON + chance.randrange(-5 * SECOND, 125 * SECOND)
    hit = chance.choice(CLASSES)
    ttft = chance.randrange(0, 2 * SECOND)
    dispatched = arrived + chance.randrange(0, ttft // 2 + 1)
    first, last = arrived + ttft, arrived + ttft + chance.randrange(0, 5 * SECOND)
    row: Row = {
        "id": name,
        "tenant": maybe(chance.choice("ABC"), 0.95),
        "adapter": None if hit == "base" else f"a{min(chance.randrange(9), chance.randrange(9))}",
        "replica": maybe(chance.choice(["r1", "r2", "r3"]), 0.9),
        "hit_class": hit,
        "arrived_ns": arrived,
        "status": chance.choice(
            ["ok", "ok", "ok", "ok", "rejected", "client_error", "client_gone", "upstream_reset", None]
        ),
        "stream": chance.choice([True, True, True, False, None]),
        "prompt_tokens": maybe(chance.randrange(1, 3000)),
        "generated_tokens": maybe(chance.randrange(0, 300)),
        "cached_tokens": maybe(chance.randrange(0, 10), 0.5),
        "queued_ns": maybe(chance.randrange(0, SECOND), 0.4),
        "engine_access": maybe(chance.choice(["gpu", "host", "disk"]), 0.5),
        "engine_queue_ns": maybe(chance.randrange(0, SECOND // 2), 0.6),
        "engine_prefill_ns": maybe(chance.randrange(0, SECOND // 2), 0.8),
        "engine_stall_ns": maybe(chance.randrange(0, SECOND // 2), 0.4),
        "engine_load_ns": maybe(chance.randrange(0, SECOND // 4), 0.4),
        "engine_activation_ns": maybe(chance.randrange(0, SECOND // 4), 0.4),
        "preemptions": maybe(chance.randrange(0, 3), 0.5),
        "itl_mean_ns": maybe(chance.randrange(10**6, 10**8), 0.7),
        "engine_version": "1",
    }
    if row["status"] != "rejected":
        row |= {"dispatched_ns": maybe(dispatched, 0.9), "first_token_ns": maybe(first), "last_token_ns": maybe(last)}
    if row["status"] is not None:
        row["finished_ns"] = last + chance.randrange(0, SECOND)
    if chance.random() < 0.3:
        start = arrived + chance.randrange(-SECOND, SECOND)
        row |= {"load_start_ns": maybe(start), "load_end_ns": maybe(start + chance.randrange(0, SECOND))}
    if chance.random() < 0.5:
        gaps[name] = [int(10**6 * math.exp(chance.gauss(3, 1))) for _ in range(chance.randrange(1, 20))]
        sketch = Sketch()
        for gap in gaps[name]:
            sketch.add(gap)
        row["itl_sketch"] = sketch.to_json()
    if chance.random() < 0.05:
        row[chance.choice(["queued_ns", "engine_queue_ns", "engine_load_ns", "itl_mean_ns"])] = -5
    if chance.random() < 0.05:
        row["first_token_ns"] = arrived - chance.randrange(1, SECOND)
    return row


class Raw:
    """Columns of some rows as arrays; times count from noon, so that floats hold them. Null is NaN."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.ours = np.array([row["status"] != "client_error" for row in rows], bool)
        self.stream = np.array([row["stream"] is not False for row in rows], bool)
        self.arrived = self("arrived_ns")
        moments = ["arrived_ns", "dispatched_ns", "first_token_ns", "finished_ns", "last_token_ns"]
        orders = [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3), (2, 4)]
        back = np.any([self(moments[later]) < self(moments[earlier]) for earlier, later in orders], axis=0)
        back |= self("load_end_ns") < self("load_start_ns")
        for name in (
            *(f"engine_{of}_ns" for of in ("queue", "prefill", "stall", "load", "activation")),
            "queued_ns",
            "itl_mean_ns",
        ):
            back |= self(name) < 0
        self.back = back
        timed = self.ours & ~self.back
        self.ttft = np.where(timed & self.stream, self("first_token_ns") - self.arrived, np.nan)
        tokens = np.nan_to_num(self("prompt_tokens")) + np.nan_to_num(self("generated_tokens"))
        known = ~np.isnan(self("prompt_tokens")) | ~np.isnan(self("generated_tokens"))
        self.active = np.where(timed & known, tokens * (self("finished_ns") - self("dispatched_ns")), np.nan)

    def __call__(self, name: str) -> Any:
        origin = NOON if name.endswith("_ns") and name.split("_")[0] in _MOMENTS else 0
        values = [row.get(name) for row in self.rows]
        return np.array([np.nan if value is None else value - origin for value in values], float)  # type: ignore[operator]


_MOMENTS = {"arrived", "dispatched", "first", "finished", "last", "load"}


def close(figure: float | None, value: Any) -> bool:
    if figure is None or value is None:
        return figure is None and value is None
    return math.isclose(figure, float(value), rel_tol=1e-9, abs_tol=1e-12)


def total(values: Any) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else None


def check_spread(found: Spread | None, ns: Any) -> None:
    ns = ns[~np.isnan(ns)]
    if not len(ns):
        assert found is None
        return
    assert found is not None
    assert found.exact
    assert found.n == len(ns)
    figures = (found.mean, found.p50, found.p90, found.p99)
    for figure, value in zip(figures, [ns.mean(), *np.percentile(ns, [50, 90, 99])], strict=True):
        assert close(figure, value / 1e9)


def check_split(found: Split | None, raw: Raw, of: Any) -> None:
    of = of & ~np.isnan(raw.ttft)
    if not of.any():
        assert found is None
        return
    assert found is not None
    left, sums = raw.ttft[of].copy(), {}
    probed = ~np.isnan(raw("engine_queue_ns")[of]) & ~np.isnan(raw("engine_prefill_ns")[of])
    stall = raw("engine_stall_ns")[of]
    parts = np.nan_to_num(raw("engine_load_ns")[of]) + np.nan_to_num(raw("engine_activation_ns")[of])
    queued = np.nan_to_num(raw("queued_ns")[of])
    load = raw("load_end_ns")[of] - np.maximum(raw("load_start_ns")[of], raw.arrived[of])
    room = np.maximum(0, raw("dispatched_ns")[of] - raw.arrived[of] - queued)
    load = np.fmin(np.maximum(0, np.nan_to_num(load)), room)
    for name, value in (
        ("gateway_queue", queued),
        ("load", load),
        ("engine_queue", np.nan_to_num(raw("engine_queue_ns")[of])),
        ("stall", np.where(np.isnan(stall), parts, stall)),
        ("prefill", np.nan_to_num(raw("engine_prefill_ns")[of])),
    ):
        taken = np.minimum(left, value)
        left -= taken
        sums[name] = taken.sum() / 1e9
    assert found.n == of.sum()
    assert close(found.ttft, raw.ttft[of].sum() / 1e9)
    assert close(found.gateway_queue, sums["gateway_queue"])
    assert close(found.preparation, sums["load"] + sums["stall"])
    assert close(found.engine_queue, sums["engine_queue"])
    assert close(found.prefill, sums["prefill"])
    assert close(found.unattributed, left[probed].sum() / 1e9)
    assert close(found.engine, left[~probed].sum() / 1e9)
    parts_of = (
        found.gateway_queue,
        found.preparation,
        found.engine_queue,
        found.prefill,
        found.unattributed,
        found.engine,
    )
    assert sum(parts_of) == found.ttft
    assert min(parts_of) >= 0
    told = [
        any(row.get(f"engine_{name}_ns") is not None for name in ("stall", "load", "activation")) for row in raw.rows
    ]
    free = [row["hit_class"] in ("gpu", "base") for row in raw.rows]
    assert found.told == (np.array(told) | np.array(free))[of].sum()


def attainment(raw: Raw) -> float | None:
    judged = met = 0
    for row, ttft, ours, back in zip(raw.rows, raw.ttft, raw.ours, raw.back, strict=True):
        if not math.isnan(ttft):
            judged, met = judged + 1, met + (ttft <= SLO * 1e9)
        elif ours and not back and row["stream"] is not False:
            waits = row["status"] is None and WINDOW.until_ns - int(row["arrived_ns"]) > SLO * 1e9  # type: ignore[call-overload]
            judged += waits or row["status"] in ("rejected", "upstream_reset")
    return met / judged if judged else None


def check_gaps(found: Spread | None, rows: list[Row], raw: Raw, gaps: Gaps) -> None:
    values = [gaps.get(str(row["id"]), []) for row, ok in zip(rows, raw.ours & ~raw.back, strict=True) if ok]
    ns = np.sort(np.array([gap for each in values for gap in each], float))
    if not len(ns):
        assert found is None
        return
    assert found is not None
    assert not found.exact
    assert found.n == len(ns)
    for figure, q in ((found.p50, 0.5), (found.p90, 0.9), (found.p99, 0.99)):
        assert figure == pytest.approx(ns[math.floor(q * (len(ns) - 1))] / 1e9, rel=0.011)
    assert found.mean == pytest.approx(ns.mean() / 1e9, rel=0.011)


def check_group(found: Group, rows: list[Row], gaps: Gaps, everything: int, own: str | None = None) -> None:
    raw = Raw(rows)
    classes = np.array([row["hit_class"] or "undecided" for row in rows])
    assert found.requests == len(rows)
    assert close(found.share, len(rows) / everything)
    assert close(found.per_minute, len(rows) / 2)
    assert found.by_status == Counter(row["status"] or "open" for row in rows)
    assert found.rejections == Counter(row.get("reason") or "unknown" for row in rows if row["status"] == "rejected")
    ours = [row for row, mine in zip(rows, raw.ours, strict=True) if mine]
    for figures, counts in (
        (found.hits, Counter(str(row["hit_class"] or "undecided") for row in ours)),
        (found.engine_hits, Counter(str(row["engine_access"] or "undecided") for row in ours)),
    ):
        if figures is None:
            assert counts.keys() <= {"undecided"}
        else:
            assert {name: getattr(figures, name) for name in counts} == counts
            assert sum(getattr(figures, name) for name in figures.__struct_fields__) == len(ours)
    for figure, name in (
        (found.prompt_tokens, "prompt"),
        (found.generated_tokens, "generated"),
        (found.cached_tokens, "cached"),
    ):
        assert close(figure, total(raw(f"{name}_tokens")[raw.ours]))
    active = total(raw.active)
    assert close(found.active_tokens, None if active is None else active / 120e9)
    by_adapter = {str(row["adapter"]): 0.0 for row in ours if row["adapter"] is not None}
    for row, value in zip(rows, raw.active, strict=True):
        if str(row["adapter"]) in by_adapter and not math.isnan(value):
            by_adapter[str(row["adapter"])] += value
    assert found.distinct_adapters == len(by_adapter)
    top = max(by_adapter, key=lambda name: by_adapter[name], default=None)
    if top is None or not by_adapter[top]:
        assert (found.top_adapter, found.top_adapter_share) == (None, None)
    else:
        assert found.top_adapter == top
        assert active is not None
        assert close(found.top_adapter_share, by_adapter[top] / active)
    sizes = [FACTS.adapter_bytes.get(name) for name in (by_adapter if own is None else [own])]
    assert found.bytes == (None if None in sizes else sum(size for size in sizes if size is not None))
    assert found.replicas == len({row["replica"] for row in ours if row["replica"] is not None})
    check_spread(found.ttft, raw.ttft)
    check_split(found.split, raw, np.ones(len(rows), bool))
    for name in {*classes, *found.ttft_by_class}:
        check_spread(found.ttft_by_class.get(name), raw.ttft[classes == name])
        check_split(found.split_by_class.get(name), raw, classes == name)
        of = [row for row, of_class in zip(rows, classes, strict=True) if of_class == name]
        check_gaps(found.itl_by_class.get(name), of, Raw(of), gaps)
    cold = raw.ttft[np.isin(classes, ["host", "disk", "remote"]) & ~np.isnan(raw.ttft)]
    assert close(found.cold_ttft_p99, np.percentile(cold, 99) / 1e9 if len(cold) else None)
    assert close(found.attainment, attainment(raw))
    weight = raw("generated_tokens") - 1
    weighed = raw.ours & ~raw.back & (weight > 0) & ~np.isnan(raw("itl_mean_ns"))
    mean = (raw("itl_mean_ns") * weight)[weighed].sum() / weight[weighed].sum() / 1e9 if weighed.any() else None
    assert close(found.itl_mean, mean)
    check_gaps(found.itl, rows, raw, gaps)
    assert close(found.oldest_wait, oldest(raw))


def oldest(raw: Raw) -> float | None:
    waits = []
    for row, ours, back in zip(raw.rows, raw.ours, raw.back, strict=True):
        end = row.get("first_token_ns")
        if end is None and row["status"] is None:
            end = WINDOW.until_ns
        elif end is None and row["status"] != "ok":
            end = row.get("finished_ns")
        if end is not None and ours and not back and row["stream"] is not False:
            waits.append((int(end) - int(row["arrived_ns"])) / 1e9)  # type: ignore[call-overload]
    return max(waits, default=None)


def check_flights(found: Signals, replica: str, rows: list[Row]) -> None:
    """A sweep over every moment at which anything changes."""
    raw, spans = Raw(rows), []
    for row, fine in zip(rows, raw.ours & ~raw.back, strict=True):
        began, ended = row.get("dispatched_ns"), row.get("finished_ns")
        if row["status"] is None and ended is None:
            ended = WINDOW.until_ns
        if fine and row["adapter"] is not None and began is not None and ended is not None:
            span = int(began), min(int(ended), WINDOW.until_ns)  # type: ignore[call-overload]
            if span[0] < span[1]:
                spans.append((*span, row["adapter"]))
    moments = sorted({moment for began, ended, _ in spans for moment in (began, ended)})
    levels = [len({adapter for began, ended, adapter in spans if began <= moment < ended}) for moment in moments]
    working = found.replicas[replica].working_set
    assert working is not None
    if not spans:
        assert working.in_flight_max in (0, None)
        return
    assert working.in_flight_max == max(levels)
    slots = FACTS.replica(replica).slots
    lasted = np.diff(moments)
    over = None if slots is None else sum(lasted[np.array(levels[:-1]) > slots]) / 120e9
    assert close(working.over_slots, over)


def check(rows: list[Row], gaps: Gaps, found: Signals) -> None:
    inside = [row for row in rows if WINDOW.since_ns <= int(row["arrived_ns"]) < WINDOW.until_ns]  # type: ignore[call-overload]
    last: dict[object, Row] = {}
    for row in inside:
        kept = last.get(row["id"])
        if kept is None or _ended(row) > _ended(kept):
            last[row["id"]] = row
    kept_rows = list(last.values())
    assert found.quality.duplicates == len(inside) - len(kept_rows)
    if not kept_rows:
        assert found.total is None
        return
    assert found.total is not None
    assert found.quality.backwards == Raw(kept_rows).back.sum()
    check_group(found.total, kept_rows, gaps, len(kept_rows))
    dimensions: list[tuple[dict[str, Group], Callable[[Row], object]]] = [
        (found.replicas, lambda row: row["replica"]),
        (found.tenants, lambda row: row["tenant"]),
        (found.adapters, lambda row: row["adapter"]),
        (found.classes, lambda row: row["hit_class"] or "undecided"),
    ]
    for groups, of in dimensions:
        names = {of(row) for row in kept_rows} - {None}
        assert set(groups) == names
        for name, group in groups.items():
            own = name if groups is found.adapters else None
            check_group(group, [row for row in kept_rows if of(row) == name], gaps, len(kept_rows), own)
    for replica in found.replicas:
        check_flights(found, replica, [row for row in kept_rows if row["replica"] == replica])


def _ended(row: Row) -> int:
    value = row.get("finished_ns")
    return value if isinstance(value, int) else -1


def measured(directory: Path, rows: list[Row]) -> Signals:
    with RecordReader(directory, {"requests": rows}) as reader:
        return measure(reader, WINDOW, FACTS, slo_s=SLO)


@pytest.mark.parametrize("seed", range(3))
def test_figures_are_those_of_the_raw_rows(tmp_path: Path, seed: int) -> None:
    rows, gaps = history(seed, 300)
    check(rows, gaps, measured(tmp_path, rows))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 12))
def test_figures_of_a_few_rows_are_right_too(tmp_path_factory: pytest.TempPathFactory, seed: int, count: int) -> None:
    rows, gaps = history(seed, count)
    check(rows, gaps, measured(tmp_path_factory.mktemp("record"), rows))
