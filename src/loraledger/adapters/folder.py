"""One adapter folder, read: what its configuration and its weights file say.

Reading is strict about what an engine needs (``r``, ``lora_alpha``, ``target_modules``: a folder without them is
refused by name) and tolerant of everything else, because PEFT adds fields with each release and old folders lack most
of them. It does not judge: DoRA, whole matrices in ``modules_to_save`` and methods other than LoRA are reported as they
are, and whether an engine can serve them is decided elsewhere.

The rank that matters is the largest one in use: ``rank_pattern`` may give single modules more than ``r``, and an engine
sized for ``r`` refuses those. ``target_modules`` may be one string, a regex or ``all-linear``: it stays a string. When
it is null, as in folders saved by some trainers, the modules are taken from the tensor names.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraledger.adapters.digest import content_digest
from loraledger.adapters.files import CONFIG_NAME, config_file, refuse_lfs_pointer, weights_file
from loraledger.adapters.weights import read_weights
from loraledger.errors import InputFileError

MAX_CONFIG: Final = 1024 * 1024
"""Bytes; the largest seen in public folders is below 100 KB."""

_REQUIRED: Final = ("r", "lora_alpha", "target_modules")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What one folder holds."""

    name: str
    path: Path
    """As configured or found; symbolic links in it are not resolved."""
    rank: int
    """The largest rank of any module."""
    target_modules: tuple[str, ...] | str
    """Module names, sorted; or the one string (regex, ``all-linear``) that the configuration has."""
    base_claim: str | None
    """The base model that the adapter says it is for: a hint, since names neither prove nor disprove."""
    bytes_disk: int
    """Size of the weights file."""
    digest: str
    """Identity of the content, 64 hex digits."""
    dora: bool
    modules_to_save: tuple[str, ...]
    """Modules saved as whole matrices; empty for plain LoRA."""
    peft_type: str | None
    """Method by PEFT's name, upper case (``LORA``); None when the configuration does not say."""


def read_folder(name: str, path: Path, *, root: Path | None = None) -> AdapterFolder:
    """The adapter in folder ``path``. With ``root``, its files must lie inside ``root`` after links are followed.

    Raises :class:`InputFileError` saying what is wrong and what to do; an unreadable file is one of those things.
    """
    try:
        if not path.is_dir():
            raise InputFileError("is not a folder" if path.exists() else "does not exist: correct the path")
        config_path = config_file(path, root)
        config = _read_config(config_path)
        weights_path = weights_file(path, root)
        weights = read_weights(weights_path)
        targets = _targets(config["target_modules"])
        if targets is None and not weights.lora_modules():
            raise InputFileError("neither target_modules nor any tensor name says which modules it changes")
        return AdapterFolder(
            name=name,
            path=path,
            rank=_rank(config),
            target_modules=weights.lora_modules() if targets is None else targets,
            base_claim=_text(config, "base_model_name_or_path"),
            bytes_disk=weights.file_bytes,
            digest=content_digest(config_path, weights_path),
            dora=config.get("use_dora") is True,
            modules_to_save=_names(config.get("modules_to_save") or [], "modules_to_save"),
            peft_type=(_text(config, "peft_type") or "").upper() or None,
        )
    except (OSError, EOFError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputFileError(f"cannot be read: {reason}") from error


def _read_config(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        raw = stream.read(MAX_CONFIG + 1)
    refuse_lfs_pointer(CONFIG_NAME, raw)
    if len(raw) > MAX_CONFIG:
        raise InputFileError(f"{CONFIG_NAME} is over {MAX_CONFIG:,} bytes: that is no adapter's configuration")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{CONFIG_NAME} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputFileError(f"{CONFIG_NAME} is not a JSON object")
    missing = [key for key in _REQUIRED if key not in config]
    if missing:
        raise InputFileError(f"{CONFIG_NAME} lacks {', '.join(missing)}: the engine needs them, save the adapter again")
    alpha = config["lora_alpha"]
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise InputFileError(f"{CONFIG_NAME}: lora_alpha is {reprlib.repr(alpha)} and must be a number above 0")
    return config


def _rank(config: Mapping[str, Any]) -> int:
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise InputFileError(f"{CONFIG_NAME}: rank_pattern must map module names to ranks")
    ranks: dict[str, int] = {
        "r": config["r"],
        **{f"rank_pattern[{reprlib.repr(module)}]": rank for module, rank in pattern.items()},
    }
    for key, rank in ranks.items():
        if type(rank) is not int or rank < 1:
            raise InputFileError(
                f"{CONFIG_NAME}: {key} is {reprlib.repr(rank)} and must be a whole number of 1 or more"
            )
    return max(ranks.values())


def _targets(value: object) -> tuple[str, ...] | str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    names = _names(value, "target_modules")
    if not names:
        raise InputFileError(f"{CONFIG_NAME}: target_modules is empty: the adapter would change nothing")
    return names


def _names(value: object, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise InputFileError(f"{CONFIG_NAME}: {key} must be a list of module names")
    return tuple(sorted(set(value)))


def _text(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise InputFileError(f"{CONFIG_NAME}: {key} is {reprlib.repr(value)} and must be text or null")
    return value or None
