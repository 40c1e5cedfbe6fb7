"""Which entry of ``rank_pattern`` or ``alpha_pattern`` a module falls under.

PEFT's rule (``peft/utils/other.py``, ``get_pattern_key``; vLLM copies it in ``lora/peft_helper.py``): a key matches a module
when ``re.match(rf"(.*\\.)?({key})$", name)``, so it is a suffix that starts at a dot, or a regex for one; the first key that
matches wins.

The keys come from tenants, and Python's matcher can be made to run for years by a key of twenty characters. Most keys
are plain names (some trainers write one a module): those are looked up, not matched. The others go to the linear-time
matcher that pydantic brings along (Rust's ``regex``), which has neither backreferences nor look-around and bounds the
size of what it compiles: 0.2 microseconds a match, 70 ms for the most expensive key that it gives up on. Number and
length of such keys are bounded too.

One deviation: a dot in a plain name stands for a dot here and for any character in PEFT. The two differ only where
two modules' names differ in nothing but that character.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator
from typing import Final

from pydantic_core import SchemaError, SchemaValidator, core_schema

from loraledger.errors import InputFileError

MAX_REGEXES: Final = 64
MAX_REGEX_LENGTH: Final = 500

_PLAIN: Final = re.compile(r"[\w.\-]+")


class NamePatterns:
    """The keys of one pattern field, ready to be matched."""

    def __init__(self, field: str, keys: Iterable[str]) -> None:
        """Raises :class:`InputFileError` naming ``field`` for a key that cannot be matched."""
        self._plain: dict[str, int] = {}
        self._regexes: list[tuple[int, str, SchemaValidator]] = []
        for index, key in enumerate(keys):
            if _PLAIN.fullmatch(key):
                self._plain[key] = index
            else:
                self._regexes.append((index, key, _compiled(field, key)))
                if len(self._regexes) > MAX_REGEXES:
                    raise InputFileError(f"{field} has over {MAX_REGEXES} regexes: name the modules instead")

    def find(self, name: str) -> str | None:
        """The first key that matches module ``name``."""
        first: int | None = None
        key: str | None = None
        for suffix in _suffixes(name) if self._plain else ():
            index = self._plain.get(suffix)
            if index is not None and (first is None or index < first):
                first, key = index, suffix
        for index, regex, matcher in self._regexes:
            if first is not None and index > first:
                break
            if matcher.isinstance_python(name):
                return regex
        return key


def _compiled(field: str, key: str) -> SchemaValidator:
    if len(key) > MAX_REGEX_LENGTH:
        raise InputFileError(
            f"{field} has a key of {len(key):,} characters: {MAX_REGEX_LENGTH} at most, if it is a regex"
        )
    try:
        return SchemaValidator(core_schema.str_schema(pattern=rf"^(?:.*\.)?(?:{key})$"))
    except SchemaError as error:
        raise InputFileError(
            f"{field}: {reprlib.repr(key)} is no regex of bounded cost (no look-around, no backreference): name the modules"
        ) from error


def _suffixes(name: str) -> Iterator[str]:
    yield name
    while name := name.partition(".")[2]:
        yield name
