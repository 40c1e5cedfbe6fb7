r"""Which entry of ``rank_pattern`` or ``alpha_pattern`` a module falls under.

PEFT's rule (``peft/utils/other.py``, ``get_pattern_key``; vLLM copies it in ``lora/peft_helper.py``): a key matches a module
when ``re.match(rf"(.*\.)?({key})$", name)``, so it is a suffix that starts at a dot, or a regex for one; the first key that
matches wins.

The keys come from tenants, and engines give them to a matcher that goes back and tries again: a key of twenty characters can
hold one for years. A key is therefore either a plain name, or written in a small language:

================================ ==========================================================================================
``q_proj``, ``\.``, ``.``        letters, digits, ``_`` and ``-``; a dot; any character
``\d``, ``[0-9]``                a digit; with ``+`` one or more
``.*``                           anything; at most two of these and of repeated digits in a key
``(q_proj|k_proj)``              one of several plain words; where one begins another (``1|10``), ``\.`` or the end must follow
``^``, ``$``                     at the start and at the end only
================================ ==========================================================================================

Anything else is refused. What is left costs a matcher that goes back the square of the name's length at worst: vLLM's takes
0.8 ms for the worst key found by search on the longest names that are read (``header``: 256 characters in 32 parts). Here
the linear-time matcher that pydantic brings along (Rust's ``regex``) is used, at 0.2 microseconds a match, and plain names,
of which some trainers write one a module, are looked up.

A match may be cheap and all of them not. :func:`check_cost` adds up what an engine would spend at each load.

One deviation: a dot in a plain name stands for a dot here and for any character in PEFT. The two differ only where
two modules' names differ in nothing but that character.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pydantic_core import SchemaError, SchemaValidator, core_schema

from loraledger.errors import InputFileError

MAX_REGEXES: Final = 64
MAX_KEY: Final = 256
"""Characters."""
MAX_QUANTIFIERS: Final = 2
MAX_ENGINE_S: Final = 10.0
"""Seconds that an engine may spend on matching when it loads one adapter. It serves nobody meanwhile."""

_PLAIN: Final = re.compile(r"[\w.\-]+")
_ATOM: Final = r"[\w\-]|\\[.\-]|\.\*?|(?:\\d|\[0-9\])\+?|\((?:\?:)?[\w\-]+(?:\|[\w\-]+)*\)"
_KEY: Final = re.compile(rf"\^?((?:{_ATOM})+)\$?")
_ATOMS: Final = re.compile(_ATOM)
_ACCEPTED: Final = r"plain names, or letters, digits, _ - \. . .* \d \d+ [0-9]+ (q_proj|k_proj) ^ $"

# vLLM 0.32, one core: a short name and a key that its matcher (``regex``) has compiled takes 4 microseconds. The matcher
# keeps 500 compiled keys; with 520 in use it compiles each anew at each match, which took 200 to 340. The worst key with one
# quantifier and 24 other atoms took 323 microseconds for 256 characters, the worst with two 800: of the length and its square.
_MATCH_US: Final = 4.0
_COMPILE_US: Final = 300.0
_COMPILED: Final = 450
_CHARACTER_US: Final = 0.2
_ATOM_US: Final = 0.05
_SQUARE_US: Final = 0.012


class NamePatterns:
    """The keys of one pattern field, ready to be matched."""

    def __init__(self, field: str, keys: Iterable[str]) -> None:
        """Raises :class:`InputFileError` naming ``field`` for a key that is not accepted."""
        self.keys = tuple(keys)
        self.shapes: list[tuple[int, int]] = []
        """Of each regex how many unbounded quantifiers it has, and atoms that are no single letter."""
        self._plain: dict[str, int] = {}
        self._regexes: list[tuple[int, str, SchemaValidator]] = []
        for index, key in enumerate(self.keys):
            if len(key) > MAX_KEY:
                raise InputFileError(f"{field} has a key of {len(key):,} characters: {MAX_KEY} at most")
            if _PLAIN.fullmatch(key):
                self._plain[key] = index
                continue
            self.shapes.append(_shape(field, key))
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


def check_cost(fields: Sequence[NamePatterns], names: Sequence[str]) -> None:
    """Raises :class:`InputFileError` when an engine would match modules ``names`` for over :data:`MAX_ENGINE_S`."""
    keys = sum(len(patterns.keys) for patterns in fields)
    distinct = {key for patterns in fields for key in patterns.keys}
    longest = max(map(len, names), default=0)
    each = _MATCH_US + (_COMPILE_US if len(distinct) > _COMPILED else 0.0)
    regexes = sum(_trying_us(*shape, longest) for patterns in fields for shape in patterns.shapes)
    seconds = len(names) * (keys * each + regexes) / 1e6
    if seconds > MAX_ENGINE_S:
        raise InputFileError(
            f"rank_pattern and alpha_pattern have {keys:,} keys for {len(names):,} modules, and an engine could match them"
            f" for {seconds:,.0f} seconds at each load: write fewer, such as q_proj for all modules of that name"
        )


def _trying_us(quantifiers: int, atoms: int, longest: int) -> float:
    """Microseconds of going back and trying again, at worst, on a name of ``longest`` characters."""
    once = longest * (_CHARACTER_US + _ATOM_US * atoms) if quantifiers else 0.0
    return once + (_SQUARE_US * longest**2 if quantifiers > 1 else 0.0)


def _shape(field: str, key: str) -> tuple[int, int]:
    """See ``shapes``. Raises :class:`InputFileError` when ``key`` is not written in the language."""
    found = _KEY.fullmatch(key)
    if found is None:
        raise InputFileError(f"{field}: {reprlib.repr(key)} is not accepted as a key: write {_ACCEPTED}")
    atoms = [atom[0] for atom in _ATOMS.finditer(found[1])]
    count = sum(len(atom) > 1 and atom.endswith(("*", "+")) for atom in atoms)
    if count > MAX_QUANTIFIERS:
        raise InputFileError(f"{field}: {reprlib.repr(key)} has {count} of .* and \\d+: {MAX_QUANTIFIERS} at most")
    for atom, after in itertools.pairwise(atoms):
        if atom.startswith("(") and after != r"\." and _one_begins_another(atom):
            raise InputFileError(
                rf"{field}: {reprlib.repr(key)} has alternatives that begin others: \. or the end must follow them"
            )
    return count, sum(len(atom) > 1 or atom == "." for atom in atoms)


def _one_begins_another(group: str) -> bool:
    words = sorted(group.strip("()").removeprefix("?:").split("|"))
    return any(long.startswith(short) for short, long in itertools.pairwise(words))


def _compiled(field: str, key: str) -> SchemaValidator:
    try:
        return SchemaValidator(core_schema.str_schema(pattern=rf"^(?:.*\.)?(?:{key})$"))
    except SchemaError as error:  # None of the language is known to be refused there.
        raise InputFileError(f"{field}: {reprlib.repr(key)} cannot be matched: name the modules") from error


def _suffixes(name: str) -> Iterator[str]:
    yield name
    while name := name.partition(".")[2]:
        yield name
