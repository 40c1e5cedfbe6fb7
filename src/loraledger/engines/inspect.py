"""Looks one replica over before it is trusted with tenants: what `loraledger check` asks of a running engine.

Theory of operation. Everything here reads; nothing is loaded, unloaded or changed. The load route is tried with an
empty object: a server that would take a load answers that fields are missing (400 or 422), one that has no such route
answers 404, one that guards it answers 401. It is asked twice, without and with our key, because a guard answers
before the route does: only the second answer says whether loads would work, only the first says who else may send
them.

Each reading stands alone: one that fails becomes a problem and the others go on, so that one run of the check shows
all there is to mend. What an engine does not show stays ``None`` and is a warning at most.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from loraledger.engines.probe_api import ProbeApi
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.scrape import EngineSample
from loraledger.engines.vllm_api import NO_LOAD_ROUTE, WANTS_KEY, Reply, VllmApi
from loraledger.errors import TargetError
from loraledger.events import parse_engine_name

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know or to mend: a stable code, and words that name the remedy."""

    code: str
    message: str


@dataclass(slots=True)
class ReplicaReport:
    """What a look at one replica showed. ``problems`` stop it from serving adapters well, ``warnings`` do not."""

    name: str
    url: str
    reachable: bool = False
    version: str | None = None
    base_models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    max_lora: int | None = None
    """GPU slots as the engine shows them; it does so only after the first adapter request."""
    kv_tokens: int | None = None
    engines: int | None = None
    runtime_updates: bool | None = None
    """Whether the engine would take loads from us."""
    load_route_open: bool | None = None
    """Whether it would take them from anyone who reaches the port."""
    probe: str | None = None
    """Version of the probe inside it, when the settings have a key for one and it answered."""
    problems: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def problem(self, code: str, message: str) -> None:
        """Add a problem, once per code."""
        if all(found.code != code for found in self.problems):
            self.problems.append(Finding(code, message))

    def warn(self, code: str, message: str) -> None:
        """Add a warning."""
        self.warnings.append(Finding(code, message))


async def inspect_replica(
    target: ReplicaTarget, *, expected_slots: int | None = None, expected_base: str | None = None
) -> ReplicaReport:
    """Look at ``target``. ``expected_*``: what the configuration believes, compared where given.

    Never raises for what an engine does or does not answer.
    """
    report = ReplicaReport(target.name, target.url)
    api = VllmApi(target)
    try:
        status = await _try(report, api.health())
        report.reachable = status is not None
        if status is None:
            return report
        if status >= 500:
            report.problem("engine_dead", f"/health answers {status}: the engine process is gone, restart it")
        report.version = await _try(report, api.version())
        await _look_at_models(report, api, expected_base)
        sample = await _try(report, api.metrics())
        if sample is not None:
            _judge_sample(report, sample, expected_slots)
        await _knock(report, api, has_key=target.api_key is not None)
        if target.probe_key is not None:
            await _look_at_probe(report, target)
    finally:
        await api.close()
    return report


async def _try(report: ReplicaReport, reading: Awaitable[_T]) -> _T | None:
    """The reading, or ``None`` with a problem noted."""
    try:
        return await reading
    except TargetError as error:
        report.problem(error.code, error.message)
        return None


async def _look_at_models(report: ReplicaReport, api: VllmApi, expected_base: str | None) -> None:
    models = await _try(report, api.models())
    if models is None:
        return
    report.base_models, report.adapters = models.base, models.adapters
    if expected_base is not None and expected_base not in models.base:
        served = ", ".join(models.base) or "nothing"
        report.problem(
            "base_not_served",
            f"serves {served}, not {expected_base}: correct base.names, or start the engine with --served-model-name",
        )
    foreign = [name for name in models.adapters if parse_engine_name(name) is None]
    if foreign:
        shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
        report.warn("foreign_adapters", f"{shown} are not ours and compete for its slots unseen: unload them")


def _judge_sample(report: ReplicaReport, sample: EngineSample, expected_slots: int | None) -> None:
    report.max_lora, report.kv_tokens, report.engines = sample.max_lora, sample.kv_tokens, sample.engines
    if sample.engines is not None and sample.engines > 1:
        report.problem(
            "data_parallel",
            f"{sample.engines} engines behind one URL: run each with its own URL and list each as a replica",
        )
    if sample.max_lora == 0:
        report.problem("lora_off", "the engine runs without LoRA: start it with --enable-lora")
    # Unknown is no warning: an engine shows its slots only once an adapter was used, so a fresh fleet could never pass.
    elif expected_slots is not None and sample.max_lora is not None and sample.max_lora != expected_slots:
        report.problem(
            "slots_differ",
            f"the engine has {sample.max_lora} slots, configured are {expected_slots}: make --max-loras and slots agree",
        )
    if sample.kv_tokens is None:
        report.warn("kv_unknown", "its metrics do not say how many KV tokens it has: the KV account will lack a total")
    if sample.process_start_ns is None:
        report.warn("restart_unseen", "its metrics lack process_start_time_seconds: a quick restart will go unnoticed")


async def _knock(report: ReplicaReport, api: VllmApi, *, has_key: bool) -> None:
    anonymous = await _try(report, api.knock(with_key=False))
    ours = await _try(report, api.knock(with_key=True)) if has_key else anonymous
    if anonymous is not None:
        report.load_route_open = _takes_loads(anonymous)
    if ours is None:
        return
    report.runtime_updates = _takes_loads(ours)
    if ours.status in (401, 403):
        report.runtime_updates = None
        report.problem("engine_wants_api_key", WANTS_KEY)
    elif ours.status == 404:
        report.problem("runtime_update_off", NO_LOAD_ROUTE)
    elif report.runtime_updates is None:
        report.warn("load_route_unclear", f"the load route answered HTTP {ours.status} to an empty request")
    if report.load_route_open:
        report.warn(
            "load_route_open",
            "anyone who reaches this port can load and unload adapters: start the engine with --api-key and give "
            "this replica its key, or let nobody else reach the port",
        )


async def _look_at_probe(report: ReplicaReport, target: ReplicaTarget) -> None:
    """The settings have a key for a probe: it must answer, and say which of its hooks found nothing to hold on to."""
    api = ProbeApi(target)
    try:
        snapshot = await _try(report, api.residency())
    finally:
        await api.close()
    report.probe = None if snapshot is None else str(snapshot.get("probe"))
    ranks = len((snapshot or {}).get("workers", ()))
    if ranks and ranks != target.tensor_parallel:
        report.problem(
            "ranks_differ",
            f"its probe shows {ranks} rank processes, tensor_parallel is {target.tensor_parallel}: make them agree",
        )
    for hooks in (snapshot or {}).get("hooks", ()):
        for missing in hooks["missing"]:
            report.warn(
                "probe_hook_missing", f"its probe lacks {missing['hook']} ({missing['why']}): no {missing['loses']}"
            )
        if not hooks["tested"]:
            report.warn("probe_untested", f"its probe was not tested with vLLM {hooks['vllm']}")


def _takes_loads(reply: Reply) -> bool | None:
    """Whether the load route is there for whoever asked; ``None`` when the answer does not tell."""
    if reply.status in (400, 422):
        return True
    return False if reply.status in (401, 403, 404) else None
