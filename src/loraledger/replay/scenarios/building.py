"""Builds scenarios: from settings, a profile and one combination of changes.

Theory of operation. A scenario begins as the settings have it: the same ``FleetSettings`` that a live gateway would be given, and
for each replica a twin whose times come from a profile and whose sizes come from the settings. A size that the settings leave
out is the profile's; that is said. Then come the changes of one combination (``axes.py``), applied to both, so that the kernel
is told the truth about the engine as an operator would have restarted it.

**Slots are paid in KV.** An engine with slots takes them before it sizes its KV cache, so at a fixed device memory ::

    KV blocks = floor((blocks x block bytes + slots x slot bytes - new slots x new slot bytes) / block bytes)

(vLLM, ``v1/worker/gpu_worker.py: determine_available_memory``). ``blocks`` are those of the settings at their own slots, else those
of the profile at the slots that it was measured with. Bytes of a slot and of a block are worked out from the configured base
model and the engine's flags, as ``loraledger budget`` does, else taken from the profile; a slot is proportional to ``max_rank``.
Where neither knows them a change of slots is refused, unless KV is to be kept as it is. If a base model is configured and cannot
be read, this is said, and whose bytes stand in for its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Final, NamedTuple

import msgspec

from loraledger.adapters.catalog import engine_settings
from loraledger.adapters.sizing.base import read_base
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.survey import kv_bytes_of, slots_of
from loraledger.config.schema import Replica, Settings
from loraledger.errors import ConfigError, InputFileError
from loraledger.kernel.policies import make_policy
from loraledger.kernel.settings import FleetSettings, ReplicaSpec, TenantSpec
from loraledger.replay.fleet.observation import PS_PER_NS, Observation
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.scenarios.axes import Changes
from loraledger.replay.scenarios.ranking import doubts, residency_of
from loraledger.twin.calibrated import Calibrated
from loraledger.twin.profile import TwinProfile

_SIZES: Final = ("slots", "host_entries", "max_rank", "max_seqs")


class Room(NamedTuple):
    """Device bytes on one rank process: of one slot and of one KV block."""

    slot: Fraction
    block: int


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What every scenario of a sweep starts from.

    ``fleet`` is what a live gateway would be told, with the trace's adapters and tenants. ``written``: whether a field of the n-th
    replica was set by anybody. ``chosen``: the profile was named by the operator and is not the default. ``read``: a profile by the
    name that ``--set profile=`` gives. ``engine_version``: what the fleet runs, where known.
    """

    settings: Settings
    fleet: FleetSettings
    written: Callable[[int, str], bool]
    profile: Calibrated
    chosen: bool
    read: Callable[[str], Calibrated]
    observation: Observation
    keep_kv: bool = False
    engine_version: str | None = None

    @cached_property
    def base(self) -> BaseModel | str | None:
        """The configured base model; the reason as text where nothing can be counted by it; ``None``: none is configured."""
        path = self.settings.base.path
        if path is None:
            return None
        try:
            found = read_base(path)
        except InputFileError as error:
            return error.message
        return found if found.shaped else "the shapes of its modules are not known"


def scenario(ground: Ground, changes: Changes) -> Scenario:
    """The scenario of one combination. Raises ``ConfigError`` for one that cannot be, ``InputFileError`` for a bad profile."""
    named = changes.text("profile")
    building = _Building(ground, changes, ground.profile if named is None else ground.read(named), named is not None)
    replicas = building.replicas()
    specs = tuple(replica.spec for replica in replicas)
    kept = residency_of(ground.settings, changes, specs)
    fleet = msgspec.structs.replace(
        ground.fleet,
        replicas=specs,
        tenants=_tenants(ground.fleet.tenants, changes),
        limits=msgspec.structs.replace(ground.fleet.limits, **changes.under("limits")),
        **_policy(ground.fleet, changes),
        residency=kept.residency,
        pins=kept.pins,
    )
    make_policy(fleet)
    return Scenario(
        label=changes.label,
        settings=fleet,
        profiles={replica.spec.name: replica.profile for replica in replicas},
        observation=way_in(ground.observation, building.calibrated),
        warnings=(*building.doubts(), *doubts(kept, specs, ground.observation.probe), *building.warnings()),
        speed=changes.speed.as_integer_ratio(),
        slot_bytes={replica.spec.name: replica.slot_bytes for replica in replicas if replica.slot_bytes},
    )


def traded_blocks(blocks: int, block: int, before: tuple[int, Fraction], after: tuple[int, Fraction]) -> int:
    """KV blocks of ``block`` bytes once slots went from ``before`` to ``after`` (count, bytes of one) in the same device memory.

    Below 1 when the new slots leave none.
    """
    left = blocks * block + before[0] * before[1] - after[0] * after[1]
    return left // block


class _Replica(NamedTuple):
    spec: ReplicaSpec
    profile: TwinProfile
    slot_bytes: int


@dataclass
class _Building:
    """The replicas of one scenario, and what there is to say of them."""

    ground: Ground
    changes: Changes
    calibrated: Calibrated
    renamed: bool
    said: dict[str, list[str]] = field(default_factory=dict)
    """What there is to say of which replicas."""

    def replicas(self) -> list[_Replica]:
        """As many as the combination asks for: the first ones, then clones of the first."""
        configured = self.ground.settings.replicas
        number = self.changes.count("replicas") or len(configured)
        built = [self._replica(index) for index in range(min(number, len(configured)))]
        taken = {replica.spec.name for replica in built}
        for copy in range(2, number - len(built) + 2):
            name = f"{configured[0].name}+{copy}"
            while name in taken:
                name += "+"
            taken.add(name)
            first = built[0]
            built.append(first._replace(spec=msgspec.structs.replace(first.spec, name=name)))
        return built

    def doubts(self) -> list[str]:
        """What is to be doubted about the profile itself."""
        ours, theirs = self.ground.engine_version, self.calibrated.engine_version
        name = self.calibrated.name
        found = []
        if not self._chosen:
            found.append(
                f"no profile was given: step times are those of {name} ({self.calibrated.model} on {self.calibrated.device}); "
                "give --profile, or measure one with `loraledger calibrate`"
            )
        if ours is not None and theirs is None:
            found.append(f"profile {name} does not say which engine version it was measured on; the fleet runs {ours}")
        elif ours is not None and ours != theirs:
            found.append(
                f"profile {name} is of {self.calibrated.engine} {theirs}, the fleet runs {ours}: calibrate again"
            )
        if isinstance(self.ground.base, str) and self.calibrated.profile.layout == "slots":
            known = self.calibrated.slot_bytes is not None and self.calibrated.block_bytes is not None
            instead = f"are those of profile {name} ({self.calibrated.model})" if known else "are not known"
            found.append(
                f"base.path {self.ground.settings.base.path}: {self.ground.base}; bytes of slots and KV blocks {instead}"
            )
        return found

    @property
    def _chosen(self) -> bool:
        """The operator named the profile, so that its sizes stand in for those that the settings leave out."""
        return self.renamed or self.ground.chosen

    def warnings(self) -> list[str]:
        """What was said of replicas, each text once."""
        return [f"{text} (replica{'s' * (len(names) > 1)} {', '.join(names)})" for text, names in self.said.items()]

    def _say(self, replica: Replica, text: str) -> None:
        self.said.setdefault(text, []).append(replica.name)

    def _replica(self, index: int) -> _Replica:
        replica, given = self.ground.settings.replicas[index], self.calibrated.profile
        sizes = {name: self._size(index, replica, name) for name in _SIZES}
        host = self.changes.count("host_entries") is not None or self.ground.written(index, "host_entries")
        if not host:
            sizes["host_entries"] = max(sizes["host_entries"], sizes["slots"])
        blocks = self._blocks(replica, sizes["slots"], sizes["max_rank"])
        try:
            profile = msgspec.structs.replace(
                given,
                **sizes,
                kv_blocks=blocks,
                token_budget=self.changes.count("token_budget") or given.token_budget,
            )
        except ValueError as error:
            raise ConfigError(f"{self._at(replica)}: {error}; {self._remedy(index, str(error))}") from error
        spec = self.ground.fleet.replicas[index]
        in_flight = spec.max_in_flight if self.ground.written(index, "max_in_flight") else _in_flight(sizes["max_seqs"])
        kv_tokens = None if spec.kv_tokens is None else profile.kv_tokens
        spec = msgspec.structs.replace(spec, **sizes, max_in_flight=in_flight, kv_tokens=kv_tokens)
        room = self._room(replica, sizes["max_rank"])
        return _Replica(spec, profile, 0 if room is None else int(room.slot * replica.tensor_parallel))

    def _remedy(self, index: int, said: str) -> str:
        """What to do about the size whose name an error begins with: it is where that came from that helps."""
        name = said.partition(" ")[0]
        profile = f"profile {self.calibrated.name}"
        if name not in (*_SIZES, "token_budget", "kv_blocks"):
            return f"{profile} does not go so far: take another one, or a smaller value"
        if self.changes.count(name) is not None:
            return f"give --set {name} another value"
        written = self.ground.written(index, "kv_tokens" if name == "kv_blocks" else name)
        return f"that is from {'the settings' if written else profile}: give --set {name}=N as well"

    def _size(self, index: int, replica: Replica, name: str) -> int:
        """The combination's, else the settings', else the profile's if it is one that the operator chose."""
        changed = self.changes.count(name)
        if changed is not None:
            return changed
        configured: int = getattr(replica, name)
        if name == "slots" or self.ground.written(index, name) or not self._chosen:
            return configured
        found: int = getattr(self.calibrated.profile, name)
        if found != configured:
            self._say(replica, f"{name} is not in the settings: {found}, from profile {self.calibrated.name}")
        return found

    def _blocks(self, replica: Replica, slots: int, rank: int) -> int:
        """KV blocks, with what other slots than those that they were counted beside take or give back."""
        given = self.calibrated.profile
        if (fixed := self.changes.count("kv_blocks")) is not None:
            return fixed
        if given.layout == "unified":
            if {"slots", "max_rank"} & self.changes.values.keys():
                raise ConfigError(
                    f"{self._at(replica)}: profile {self.calibrated.name} has one pool and no slots to change"
                )
            return given.kv_blocks
        if replica.kv_tokens is not None:
            blocks, before, ranked = replica.kv_tokens // given.block_size, replica.slots, replica.max_rank
        else:
            blocks, before, ranked = given.kv_blocks, given.slots, given.max_rank
            self._say_kv(replica, blocks)
        if self.ground.keep_kv or (slots, rank) == (before, ranked):
            return blocks
        room, other = self._room(replica, ranked), self._room(replica, rank)
        if room is None or other is None:
            return self._untraded(replica, blocks, f"{before} of rank {ranked}")
        left = traded_blocks(blocks, room.block, (before, room.slot), (slots, other.slot))
        if left < 1:
            most = (blocks - 1) * room.block + before * room.slot
            raise ConfigError(
                f"{self._at(replica)}: {slots} slots of rank {rank} leave no KV: {most // other.slot} leave one block "
                f"({blocks:,} blocks beside {before} slots of rank {ranked})"
            )
        return left

    def _say_kv(self, replica: Replica, blocks: int) -> None:
        where = f"{blocks:,} blocks" + ("" if self._chosen else ", a guess")
        self._say(replica, f"kv_tokens is not in the settings: KV is that of profile {self.calibrated.name}, {where}")

    def _untraded(self, replica: Replica, blocks: int, beside: str) -> int:
        if {"slots", "max_rank"} & self.changes.values.keys():
            why = f" (base.path: {self.ground.base})" if isinstance(self.ground.base, str) else ""
            raise ConfigError(
                f"{self._at(replica)}: what slots cost in KV is not known{why}: set base.path to the base model's folder, give a "
                "profile with slot_bytes and block_bytes, or --keep-kv to leave KV as it is"
            )
        self._say(replica, f"KV was counted beside {beside} and is taken as it is: what slots cost is not known")
        return blocks

    def _room(self, replica: Replica, rank: int) -> Room | None:
        """Bytes of a slot of ``rank`` and of a KV block; ``None``: not known."""
        given, base = self.calibrated, self.ground.base
        if isinstance(base, BaseModel):
            engine = engine_settings(replica)
            slots = slots_of(base, engine, rank)
            if slots is not None and slots.one.total:
                return Room(Fraction(slots.one.total), kv_bytes_of(base, engine) * given.profile.block_size)
        if given.slot_bytes is None or given.block_bytes is None:
            return None
        return Room(Fraction(given.slot_bytes * rank, given.profile.max_rank), given.block_bytes)

    def _at(self, replica: Replica) -> str:
        return f"{self.changes.label}: replica {replica.name}"


def _in_flight(max_seqs: int) -> int:
    """What the settings' own default would be."""
    field = Replica.model_fields["max_in_flight"]
    found: int = field.get_default(call_default_factory=True, validated_data={"max_seqs": max_seqs})
    return found


def way_in(observation: Observation, calibrated: Calibrated) -> Observation:
    """``observation`` with what lies between gateway and engine, as the profile has it."""
    return msgspec.structs.replace(
        observation,
        boundary=calibrated.boundary_ps // PS_PER_NS,
        boundary_per_seq=calibrated.boundary_per_seq_ps // PS_PER_NS,
        load_call=calibrated.load_call_ps // PS_PER_NS,
    )


def _tenants(tenants: tuple[TenantSpec, ...], changes: Changes) -> tuple[TenantSpec, ...]:
    limits = changes.under("tenants")
    return tuple(msgspec.structs.replace(spec, **limits) for spec in tenants) if limits else tenants


def _policy(fleet: FleetSettings, changes: Changes) -> dict[str, object]:
    """Policy and parameters: those of the settings are kept for the policy that they were written for."""
    name = changes.text("policy") or fleet.policy
    params = {key: float(value) for key, value in changes.under("policy").items()}
    return {"policy": name, "params": (dict(fleet.params) if name == fleet.policy else {}) | params}
