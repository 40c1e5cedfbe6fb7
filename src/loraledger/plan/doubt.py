"""How far off an estimated twin may be, taken at its worst.

``scaling`` says of each term between what factors it is believed to lie. Here every term takes its worst end at once: more than
is likely, so that an order which stays has stood the test. A GPU on which the profile was measured has no such doubt: its factors
are 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from loraledger.plan.scaling import Scaled
from loraledger.twin.profile import TwinProfile

_DECODE: Final = ("step_per_kv_token_ps", "prefill_floor_ps", "adapter_step_ps", "rank_step_ps")
_ACTIVATION: Final = ("activation_ps", "activation_per_rank_ps")


def at_worst(profile: TwinProfile, notes: Sequence[Scaled]) -> TwinProfile:
    """``profile``, as ``scaled`` made it, with each term as slow as its note believes it can be."""
    worse = {note.term: max(1.0, note.high / note.factor) for note in notes}
    decode, sequence, prefill = worse["decode"], worse["sequence"], worse["prefill"]
    base = round(profile.step_base_ps * decode)
    return msgspec.structs.replace(
        profile,
        step_base_ps=base,
        step_per_seq_ps=round(profile.step_per_seq_ps * sequence),
        **{name: round(getattr(profile, name) * decode) for name in _DECODE},
        **{name: round(getattr(profile, name) * worse["activation"]) for name in _ACTIVATION},
        prefill_per_token_ps=round(profile.prefill_per_token_ps * prefill),
        # What a prefill takes beside its tokens lies in base and offset together, and is no matter of the GPU.
        prefill_offset_ps=profile.step_base_ps + profile.prefill_offset_ps - base,
        decode_table=tuple(
            (count, round(intercept * max(decode, sequence)), round(slope * decode))
            for count, intercept, slope in profile.decode_table
        ),
        prefill_table=tuple((tokens, round(time * max(decode, prefill))) for tokens, time in profile.prefill_table),
        mixed_table=tuple((tokens, round(time * max(decode, prefill))) for tokens, time in profile.mixed_table),
    )


def is_estimated(notes: Sequence[Scaled]) -> bool:
    """Whether any term was carried over from another device."""
    return any(note.low != note.high for note in notes)
