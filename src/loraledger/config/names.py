"""Which names may be given, and when an adapter's name would take traffic that is not its own.

Engines resolve adapters before base names, so whoever registers an adapter under a served name of the base captures the
base traffic of everyone; a variant that differs in case or blanks does the same wherever one side normalises. Both are
refused, by the same rule for adapters written in the settings and for those found in a folder.

The alphabet is an allow-list. Slash, at and colon are in it (``org/adapter@main`` is common, engines take it, and it
must survive URLs and metric labels). Out of it, with the reason: comma (engines join adapter names with commas in one
metric label), quotes, newlines and other control characters (labels, logs), blanks and anything beyond ASCII
(look-alikes, reversed text), backslash and percent (paths), ``~`` and the segments ``.`` and ``..``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

MAX_NAME: Final = 200
"""Characters. Leaves room for the version suffix of engine-side names within the 255 bytes of a file name."""

_OUTSIDE: Final = re.compile(r"[^A-Za-z0-9._:@/+-]")


def bad_name(name: str) -> str | None:
    """Why ``name`` cannot be the name of anything here; None when it can."""
    if not name:
        return "is empty"
    if len(name) > MAX_NAME:
        return f"has {len(name)} characters: at most {MAX_NAME} are allowed"
    outside = sorted(set(_OUTSIDE.findall(name)))
    if outside:
        listed = ", ".join(ascii(character) for character in outside)
        return f"contains {listed}: use ASCII letters, digits and . _ - + : @ /"
    if any(segment in {"", ".", ".."} for segment in name.split("/")):
        return "has an empty, '.' or '..' segment between slashes"
    return None


def clash_with_base(name: str, base_names: Collection[str]) -> str | None:
    """Why an adapter called ``name`` would capture traffic of the base model; None when it would not."""
    if name in base_names:
        return f"equals a base alias ({name!r}): adapters are resolved first, so it would capture base traffic"
    for alias in base_names:
        if _folded(alias) == _folded(name):
            return f"differs by {_difference(name, alias)} only from the base alias {alias!r}: choose another name"
    return None


def refused_adapters(names: Sequence[str], base_names: Collection[str]) -> dict[int, str]:
    """Reasons by position, for those of ``names`` that cannot be adapters beside ``base_names`` and those before."""
    refused: dict[int, str] = {}
    seen: set[str] = set()
    for index, name in enumerate(names):
        reason = clash_with_base(name, base_names) or bad_name(name)
        if reason is None and name in seen:
            reason = "is a duplicate: another adapter has this name already"
        if reason is not None:
            refused[index] = reason
        seen.add(name)
    return refused


def _folded(name: str) -> str:
    return "".join(name.split()).casefold()


def _difference(name: str, alias: str) -> str:
    if name.casefold() == alias.casefold():
        return "case"
    return "space" if "".join(name.split()) == "".join(alias.split()) else "case and space"
