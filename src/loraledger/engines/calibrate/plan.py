"""Which points are measured, and in which order, so that whatever the time allows is a whole profile.

Theory of operation. Every profile needs decodes at several batch sizes and prompts of several lengths; a profile for adapters
needs what they add. So one round measures each point once, short ones before long ones, and further rounds repeat it: a round
that is cut leaves each term with points. ``--quick`` is one round of fewer points. Batches and lengths grow by factors, because
costs do.
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
LONGEST: Final = 4096
ROUNDS: Final = 3


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
    decodes: list[Probe] = [DecodeProbe(sequences=n, prompt=SHORT, adapters=one) for n in batches]
    roomy = min(longest // 2, facts.kv_blocks * facts.block_size // (2 * middle))
    if roomy > 4 * SHORT:
        decodes.append(DecodeProbe(sequences=middle, prompt=roomy, adapters=one))
    prompts = _grow(8, min(facts.token_budget, facts.max_model_len - 1, LONGEST), 4 if quick else 2)
    prefills: list[Probe] = [PrefillProbe(tokens=tokens) for tokens in prompts]
    mixed: list[Probe] = [
        MixedProbe(sequences=n, tokens=tokens) for tokens in prompts[1:] for n in sorted({min(2, most), min(8, most)})
    ]
    return [*decodes, *_adapter_probes(facts, folders, most), *prefills, *_moves(facts, folders, quick=quick), *mixed]


def _adapter_probes(facts: Facts, folders: list[tuple[int, int]], most: int) -> list[Probe]:
    """One stream of the base model, and the same batch of no adapter, one, half of the slots and all of them."""
    if not folders:
        return []
    alone: list[Probe] = [DecodeProbe(sequences=1, prompt=SHORT, adapters=0)]
    batch = min(most, max(8, facts.slots))
    counts = sorted({0, 1, min(batch, max(1, facts.slots // 2)), min(batch, facts.slots)})
    return alone + [DecodeProbe(sequences=batch, prompt=SHORT, adapters=count) for count in counts]


def _moves(facts: Facts, folders: list[tuple[int, int]], *, quick: bool) -> list[Probe]:
    """The smallest and the largest adapter, and without haste one in between."""
    if not folders:
        return []
    order = sorted(range(len(folders)), key=lambda number: folders[number])
    chosen = [order[0], order[-1]] if quick else [order[0], order[len(order) // 2], order[-1]]
    probes: list[Probe] = []
    for folder in dict.fromkeys(chosen):
        if facts.host_entries > facts.slots:
            probes.append(MoveProbe(kind="activation", folder=folder))
        probes += [MoveProbe(kind="load", folder=folder), MoveProbe(kind="call", folder=folder)]
    return probes


def _grow(start: int, end: int, factor: int) -> list[int]:
    """``start``, each next one by ``factor``, and ``end`` itself."""
    found = []
    while start < end:
        found.append(start)
        start *= factor
    return [*found, end]
