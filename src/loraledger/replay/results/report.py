"""What a run came to, in the figures that a person compares.

Theory of operation. Everything is asked of the run's record files in SQL, so memory does not grow with requests, and a live record
would give the same figures; what rows do not hold (loads and evictions as the engine made them, preemptions) comes from
``run.json``. Percentiles are exact (``quantile_cont``). Unknown is ``None`` or a count of its own, never a zero.

The time to the first token is from the request's first byte at the gateway to its first token, waiting and loads included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from loraledger.record.duck import quote
from loraledger.record.tables import HIT_CLASSES
from loraledger.replay.fleet.outcome import Saturation
from loraledger.replay.results.bound import LoadWork, load_work
from loraledger.replay.results.folder import RunTables, check_record, open_runs, read_outcome
from loraledger.units import NS_PER_S

DEFAULT_SLO_S: Final = 1.0
JUDGED_FROM: Final = 5
"""Requests that an adapter or tenant needs to be judged alone."""

_TTFT: Final = "(first_token_ns - arrived_ns)"
_ANSWERED: Final = "first_token_ns IS NOT NULL"
_PROMPT: Final = "coalesce(prompt_tokens, predicted_prompt_tokens)"
_JUDGED: Final = "(first_token_ns IS NOT NULL OR status IS NULL OR status NOT IN ('client_error', 'client_gone'))"
_STATUSES: Final = "SELECT coalesce(status, 'open'), count(*) FROM run.requests GROUP BY 1 ORDER BY 2 DESC, 1"
_COLD: Final = """
SELECT adapter FROM (
    SELECT adapter, row_number() OVER (ORDER BY count(*), adapter) AS place, count(*) OVER () AS adapters
    FROM run.requests WHERE adapter IS NOT NULL GROUP BY adapter
) WHERE place <= adapters // 2
"""


class Spread(msgspec.Struct, frozen=True):
    """Of ``n`` durations, in s. Percentiles are exact, linear between neighbours."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float


class TokenTimes(msgspec.Struct, frozen=True):
    """Time between tokens, in s, of ``n`` requests with two tokens or more.

    ``mean`` is over all times between tokens: long answers weigh more. ``p90`` is over the requests' own means, each once.
    """

    n: int
    mean: float
    p90: float


class Access(msgspec.Struct, frozen=True):
    """Requests by where their adapter was. ``undecided`` ended before that was known; ``base`` need none.

    Rates are of requests with an adapter whose class is known: ``unknown`` ones are counted here and are no part of them.
    """

    gpu: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    base: int = 0
    unknown: int = 0
    undecided: int = 0
    gpu_rate: float | None = None
    """Share that found their adapter in a slot."""
    host_rate: float | None = None
    """Share of the others that found it in the host cache."""


class Served(msgspec.Struct, frozen=True):
    """One adapter or tenant. ``attainment``: share of its requests with a first token within the objective."""

    name: str
    requests: int
    attainment: float
    ttft_p99: float | None
    """In s, of those that got a first token."""


class Attainment(msgspec.Struct, frozen=True):
    """How many got their first token within ``slo_s``. Rejected, failed and open requests missed it; what a client got wrong
    (4xx) or gave up is not judged."""

    slo_s: float
    overall: float | None
    adapters: int
    """Adapters with enough requests to be judged alone."""
    worst_adapter: Served | None
    tenants: int
    worst_tenant: Served | None


class Tail(msgspec.Struct, frozen=True):
    """The cold adapters: the half of those asked for that was asked for least. ``loads`` and ``evictions`` (from a slot) as the
    kernel knew of them."""

    adapters: int
    requests: int
    ttft: Spread | None
    gpu_rate: float | None
    loads: int
    evictions: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures. Durations in s; ``None``: unknown or nothing to measure. Keys of ``*_by_class`` are hit classes."""

    label: str
    policy: str
    trace: str
    scenario: str
    requests: int
    by_status: dict[str, int]
    """``open`` for those that had not ended."""
    dropped: dict[str, int]
    saturation: Saturation
    warnings: tuple[str, ...]

    hits: Access
    """By the kernel's own view when it decided."""
    engine_hits: Access | None
    """By what the engine found; ``None`` without its probe."""
    loads: int
    activations: int
    evictions_slot: int
    evictions_host: int
    preemptions: int
    work: LoadWork | None
    """Load seconds saved, against the most that could have been; ``None`` when costs are not known."""

    ttft: Spread | None
    ttft_by_class: dict[str, Spread]
    ttft_long: Spread | None
    """Of requests with more prompt tokens than ``long_above``."""
    long_above: int | None
    """90th percentile of the trace's prompt tokens."""
    itl: TokenTimes | None
    itl_by_class: dict[str, TokenTimes]
    attainment: Attainment
    cold: Tail | None
    tokens_per_s: float | None
    """Generated tokens, from the first arrival to the last end."""
    busiest_replica: str | None
    busiest_share: float | None
    """Its share of the requests that were sent to one."""


def summarize(directory: Path, *, slo_s: float = DEFAULT_SLO_S) -> Report:
    """The figures of a run folder. Raises InputFileError when it is not one or is damaged."""
    outcome = read_outcome(directory)
    with open_runs(run=directory) as tables:
        check_record(tables, directory, outcome)
        requests, tokens_per_s, long_above = _totals(tables)
        ttft_by_class = _spreads(tables, "coalesce(hit_class, 'undecided')", _ANSWERED)
        replica, share = _busiest(tables)
        figures: dict[str, Any] = {
            "requests": requests,
            "by_status": dict(tables.rows(_STATUSES)),
            "hits": _access(tables, "hit_class"),
            "engine_hits": _engine_access(tables),
            "ttft": _spreads(tables, "''", _ANSWERED).get(""),
            "ttft_by_class": ttft_by_class,
            "ttft_long": _spreads(tables, "''", f"{_ANSWERED} AND {_PROMPT} > {long_above}").get("")
            if long_above is not None
            else None,
            "long_above": long_above,
            "itl": _token_times(tables, "''").get(""),
            "itl_by_class": _token_times(tables, "coalesce(hit_class, 'undecided')"),
            "attainment": _attainment(tables, slo_s),
            "cold": _cold(tables),
            "tokens_per_s": tokens_per_s,
            "busiest_replica": replica,
            "busiest_share": share,
            "work": load_work(tables, outcome),
        }
    replicas = outcome.replicas
    return Report(
        label=outcome.label,
        policy=outcome.policy,
        trace=outcome.trace,
        scenario=outcome.scenario,
        dropped=outcome.dropped,
        saturation=outcome.saturation,
        warnings=outcome.warnings,
        loads=sum(r.loads for r in replicas),
        activations=sum(r.activations for r in replicas),
        evictions_slot=sum(r.evictions_slot for r in replicas),
        evictions_host=sum(r.evictions_host for r in replicas),
        preemptions=sum(r.preemptions for r in replicas),
        **figures,
    )


def _totals(tables: RunTables) -> tuple[int, float | None, int | None]:
    """Requests, generated tokens a second, and the 90th percentile (a value that occurs) of prompt tokens."""
    ((requests, tokens, span, long_above),) = tables.rows(
        f"FROM run.requests SELECT count(*), sum(generated_tokens)::BIGINT, max(finished_ns) - min(arrived_ns), "
        f"quantile_disc({_PROMPT}, 0.9)"
    )
    return requests, tokens * NS_PER_S / span if tokens is not None and span else None, long_above


def _spreads(tables: RunTables, by: str, where: str) -> dict[str, Spread]:
    rows = tables.rows(
        f"FROM run.requests SELECT {by}, count(*), avg({_TTFT}) / 1e9, quantile_cont({_TTFT} / 1e9, [0.5, 0.9, 0.99]) "
        f"WHERE {where} GROUP BY 1 ORDER BY 1"
    )
    return {name: Spread(n, mean, *percentiles) for name, n, mean, percentiles in rows}


def _token_times(tables: RunTables, by: str) -> dict[str, TokenTimes]:
    rows = tables.rows(
        f"FROM run.requests SELECT {by}, count(*), sum(last_token_ns - first_token_ns) / sum(generated_tokens - 1) / 1e9, "
        "quantile_cont((last_token_ns - first_token_ns) / (generated_tokens - 1) / 1e9, 0.9) "
        "WHERE generated_tokens > 1 AND last_token_ns IS NOT NULL AND first_token_ns IS NOT NULL GROUP BY 1 ORDER BY 1"
    )
    return {name: TokenTimes(n, mean, p90) for name, n, mean, p90 in rows}


def _access(tables: RunTables, column: str) -> Access:
    classes = ", ".join(map(quote, HIT_CLASSES))
    known = f"CASE WHEN {column} IS NULL THEN 'undecided' WHEN {column} IN ({classes}) THEN {column} ELSE 'unknown' END"
    counts: dict[str, int] = dict(tables.rows(f"FROM run.requests SELECT {known}, count(*) GROUP BY 1 ORDER BY 1"))
    missed = sum(counts.get(tier, 0) for tier in ("host", "disk", "remote"))
    found, on_host = counts.get("gpu", 0), counts.get("host", 0)
    return Access(
        **counts,
        gpu_rate=found / (found + missed) if found + missed else None,
        host_rate=on_host / missed if missed else None,
    )


def _engine_access(tables: RunTables) -> Access | None:
    access = _access(tables, "engine_access")
    known = sum(getattr(access, name) for name in HIT_CLASSES)
    return access if known else None


def _attainment(tables: RunTables, slo_s: float) -> Attainment:
    met = f"count(*) FILTER (first_token_ns IS NOT NULL AND {_TTFT} <= {round(slo_s * NS_PER_S)})"
    ((judged, in_time),) = tables.rows(f"FROM run.requests SELECT count(*), {met} WHERE {_JUDGED}")
    adapters, worst_adapter = _worst(tables, "adapter", met)
    tenants, worst_tenant = _worst(tables, "tenant", met)
    overall = in_time / judged if judged else None
    return Attainment(slo_s, overall, adapters, worst_adapter, tenants, worst_tenant)


def _worst(tables: RunTables, column: str, met: str) -> tuple[int, Served | None]:
    """How many of ``column`` have requests enough, and the one least well served; the slowest of those that are alike."""
    grouped = (
        f"FROM run.requests SELECT {column} AS name, count(*) AS n, {met} / count(*) AS share, "
        f"quantile_cont({_TTFT} / 1e9, 0.99) AS p99 "
        f"WHERE {column} IS NOT NULL AND {_JUDGED} GROUP BY 1 HAVING n >= {JUDGED_FROM}"
    )
    rows = tables.rows(
        f"FROM ({grouped}) SELECT name, n, share, p99, count(*) OVER () ORDER BY share, p99 DESC NULLS FIRST, name LIMIT 1"
    )
    return next(((count, Served(name, n, share, p99)) for name, n, share, p99, count in rows), (0, None))


def _cold(tables: RunTables) -> Tail | None:
    cold = f"adapter IN ({_COLD})"
    ((adapters, requests, gpu, known),) = tables.rows(
        "FROM run.requests SELECT count(DISTINCT adapter), count(*), count(*) FILTER (hit_class = 'gpu'), "
        f"count(*) FILTER (hit_class IN ('gpu', 'host', 'disk', 'remote')) WHERE {cold}"
    )
    if not adapters:
        return None
    ((loads, evictions),) = tables.rows(
        "FROM run.residency SELECT count(*) FILTER (coalesce(tier_before, 'disk') = 'disk' AND tier_after IN ('gpu', 'host')), "
        f"count(*) FILTER (tier_before = 'gpu' AND tier_after IN ('host', 'disk')) WHERE {cold}"
    )
    ttft = _spreads(tables, "''", f"{_ANSWERED} AND {cold}").get("")
    return Tail(adapters, requests, ttft, gpu / known if known else None, loads, evictions)


def _busiest(tables: RunTables) -> tuple[str | None, float | None]:
    rows = tables.rows(
        "SELECT replica, count(*) / sum(count(*)) OVER () AS share FROM run.requests "
        "WHERE replica IS NOT NULL AND dispatched_ns IS NOT NULL GROUP BY 1 ORDER BY share DESC, replica LIMIT 1"
    )
    return next(((replica, share) for replica, share in rows), (None, None))
