"""Whether a configuration keeps its budgets: KV preemptions and waiting of long prompts, which more slots pay for.

Theory of operation. Slots are paid for in KV blocks, so what a larger adapter pool gains in hits it may lose where KV is short:
requests are preempted and computed again, and long prompts wait longest for room. Both are judged against the first run of a
sweep, the configuration as it is, or against a fixed limit. What was not measured is ``unknown``: neither passed nor failed. A
saturated run passes none: those who still got an answer say nothing of those who were refused or wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from loraledger.replay.results.report import Report


class Guardrails(msgspec.Struct, frozen=True, kw_only=True):
    """Budgets; ``None``: not asked for. Those named ``*_ratio`` are relative to the baseline, the first run of a sweep."""

    preemptions_per_1000: float | None = 10.0
    """KV preemptions for 1,000 requests. A baseline that has more is allowed its own count."""
    long_ttft_ratio: float | None = 1.1
    """p90 of the time to the first token of long prompts, over the baseline's."""
    long_ttft_s: float | None = None
    """The same, absolute."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (value := getattr(self, name)) is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}: must be a number from 0 on")


class Verdict(msgspec.Struct, frozen=True):
    """One budget judged. ``value`` and ``limit`` in the budget's own unit; ``limit`` ``None``: relative to an unknown one."""

    guardrail: str
    verdict: Literal["pass", "fail", "unknown"]
    value: float | None
    limit: float | None
    words: str


def judge(report: Report, baseline: Report, guardrails: Guardrails) -> tuple[Verdict, ...]:
    """One verdict for each budget that is set, in the order of ``Guardrails``."""
    found = tuple(_verdicts(report, baseline, guardrails))
    if not report.saturation.saturated:
        return found
    return tuple(
        msgspec.structs.replace(one, verdict="unknown", words=f"{one.words}, but the run is saturated")
        if one.verdict == "pass"
        else one
        for one in found
    )


def _verdicts(report: Report, baseline: Report, guardrails: Guardrails) -> Iterator[Verdict]:
    limit = guardrails.preemptions_per_1000
    if limit is not None:
        rate, before = _per_1000(report), _per_1000(baseline)
        allowed = max(limit, before or 0.0)
        whose = "the baseline's own" if before is not None and before > limit else "allowed"
        yield _judged(
            "preemptions_per_1000", rate, allowed, "{:.1f} KV preemptions for 1,000 requests", f"{{:.1f}} are {whose}"
        )
    long, before = _long(report), _long(baseline)
    if guardrails.long_ttft_ratio is not None:
        allowed_s = None if before is None else before * guardrails.long_ttft_ratio
        said = f"{{:.3g}} s is {guardrails.long_ttft_ratio:g} x the baseline"
        yield _judged("long_ttft_ratio", long, allowed_s, _LONG, said)
    if guardrails.long_ttft_s is not None:
        yield _judged("long_ttft_s", long, guardrails.long_ttft_s, _LONG, "{:.3g} s are allowed")


_LONG = "long prompts' first token after {:.3g} s (p90)"


def _judged(guardrail: str, value: float | None, limit: float | None, what: str, allowed: str) -> Verdict:
    if value is None or limit is None:
        missing = "in this run" if value is None else "in the baseline"
        return Verdict(guardrail, "unknown", value, limit, f"{guardrail}: nothing to measure {missing}")
    words = f"{what.format(value)}, {allowed.format(limit)}"
    return Verdict(guardrail, "pass" if value <= limit else "fail", value, limit, words)


def _per_1000(report: Report) -> float | None:
    return report.preemptions * 1000 / report.requests if report.requests else None


def _long(report: Report) -> float | None:
    return None if report.ttft_long is None else report.ttft_long.p90
