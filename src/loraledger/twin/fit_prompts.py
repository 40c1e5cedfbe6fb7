"""What prompts cost: alone, beside decodes, and at the boundary of the engine.

Theory of operation. A prompt that arrives while others decode delays them by what it adds to their steps: this is the twin's
prefill term and holds nothing of the wire. The time to the first token on an idle engine, less that and the step, is the
boundary. On a busy engine a request also waits for half a step in the mean; what is left after that grows with the streams
that the engine's server serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Final

import msgspec

from loraledger.twin.calibrated import Term
from loraledger.twin.fit_points import MixedPoint, Points, term_of, to_ps, to_seconds
from loraledger.twin.fit_solving import isotonic
from loraledger.twin.profile import PS_PER_S, TwinProfile

LINE_MISS: Final = 0.05
"""A floor and a line that miss a point by more give way to a table."""
MIXED_MISS: Final = 0.05
"""Prefill beside decodes that differs from prefill alone by more, in the mean, gets a table of its own."""


def fit_prompts(points: Points, profile: TwinProfile, terms: list[Term]) -> tuple[TwinProfile, float, float]:
    """Prefill alone, prefill beside decodes, and the boundary (alone, for each running stream)."""
    prefills, mixed = points.prefills, points.mixed
    steps = [to_seconds(profile.step_ps(0, 0, 0, p.adapters)) for p in prefills]
    spent = {tokens: median([p.delay for p in mixed if p.tokens == tokens]) for tokens in {p.tokens for p in mixed}}
    over = [p.seconds - step - spent[p.tokens] for p, step in zip(prefills, steps, strict=True) if p.tokens in spent]
    alone = max(0.0, median(over)) if over else 0.0
    own = [max(0.0, p.seconds - step - alone) for p, step in zip(prefills, steps, strict=True)]
    rows = [(p.tokens, own_s, p.seconds) for p, own_s in zip(prefills, own, strict=True)]
    profile, notes = _fit_prefill(rows, profile, alone, steps)
    terms.append(term_of("prefill", _prefill_misses(rows, profile, alone, steps), notes))
    if not mixed:
        terms.append(Term(name="mixed", points=0, note="not measured: taken to cost what a prompt alone does"))
        terms.append(Term(name="boundary", points=0, note="not measured: it is within the prefill"))
        return profile, 0.0, 0.0
    profile = _fit_mixed(mixed, spent, profile, terms)
    per_seq = _busy_boundary(mixed, profile, alone)
    misses = [abs(_busy_ttft(p, profile, alone, per_seq) / p.ttft - 1) for p in mixed]
    terms.append(
        term_of("boundary", misses, [f"{alone * 1e3:.1f} ms alone, {per_seq * 1e3:.2f} ms more for each stream"])
    )
    return profile, alone, per_seq


PrefillRow = tuple[int, float, float]
"""(tokens, what the prompt adds to its step, all of its time to the first token), times in s."""


def _fit_prefill(
    rows: Sequence[PrefillRow], profile: TwinProfile, alone: float, steps: Sequence[float]
) -> tuple[TwinProfile, list[str]]:
    """The better of a floor and a line; a table where that misses."""
    ordered = sorted(rows)
    candidates = []
    for floored in range(len(ordered)):
        floor = fmean(own for _, own, _ in ordered[:floored]) if floored else 0.0
        above = ordered[floored:]
        slope, offset = _line(above)
        candidates.append(
            msgspec.structs.replace(
                profile,
                prefill_floor_ps=to_ps(floor),
                prefill_offset_ps=round(offset * PS_PER_S),
                prefill_per_token_ps=to_ps(slope),
                prefill_table=(),
                mixed_table=(),
            )
        )
    best = min(candidates, key=lambda made: sum(x * x for x in _prefill_misses(rows, made, alone, steps)))
    misses = _prefill_misses(rows, best, alone, steps)
    if max(misses) <= LINE_MISS:
        return best, []
    table = _table({tokens: own for tokens, own, _ in ordered}, profile.prefill_limit)
    note = f"a table: a floor and a line miss by {fmean(misses):.1%} in the mean, {max(misses):.1%} at worst"
    return msgspec.structs.replace(best, prefill_table=table), [note]


def _line(rows: Sequence[PrefillRow]) -> tuple[float, float]:
    """(slope, offset) of what prompts add, relative to the whole time; the slope is never negative, the offset may be."""
    weights = [1 / whole**2 for _, _, whole in rows]
    total = sum(weights)
    x = sum(w * tokens for w, (tokens, _, _) in zip(weights, rows, strict=True)) / total
    y = sum(w * own for w, (_, own, _) in zip(weights, rows, strict=True)) / total
    spread = sum(w * (tokens - x) ** 2 for w, (tokens, _, _) in zip(weights, rows, strict=True))
    joint = sum(w * (tokens - x) * (own - y) for w, (tokens, own, _) in zip(weights, rows, strict=True))
    slope = max(0.0, joint / spread) if spread else 0.0
    return slope, y - slope * x


def _prefill_misses(
    rows: Sequence[PrefillRow], profile: TwinProfile, alone: float, steps: Sequence[float]
) -> list[float]:
    return [
        abs((alone + step + to_seconds(profile.prefill_ps(tokens, 0))) / whole - 1)
        for (tokens, _, whole), step in zip(rows, steps, strict=True)
    ]


def _fit_mixed(
    mixed: Sequence[MixedPoint], spent: dict[int, float], profile: TwinProfile, terms: list[Term]
) -> TwinProfile:
    """A table of its own where prompts beside decodes do not cost what they do alone."""

    def misses(made: TwinProfile) -> list[float]:
        found = []
        for p in mixed:
            step = to_seconds(made.step_ps(p.sequences, p.kv_tokens, 0, p.adapters))
            found.append(abs(to_seconds(made.prefill_ps(p.tokens, p.sequences)) - p.delay) / (step + p.delay))
        return found

    alike, notes = misses(profile), []
    if fmean(alike) > MIXED_MISS:
        profile = msgspec.structs.replace(profile, mixed_table=_table(spent, profile.prefill_limit))
        notes.append(f"a table of its own: prompts alone miss by {fmean(alike):.1%} in the mean")
    terms.append(term_of("mixed", misses(profile), notes))
    return profile


def _busy_ttft(point: MixedPoint, profile: TwinProfile, alone: float, per_seq: float) -> float:
    """Half a step until the one in hand ends, then the prompt's own, and the boundary."""
    step = to_seconds(profile.step_ps(point.sequences, point.kv_tokens, 0, point.adapters))
    prefill = to_seconds(profile.prefill_ps(point.tokens, point.sequences))
    return 1.5 * step + prefill + alone + per_seq * point.sequences


def _busy_boundary(mixed: Sequence[MixedPoint], profile: TwinProfile, alone: float) -> float:
    """What each running stream adds to the boundary: relative least squares through the origin."""
    left = [(p.sequences / p.ttft, (p.ttft - _busy_ttft(p, profile, alone, 0.0)) / p.ttft) for p in mixed]
    return max(0.0, sum(x * y for x, y in left) / sum(x * x for x, _ in left))


def _table(spent: dict[int, float], limit: int) -> tuple[tuple[int, int], ...]:
    """Rows (tokens, ps) that never fall, continued to ``limit`` tokens with their last slope."""
    tokens = sorted(spent)
    times = isotonic([max(0.0, spent[count]) for count in tokens])
    rows = [(count, to_ps(time)) for count, time in zip(tokens, times, strict=True)]
    if rows[-1][0] < limit:
        (low, before), (high, after) = (rows[-2] if len(rows) > 1 else (0, 0)), rows[-1]
        rows.append((limit, after + (after - before) * (limit - high) // (high - low)))
    return tuple(rows)
