"""Which points are measured, and in which order, so that whatever the time allows is a whole profile.

Theory of operation. Every profile needs decodes at several batch sizes and prompts of several lengths; a profile for adapters
needs what they add. So one round measures each point once, short ones before long ones, and further rounds repeat it: a round
that is cut leaves each term with points. ``--quick`` is one round of fewer points. Batches and lengths grow by factors, because
costs do. A shared machine is faster and slower by turns of ten seconds and more, by up to a third: rounds help against that, more
repeats within one do not.

Somebody's engine gets no more than ``MOST_NAMES`` adapters of ours at once: what would need more is not measured, and said.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from loraledger.engines.calibrate.facts import Facts

SHORT: Final = 16
"""Prompt tokens of a stream whose context should not matter."""
STEPS: Final = 32
"""Decode steps that a batch is measured over."""
MOST_STREAMS: Final = 64
MOST_NAMES: Final = 512
"""Adapters that are registered at once."""
LONGEST: Final = 4096
BESIDE: Final = (2, 8)
"""Streams that a prompt is injected beside."""
ROUNDS: Final = 5


class DecodeProbe(msgspec.Struct, frozen=True, kw_only=True):
    """``sequences`` streams at once, of ``adapters`` distinct adapters (0: the base model), after ``prompt`` tokens each."""

    sequences: int
    prompt: int
    adapters: int


class PrefillProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Single prompts of ``tokens`` with one token of output, on the idle engine."""

    tokens: int


class MixedProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of ``tokens``, one at a time, while ``sequences`` streams decode."""

    sequences: int
    tokens: int


class MoveProbe(msgspec.Struct, frozen=True, kw_only=True):
    """``activation``: single requests over one more adapter than there are slots; ``load``: than there are host entries;
    ``call``: load calls beside a stream. ``folder``: which of the given adapters, by number."""

    kind: Literal["activation", "load", "call"]
    folder: int


Probe = DecodeProbe | PrefillProbe | MixedProbe | MoveProbe


def plan(facts: Facts, folders: list[tuple[int, int]], *, quick: bool) -> list[Probe]:
    """One round. ``folders``: bytes and rank of each given adapter, in order."""
    one = 1 if folders else 0
    most = min(facts.max_seqs, MOST_STREAMS, max(1, facts.kv_blocks // 2))
    batches = _grow(1, most, 4 if quick else 2)
    longest = min(facts.max_model_len - STEPS - 2, LONGEST)
    middle = batches[len(batches) // 2]
    decodes = _decode_probes(facts, batches, one)
    roomy = min(longest // 2, facts.kv_blocks * facts.block_size // (2 * middle))
    if roomy > 4 * SHORT:
        decodes.append(DecodeProbe(sequences=middle, prompt=roomy, adapters=one))
    prompts = _grow(8, min(facts.token_budget, facts.max_model_len - 1, LONGEST), 4 if quick else 2)
    prefills: list[Probe] = [PrefillProbe(tokens=tokens) for tokens in prompts]
    # One place must be free, or what is injected waits until a stream ends.
    beside = sorted({min(few, most, facts.max_seqs - 1) for few in BESIDE} - {0})
    mixed: list[Probe] = [MixedProbe(sequences=n, tokens=tokens) for tokens in prompts for n in beside]
    return [*decodes, *prefills, *_moves(facts, folders, quick=quick), *mixed]


def pool_size(facts: Facts) -> int:
    """Adapters that stay registered: one a slot, and no more than run at once."""
    return min(facts.slots, MOST_STREAMS)


def places(facts: Facts, kind: str) -> int:
    """How many adapters find a place where moves of ``kind`` go to; a cycle needs one more."""
    return facts.slots if kind == "activation" else facts.host_entries


def left_out(facts: Facts) -> list[str]:
    """A sentence for each kind of move that would need too many adapters at once."""
    return [
        f"no {kind} was measured: {places(facts, kind)} {what} need more than the {MOST_NAMES} adapters that are registered at most"
        for kind, what in (("activation", "slots"), ("load", "host entries"))
        if not _fits(facts, kind)
    ]


def _fits(facts: Facts, kind: str) -> bool:
    return pool_size(facts) + places(facts, kind) + 1 <= MOST_NAMES


def _decode_probes(facts: Facts, batches: list[int], one: int) -> list[Probe]:
    """Each batch of ``one`` adapter and of as many as it can hold; one stream, and a larger batch, of the base model too.

    Batches that differ in nothing but adapters follow each other, so that a machine that slowly changes its speed does not count
    as one more adapter's cost. The larger batch also runs on half of the slots.
    """
    compared = min((n for n in batches if n >= max(8, facts.slots)), default=batches[-1])
    found: list[Probe] = []
    for n in batches:
        counts = {one, min(n, facts.slots) if one else 0}
        if n == 1:
            counts.add(0)
        if n == compared and one:
            counts |= {0, min(n, max(1, facts.slots // 2))}
        found += [DecodeProbe(sequences=n, prompt=SHORT, adapters=count) for count in sorted(counts)]
    return found


def _moves(facts: Facts, folders: list[tuple[int, int]], *, quick: bool) -> list[Probe]:
    """The smallest and the largest adapter, and without haste one in between."""
    if not folders:
        return []
    order = sorted(range(len(folders)), key=lambda number: folders[number])
    chosen = [order[0], order[-1]] if quick else [order[0], order[len(order) // 2], order[-1]]
    probes: list[Probe] = []
    for folder in dict.fromkeys(chosen):
        if facts.host_entries > facts.slots and _fits(facts, "activation"):
            probes.append(MoveProbe(kind="activation", folder=folder))
        if _fits(facts, "load"):
            probes.append(MoveProbe(kind="load", folder=folder))
        probes.append(MoveProbe(kind="call", folder=folder))
    return probes


def _grow(start: int, end: int, factor: int) -> list[int]:
    """``start``, each next one by ``factor``, and ``end`` itself."""
    found = []
    while start < end:
        found.append(start)
        start *= factor
    return [*found, end]
