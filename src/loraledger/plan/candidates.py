"""An offer with the floor of a base taken off: what is left for adapters and KV.

Theory of operation. Two offers of the same memory are not two of the same room. Each replica holds the base's weights once, on one
device or cut over several (tensor parallel), and each device keeps a share free and has an overhead; only what is left is divided
into slots and KV (``ledger.budget.exact_budget``, which does it as vLLM does). So candidates are ranked by *usable* memory: all
devices less all floors. The headline, which is what is paid for by name, stands beside it for contrast.

*Tensor parallel.* The fewest devices that hold the floor, the slots and the least KV, of the numbers that divide the offer's count
and that the base can be cut over. A wider cut makes fewer and faster replicas, with fewer floors and dearer steps; which is better
only a replay can tell, so ``candidate`` takes a width too. Where none fits, the candidate *does not fit*, and the shortage on one
device of the widest cut is said.

What the engine takes beside weights, slots and KV (``overhead``) depends on device and engine. Not given, it is unknown: floors are
then lower bounds and what is usable an upper one, for all candidates alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loraledger.adapters.sizing.base import read_base
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.survey import Unreadable, find, sum_up, survey
from loraledger.errors import InputFileError
from loraledger.ledger.budget import BLOCK_TOKENS, UTILIZATION, ExactBudget, Plan, exact_budget
from loraledger.plan.offers import Offer
from loraledger.units import format_bytes


@dataclass(frozen=True, slots=True)
class Setup:
    """The engine that is meant to run on whatever is offered; ``tensor_parallel`` of its settings is each candidate's own."""

    base: BaseModel
    engine: EngineSettings
    least_kv_tokens: int = BLOCK_TOKENS
    """KV tokens without which a replica is of no use, such as ``max_model_len``."""
    utilization: float = UTILIZATION
    safety: int = 0
    """Bytes of a device to keep free at least."""
    overhead: int | None = None
    """Bytes of a device that the engine takes beside weights, slots and KV; ``None``: unknown."""
    adapters: int | None = None
    """How many the engine can take; ``None``: no folder of them was read."""
    entry_bytes: int | None = None
    """Host bytes of the largest adapter, on one rank process; ``None``: not known."""
    unreadable: tuple[str, ...] = ()
    """Adapters that could not be read, and why."""

    def plan(self, device: int, tensor_parallel: int, slots: int | None = None) -> Plan:
        """What the ledger is asked for one device of ``device`` bytes."""
        engine = replace(self.engine, tensor_parallel=tensor_parallel)
        if slots is not None:
            engine = replace(engine, max_loras=slots, max_cpu_loras=max(slots, engine.host_entries))
        return Plan(device, self.base, engine, self.utilization, self.safety, self.overhead)


def read_setup(
    base: Path, adapters: Sequence[Path], engine: EngineSettings, *, max_lora_rank: int | None = None
) -> Setup:
    """The base in its folder and the adapters in theirs, for ``engine``.

    The engine's ``max_lora_rank`` is the one given, else the smallest that takes the adapters, else its own. Raises
    :class:`InputFileError` for a base that cannot be read, and adapters of which not one can.
    """
    read = read_base(base)
    places, problems = find(adapters)
    rows = [*problems, *survey(places, read, engine)]
    totals = sum_up(rows, engine)
    bad = tuple(f"{row.name}: {row.reason}" for row in rows if isinstance(row, Unreadable))
    if adapters and len(bad) == len(rows):
        raise InputFileError(f"no adapter can be read: {bad[0]}" if bad else "no adapter was found")
    rank = max_lora_rank or totals.fit.without_too_big or engine.max_lora_rank
    hosts = [row.host.exact for row in rows if not isinstance(row, Unreadable) and row.host is not None]
    return Setup(
        base=read,
        engine=replace(engine, max_lora_rank=rank),
        adapters=len(rows) - len(bad) - totals.fit.aside if adapters else None,
        entry_bytes=max(hosts, default=None),
        unreadable=bad,
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """An offer as the engine would divide it. Bytes of a device are of one; totals are of all devices that are used."""

    offer: Offer
    setup: Setup
    tensor_parallel: int
    """Devices of a replica; of one that does not fit the widest cut that was tried, 0 when none could be."""
    replicas: int
    """Of the whole offer; 0 when it does not fit."""
    budget: ExactBudget | None
    """Of one device, with the engine's slots; ``None`` when no cut could be worked out."""
    shortage: int | None
    """Bytes that one device lacks; 0 when it fits, ``None`` when it cannot be said."""
    words: str

    @property
    def fits(self) -> bool:
        """Whether at least one replica would start with its slots and the least KV."""
        return self.replicas > 0

    @property
    def headline_bytes(self) -> int:
        """Memory of all devices of the offer."""
        return self.offer.headline_bytes

    @property
    def floor_bytes(self) -> int | None:
        """Weights, overhead and what is kept free, of all devices used; a lower bound while the overhead is unknown."""
        if self.budget is None:
            return None
        return self._devices * (self.budget.weights + (self.budget.overhead or 0) + self.budget.kept)

    @property
    def usable_bytes(self) -> int:
        """All devices used, less their floors: what slots and KV share. 0 when it does not fit."""
        floor = self.floor_bytes
        return 0 if floor is None or not self.fits else self._devices * self.offer.memory_bytes - floor

    @property
    def at_most(self) -> bool:
        """Whether ``usable_bytes`` is an upper bound: the overhead is unknown."""
        return self.setup.overhead is None

    @property
    def host_link(self) -> int:
        """Bytes a second to one device: the offer's, else the catalogue's."""
        return self.offer.gpu.host_link.value if self.offer.host_link is None else self.offer.host_link

    @property
    def host_bytes(self) -> int | None:
        """Host memory of the full caches of all replicas, each entry the largest adapter; ``None``: adapters are not known."""
        if self.setup.entry_bytes is None:
            return None
        return self._devices * self.setup.engine.host_entries * self.setup.entry_bytes

    @property
    def _devices(self) -> int:
        return self.replicas * self.tensor_parallel if self.fits else self.tensor_parallel

    def at_slots(self, slots: int) -> ExactBudget | None:
        """The budget of one device with other slots; ``None`` when these or the least KV do not fit."""
        if not self.fits:
            return None
        budget = exact_budget(self.setup.plan(self.offer.memory_bytes, self.tensor_parallel, slots))
        return budget if _short(budget, self.setup) == 0 else None

    def kv_blocks(self, slots: int) -> int:
        """KV blocks of a replica with so many slots; 0 when it does not fit."""
        budget = self.at_slots(slots)
        return 0 if budget is None else budget.kv_tokens // budget.block_tokens


def candidate(offer: Offer, setup: Setup, tensor_parallel: int | None = None) -> Candidate:
    """``offer`` with the floor taken off, on replicas of ``tensor_parallel`` devices; by default of the fewest that do.

    Never raises for a base that cannot be cut: it then does not fit, in words.
    """
    tried: Candidate | None = None
    reason = f"{offer.count} devices are no replicas of {tensor_parallel} devices each"
    widths = range(1, offer.count + 1) if tensor_parallel is None else (tensor_parallel,)
    for width in (width for width in widths if offer.count % width == 0):
        if setup.base.heads % width:
            reason = f"{setup.base.heads} attention heads cannot be cut over {width} devices"
            continue
        try:
            budget = exact_budget(setup.plan(offer.memory_bytes, width))
        except InputFileError as error:
            reason = error.message
            continue
        short = _short(budget, setup)
        if short == 0:
            return Candidate(offer, setup, width, offer.count // width, budget, 0, _fitting(offer, width))
        tried = Candidate(offer, setup, width, 0, budget, short, _missing(short, width, budget))
    return tried or Candidate(offer, setup, 0, 0, None, None, f"does not fit: {reason}")


def candidates(offers: Iterable[Offer], setup: Setup) -> list[Candidate]:
    """All of them, ranked."""
    return ranked(candidate(offer, setup) for offer in offers)


def ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Most usable memory first, whatever the headline; of two alike the cheaper one, then by name."""
    return sorted(found, key=lambda one: (-one.usable_bytes, one.offer.price_per_hour, one.offer.name))


def _short(budget: ExactBudget, setup: Setup) -> int:
    """Bytes that a device lacks for its slots and the least KV; 0 when it has them."""
    if budget.left < 0:
        more = setup.least_kv_tokens - budget.kv_tokens
        return -budget.left + max(0, _blocks(more, budget)) * budget.block_tokens * budget.kv_bytes_per_token
    missing = _blocks(setup.least_kv_tokens - budget.kv_tokens, budget)
    return max(0, missing * budget.block_tokens * budget.kv_bytes_per_token - budget.left)


def _blocks(tokens: int, budget: ExactBudget) -> int:
    return -(-tokens // budget.block_tokens)


def _fitting(offer: Offer, width: int) -> str:
    replicas = offer.count // width
    on = "one device each" if width == 1 else f"{width} devices each"
    return f"{replicas} replica{'s' if replicas > 1 else ''}, {on}"


def _missing(short: int, width: int, budget: ExactBudget) -> str:
    over = f" with the base cut over {width}" if width > 1 else ""
    most = f"; {budget.largest_slots} slots fit" if budget.largest_slots else ""
    return f"does not fit: {format_bytes(short)} short on each device{over}{most}"
