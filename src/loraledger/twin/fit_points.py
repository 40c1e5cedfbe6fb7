"""What a calibration measures of one engine, in seconds, and the small words that fitting shares."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from loraledger.twin.calibrated import Term
from loraledger.twin.profile import PS_PER_S


class DecodePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A step in which ``sequences`` decode that hold ``kv_tokens`` in all, of ``adapters`` distinct ones (0: the base model)."""

    sequences: int
    kv_tokens: int
    adapters: int
    seconds: float


class PrefillPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The time to the first token of a prompt of ``tokens`` on an idle engine."""

    tokens: int
    adapters: int
    seconds: float


class MixedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of ``tokens`` that arrived while ``sequences`` decoded with ``kv_tokens``: by how much they were delayed, and its
    own time to the first token."""

    sequences: int
    kv_tokens: int
    tokens: int
    adapters: int
    delay: float
    ttft: float


class MovePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A load or an activation of an adapter of ``bytes`` on disk and rank ``rank``."""

    bytes: int
    rank: int
    seconds: float


class Points(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured of one engine, in seconds."""

    decodes: tuple[DecodePoint, ...]
    prefills: tuple[PrefillPoint, ...]
    mixed: tuple[MixedPoint, ...] = ()
    loads: tuple[MovePoint, ...] = ()
    """Disk to host inside a step, the activation not included."""
    activations: tuple[MovePoint, ...] = ()
    calls: tuple[MovePoint, ...] = ()
    """How long a load call held the engine, all in."""


def term_of(name: str, misses: Sequence[float], notes: Sequence[str]) -> Term:
    """The term ``name`` whose points are missed by ``misses`` (at least one), relative to what was measured."""
    return Term(
        name=name,
        points=len(misses),
        error_mean=fmean(misses),
        error_worst=max(misses),
        note="; ".join(notes) or None,
    )


def to_ps(seconds: float) -> int:
    """Whole picoseconds, never negative."""
    return max(0, round(seconds * PS_PER_S))


def to_seconds(ps: int) -> float:
    """The other way."""
    return ps / PS_PER_S
