"""What every candidate is given alike: the trace with its adapters and tenants, the engine, the measured profile, the objectives.

Theory of operation. The *canary* is one trace; its digest names it, and replays draw nothing, so equal candidates give equal
figures on every machine. Tenants get no limits of their own here: those would hold hardware back that others pay for. Adapters
have the rank and the bytes of the trace's header, else of their files, else those that the caller gives.

A scenario is a candidate at work: so many units of it, each replica with its slots, the KV that these leave (``ledger.budget``),
and the twin of its GPU (``scaling``). Replicas are called alike everywhere, so that policies which hash names see the same fleet.
Host caches have one size for all: memory of the host is no part of an offer. An offer says nothing of its disk: loads are as
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from loraledger.adapters.survey import find
from loraledger.config.schema import Adapters, Settings
from loraledger.config.schema import AdapterSpec as ConfiguredAdapter
from loraledger.events import AdapterSpec
from loraledger.kernel.settings import FleetSettings, ReplicaSpec, TenantSpec
from loraledger.plan.candidates import Candidate
from loraledger.plan.hardware import Catalogue, Gpu
from loraledger.plan.scaling import Scaled, scaled
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.scenarios.building import way_in
from loraledger.replay.scenarios.parties import adapters_of, survey
from loraledger.replay.scenarios.sweep import identity
from loraledger.replay.scenarios.unfit import Unfit
from loraledger.replay.traces.trace import Trace
from loraledger.twin.calibrated import Calibrated
from loraledger.twin.profile import TwinProfile

UNLIMITED: Final = 1_000_000
"""Requests of one tenant in flight, and waiting."""


@dataclass(frozen=True, kw_only=True)
class Canary:
    """The trace that all candidates share."""

    path: Path
    name: str
    identity: str
    """Its digest, and how much faster it is played."""
    seed: int | None
    """Which drew it, as its header says."""
    requests: int
    adapters: tuple[AdapterSpec, ...]
    tenants: tuple[str, ...]
    most_tokens: int
    """Prompt and output of the largest request."""
    speed: tuple[int, int]
    warnings: tuple[str, ...]

    @property
    def largest_rank(self) -> int:
        """Of its adapters; 0 without any."""
        return max((spec.rank for spec in self.adapters), default=0)


def read_canary(
    path: Path,
    folders: tuple[Path, ...] = (),
    *,
    rank: int | None = None,
    size: int | None = None,
    speed: tuple[int, int] = (1, 1),
) -> Canary:
    """The trace, read to its end. Raises ``InputFileError``, also when rank or bytes of an adapter are unknown."""
    trace = Trace(path)
    seen = survey(trace)
    places, _ = find(folders)
    listed = tuple(ConfiguredAdapter.model_construct(name=place.name, path=place.path) for place in places)
    settings = Settings.model_construct(adapters=Adapters.model_construct(list=listed))
    specs, warnings = adapters_of(trace, seen, settings, rank=rank, size=size)
    return Canary(
        path=path,
        name=trace.header.name,
        identity=identity(seen.digest, speed, Unfit()),
        seed=trace.header.seed,
        requests=seen.requests,
        adapters=specs,
        tenants=seen.tenants,
        most_tokens=seen.most_tokens,
        speed=speed,
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, kw_only=True)
class Twins:
    """The profile that was measured, on what, and the ladders that other GPUs have."""

    calibrated: Calibrated
    measured_on: Gpu
    gpus: Catalogue
    host_entries: int
    observation: Observation

    def of(self, candidate: Candidate, slots: int) -> tuple[TwinProfile, tuple[Scaled, ...]]:
        """The twin of one replica, and how each term was carried over. ``slots`` are some that fit."""
        profile, gpu, setup = self.calibrated.profile, candidate.offer.gpu, candidate.setup
        ladder = self.gpus.ladder(gpu, candidate.offer.host_link)
        ladder = ladder.with_rung("disk", "as measured", bytes_per_s=profile.load_bytes_per_s)
        moved, notes = scaled(
            profile,
            self.measured_on,
            gpu,
            candidate.tensor_parallel,
            layers=setup.base.layers or None,
            ladder=ladder,
        )
        sized = msgspec.structs.replace(
            moved,
            slots=slots,
            host_entries=max(slots, self.host_entries),
            max_rank=setup.engine.max_lora_rank,
            kv_blocks=kv_tokens(candidate, slots) // profile.block_size,
        )
        return sized, notes


def kv_tokens(candidate: Candidate, slots: int) -> int:
    """KV tokens of a replica with so many slots; 0 when these do not fit."""
    budget = candidate.at_slots(slots)
    return 0 if budget is None else budget.kv_tokens


def scenario(
    canary: Canary,
    twins: Twins,
    candidate: Candidate,
    policy: str,
    units: int,
    slots: int,
    profile: TwinProfile | None = None,
) -> Scenario:
    """``units`` of ``candidate`` under ``policy``; ``profile``: another twin than that of the candidate."""
    twin = twins.of(candidate, slots)[0] if profile is None else profile
    names = [f"r{number}" for number in range(1, units * candidate.replicas + 1)]
    specs = tuple(
        ReplicaSpec(
            name,
            slots=slots,
            host_entries=twin.host_entries,
            max_rank=twin.max_rank,
            max_seqs=twin.max_seqs,
            max_in_flight=2 * twin.max_seqs,
            kv_tokens=twin.kv_tokens,
        )
        for name in names
    )
    return Scenario(
        label=f"{candidate.offer.name} x{units} slots={slots} {policy}",
        settings=FleetSettings(
            specs,
            canary.adapters,
            tuple(TenantSpec(name, UNLIMITED, UNLIMITED) for name in canary.tenants),
            policy=policy,
        ),
        profiles=dict.fromkeys(names, twin),
        observation=way_in(twins.observation, twins.calibrated),
        speed=canary.speed,
    )
