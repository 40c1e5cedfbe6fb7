"""Compares what is offered, by the same replayed trace: hardware and policy, each for itself and together.

Theory of operation. Candidates that fit are crossed with policies. For each such *cell* a search (``search``) replays the canary
until it knows the fewest units that keep the objectives and the best slots; all searches are carried on in rounds, so that runs
go side by side. Then three things are asked that no cell answers alone:

* *The grid.* A cell's figures are at its own size, so a policy that needs fewer units would look slower for it. For each offer
  all policies are therefore replayed at one size, that of its best cell, and the table is taken apart (``grid``).
* *The Pareto set*, over everything that was tried (``pareto``).
* *The doubt.* Twins of GPUs that nobody measured are estimates. The first and the best other offer are searched again with every
  term at its worst (``doubt``): whether their order stays is said.

What is recommended is the first in order, if it keeps the objectives; if none does, nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

import msgspec

from loraledger.errors import InputFileError
from loraledger.plan.canary import Canary, Twins, scenario
from loraledger.plan.candidates import Candidate
from loraledger.plan.doubt import at_worst, is_estimated
from loraledger.plan.grid import Grid, grid
from loraledger.plan.pareto import MICRO, Point, pareto, ranking
from loraledger.plan.runs import Runs, Wanted
from loraledger.plan.scaling import Scaled
from loraledger.plan.search import Judged, Search, Try, drive, search
from loraledger.plan.trials import Objective, Trial

LADDER: Final = (4, 8, 16, 32, 64)
"""Slots that are tried unless told otherwise."""
REPLICAS_MAX: Final = 8
COST: Final = "cost an hour that keeps the objectives"
WAIT: Final = "mean time to first token, s"
IN_SLOT: Final = "share that found its adapter in a slot"
_HOUR_S: Final = 3600
_NAMED: Final = 3
"""Offers that an error names at most."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is compared, and how far it is looked."""

    policies: tuple[str, ...]
    ladder: tuple[int, ...]
    replicas_max: int
    objective: Objective


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """An offer under a policy, at the best size that was found."""

    offer: str
    policy: str
    trial: Trial
    cost_micro: int
    usable_bytes: int
    per_million: float | None
    """Of the currency, for a million generated tokens at the canary's rate; ``None``: none were generated."""
    tried: tuple[Try, ...] = ()
    """Of the offer under the policy."""

    @property
    def point(self) -> Point:
        """As it is ranked."""
        return _point(self.offer, self.policy, self.trial, self.cost_micro, self.usable_bytes)


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A cell with every estimated term at its worst."""

    cell: Cell
    estimated: bool
    """Whether its twin is an estimate at all; else the cell is as it was."""
    terms: tuple[Scaled, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found. ``cells``: best first."""

    cells: tuple[Cell, ...]
    grids: tuple[Grid, ...]
    pareto: tuple[Cell, ...]
    first: Doubt | None
    """The recommended cell at its worst; ``None`` when none is recommended."""
    second: Doubt | None
    """The best cell of another offer, at its worst; ``None`` when there is none."""
    trials: int

    @property
    def recommended(self) -> Cell | None:
        """The first in order, if it keeps the objectives."""
        return self.cells[0] if self.cells and self.cells[0].trial.meets else None

    @property
    def runner_up(self) -> Cell | None:
        """The best cell of another offer than the first one's."""
        return next((cell for cell in self.cells if cell.offer != self.cells[0].offer), None)


def steps_of(candidate: Candidate, ladder: Sequence[int]) -> tuple[int, ...]:
    """The steps of ``ladder`` that fit beside the least KV."""
    return tuple(slots for slots in ladder if candidate.at_slots(slots) is not None)


def default_ladder(adapters: int) -> tuple[int, ...]:
    """``LADDER`` up to the first step that holds all ``adapters``."""
    enough = next((slots for slots in LADDER if slots >= adapters), LADDER[-1])
    return tuple(slots for slots in LADDER if slots <= enough)


def compare(candidates: Sequence[Candidate], canary: Canary, twins: Twins, asked: Asked, runs: Runs) -> Comparison:
    """Replay all of it. Raises ``InputFileError`` when no candidate fits, or a run goes wrong."""
    fitting = [one for one in candidates if steps_of(one, asked.ladder) and one.replicas <= asked.replicas_max]
    if not fitting and any(steps_of(one, asked.ladder) for one in candidates):
        raise InputFileError(
            f"every offer that fits is of more replicas than {asked.replicas_max}: raise --replicas-max"
        )
    if not fitting:
        why = "; ".join(f"{one.offer.name} {one.words}" for one in candidates[:_NAMED])
        raise InputFileError(f"no offer fits: {why}: give larger devices, more of them, or fewer --slots")
    work = _Work(canary, twins, asked, runs)
    places = [_Place(one, policy, asked.ladder) for one in fitting for policy in asked.policies]
    at_one_size = work.at_one_size(fitting, work.searched(places))
    cells = work.best()
    doubts = [work.doubt(cell) for cell in _leaders(cells)] if cells[0].trial.meets else []
    return Comparison(
        cells=tuple(cells),
        grids=_grids(at_one_size, cells, [one.offer.name for one in fitting], asked.policies),
        pareto=work.pareto(),
        first=doubts[0] if doubts else None,
        second=doubts[1] if len(doubts) > 1 else None,
        trials=work.trials,
    )


class _Place(NamedTuple):
    """Where a search looks."""

    candidate: Candidate
    policy: str
    ladder: tuple[int, ...]
    least: int = 1
    worst: bool = False
    """With every estimated term at its worst."""


@dataclass
class _Work:
    """The trials of one comparison, and the cells that they make."""

    canary: Canary
    twins: Twins
    asked: Asked
    runs: Runs

    def __post_init__(self) -> None:
        self._cells: dict[tuple[str, str, Try], Cell] = {}
        self._by_name: dict[str, Candidate] = {}
        self.trials = 0

    def searched(self, places: Sequence[_Place]) -> list[Cell]:
        """A search at each of ``places``, carried on side by side; the cell that each ends with."""
        trials: list[dict[Try, Trial]] = [{} for _ in places]

        def ask(asked: list[tuple[int, Try]]) -> list[Judged]:
            found = self._play([(places[number], one) for number, one in asked])
            for (number, one), trial in zip(asked, found, strict=True):
                trials[number][one] = trial
            return [trial.judged for trial in found]

        found = drive([self._search(place) for place in places], ask)
        return [
            self._cell(place, end.best, known[end.best])
            for place, end, known in zip(places, found, trials, strict=True)
        ]

    def at_one_size(self, fitting: Sequence[Candidate], cells: Sequence[Cell]) -> dict[tuple[str, str], Trial]:
        """By policy and offer, each offer at the size of its best cell."""
        best: dict[str, Cell] = {}
        for cell in self.in_order(cells):
            best.setdefault(cell.offer, cell)
        keys, wanted = [], []
        for one in fitting:
            size = best[one.offer.name].trial
            for policy in self.asked.policies:
                keys.append((policy, one.offer.name))
                wanted.append((_Place(one, policy, ()), Try(size.units, size.slots)))
        return dict(zip(keys, self._play(wanted), strict=True))

    def doubt(self, cell: Cell) -> Doubt:
        """The cell again, with every estimated term at its worst; its slots stay, units may grow."""
        one = self._by_name[cell.offer]
        slots = cell.trial.slots
        terms = self.twins.of(one, slots)[1]
        if not is_estimated(terms):
            return Doubt(cell=cell, estimated=False, terms=terms)
        place = _Place(one, cell.policy, (slots,), min(cell.trial.units, self._most(one)), worst=True)
        return Doubt(cell=self.searched([place])[0], estimated=True, terms=terms)

    def best(self) -> list[Cell]:
        """The best cell of each offer under each policy, of all that was tried with estimates as they are; best first."""
        found: dict[tuple[str, str], Cell] = {}
        tried: dict[tuple[str, str], list[Try]] = {}
        for cell in self.in_order([*self._cells.values()]):
            place = (cell.offer, cell.policy)
            found.setdefault(place, cell)
            tried.setdefault(place, []).append(Try(cell.trial.units, cell.trial.slots))
        return [msgspec.structs.replace(cell, tried=tuple(sorted(tried[place]))) for place, cell in found.items()]

    def in_order(self, cells: Sequence[Cell]) -> list[Cell]:
        """Best first."""
        by_point = {cell.point: cell for cell in cells}
        return [by_point[point] for point in ranking(by_point, self.asked.policies)]

    def pareto(self) -> tuple[Cell, ...]:
        """Of everything that was tried with estimates as they are."""
        by_point = {cell.point: cell for cell in self._cells.values()}
        return tuple(by_point[point] for point in pareto(by_point, self.asked.policies))

    def _search(self, place: _Place) -> Search:
        return search(steps_of(place.candidate, place.ladder), self._most(place.candidate), place.least)

    def _most(self, one: Candidate) -> int:
        return self.asked.replicas_max // one.replicas

    def _play(self, wanted: Sequence[tuple[_Place, Try]]) -> list[Trial]:
        found = self.runs.trials([self._wanted(place, one) for place, one in wanted])
        self.trials += len(found)
        for (place, one), trial in zip(wanted, found, strict=True):
            self._by_name[place.candidate.offer.name] = place.candidate
            if not place.worst:
                cell = self._cell(place, one, trial)
                self._cells.setdefault((cell.offer, cell.policy, one), cell)
        return found

    def _wanted(self, place: _Place, one: Try) -> Wanted:
        candidate, policy = place.candidate, place.policy
        twin, notes = self.twins.of(candidate, one.slots)
        twin = at_worst(twin, notes) if place.worst else twin
        played = scenario(self.canary, self.twins, candidate, policy, one.units, one.slots, twin)
        return Wanted(played, one.units, one.slots)

    def _cell(self, place: _Place, one: Try, trial: Trial) -> Cell:
        candidate = place.candidate
        cost = one.units * micro(candidate.offer.price_per_hour)
        per_hour = (trial.tokens_per_s or 0.0) * _HOUR_S
        return Cell(
            offer=candidate.offer.name,
            policy=place.policy,
            trial=trial,
            cost_micro=cost,
            usable_bytes=one.units * candidate.usable_bytes,
            per_million=cost / per_hour if per_hour else None,
        )


def micro(price: float) -> int:
    """Millionths of what was written, not of the nearest binary fraction."""
    return round(Fraction(repr(price)) * MICRO)


def _leaders(cells: Sequence[Cell]) -> list[Cell]:
    """The first, and the first of another offer."""
    other = next((cell for cell in cells if cell.offer != cells[0].offer), None)
    return [cells[0]] if other is None else [cells[0], other]


def _grids(
    trials: dict[tuple[str, str], Trial], cells: Sequence[Cell], offers: Sequence[str], policies: Sequence[str]
) -> tuple[Grid, ...]:
    costs = {(cell.policy, cell.offer): cell.cost_micro / MICRO if cell.trial.meets else None for cell in cells}
    calm = {place: trial for place, trial in trials.items() if not trial.saturated}
    return (
        grid(COST, policies, offers, costs),
        grid(WAIT, policies, offers, {place: trial.ttft_mean for place, trial in calm.items()}),
        grid(IN_SLOT, policies, offers, {place: trial.gpu_rate for place, trial in calm.items()}),
    )


def _point(offer: str, policy: str, trial: Trial, cost_micro: int, usable_bytes: int) -> Point:
    return Point(
        offer=offer,
        policy=policy,
        units=trial.units,
        slots=trial.slots,
        cost_micro=cost_micro,
        usable_bytes=usable_bytes,
        meets=trial.meets,
        met=trial.met,
        ttft_p99=trial.ttft_p99,
        saturated=trial.saturated,
    )
