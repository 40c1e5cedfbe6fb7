"""What a replay of a change is: one trace through the fleet as it was, and through the fleet all changed.

Theory of operation. A rollout changes a part of the fleet and compares it with the rest. A replay needs no part: it plays the same
trace, from the same start, against ``before`` and against ``after``, everything else as configured, so what differs between both
runs is the change. The runs are those of ``loraledger replay``; here is what is played (``sides``) and what it came to (``judge``).
The figures are those that blocks of a rollout have, over the whole run, and are held against the same target and guardrails.
There is no interval: both runs are exact for this trace. Whether traffic of another day would say the same they do not tell.

A replay answers for the engine that its profile was measured on. A profile of another engine version, or of another model, than the
record's newest requests show is *stale*, and a replay with it is no evidence (``staleness``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from loraledger.config import Settings
from loraledger.config.pins import VERSION
from loraledger.kernel.policies import make_policy
from loraledger.kernel.settings import FleetSettings
from loraledger.operate.blocks import Figures
from loraledger.operate.change import BETTER, Change, Check, Metric, Value, check_variable
from loraledger.replay.results.report import Report
from loraledger.replay.scenarios.axes import Changes, parse_axes
from loraledger.replay.scenarios.axes import Value as Played
from loraledger.twin.calibrated import Calibrated

_KEYS: Final = {"tenant.concurrency": "tenants.concurrency"}
"""What a replay calls a variable, where that is another name."""
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "policy": (str,),
    "slots": (int,),
    "host_entries": (int,),
    "replicas": (int,),
    "tenant.concurrency": (int,),
}
"""What a value has to be; of a policy's parameter any number."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What two runs of one trace came to. ``ok``: the target is better by more than it has to be, and every guardrail holds."""

    checks: tuple[Check, ...]
    before: Figures
    after: Figures
    ok: bool
    reasons: tuple[str, ...]
    """Why it is not ``ok``; none if it is."""


def check_value(variable: str, value: Value) -> None:
    """Raises ValueError, saying what would be taken, for what ``variable`` cannot be."""
    check_variable(variable)
    if variable != "pins":
        _read(variable, value)
    elif not isinstance(value, list) or not all(len(pair) == 2 for pair in value):
        raise ValueError(f"{json.dumps(value)}: a list of [replica, adapter] is wanted")


def in_force(settings: Settings, variable: str) -> Value:
    """What ``settings`` say of ``variable``; ``None`` where they do not say it, or not the same of all."""
    policy = settings.policy
    if variable == "policy":
        return policy.name
    if variable.startswith("policy."):
        defaults = make_policy(FleetSettings((), policy=policy.name)).defaults
        return {**defaults, **policy.params}.get(variable.removeprefix("policy."))
    if variable == "pins":
        return [list(pair) for pair in settings.ranking]
    if variable == "replicas":
        return len(settings.replicas)
    if variable == "tenant.concurrency":
        return _same({tenant.limits.concurrency for tenant in settings.tenants})
    return _same({getattr(replica, variable) for replica in settings.replicas})


def sides(change: Change, held: Sequence[Change], folder: Path) -> tuple[Changes, Changes]:
    """What is varied before and after. ``held``: changes that the gateway holds, of other variables: they are part of both.

    A ranking is written into ``folder``, where the scenarios read it from. Raises ValueError for a value that cannot be.
    """
    kept = [_side(other.id, other.variable, other.after, folder) for other in held]
    before, after = (
        _side(side, change.variable, value, folder)
        for side, value in (("before", change.before), ("after", change.after))
    )
    return _joined(*kept, before), _joined(*kept, after)


def figures_of(report: Report) -> Figures:
    """The figures of a run, as a block of a rollout has them."""
    ttft, n = report.ttft, report.requests
    judged = n - sum(report.by_status.get(status, 0) for status in ("client_error", "client_gone"))
    return {
        "hit_rate": report.hits.gpu_rate,
        "ttft_mean": None if ttft is None else ttft.mean,
        "ttft_p50": None if ttft is None else ttft.p50,
        "ttft_p90": None if ttft is None else ttft.p90,
        "ttft_p99": None if ttft is None else ttft.p99,
        "itl_mean": None if report.itl is None else report.itl.mean,
        "attainment": report.attainment.overall,
        "preemptions": report.preemptions * 1000 / n if n else None,
        "refused": report.by_status.get("rejected", 0) / judged if judged else None,
    }


def judge(change: Change, before: Report, after: Report) -> Trial:
    """The two runs held against the target and the guardrails of ``change``."""
    old, new = figures_of(before), figures_of(after)
    checks = (
        _check(change.target.metric, "target", change.target.least, old, new),
        *(_check(rail.metric, "guardrail", rail.worse_by, old, new) for rail in change.guardrails),
    )
    reasons = [_words(check) for check in checks if check.verdict != "pass"]
    if after.saturation.saturated:
        reasons.append("arrivals outran service with the change: its figures say how long the trace is")
    return Trial(checks=checks, before=old, after=new, ok=not reasons, reasons=tuple(reasons))


def staleness(profile: Calibrated, engine_version: str | None, models: Collection[str]) -> str | None:
    """Why ``profile`` is not of what runs; ``None`` where nothing is known against it.

    ``engine_version``: of the newest requests. ``models``: every name that their base model has, none where it is not known.
    """
    theirs = profile.engine_version
    if engine_version is not None and theirs is not None and theirs != engine_version:
        return f"profile {profile.name} is of {profile.engine} {theirs}, the newest requests ran on {engine_version}"
    if models and _plain(profile.model) not in {_plain(name) for name in models}:
        named = " or ".join(repr(name) for name in sorted(models))
        return f"profile {profile.name} is of model {profile.model!r}, the newest requests are of {named}"
    return None


def _joined(*parts: Changes) -> Changes:
    values: dict[str, Played] = {}
    typed: dict[str, str] = {}
    for part in parts:
        values |= part.values
        typed |= part.typed
    return Changes(values, typed)


def _side(label: str, variable: str, value: Value, folder: Path) -> Changes:
    check_value(variable, value)
    if not isinstance(value, list):
        typed, meant = _read(variable, value)
        key = _KEYS.get(variable, variable)
        return Changes({key: meant}, {variable: typed})
    typed_pins = {"pins": f"{len(value)} adapters"}
    if not value:
        return Changes({"residency": "lru"}, typed_pins)
    path = folder / f"{label}.json"
    path.write_text(ranking_file(value), encoding="utf-8")
    return Changes({"residency": "ranked", "pins": str(path)}, typed_pins)


def ranking_file(pins: list[list[str]]) -> str:
    """The file that ``policy.pins`` names, with these in it."""
    entries = [{"replica": replica, "adapter": adapter} for replica, adapter in pins]
    return json.dumps({"schema_version": VERSION, "kind": "pins", "pins": entries}, indent=1) + "\n"


def _read(variable: str, value: Value) -> tuple[str, Played]:
    """How ``value``, which is no ranking, is typed, and what a replay takes it for."""
    kinds = _KINDS.get(variable, (int, float))
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = "a name" if str in kinds else "a number" if float in kinds else "a whole number"
        raise ValueError(f"{json.dumps(value)}: {wanted} is wanted")
    typed = str(value)
    key = _KEYS.get(variable, variable)
    policies, settings = ([typed], []) if key == "policy" else ([], [f"{key}={typed}"])
    try:
        ((_, read),) = parse_axes(policies, settings)[0].values
    except ValueError as error:
        said = str(error)
        for option in (f"--set {key}={typed}: ", f"--policy {typed}: "):
            if said.startswith(option):
                raise ValueError(f"{typed}: {said.removeprefix(option)}") from error
        raise ValueError(said.removeprefix("--set ")) from error
    return typed, read


def _same(values: set[int]) -> int | None:
    return values.pop() if len(values) == 1 else None


def _check(
    metric: Metric, role: Literal["target", "guardrail"], limit: float, before: Figures, after: Figures
) -> Check:
    old, new = before[metric], after[metric]
    if old is None or new is None:
        return Check(metric, role, limit, old, new, None, "unknown")
    up = (BETTER[metric] == "up") == (role == "target")
    moved = new - old if up else old - new
    passed = moved > limit if role == "target" else moved <= limit
    return Check(metric, role, limit, old, new, moved, "pass" if passed else "fail")


def _words(check: Check) -> str:
    what = f"{check.role} {check.metric}"
    if check.moved is None:
        return f"{what} could not be measured"
    pair = f"{check.before:.4g} before, {check.after:.4g} after"
    if check.role == "target":
        return f"{what} is not better by more than {check.limit:g}: {pair}"
    return f"{what} is worse by more than {check.limit:g}: {pair}"


def _plain(model: str) -> str:
    """A model's name without who published it, and without what a profile says of its numbers in brackets."""
    return model.rstrip("/").rpartition("/")[2].partition(" (")[0].casefold()
