"""Bytes, durations and rates: read as people write them, kept as plain integers, shown so that they can be compared.

Inside the product a size is an int of bytes, a time an int of nanoseconds, a rate an int of bytes per second. Text
exists at two edges only. *Reading*: a number with a unit, exact (fractions, not floats: ``0.1GB`` is 100,000,000
bytes), refused when it does not come to a whole byte or nanosecond. ``MB`` is 10^6 and ``MiB`` is 2^20: they differ by
4.9 %, ``GB`` and ``GiB`` by 7.4 %, so a bare ``G`` or ``Gi`` is refused rather than guessed; so is a duration without a
unit. *Writing*, in two ways: ``format_*`` rounds to three digits for eyes, ``spell_*`` gives a short spelling that
reads back to the same integer.

All parsers raise ``ValueError`` with the accepted units in the message, so that they serve as validators of settings
and of command-line options alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Final

NS_PER_S: Final = 10**9

_BINARY: Final[Mapping[str, int]] = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES: Final[Mapping[str, int]] = {**_BINARY, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TIMES: Final[Mapping[str, int]] = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": NS_PER_S,
    "m": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
    "d": 86400 * NS_PER_S,
}
_QUANTITY: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")


def parse_bytes(value: object) -> int:
    """Bytes from an int, or from text such as ``16GiB``, ``42MB``, ``1.5 KiB``, ``512``."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative: a size is 0 or more bytes")
        return value
    return _parse(value, _BYTES, "a size", bare_unit="B")


def parse_duration(value: object) -> int:
    """Nanoseconds from text such as ``1.5s``, ``200ms``, ``5m``, ``1d``. A number without a unit is refused."""
    return _parse(value, _TIMES, "a duration", bare_unit=None)


def parse_rate(value: object) -> int:
    """Bytes per second from an int, or from text such as ``200MB/s``."""
    if isinstance(value, str):
        amount, slash, per = value.strip().rpartition("/")
        if not slash or per.strip() != "s":
            raise ValueError(f"{value!r} is not a rate: write a size per second, like 200MB/s")
        return parse_bytes(amount.strip())
    return parse_bytes(value)


def format_bytes(count: int) -> str:
    """Binary units, three digits: ``80 MiB``, ``1.5 GiB``, ``-512 B``."""
    return _rounded(count, list(_BINARY.items()))


def format_duration(ns: int) -> str:
    """The largest unit that keeps the number at 1 or more, three digits: ``200 ms``, ``1.5 m``."""
    return _rounded(ns, list(_TIMES.items()))


def format_rate(bytes_per_s: int) -> str:
    """Binary units a second: ``191 MiB/s``."""
    return f"{format_bytes(bytes_per_s)}/s"


def spell_bytes(count: int) -> str:
    """The shortest spelling that :func:`parse_bytes` reads back exactly: ``64KiB``, ``42MB``."""
    return _spelled(count, _BYTES)


def spell_duration(ns: int) -> str:
    """The shortest spelling that :func:`parse_duration` reads back exactly: ``1500ms``, ``5m``."""
    return _spelled(ns, _TIMES)


def spell_rate(bytes_per_s: int) -> str:
    """The shortest spelling that :func:`parse_rate` reads back exactly: ``200MB/s``."""
    return f"{spell_bytes(bytes_per_s)}/s"


def _parse(value: object, units: Mapping[str, int], what: str, bare_unit: str | None) -> int:
    known = ", ".join(units)
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not {what}: write a number with a unit ({known})")
    number, unit = match[1], match[2] or bare_unit
    if unit is None:
        raise ValueError(f"{value!r} has no unit: write one after it ({known})")
    if unit not in units:
        raise ValueError(f"{unit!r} in {value!r} is no unit of {what}: use one of {known}")
    exact = Fraction(number) * units[unit]
    if exact.denominator != 1:
        smallest = next(iter(units))
        raise ValueError(f"{value!r} is not a whole number of {smallest}: round it")
    return exact.numerator


def _rounded(amount: int, units: list[tuple[str, int]]) -> str:
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    for (unit, size), (_, bigger) in pairwise(units):
        # Judged after rounding to the shown digits, so that 1023.9 KiB is 1 MiB and never "1024 KiB".
        shown = _three_digits(amount / size)
        if float(shown) < bigger / size:
            return f"{sign}{shown} {unit}"
    unit, size = units[-1]
    return f"{sign}{_three_digits(amount / size)} {unit}"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _spelled(amount: int, units: Mapping[str, int]) -> str:
    if amount == 0:
        return f"0{next(iter(units))}"
    exact = [f"{amount // size}{unit}" for unit, size in units.items() if amount % size == 0]
    return min(exact, key=len)
