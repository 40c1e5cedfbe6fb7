"""A twin profile of one GPU carried over to another one: an estimate, for candidates that nobody has measured.

Theory of operation. The roofline model (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009): what a kernel takes is bound
either by the bytes that it moves or by the arithmetic that it does. A decode step reads all weights, each sequence's KV and each
adapter once: memory. A long prefill multiplies: arithmetic. So with the ratios of two data sheets (``faster`` > 1) ::

    step_base, per_seq, per_kv_token, adapters, prefill_floor     / memory bandwidth ratio
    prefill_per_token                                             / FLOP ratio
    activation                                                    / host link ratio
    load_bytes_per_s                                              the disk's own rate, where it is given
    the constant of a prefill, load overhead, lora_ps             unchanged: launches and Python do not know the GPU

The constant of a prefill is ``step_base + prefill_offset``, so the offset moves by what the base moves and the constant stays.
Tables: a row is bound by memory or by arithmetic, whichever takes longer on the new GPU; its arithmetic is taken as linear up to
the last row, and never as more than the row.

*Tensor parallel* divides memory and arithmetic by the number of devices and adds two all-reduces a layer, each at
``ALL_REDUCE_PS`` (AIConfigurator's ``p2p_latency``, which it calls unofficial). The measured profile must be of one device.

*How far off.* The two shipped S-LoRA profiles were fitted to one engine and model on an A100-80 and an A10G: there decode follows
the bandwidth ratio to the power 0.66 (base) and 0.70 (KV), prefill the FLOP ratio to the power 1.08, and what each sequence adds
only to the power 0.25. Hence ``low`` and ``high`` of each term: the ratio to the power of ``EXPONENTS``. The tests work these
numbers out again. Two devices of another vendor, or generation, can be further off: calibrate before money depends on it.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from loraledger.plan.hardware import Catalogue, Gpu, Ladder
from loraledger.twin.profile import PS_PER_US, TwinProfile

EXPONENTS: Final = (0.66, 1.08)
"""Measured times between two GPUs are the roofline's ratio to a power in this range."""
SEQUENCE_EXPONENT: Final = 0.25
"""The lower end for what each sequence adds to a step."""
ALL_REDUCE_PS: Final = 10 * PS_PER_US
"""What one all-reduce of a decode step is taken to cost."""


class Scaled(msgspec.Struct, frozen=True):
    """What became of one term. Factors multiply times: 2 is twice as long."""

    term: str
    factor: float
    low: float
    high: float
    """The factor is believed to lie between these."""
    words: str


def scaled(
    profile: TwinProfile,
    of: Gpu,
    to: Gpu,
    tensor_parallel: int = 1,
    *,
    layers: int | None = None,
    ladder: Ladder | None = None,
) -> tuple[TwinProfile, tuple[Scaled, ...]]:
    """``profile``, measured on one ``of``, as it is estimated for ``tensor_parallel`` devices ``to``; and how each term moved.

    ``layers``: of the base, for the price of all-reduces; ``ladder``: of the node, for link and disk. Sizes (slots, KV blocks) are
    not changed: they come from a candidate's budget. Raises ``ValueError`` for less than one device.
    """
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel is {tensor_parallel}: must be at least 1")
    link = to.host_link.value if ladder is None else ladder.rung("host").bytes_per_s
    disk = profile.load_bytes_per_s if ladder is None else ladder.rung("disk").bytes_per_s
    memory = of.memory_bandwidth.value / (to.memory_bandwidth.value * tensor_parallel)
    compute = of.bf16.value / (to.bf16.value * tensor_parallel)
    activation = of.host_link.value / link
    reduces = 2 * (layers or 0) * ALL_REDUCE_PS if tensor_parallel > 1 else 0
    base = max(1, _times(profile.step_base_ps, memory)) + reduces
    result = msgspec.structs.replace(
        profile,
        step_base_ps=base,
        **{name: _times(getattr(profile, name), memory) for name in _MEMORY},
        prefill_per_token_ps=_times(profile.prefill_per_token_ps, compute),
        prefill_offset_ps=profile.step_base_ps + profile.prefill_offset_ps - base,
        decode_table=tuple(
            (count, max(1, _times(intercept, memory)) + reduces, _times(slope, memory))
            for count, intercept, slope in profile.decode_table
        ),
        prefill_table=_points(profile, profile.prefill_table, base, memory, compute),
        mixed_table=_points(profile, profile.mixed_table, base, memory, compute),
        activation_ps=_times(profile.activation_ps, activation),
        activation_per_rank_ps=_times(profile.activation_per_rank_ps, activation),
        load_bytes_per_s=disk,
    )
    return result, _notes(of, to, tensor_parallel, layers, memory, compute, activation, profile.load_bytes_per_s / disk)


def measured_on(device: str, gpus: Catalogue) -> Gpu | None:
    """The GPU of a profile's ``device``, such as ``one H100 SXM``; ``None`` when the catalogue has no such GPU."""
    return gpus.find(_ONE.sub("", device))


_ONE: Final = re.compile(r"^\s*(one|a|an|1\s*x?)\s+", re.IGNORECASE)
_MEMORY: Final = ("step_per_seq_ps", "step_per_kv_token_ps", "prefill_floor_ps", "adapter_step_ps", "rank_step_ps")


def _times(value: int, factor: float) -> int:
    return round(value * factor)


def _points(
    profile: TwinProfile, rows: tuple[tuple[int, int], ...], base: int, memory: float, compute: float
) -> tuple[tuple[int, int], ...]:
    """A table of prefills: what is beyond the rest of the step, whichever side of the roof it then lies under."""
    if not rows:
        return ()
    most, longest = rows[-1][0], rows[-1][1] + profile.step_base_ps
    found = []
    for tokens, beyond in rows:
        arithmetic = min(longest * tokens // most, beyond + profile.step_base_ps)
        found.append((tokens, max(_times(beyond, memory), _times(arithmetic, compute) - base, 0)))
    return tuple(found)


def _notes(
    of: Gpu, to: Gpu, width: int, layers: int | None, memory: float, compute: float, activation: float, load: float
) -> tuple[Scaled, ...]:
    over = "" if width == 1 else f" x {width} devices"
    if width == 1:
        reduces = ""
    elif layers:
        reduces = f"; two all-reduces a layer at {ALL_REDUCE_PS // PS_PER_US} us are added"
    else:
        reduces = "; all-reduces are not counted: the number of layers is not known"
    return (
        _scaled("decode", memory, f"memory bandwidth of {of.name} over that of {to.name}{over}{reduces}"),
        _scaled(
            "sequence", memory, "what each sequence adds to a step: as decode, or hardly at all", SEQUENCE_EXPONENT
        ),
        _scaled("prefill", compute, f"dense bf16 of {of.name} over that of {to.name}{over}; short ones as decode"),
        Scaled(
            "activation",
            activation,
            min(1.0, activation),
            max(1.0, activation),
            "host link; where emptying the slot takes most of it, as in vLLM, it moves less",
        ),
        Scaled("load", load, load, load, "disk's rate; the overhead of a load is unchanged"),
    )


def _scaled(term: str, factor: float, words: str, least: float = EXPONENTS[0]) -> Scaled:
    ends = sorted(factor**exponent for exponent in (least, EXPONENTS[1]))
    return Scaled(term, factor, ends[0], ends[1], words)
