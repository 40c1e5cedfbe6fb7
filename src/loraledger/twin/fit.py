"""From measured points to a twin's profile, and how far each part of it misses them.

Theory of operation. Every part is a sum of few terms that cannot be negative, so each is a least-squares fit over the sets of terms
that stay positive: with at most three terms all sets are tried, which is exact and needs no solver. Residuals are relative
(divided by what was measured), because 5 % of a short step matters as much as 5 % of a long one. A point that a first fit
misses by over half, and by six times the median miss, was disturbed by something else: it is left out, and counted.

Order. What one more distinct adapter costs comes from points that differ in nothing else. Then decodes: a line over sequences
and KV tokens, or, where it misses a point by over 5 %, a row for each batch size. Points with adapters are preferred, since
that is the traffic that a replay of adapters plays; what base requests are overpriced by is said. Then prompts
(``fit_prompts``), loads and activations.

A slope that comes out negative is a term that is not there: it is clamped to zero and said in the note of its term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Final

import msgspec

from loraledger.twin.calibrated import Calibrated, Term
from loraledger.twin.fit_points import DecodePoint, MovePoint, Points, term_of, to_ps, to_seconds
from loraledger.twin.fit_prompts import fit_prompts
from loraledger.twin.fit_solving import isotonic, least_squares, without_outliers
from loraledger.twin.profile import PS_PER_S, TwinProfile, is_shorter

LINE_MISS: Final = 0.05
"""A line that misses a point by more gives way to a table."""
ALIKE: Final = 1.25
"""Contexts whose ratio is below count as equal where batches are compared."""
MOST_OF_A_STEP: Final = 0.5
"""The largest share of the shortest step that counts as its adapters' fixed cost."""
INSTANT: Final = 10**15
"""Bytes a second of a load whose time does not depend on its bytes."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What the points come to. ``adapter_ps``: what one more distinct adapter adds to a step, before it was clamped."""

    profile: TwinProfile
    terms: tuple[Term, ...]
    boundary_ps: int
    boundary_per_seq_ps: int
    load_call_ps: int
    adapter_ps: int | None

    def into(self, given: Calibrated) -> Calibrated:
        """``given`` with all that was fitted. Raises ``ValueError`` for what no engine is believed to take."""
        return msgspec.structs.replace(
            given,
            profile=self.profile,
            terms=self.terms,
            boundary_ps=self.boundary_ps,
            boundary_per_seq_ps=self.boundary_per_seq_ps,
            load_call_ps=self.load_call_ps,
        )


def fit(points: Points, facts: TwinProfile) -> Fit:
    """The profile with the sizes of ``facts`` and the times of ``points``; what was not measured stays as ``facts`` has it.

    Raises ``ValueError`` without a decode point or without a prefill point.
    """
    if not points.decodes or not points.prefills:
        raise ValueError("no decode or no prefill was measured: a profile needs both")
    terms: list[Term] = []
    profile, adapter_ps = _fit_adapters(points.decodes, facts, terms)
    profile = _fit_decodes(points.decodes, profile, terms)
    profile, alone, per_seq = fit_prompts(points, profile, terms)
    profile, call = _fit_moves(points, profile, terms)
    return Fit(
        profile=profile,
        terms=tuple(terms),
        boundary_ps=to_ps(alone),
        boundary_per_seq_ps=to_ps(per_seq),
        load_call_ps=to_ps(call),
        adapter_ps=adapter_ps,
    )


# --- adapters in a step -----------------------------------------------------------------------------------------------


def _fit_adapters(
    points: Sequence[DecodePoint], facts: TwinProfile, terms: list[Term]
) -> tuple[TwinProfile, int | None]:
    """What a step pays for adapters: the first one, and each distinct one."""
    if not any(point.adapters for point in points):
        terms.append(Term(name="adapter", points=0, note="no adapter was given: not measured"))
        return facts, None
    steep: list[tuple[float, float]] = []
    for group in _alike(points):
        mine = [p for p in group if p.adapters]
        if len({p.adapters for p in mine}) > 1:
            middle, mean = fmean(p.adapters for p in mine), fmean(p.seconds for p in mine)
            steep += [(p.adapters - middle, p.seconds - mean) for p in mine]
    spread = sum(x * x for x, _ in steep)
    slope = sum(x * y for x, y in steep) / spread if spread else None
    each = max(0.0, slope or 0.0)
    first = _first_adapter(points, each)
    note = [] if slope is None or slope >= 0 else [f"came out at {slope * 1e6:+.0f} us: clamped to 0"]
    if slope is None:
        note.append("only one number of distinct adapters was measured: what one more costs is unknown and left at 0")
    misses = [abs(y - each * x) for x, y in steep]
    scale = fmean(p.seconds for p in points)
    terms.append(
        Term(
            name="adapter",
            points=len(steep),
            error_mean=fmean(misses) / scale if misses else None,
            error_worst=max(misses) / scale if misses else None,
            note="; ".join(note) or None,
        )
    )
    profile = msgspec.structs.replace(
        facts, adapter_step_ps=to_ps(each), lora_ps=to_ps(first), rank_step_ps=0, activation_per_rank_ps=0
    )
    return profile, None if slope is None else round(slope * PS_PER_S)


def _first_adapter(points: Sequence[DecodePoint], each: float) -> float:
    """What a step with any adapter pays once: the difference to the base model at the smallest batch that ran both."""
    for group in _alike(points):
        base = [p.seconds for p in group if not p.adapters]
        with_one = [p.seconds - each * p.adapters for p in group if p.adapters]
        if base and with_one:
            # Engines whose adapter kernels cost by the sequence would have it eat up the step of a single one.
            most = MOST_OF_A_STEP * min(p.seconds - each * p.adapters for p in points if p.adapters)
            return min(max(0.0, median(with_one) - median(base)), max(0.0, most))
    return 0.0


def _alike(points: Iterable[DecodePoint]) -> list[list[DecodePoint]]:
    """Points of equal batches and contexts within a quarter of each other, smallest first: they differ in adapters alone."""
    groups: list[list[DecodePoint]] = []
    for point in sorted(points, key=lambda p: (p.sequences, p.kv_tokens)):
        first = groups[-1][0] if groups else None
        if first and first.sequences == point.sequences and point.kv_tokens <= ALIKE * first.kv_tokens:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


# --- decodes ----------------------------------------------------------------------------------------------------------


def _fit_decodes(points: Sequence[DecodePoint], profile: TwinProfile, terms: list[Term]) -> TwinProfile:
    """A line over sequences and KV tokens, or a table by sequences where the line misses."""
    used = [p for p in points if p.adapters] or list(points)
    own = [p.seconds - to_seconds(profile.adapters_ps(p.adapters, ())) for p in used]
    rows = [(1.0, float(p.sequences), float(p.kv_tokens)) for p in used]
    kept, dropped = without_outliers(rows, own)
    base, per_seq, per_kv = least_squares([rows[i] for i in kept], [own[i] for i in kept])
    profile = msgspec.structs.replace(
        profile,
        step_base_ps=max(1, to_ps(base)),
        step_per_seq_ps=to_ps(per_seq),
        step_per_kv_token_ps=to_ps(per_kv),
        decode_table=(),
    )
    good = [used[i] for i in kept]
    notes = [f"{dropped} points left out as disturbed"] if dropped else []
    misses = _decode_misses(good, profile)
    if max(misses) > LINE_MISS:
        worst, mean = max(misses), fmean(misses)
        profile = msgspec.structs.replace(
            profile, decode_table=_decode_table(good, [own[i] for i in kept], profile, per_kv)
        )
        misses = _decode_misses(good, profile)
        notes.append(f"by batch size: a line misses by {mean:.1%} in the mean, {worst:.1%} at worst")
        notes.append(f"beyond {max(p.sequences for p in good)} sequences extrapolated")
    based = [p for p in points if not p.adapters]
    if len(used) < len(points) and based:
        over = fmean(to_seconds(profile.step_ps(p.sequences, p.kv_tokens, 0, 0)) / p.seconds - 1 for p in based)
        notes.append(f"fitted to adapter requests; base requests come out {over:+.0%}")
    terms.append(term_of("decode", misses, notes))
    return profile


def _decode_misses(points: Iterable[DecodePoint], profile: TwinProfile) -> list[float]:
    return [abs(to_seconds(profile.step_ps(p.sequences, p.kv_tokens, 0, p.adapters)) / p.seconds - 1) for p in points]


def _decode_table(
    points: Sequence[DecodePoint], own: Sequence[float], profile: TwinProfile, per_kv: float
) -> tuple[tuple[int, int, int], ...]:
    """A row for each batch size: its own slope where contexts differ twofold, else the common one."""
    fitted: list[tuple[int, int, float]] = []
    shortest: list[float] = []  # what the step of each batch takes at its shortest context
    for count in sorted({p.sequences for p in points}):
        mine = [(p.kv_tokens, s) for p, s in zip(points, own, strict=True) if p.sequences == count]
        contexts = [kv for kv, _ in mine]
        if max(contexts) >= 2 * min(contexts) and len(mine) > 2:
            start, slope = least_squares([(1.0, float(kv)) for kv in contexts], [s for _, s in mine])
        else:
            slope = per_kv
            start = fmean(s - slope * kv for kv, s in mine)
        fitted.append((count, min(contexts), slope))
        shortest.append(start + slope * min(contexts))
    # One more sequence never makes a step shorter; a machine that was slow for a moment would.
    rows = [
        (count, max(1, to_ps(time - slope * kv)), to_ps(slope))
        for (count, kv, slope), time in zip(fitted, isotonic(shortest), strict=True)
    ]
    for at in range(1, len(rows)):
        if is_shorter(rows[at], rows[at - 1]):  # the shortest contexts of the two were not alike
            rows[at] = rows[at][0], rows[at - 1][1], rows[at][2]
    if rows[0][0] > 1:
        rows.insert(0, (1, max(1, min(rows[0][1], profile.step_base_ps + profile.step_per_seq_ps)), rows[0][2]))
    last, most = rows[-1], profile.max_seqs
    if last[0] < most:
        before = rows[-2] if len(rows) > 1 else last
        steep = max(0.0, (last[1] - before[1]) / max(1, last[0] - before[0]))
        rows.append((most, round(last[1] + steep * (most - last[0])), last[2]))
    return tuple(rows)


# --- loads and activations --------------------------------------------------------------------------------------------


def _fit_moves(points: Points, profile: TwinProfile, terms: list[Term]) -> tuple[TwinProfile, float]:
    """Loads by bytes, activations by rank, and what a load call takes beyond both."""
    activation, per_rank, term = _fit_move("activation", points.activations, lambda p: p.rank)
    terms.append(term)
    if points.activations:
        profile = msgspec.structs.replace(
            profile, activation_ps=to_ps(activation), activation_per_rank_ps=to_ps(per_rank)
        )
    overhead, per_byte, term = _fit_move("load", points.loads, lambda p: p.bytes)
    terms.append(term)
    if points.loads:
        rate = INSTANT if per_byte == 0 else min(INSTANT, max(1, round(1 / per_byte)))
        profile = msgspec.structs.replace(profile, load_overhead_ps=to_ps(overhead), load_bytes_per_s=rate)
    over = [p.seconds - to_seconds(profile.load_ps(p.bytes) + profile.activate_ps(p.rank)) for p in points.calls]
    call = max(0.0, median(over)) if over else 0.0
    if over:
        note = f"{call * 1e3:.1f} ms beyond the load and the activation that the call makes"
        misses = [abs(x - call) / p.seconds for x, p in zip(over, points.calls, strict=True)]
        terms.append(term_of("load_call", misses, [note]))
    return profile, call


def _fit_move(name: str, points: Sequence[MovePoint], size: Callable[[MovePoint], int]) -> tuple[float, float, Term]:
    """(once, for each unit of ``size``, the term). Absolute least squares: what disturbs a move does not grow with it."""
    if not points:
        return 0.0, 0.0, Term(name=name, points=0, note="not measured")
    notes = []
    seconds = [p.seconds for p in points]
    if len({size(p) for p in points}) < 2:
        once, each = max(0.0, median(seconds)), 0.0
        notes.append("one size only: how it grows with size is unknown")
    else:
        once, each = least_squares([(1.0, float(size(p))) for p in points], seconds, relative=False)
        if each == 0:
            notes.append("no growth with size: the slope is clamped to 0")
    mean = fmean(seconds)
    if mean <= 0:
        notes.append("not above what the clock of this measurement can tell")
        return once, each, Term(name=name, points=len(points), note="; ".join(notes))
    misses = [abs(once + each * size(p) - p.seconds) / mean for p in points]
    return once, each, term_of(name, misses, notes)
