"""Two runs of one trace, request by request.

Theory of operation. Both runs got the same requests, so the n-th arrival of one is the n-th of the other: requests are paired by
their place in the order of arrival, and it is checked that tenant, adapter and prompt agree. A paired difference is free of what
the requests themselves differ in, so a small one shows that two means would hide. The pairs are made in DuckDB; only figures come
out.

The interval of the mean is a bootstrap with a fixed seed. Neighbours in a trace wait in the same queues and are not independent,
so it does not draw single requests but whole stretches of neighbours: ``BLOCKS`` of them, equally long.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import msgspec

from loraledger.errors import InputFileError
from loraledger.replay.fleet.outcome import Outcome
from loraledger.replay.results.folder import RunTables, open_runs, read_outcome

BLOCKS: Final = 100
DRAWS: Final = 2_000
SHOWN: Final = 5
"""Adapters that lost or gained most."""
_LEAST_PAIRS: Final = 10
_MOST_SAID: Final = 80


class Difference(msgspec.Struct, frozen=True):
    """Of ``n`` paired times to the first token: ours less theirs, in s. Below 0 is better."""

    n: int
    mean: float
    mean_low: float | None
    mean_high: float | None
    """95 % interval of the mean; ``None`` for fewer than 10 pairs."""
    p50: float
    p90: float
    better: float
    """Share of pairs where ours is faster by more than a millisecond."""
    worse: float


class ClassPair(msgspec.Struct, frozen=True):
    """Requests whose adapter they found in ``theirs`` and we in ``ours`` (hit classes), and what that changed on average, in s."""

    theirs: str
    ours: str
    n: int
    mean: float


class AdapterChange(msgspec.Struct, frozen=True):
    """Mean change of one adapter's time to the first token, in s, over ``n`` pairs."""

    adapter: str
    n: int
    mean: float


class Pairing(msgspec.Struct, frozen=True, kw_only=True):
    """Ours against theirs."""

    ours: str
    theirs: str
    """Labels."""
    requests: int
    only_ours: int
    """Requests that got a first token in our run alone."""
    only_theirs: int
    neither: int
    ttft: Difference | None
    """``None`` when no request got a first token in both."""
    by_class: tuple[ClassPair, ...]
    """Most frequent first."""
    gpu_rate_ours: float | None
    gpu_rate_theirs: float | None
    """Share of requests with an adapter whose class is known in both runs that found it in a slot."""
    lost: tuple[AdapterChange, ...]
    """Up to 5 adapters with 5 pairs or more that became slower, the worst first."""
    gained: tuple[AdapterChange, ...]


_ARRIVALS: Final = """
CREATE TEMP TABLE {run}_arrivals AS FROM {run}.requests SELECT
    row_number() OVER (ORDER BY arrived_ns, length(id), id) AS place,
    tenant, adapter, coalesce(prompt_tokens, predicted_prompt_tokens) AS prompt, hit_class,
    first_token_ns - arrived_ns AS ttft
"""
_PAIRS: Final = """
CREATE TEMP TABLE pairs AS FROM ours_arrivals AS o JOIN theirs_arrivals AS t USING (place) SELECT
    place, o.adapter AS adapter, o.hit_class AS ours, t.hit_class AS theirs,
    o.ttft IS NOT NULL AS o_answered, t.ttft IS NOT NULL AS t_answered, (o.ttft - t.ttft) / 1e9 AS change,
    o.tenant IS NOT DISTINCT FROM t.tenant AND o.adapter IS NOT DISTINCT FROM t.adapter
        AND o.prompt IS NOT DISTINCT FROM t.prompt AS alike
"""
_COUNTS: Final = """
FROM pairs SELECT count(*), count(*) FILTER (o_answered AND NOT t_answered),
    count(*) FILTER (t_answered AND NOT o_answered), count(*) FILTER (NOT o_answered AND NOT t_answered),
    min(place) FILTER (NOT alike)
"""
_DIFFERENCE: Final = """
FROM pairs SELECT count(change), avg(change), quantile_cont(change, 0.5), quantile_cont(change, 0.9),
    count(*) FILTER (change < -1e-3) / count(change), count(*) FILTER (change > 1e-3) / count(change)
WHERE change IS NOT NULL
"""
_STRETCHES: Final = f"""
FROM (FROM pairs SELECT change, ntile({BLOCKS}) OVER (ORDER BY place) AS block WHERE change IS NOT NULL)
SELECT sum(change), count(*) GROUP BY block ORDER BY block
"""
_CLASSES: Final = """
FROM pairs SELECT theirs, ours, count(*) AS n, avg(change)
WHERE change IS NOT NULL AND theirs IS NOT NULL AND ours IS NOT NULL GROUP BY 1, 2 ORDER BY n DESC, 1, 2
"""
_RATES: Final = """
FROM pairs SELECT count(*) FILTER (ours = 'gpu') / count(*), count(*) FILTER (theirs = 'gpu') / count(*), count(*)
WHERE ours IN ('gpu', 'host', 'disk', 'remote') AND theirs IN ('gpu', 'host', 'disk', 'remote')
"""
_ADAPTERS: Final = """
FROM (FROM pairs SELECT adapter, count(*) AS n, avg(change) AS mean WHERE change IS NOT NULL AND adapter IS NOT NULL
      GROUP BY 1 HAVING n >= 5)
SELECT adapter, n, mean WHERE mean {sign} 0 ORDER BY abs(mean) DESC, adapter LIMIT {shown}
"""


def pair(ours: Path, theirs: Path) -> Pairing:
    """Pair two run folders. Raises InputFileError when they are not runs of one trace, and says why."""
    mine, other = read_outcome(ours), read_outcome(theirs)
    _check(ours, mine, theirs, other)
    with open_runs(ours=ours, theirs=theirs) as tables:
        for name in ("ours", "theirs"):
            tables.rows(_ARRIVALS.format(run=name))
        tables.rows(_PAIRS)
        ((pairs, only_ours, only_theirs, neither, unlike),) = tables.rows(_COUNTS)
        if pairs != mine.requests or pairs != other.requests:
            raise InputFileError(
                f"{ours} and {theirs} cannot be paired: their records have {pairs:,} requests in common, the runs had "
                f"{mine.requests:,} and {other.requests:,}; replay the trace again"
            )
        if unlike is not None:
            raise InputFileError(
                f"{ours} and {theirs} cannot be paired: arrival {unlike:,} is not the same request in both; "
                f"replay the trace again"
            )
        ((gpu_ours, gpu_theirs, known),) = tables.rows(_RATES)
        return Pairing(
            ours=mine.label,
            theirs=other.label,
            requests=pairs,
            only_ours=only_ours,
            only_theirs=only_theirs,
            neither=neither,
            ttft=_difference(tables),
            by_class=tuple(ClassPair(*row) for row in tables.rows(_CLASSES)),
            gpu_rate_ours=gpu_ours if known else None,
            gpu_rate_theirs=gpu_theirs if known else None,
            lost=_changed(tables, ">"),
            gained=_changed(tables, "<"),
        )


def unlike(mine: str, other: str) -> str | None:
    """How two identities (``scenarios/sweep.py``) of what was played differ, in words; ``None``: they do not."""
    if mine == other:
        return None
    (ours, _, how), (theirs, _, else_how) = mine.partition(" "), other.partition(" ")
    if ours != theirs:
        return f"they are of different traces ({ours[:19]} and {theirs[:19]})"
    return f"the same trace was played with {_arrivals(how)} and with {_arrivals(else_how)}"


def _arrivals(how: str) -> str:
    """Names of adapters that were left out come from the trace and may be many: those are cut."""
    speed = "" if how.startswith("speed=") else "speed=1 "
    said = ascii(f"{speed}{how}".strip())[1:-1]
    return said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]}..."


def _check(ours: Path, mine: Outcome, theirs: Path, other: Outcome) -> None:
    reason = unlike(mine.trace, other.trace)
    if reason is None and mine.requests != other.requests:
        reason = f"one played {mine.requests:,} requests of the trace and the other {other.requests:,}"
    elif reason is None and mine.dropped != other.dropped:
        reason = "different rows of the trace were dropped"
    if reason is not None:
        raise InputFileError(
            f"{ours} and {theirs} cannot be paired: {reason}; replay the same trace with the same flags"
        )


def _difference(tables: RunTables) -> Difference | None:
    ((n, mean, p50, p90, better, worse),) = tables.rows(_DIFFERENCE)
    if not n:
        return None
    low, high = _interval(tables.rows(_STRETCHES)) if n >= _LEAST_PAIRS else (None, None)
    return Difference(n, mean, low, high, p50, p90, better, worse)


def _interval(stretches: list[tuple[float, int]]) -> tuple[float, float]:
    """Of the mean over all stretches, each a (sum, number of pairs): the middle 95 % of what redrawing them gives."""
    rng = random.Random(0)  # noqa: S311  nothing secret: equal runs give equal figures
    means = []
    for _ in range(DRAWS):
        drawn = rng.choices(stretches, k=len(stretches))
        means.append(sum(total for total, _ in drawn) / sum(n for _, n in drawn))
    means.sort()
    return means[DRAWS * 25 // 1000], means[DRAWS * 975 // 1000 - 1]


def _changed(tables: RunTables, sign: str) -> tuple[AdapterChange, ...]:
    return tuple(AdapterChange(*row) for row in tables.rows(_ADAPTERS.format(sign=sign, shown=SHOWN)))
