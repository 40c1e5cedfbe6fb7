"""What no replica of some scenario could run: refused with its row, or left out of every run alike.

An adapter of too high a rank or with more bytes than a slot, a request with more tokens than the whole KV cache. What is left out
is left out of all runs of a sweep, so that they stay comparable request by request. All of it is looked at, and said with the run
that it comes from, before anything is played.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loraledger.errors import InputFileError
from loraledger.events import AdapterSpec
from loraledger.record.lines import BadRows
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.traces.trace import Request, Trace
from loraledger.twin.profile import TwinProfile
from loraledger.units import format_bytes

FLOAT32_OVER_SLOT: Final = 2
"""Files may hold float32 where a slot holds 16 bits: only twice a slot's bytes are certainly too many."""
_TOO_LARGE: Final = "adapter larger than a slot"
_TOO_LONG: Final = "larger than all KV"


@dataclass(frozen=True)
class Unfit:
    """What is left out of every run: requests of ``adapters``, and those of more than ``most_tokens`` tokens."""

    adapters: frozenset[str] = frozenset()
    most_tokens: int | None = None

    def reason(self, request: Request) -> str | None:
        """Why ``request`` is left out; ``None``: it is not."""
        if request.adapter in self.adapters:
            return _TOO_LARGE
        if self.most_tokens is not None and request.prompt_tokens + request.output_tokens > self.most_tokens:
            return _TOO_LONG
        return None


def unfit_of(
    trace: Trace,
    adapters: Collection[str],
    largest: int,
    scenarios: Sequence[Scenario],
    *,
    skip: bool = False,
) -> tuple[Unfit, list[str]]:
    """What no replica of some scenario could run, of a trace with these adapters and ``largest`` tokens in its largest request;
    and what is to be said of it.

    Raises ``InputFileError`` with the row of the first such adapter or request, unless it is to be skipped; then when nothing
    would be left to play.
    """
    faults: dict[str, str] = {}
    for scenario in scenarios:
        for spec in scenario.settings.adapters:
            if spec.name in adapters and spec.name not in faults and (fault := _too_large(spec, scenario)):
                faults[spec.name] = f"{fault} in the run {scenario.label}"
    most, label = min(
        ((max(map(most_tokens, one.profiles.values())), one.label) for one in scenarios), key=lambda found: found[0]
    )
    found = Unfit(frozenset(faults), most if largest > most else None)
    if found == Unfit():
        return found, []
    limit = f"all KV of a replica takes {most:,} in the run {label}"
    if not skip:
        raise _first_unfit(trace, found, faults, limit)
    return found, [_left_out(trace, found, faults, limit)]


def most_tokens(profile: TwinProfile) -> int:
    """The most prompt and output tokens that a request may have to run alone: the last output token needs no place in KV."""
    return profile.kv_tokens + 1 if profile.layout == "slots" else profile.kv_tokens - 1


def fitting(requests: Iterable[Request], unfit: Unfit, dropped: dict[str, int]) -> Iterator[Request]:
    """``requests`` without those that are unfit, which are counted in ``dropped`` by reason."""
    for request in requests:
        if reason := unfit.reason(request):
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            yield request


def _too_large(spec: AdapterSpec, scenario: Scenario) -> str | None:
    """Why no replica of ``scenario`` takes ``spec``; ``None``: one does."""
    ranks = max(profile.max_rank for profile in scenario.profiles.values())
    if spec.rank > ranks:
        return f"its rank {spec.rank} is above max_rank {ranks} of every replica"
    most = 0
    for name, profile in scenario.profiles.items():
        bound = profile.slot_bytes or FLOAT32_OVER_SLOT * scenario.slot_bytes.get(name, 0)
        if profile.layout != "slots" or not bound or spec.bytes <= bound:
            return None
        most = max(most, bound)
    return f"its {format_bytes(spec.bytes)} are more than a slot takes ({format_bytes(most)})"


def _first_unfit(trace: Trace, unfit: Unfit, faults: Mapping[str, str], limit: str) -> InputFileError:
    """The error that names the first row that is unfit."""
    for row, request in trace.numbered(BadRows(trace.path, skip=True)):
        if unfit.reason(request):
            name = request.adapter
            if name in unfit.adapters and name is not None:
                fault = f"adapter {name!r}: {faults[name]}"
            else:
                fault = f"{request.prompt_tokens + request.output_tokens:,} tokens, {limit}"
            return InputFileError(
                f"{trace.path}: row {row}: {fault} (--skip-unfit leaves such requests out and counts them)"
            )
    raise AssertionError("a survey saw what the trace does not hold")


def _left_out(trace: Trace, unfit: Unfit, faults: Mapping[str, str], limit: str) -> str:
    """How many requests are left out, and why. Raises ``InputFileError`` when no other is there."""
    dropped: dict[str, int] = {}
    left = sum(1 for _ in fitting(trace, unfit, dropped))
    why = {_TOO_LONG: limit}
    for name, fault in faults.items():
        why.setdefault(_TOO_LARGE, f"{name!r}: {fault}")
    out = "; ".join(f"{number:,} {reason} ({why[reason]})" for reason, number in dropped.items())
    if not left:
        raise InputFileError(f"{trace.path}: --skip-unfit would leave no request: {out}")
    return f"--skip-unfit leaves out of every run, beside {left:,} requests that are played: {out}"
