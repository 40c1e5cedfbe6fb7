"""One replay of a candidate, in the figures that it is judged by; and the objectives that judge it.

Theory of operation. A request is *met* when its first token came within the objective and, where one is set, the mean time
between its tokens stayed within its own: both of the same request, for a client waits for both. Who is judged is as in
``results.report``: rejected, failed and open requests missed, what a client got wrong is left out. A trial *meets the objectives*
when enough requests are met, arrivals did not outrun service, and no guardrail fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from loraledger.plan.search import Judged
from loraledger.replay.results.folder import open_runs
from loraledger.replay.results.guardrails import Guardrails, judge
from loraledger.replay.results.report import Report, summarize
from loraledger.units import NS_PER_S

_JUDGED: Final = "(first_token_ns IS NOT NULL OR status IS NULL OR status NOT IN ('client_error', 'client_gone'))"
NEVER: Final = float("inf")


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """What clients are to get."""

    ttft_ns: int = NS_PER_S
    """First token within this."""
    itl_ns: int | None = None
    """Mean time between a request's tokens within this; ``None``: not asked for."""
    share: float = 0.99
    """Of the requests that are judged."""
    preemptions_per_1000: float = 10.0
    """Guardrail: KV preemptions for 1,000 requests."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A replay in figures. Times in s; ``None``: nothing to measure, or too short to tell."""

    units: int
    slots: int
    replicas: int
    kv_tokens: int
    """Of one replica."""
    requests: int
    met: float | None
    """Share of the judged requests that kept the objective."""
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    itl: float | None
    """Mean over all times between tokens."""
    gpu_rate: float | None
    host_rate: float | None
    loads: int
    activations: int
    preemptions_per_1000: float | None
    tokens_per_s: float | None
    """Generated, from the first arrival to the last end."""
    saturated: bool | None
    saturation: str
    failed: tuple[str, ...]
    """Guardrails that fail, in words."""
    meets: bool

    @property
    def judged(self) -> Judged:
        """For a search: first who meets, then how many are met, then the slowest hundredth."""
        p99 = NEVER if self.ttft_p99 is None else self.ttft_p99
        merit = (self.met or 0.0, -p99, -(self.preemptions_per_1000 or 0.0))
        return Judged(self.meets, merit, bool(self.saturated))


def measured(directory: Path, objective: Objective, *, units: int, slots: int, replicas: int, kv_tokens: int) -> Trial:
    """The figures of the run in ``directory``. Raises ``InputFileError`` when it is damaged."""
    report = summarize(directory, slo_s=objective.ttft_ns / NS_PER_S)
    limits = Guardrails(preemptions_per_1000=objective.preemptions_per_1000, long_ttft_ratio=None)
    failed = tuple(one.words for one in judge(report, _without(report), limits) if one.verdict == "fail")
    met, ttft, itl, saturated = _met(directory, objective), report.ttft, report.itl, report.saturation.saturated
    return Trial(
        units=units,
        slots=slots,
        replicas=replicas,
        kv_tokens=kv_tokens,
        requests=report.requests,
        met=met,
        ttft_mean=None if ttft is None else ttft.mean,
        ttft_p50=None if ttft is None else ttft.p50,
        ttft_p99=None if ttft is None else ttft.p99,
        itl=None if itl is None else itl.mean,
        gpu_rate=report.hits.gpu_rate,
        host_rate=report.hits.host_rate,
        loads=report.loads,
        activations=report.activations,
        preemptions_per_1000=report.preemptions * 1000 / report.requests if report.requests else None,
        tokens_per_s=report.tokens_per_s,
        saturated=saturated,
        saturation=report.saturation.reason,
        failed=failed,
        meets=met is not None and met >= objective.share and not saturated and not failed,
    )


def _without(report: Report) -> Report:
    """A baseline for guardrails that allows nothing of its own: a candidate has none that runs already."""
    return msgspec.structs.replace(report, preemptions=0)


def _met(directory: Path, objective: Objective) -> float | None:
    within = f"first_token_ns - arrived_ns <= {objective.ttft_ns}"
    if objective.itl_ns is not None:
        within += (
            " AND (coalesce(generated_tokens, 0) <= 1 OR "
            f"last_token_ns - first_token_ns <= {objective.itl_ns} * (generated_tokens - 1))"
        )
    with open_runs(run=directory) as tables:
        ((judged, met),) = tables.rows(
            f"FROM run.requests SELECT count(*), count(*) FILTER (first_token_ns IS NOT NULL AND {within}) WHERE {_JUDGED}"
        )
    return met / judged if judged else None
