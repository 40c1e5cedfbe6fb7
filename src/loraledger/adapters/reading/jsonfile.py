"""JSON from strangers: one object, nothing twice, only numbers that are numbers.

Python's parser takes more than JSON: a key given twice (the last wins, so what a reviewer reads is not what is used),
``NaN`` and ``Infinity``, numbers such as ``1e999`` that become infinite, half surrogates that no output can encode. An
adapter that holds one of these is not what its author believes it to be; each is refused in one line that names the file.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

from loraledger.errors import InputFileError


def read_object(name: str, raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``; ``name`` is how messages call it. Raises :class:`InputFileError` saying what is wrong."""
    try:
        text = raw.decode()
        if text.startswith("\ufeff"):
            raise _NotStrictError("it starts with a byte-order mark: save it as plain UTF-8")
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer
        )
        if b"\\u" in raw:  # Only an escape can bring half a surrogate into valid UTF-8.
            json.dumps(value, ensure_ascii=False).encode()
    except _NotStrictError as error:
        raise InputFileError(f"{name} is not usable JSON: {error}") from error
    except RecursionError as error:
        raise InputFileError(f"{name} is not usable JSON: it is nested too deeply") from error
    except UnicodeError as error:
        raise InputFileError(f"{name} is not JSON: it is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise InputFileError(f"{name} is not JSON: {error}") from error
    except ValueError as error:  # int() refuses more than 4,300 digits
        raise InputFileError(f"{name} is not usable JSON: a number in it is too long") from error
    if not isinstance(value, dict):
        raise InputFileError(f"{name} is not a JSON object")
    return value


class _NotStrictError(Exception):
    """JSON by Python's parser, and not taken here."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _NotStrictError(f"it has the key {reprlib.repr(twice)} twice")
    return value


def _constant(text: str) -> float:
    raise _NotStrictError(f"{text} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _NotStrictError(f"{reprlib.repr(text)} is too large a number")
    return value


def _integer(text: str) -> int:
    if text == "-0":
        raise _NotStrictError("-0 is no whole number")  # A float to other parsers, among them that of safetensors.
    return int(text)
