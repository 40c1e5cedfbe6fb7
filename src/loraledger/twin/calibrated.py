"""A profile with what it rests on: which engine, model and device it was fitted to, when, and how well each term fits.

A profile without its origin is a guess. Each term carries how many measured points it rests on and by how much the fit misses
them, so that whoever reads a replay's answer can see which of its parts to doubt.

Three costs lie outside of the twin's steps and are kept beside the profile. The boundary is what passes between a request's
dispatch and its first token beyond waiting for a step and running it (the engine's HTTP server, its tokenizer, the way back); it
grows with the streams that the same server has to serve. A load call holds the engine longer than the same load inside a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from loraledger.twin.profile import PS_PER_S, TwinProfile

VERSION: Final = 1
LARGEST: Final = 10**16
"""Of any number in a profile."""
LONGEST_PS: Final = 600 * PS_PER_S
"""Of what one term adds to the longest step, of a move, and of the way in: nobody waits for an engine that takes longer."""
SLOWEST: Final = 100_000
"""Bytes a second of a load: an adapter of 60 MB in ten minutes."""


class Term(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one part of the profile was fitted. Errors are relative (0.05 is 5 %), over the points that it was fitted to."""

    name: str
    """What it prices: ``decode``, ``prefill``, ``mixed``, ``load``, ``activation``, ``adapter`` ..."""
    points: int
    error_mean: float | None = None
    error_worst: float | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        for field in ("points", "error_mean", "error_worst"):
            value = getattr(self, field)
            if value is not None and value < 0:
                raise ValueError(f"{field} is {value}: must not be negative")


class Calibrated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile file. ``block_bytes``: device bytes of one KV block; ``slot_bytes``: device bytes that one slot takes (padded).

    Both are of one rank process and ``None`` where unknown; together they say what a slot costs in KV.
    """

    loraledger_profile: Literal[1] = VERSION
    name: str
    engine: str
    engine_version: str | None
    model: str
    device: str
    date: str
    """ISO date of the measurement."""
    source: str
    """Where the numbers come from: a command that was run, or a publication."""
    licence: str | None = None
    profile: TwinProfile
    block_bytes: int | None = None
    slot_bytes: int | None = None
    boundary_ps: int = 0
    """Time to the first token beyond the engine's own, alone on the engine."""
    boundary_per_seq_ps: int = 0
    """The same for each stream that runs meanwhile."""
    load_call_ps: int = 0
    """What a load call takes beyond the load and the activation that it makes."""
    terms: tuple[Term, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("boundary_ps", "boundary_per_seq_ps", "load_call_ps"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)}: must not be negative")
        for field in ("block_bytes", "slot_bytes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} is {value}: must be at least 1, or null where it is unknown")
        for field, value, lasts in _durations(self):
            if lasts > LONGEST_PS:
                raise ValueError(
                    f"{field} is {value}: that comes to {lasts // PS_PER_S:,} s, and {LONGEST_PS // PS_PER_S} s is the most "
                    "that an engine is believed to take"
                )
        if self.profile.load_bytes_per_s < SLOWEST:
            raise ValueError(f"profile.load_bytes_per_s is {self.profile.load_bytes_per_s}: must be at least {SLOWEST}")


def _durations(calibrated: Calibrated) -> Iterator[tuple[str, int, int]]:
    """Each time in the file: (field, as it is there, how long it makes the longest step, a move or the way in, ps)."""
    profile = calibrated.profile
    adapters = profile.slots if profile.layout == "slots" else profile.max_seqs
    times = {
        "step_base_ps": 1,
        "step_per_seq_ps": profile.max_seqs,
        "step_per_kv_token_ps": profile.kv_tokens,
        "prefill_floor_ps": 1,
        "prefill_offset_ps": 1,
        "prefill_per_token_ps": profile.prefill_limit,
        "adapter_step_ps": adapters,
        "lora_ps": 1,
        "rank_step_ps": profile.max_rank * (adapters if profile.rank_cost == "sum" else 1),
        "load_overhead_ps": 1,
        "activation_ps": 1,
        "activation_per_rank_ps": profile.max_rank,
    }
    for field, count in times.items():
        yield f"profile.{field}", getattr(profile, field), abs(getattr(profile, field)) * count
    for count, intercept, slope in profile.decode_table:
        yield f"profile.decode_table: intercept of {count} sequences", intercept, intercept
        yield f"profile.decode_table: slope of {count} sequences", slope, slope * profile.kv_tokens
    for field in ("prefill_table", "mixed_table"):
        for tokens, time in getattr(profile, field):
            yield f"profile.{field}: time of {tokens} tokens", time, time
    for field, count in (("boundary_ps", 1), ("boundary_per_seq_ps", profile.max_seqs), ("load_call_ps", 1)):
        yield field, getattr(calibrated, field), getattr(calibrated, field) * count


_DECODER: Final = msgspec.json.Decoder(Calibrated)


def encode(calibrated: Calibrated) -> bytes:
    """The file's text: JSON, indented, equal for equal profiles."""
    return msgspec.json.format(msgspec.json.encode(calibrated), indent=1) + b"\n"


def decode(data: bytes) -> Calibrated:
    """The profile in ``data``. Raises ``ValueError`` in one line, naming the field, for anything else."""
    try:
        found = _DECODER.decode(data)
        _refuse_large(msgspec.to_builtins(found))
        return found
    except msgspec.ValidationError as error:
        said, _, where = str(error).partition(" - at `$")
        raise ValueError(f"{where.rstrip('`').lstrip('.')}: {said}" if where else said) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a JSON document: {error}") from error


def _refuse_large(value: object, where: str = "") -> None:
    """Raises ``ValueError`` for a number that a record could not hold: sums of it must stay below 2**63."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_large(item, f"{where}.{name}" if where else name)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_large(item, where)
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{where} is {value}: must be at most {LARGEST}")
