"""An inspection of adapters as one JSON document.

Figures are plain integers named with their unit. ``null`` is what is not known (the base was not given) or does not exist (this
engine has no slots); it is never 0. Host figures are of all rank processes together unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.survey import Row, Slots, Totals, Unreadable, kv_bytes_of, slots_of
from loraledger.adapters.verdict.judge import Outcome


def document(
    rows: Sequence[Row | Unreadable],
    problems: Sequence[Unreadable],
    totals: Totals,
    slots: Slots | None,
    base: BaseModel | None,
    engine: EngineSettings,
) -> dict[str, object]:
    """The inspection as data: plain integers named with their unit, ``None`` for what is not known or does not exist."""
    found = {
        "engine": {**asdict(engine), "host_entries": engine.host_entries, "usable_slots": engine.usable_slots},
        "base": None if base is None else _base_document(base, engine),
        "adapters": [_row_document(row, slots, engine) for row in rows],
        "totals": _totals_document(totals, slots, base, engine),
        "problems": [{"path": item.path, "reason": item.reason} for item in problems],
    }
    return {key: _json(value) for key, value in found.items()}


def share_of(row: Row, slots: Slots | None) -> float | None:
    """How much of one slot ``row`` fills, 1 for all; ``None`` where there are no slots, or none of them holds a byte."""
    return None if slots is None or row.device is None or not slots.one.total else row.device / slots.one.total


def _json(value: object) -> object:
    """``value`` as JSON can hold it: what is not Unicode in a file's or tensor's name is escaped."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return str(value).encode(errors="backslashreplace").decode() if isinstance(value, str | Path) else value


def _base_document(base: BaseModel, engine: EngineSettings) -> dict[str, object]:
    kv = kv_bytes_of(base, engine) if base.shaped else None
    return {
        "name": base.name,
        "architecture": base.architecture,
        "dtype": base.dtype,
        "layers": base.layers,
        "lora_modules": len(base.modules),
        "weight_bytes": base.weight_bytes if base.shaped else None,
        "weight_source": base.weight_source,
        "kv_bytes_per_token_and_rank_process": kv,
        "notes": base.notes,
    }


def _row_document(row: Row | Unreadable, slots: Slots | None, engine: EngineSettings) -> dict[str, object]:
    if isinstance(row, Unreadable):
        return {
            "name": row.name,
            "path": row.path,
            "verdict": "unreadable",
            "reason": row.reason,
        }
    host = row.host
    return {
        "name": row.name,
        "path": row.path,
        "verdict": row.verdict.outcome,
        "findings": [asdict(finding) for finding in row.verdict.findings],
        "notes": row.notes,
        "rank": row.rank,
        "smallest_max_lora_rank": row.verdict.max_lora_rank,
        "modules": row.modules,
        "modules_applied": row.verdict.applied,
        "module_suffixes": row.suffixes,
        "parameters": row.parameters,
        "dtypes": row.dtypes,
        "base_claim": row.base_claim,
        "peft_type": row.peft_type,
        "layout_id": row.layout_id,
        "disk_bytes": row.disk,
        "lora_bytes": row.lora,
        "whole_matrix_bytes": row.whole,
        "magnitude_bytes": row.magnitude,
        "other_bytes": row.other,
        "host_bytes": None if host is None else host.exact * engine.tensor_parallel,
        "host_bytes_per_rank_process": None if host is None else host.exact,
        "host_bytes_pinned_at_most": None if host is None else host.pinned * engine.tensor_parallel,
        "device_bytes_per_rank_process": row.device,
        "slot_share": share_of(row, slots),
    }


def _totals_document(
    totals: Totals, slots: Slots | None, base: BaseModel | None, engine: EngineSettings
) -> dict[str, object]:
    ranks, fit, host = engine.tensor_parallel, totals.fit, totals.host
    fitting = None if fit.without_too_big is None else slots_of(base, engine, fit.without_too_big)
    return {
        "adapters": totals.outcomes.total(),
        "unreadable": totals.unreadable,
        **{outcome: totals.outcomes[outcome] for outcome in get_args(Outcome)},
        "parameters": totals.parameters,
        "disk_bytes": totals.disk,
        "host_bytes": None if host is None else host.exact * ranks,
        "host_bytes_pinned_at_most": None if host is None else host.pinned * ranks,
        "host_bytes_held_at_most": None if totals.host_fullest is None else totals.host_fullest * ranks,
        "device_bytes_per_rank_process": totals.device,
        **_slots_document(slots),
        "smallest_max_lora_rank": fit.smallest,
        "smallest_max_lora_rank_but_for_too_big": fit.without_too_big,
        "too_big_for_any_max_lora_rank": fit.too_big,
        "refused_beyond_rank": fit.aside,
        "at_smallest_max_lora_rank": _slots_document(fitting),
    }


def _slots_document(slots: Slots | None) -> dict[str, object]:
    return {
        "slot_bytes_per_rank_process": None if slots is None else slots.one.total,
        "slot_projection_bytes_per_rank_process": None if slots is None else slots.one.projections,
        "slot_embedding_bytes_per_rank_process": None if slots is None else slots.one.embeddings,
        "all_slots_bytes_per_rank_process": None if slots is None else slots.total,
        "slot_kv_tokens": None if slots is None else slots.kv_tokens_one,
        "all_slots_kv_tokens": None if slots is None else slots.kv_tokens,
    }
