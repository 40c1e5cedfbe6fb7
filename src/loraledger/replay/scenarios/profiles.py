"""Profiles of engines to replay against: files that a calibration wrote, and those that are shipped.

A profile is a small JSON document (``twin/calibrated.py``). It is read strictly: a misspelt constant that silently kept its
default would be the worst kind of error, so a key that does not exist is refused too, with the nearest one. What cannot be (a
negative slope, a table that falls) is refused by the profile itself, which names the term. A key that is there twice, of which a
JSON reader would take the last, is refused here.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from loraledger.config.checks import nearest
from loraledger.errors import InputFileError
from loraledger.twin.calibrated import Calibrated, decode
from loraledger.twin.profile import TwinProfile, UnifiedRules

DEFAULT: Final = "llama-3.1-8b-h100"
"""What a replay runs on when nothing else is said: the twin's own defaults."""
MAX_BYTES: Final = 4 << 20

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


def shipped() -> tuple[str, ...]:
    """Names of the profiles that come with the package, sorted."""
    return tuple(
        sorted(found.name.removesuffix(".json") for found in _folder().iterdir() if found.name.endswith(".json"))
    )


def read_profile(text: str) -> Calibrated:
    """The profile in the file ``text``, or the shipped one of that name. Raises ``InputFileError``."""
    if _NAME.fullmatch(text) and text in shipped():
        return parse_profile(text, _folder().joinpath(f"{text}.json").read_bytes())
    path = Path(text)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        known = "" if "/" in text else f"; it is no shipped profile either{nearest(text, shipped())}"
        raise InputFileError(f"profile {text}: {getattr(error, 'strerror', None) or error}{known}") from error
    if len(data) > MAX_BYTES:
        raise InputFileError(f"profile {text}: over {MAX_BYTES >> 20} MiB: no profile is that large")
    return parse_profile(text, data)


def parse_profile(name: str, data: bytes) -> Calibrated:
    """The profile in ``data``, called ``name`` in messages. Raises ``InputFileError`` naming the field and what is wrong."""
    try:
        found = decode(data)
        _check_keys(json.loads(data, object_pairs_hook=_once))
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"profile {name}: {error}; `loraledger calibrate` writes such files") from error
    return found


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of the document. Raises ``ValueError`` for a key that is in it twice."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{_shown(key)} is given twice: keep one")
        found[key] = value
    return found


def _check_keys(document: dict[str, Any]) -> None:
    """Raises ``ValueError`` for a key that means nothing, in a document that decodes."""
    profile = document["profile"]
    for where, found, fields in (
        ("profile", profile, TwinProfile.__struct_fields__),
        ("profile.unified", profile.get("unified", {}), UnifiedRules.__struct_fields__),
    ):
        for key in found:
            if key not in fields:
                raise ValueError(f"{where}.{_shown(key)}: no such field{nearest(key, fields)}")


def _shown(key: str) -> str:
    return key[:100] if key.isprintable() else ascii(key[:100])


def _folder() -> Traversable:
    return files("loraledger.replay.scenarios").joinpath("shipped")
