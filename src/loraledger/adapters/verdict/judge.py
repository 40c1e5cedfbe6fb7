"""Whether an engine will take an adapter, and whether it will then apply it.

Four things can happen, and an engine tells only one of them. It refuses: then with an error, late, and possibly after it gave
the bad adapter a slot. It loads and applies all. It loads, answers 200, and drops some modules, or all: the adapter then
answers partly or wholly as the base does. Or it loads and computes something that nobody trained: another shape, another
scaling. loraledger refuses in that case itself (``Finding.by``).

The verdict looks at the header and the configuration, never at values: pairs of zeros load and change nothing, which only a
request can show. Rules that need the adapter alone are in :mod:`~loraledger.adapters.verdict.alone`, those on the base's
modules in :mod:`~loraledger.adapters.verdict.fit`, both for vLLM and compared with a real one; engines that were only read
are in :mod:`~loraledger.adapters.verdict.others`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loraledger.adapters.reading.folder import AdapterFolder
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings, smallest_max_rank
from loraledger.adapters.verdict.alone import Finding, alone
from loraledger.adapters.verdict.fit import FUSED, base_name, findings, fused_names, place
from loraledger.adapters.verdict.others import judged_by_source

Outcome = Literal["loads", "partly_applied", "changes_nothing", "refused"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fate of one adapter on one engine."""

    outcome: Outcome
    findings: tuple[Finding, ...]
    applied: int
    """Modules that the engine applies, if nothing refuses the adapter; all of them when the base is unknown."""
    modules: int
    max_lora_rank: int | None
    """The smallest setting that takes its rank; ``None`` when there is none."""


def judge(adapter: AdapterFolder, base: BaseModel | None, engine: EngineSettings) -> Verdict:
    """The verdict. Without ``base`` only what the adapter says by itself is judged, and a finding says so.

    Raises :class:`~loraledger.errors.InputFileError` when ``base`` cannot be cut over the engine's ranks.
    """
    found = list(alone(adapter, base, engine))
    applied = len(adapter.inventory.modules)
    if engine.engine != "vllm":
        more, applied = judged_by_source(adapter, base, engine)
        found += more
    elif base is None:
        fused = sorted({pair.suffix for pair in adapter.inventory.modules.values()} & set(FUSED))
        found += [fused_names(fused)] if fused else []
    else:
        fit = place(adapter, base, engine)
        applied = len(fit.placed)
        found += [*findings(fit, adapter, base, engine), *base_name(adapter, base)]
    if base is None:
        found.append(Finding("base_unknown", "warn", "loraledger", "no base given: names and shapes were not compared"))
    elif not base.shaped:
        found.append(
            Finding("shapes_unknown", "warn", "loraledger", "only names of the base are known: no shapes compared")
        )
    found.sort(key=lambda finding: ("refuse", "drop", "warn").index(finding.effect))
    return Verdict(
        outcome=_outcome(found, applied, len(adapter.inventory.modules)),
        findings=tuple(found),
        applied=applied,
        modules=len(adapter.inventory.modules),
        max_lora_rank=_smallest(adapter, engine),
    )


def _outcome(found: list[Finding], applied: int, modules: int) -> Outcome:
    if any(finding.effect == "refuse" for finding in found):
        return "refused"
    if applied == 0:
        return "changes_nothing"
    return "loads" if applied == modules else "partly_applied"


def _smallest(adapter: AdapterFolder, engine: EngineSettings) -> int | None:
    if engine.engine == "vllm":
        return smallest_max_rank(adapter.rank)
    return adapter.rank if engine.engine == "sglang" else None
