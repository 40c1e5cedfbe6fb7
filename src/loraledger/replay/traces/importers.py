"""Public trace formats, read row by row: Azure LLM inference 2023, Mooncake, Vidur.

Theory of operation. An importer is a generator of (row number, request): it knows a format and nothing else. What makes a row
bad in itself (a missing cell, a figure that is none, NaN) goes to ``BadRows`` here; what makes it bad where it stands (order,
size, names) is found by whoever writes the trace. These formats have neither tenants nor adapters: every request is ``t0``'s to
the base model until adapters are laid over it. Times keep the origin of the file where that is a relative one, else the first
row is 0.

Mooncake's ``hash_ids`` name blocks of 512 prompt tokens by running numbers, which say which prefixes are equal and nothing
about their text; they are kept. In a file of one's own they may be hashes of text, which can be guessed: with a salt each
number is replaced by a keyed hash, so that only who has the salt could try.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from loraledger.errors import InputFileError
from loraledger.record.lines import BadRows, csv_rows, lines
from loraledger.replay.traces.trace import Request
from loraledger.replay.workloads.draws import US
from loraledger.replay.workloads.generate import Rows

MOONCAKE_BLOCK: Final = 512
MIN_SALT: Final = 16
TENANT: Final = "t0"

Salted = Callable[[str], int]

_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?")
_COUNT: Final = re.compile(r"-?[0-9]{1,18}")


def salted(salt: bytes) -> Salted:
    """Replaces the name of a block by a number below 2^63, keyed by ``salt`` (BLAKE2b). Raises ``InputFileError`` for a short
    one."""
    if len(salt) < MIN_SALT:
        raise InputFileError(
            f"the salt has {len(salt)} bytes: {MIN_SALT} or more, such as `openssl rand -hex 16` gives"
        )
    key = hashlib.blake2b(salt, person=b"loraledgersalt").digest()
    return lambda name: int.from_bytes(hashlib.blake2b(name.encode(), key=key, digest_size=8).digest()) >> 1


def azure(path: Path, bad: BadRows) -> Rows:
    """Azure LLM inference trace: ``TIMESTAMP`` (UTC), ``ContextTokens``, ``GeneratedTokens``. The first good row is at 0."""
    first: int | None = None
    for row, (time, prompt, output) in table(path, bad, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        try:
            at = utc_ns(time)
            request = Request(at, TENANT, None, count(prompt), count(output))
        except ValueError as error:
            bad.bad(row, "not a request", str(error))
            continue
        first = at if first is None else first
        yield row, msgspec.structs.replace(request, at=at - first)


def vidur(path: Path, bad: BadRows) -> Rows:
    """Vidur: ``arrived_at`` (s), ``num_prefill_tokens``, ``num_decode_tokens``."""
    for row, (time, prompt, output) in table(path, bad, ("arrived_at", "num_prefill_tokens", "num_decode_tokens")):
        try:
            yield row, Request(seconds_ns(time), TENANT, None, count(prompt), count(output))
        except ValueError as error:
            bad.bad(row, "not a request", str(error))


class _Mooncake(msgspec.Struct, gc=False):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def mooncake(path: Path, bad: BadRows, rename: Salted | None = None) -> Rows:
    """Mooncake JSON lines: ``timestamp`` (ms), lengths, ``hash_ids``. ``rename`` replaces each of these."""
    decode = msgspec.json.Decoder(_Mooncake).decode
    for row, line in enumerate(lines(path), 1):
        try:
            found = decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            bad.bad(row, "not a request" if line.strip() else "a hole", str(error) if line.strip() else "")
            continue
        blocks = found.hash_ids if rename is None else tuple(rename(str(block)) for block in found.hash_ids)
        at = round(found.timestamp * US * 1_000)
        yield row, Request(at, TENANT, None, found.input_length, found.output_length, blocks)


def from_first(rows: Rows) -> Rows:
    """``rows`` with times counted from the first one."""
    first: int | None = None
    for number, row in rows:
        first = row.at if first is None else first
        yield number, msgspec.structs.replace(row, at=row.at - first)


def table(
    path: Path, bad: BadRows, wanted: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, list[str]]]:
    """(number of the line, the wanted cells, then the optional ones: "" where absent) of a CSV file with a heading.

    Raises ``InputFileError`` when a wanted column is missing.
    """
    places: list[int] | None = None
    for row, cells in csv_rows(path, bad):
        if places is None:
            names = [cell.strip() for cell in cells]
            if missing := [name for name in wanted if name not in names]:
                raise InputFileError(f"{path}: row {row}: no column {', '.join(missing)}: not this format")
            # A column that is not there lies behind the last cell, where every row is given an empty one.
            places = [names.index(name) if name in names else -1 for name in (*wanted, *optional)]
            width = max(places) + 1
        elif len(cells) < width:
            bad.bad(row, "a hole", f"{len(cells)} cells of {width}")
        else:
            cells.append("")
            yield row, [cells[place] for place in places]
    if places is None:
        raise InputFileError(f"{path}: it is empty")


def count(cell: str) -> int:
    """A whole number, as data sets write it. Raises ``ValueError``."""
    text = cell.strip()
    if not _COUNT.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a whole number" if text else "a number is missing")
    return int(text)


def seconds_ns(cell: str) -> int:
    """Seconds as ns. Raises ``ValueError``, for NaN and infinity too."""
    value = float(cell)
    if not math.isfinite(value) or abs(value) > 1e12:
        raise ValueError(f"{cell.strip()[:40]!r} is not a time in s")
    return round(value * 1e9)


def utc_ns(cell: str) -> int:
    """A moment in UTC such as ``2023-11-16 18:15:46.6805900`` as ns since the Unix epoch. Raises ``ValueError``."""
    match = _TIME.fullmatch(cell.strip())
    if match is None:
        raise ValueError(f"{cell.strip()[:40]!r} is not a time such as 2023-11-16 18:15:46.6805900")
    return _epoch_s(match[1]) * 10**9 + int((match[2] or "").ljust(9, "0"))


@lru_cache(maxsize=16)
def _epoch_s(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())
