"""The one form of a trace: what arrived when, for whom, for which adapter, how long; never what was said.

Theory of operation. A file is JSON lines, plain or gzip (a name that ends in ``.gz``). The first line is the header: a version,
where the requests come from and under which licence, the seed if they were drawn, every adapter that they name with rank and
bytes where known, how many requests follow, and the digest of the content. Each further line is one request, in order of time.
Whatever is read as a trace (a public data set, another simulator's format, our own record) is turned into this form first, so
that a replay has one thing to read and a result one thing to cite.

The digest is the identity of a trace: SHA-256 over each request and then the adapters and the block size, in their canonical
encoding. It does not depend on compression, white space, name, source or licence; two files with one digest give one replay. It
is stored in the header and checked by every reader that reaches the end, so an edited or cut file is found out.

A key that a row or the header gives twice is refused: a decoder keeps the last one, so what a person reads is not what is played.
No second parser is needed for that where a line is byte for byte its own canonical encoding, which names each key once.

The header can only be written when the requests are known, so these are written to a scratch file first and copied behind it;
in a compressed file header and requests are two members of one archive. Both directions hold one request at a time: 1,000,000
requests take no more memory than ten.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Final, Literal, Protocol

import msgspec

from loraledger.errors import InputFileError
from loraledger.record.lines import MAX_LINE, BadRows, lines

VERSION: Final = 1
MAX_TOKENS: Final = 10_000_000
"""Prompt and output tokens of one request, unless a caller says less: the longest context on offer is 10 million."""
MAX_AT: Final = 10 * 366 * 86_400 * 10**9
"""Ten years in ns. A time beyond it counts from an epoch and not from the trace's start."""
MAX_NAME: Final = 256
MAX_TEXT: Final = 4_096
MAX_ADAPTERS: Final = 100_000

_MAX_BLOCK: Final = 2**63 - 1
_BATCH: Final = 512
"""Lines that are hashed or written at once: one by one costs gzip and SHA-256 a call each, 1 us a request."""


class _Sink(Protocol):
    def write(self, data: bytes, /) -> int: ...


class Request(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """One request. ``at`` in ns from the trace's start; ``adapter`` ``None`` for the base model.

    ``blocks`` names the full and partial blocks of ``Header.block_tokens`` prompt tokens that the prompt begins with, in order:
    equal numbers in equal places mean an equal prefix. It may be shorter than the prompt.
    """

    at: int
    tenant: str
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class Adapter(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An adapter that requests may name; rank and bytes (of its files) ``None`` where unknown."""

    name: str
    rank: int | None = None
    bytes: int | None = None


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a trace. ``requests`` and ``digest`` are filled in by ``write_trace``."""

    loraledger_trace: Literal[1] = VERSION
    name: str
    source: str
    licence: str
    seed: int | None = None
    time_unit: Literal["ns"] = "ns"
    block_tokens: int | None = None
    adapters: tuple[Adapter, ...] = ()
    requests: int | None = None
    digest: str | None = None


def no_request(file: Path | str, dropped: Mapping[str, int]) -> InputFileError:
    """What to say of a ``file`` that holds no request, or none but those that were ``dropped`` (rows, by reason)."""
    if not dropped:
        return InputFileError(f"{file}: no request in it: give a file that holds at least one")
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    return InputFileError(f"{file}: no request in it, all were dropped ({why}): mend them, or give another file")


class RowCheck:
    """Says what is wrong with a request that stands where it stands. One for each pass over a trace."""

    def __init__(self, header: Header, max_tokens: int = MAX_TOKENS) -> None:
        self._adapters = frozenset(adapter.name for adapter in header.adapters)
        self._block_tokens = header.block_tokens
        self._max_tokens = max_tokens
        self._last = 0

    def fault(self, request: Request) -> tuple[str, str] | None:
        """(reason, detail), or ``None`` for a good row, which then sets the time before which no later one may lie."""
        at, prompt, output = request.at, request.prompt_tokens, request.output_tokens
        if not self._last <= at <= MAX_AT:
            if at > MAX_AT:
                return (
                    "time out of range",
                    f"{at} ns is over ten years after the start: times count from the trace's start",
                )
            return "unsorted time" if at >= 0 else "negative time", f"{at} ns, after {self._last} ns"
        if prompt < 1 or output < 1:
            return "no tokens", f"prompt {prompt}, output {output}: both are 1 or more"
        if prompt + output > self._max_tokens:
            return "request too large", f"{prompt + output:,} tokens, limit {self._max_tokens:,}"
        if request.adapter is not None and request.adapter not in self._adapters:
            return "unknown adapter", f"{request.adapter[:MAX_NAME]!r} is not in the header"
        if not 0 < len(request.tenant) <= MAX_NAME:
            return "bad tenant", f"a name has 1 to {MAX_NAME} characters"
        if request.blocks and (fault := self._block_fault(request)):
            return "bad blocks", fault
        self._last = at
        return None

    def _block_fault(self, request: Request) -> str | None:
        if self._block_tokens is None:
            return "the header has no block_tokens"
        most = -(-request.prompt_tokens // self._block_tokens)
        if len(request.blocks) > most:
            return f"{len(request.blocks)} of {self._block_tokens} tokens, the prompt has {most}"
        if min(request.blocks) < 0 or max(request.blocks) > _MAX_BLOCK:
            return "a block is a number from 0 to 2^63 - 1"
        return None


class Digest:
    """Digest of the content of a trace, taken request by request."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"loraledger trace 1\n")
        self._waiting: list[bytes] = []

    def add(self, line: bytes) -> None:
        """One request in its canonical encoding, as ``encode_request`` gives it."""
        self._waiting.append(line)
        if len(self._waiting) >= _BATCH:
            self._flush()

    def end(self, header: Header) -> str:
        """``sha256:`` and 64 hexadecimal digits, once every request was added."""
        self._flush()
        self._hash.update(msgspec.json.encode({"block_tokens": header.block_tokens, "adapters": header.adapters}))
        return f"sha256:{self._hash.hexdigest()}"

    def _flush(self) -> None:
        self._waiting.append(b"")
        self._hash.update(b"\n".join(self._waiting))
        self._waiting.clear()


class Trace:
    """A trace file: its header at once, its requests each time it is iterated over.

    With ``skip_bad`` bad rows are dropped and counted in ``dropped`` (of the latest pass). ``digest`` is that of the latest
    complete pass; with ``verify`` a pass that dropped nothing raises ``InputFileError`` at its end if header and content
    disagree. Every fault of the file is an ``InputFileError`` that names the row.
    """

    def __init__(
        self, path: Path, *, skip_bad: bool = False, max_tokens: int = MAX_TOKENS, verify: bool = True
    ) -> None:
        self.path = path
        self.header = _read_header(path)
        self.digest: str | None = None
        self._bad = BadRows(path, skip=skip_bad)
        self._max_tokens = max_tokens
        self._verify = verify

    @property
    def dropped(self) -> Counter[str]:
        """How many rows were dropped, by reason."""
        return self._bad.dropped

    def __iter__(self) -> Iterator[Request]:
        self._bad.dropped.clear()
        fault, digest, count = RowCheck(self.header, self._max_tokens).fault, Digest(), 0
        for number, request, line in self._encoded(self._bad):
            if found := fault(request):
                self._bad.bad(number, *found)
                continue
            digest.add(line)
            count += 1
            yield request
        self.digest = digest.end(self.header)
        if self._verify and not self._bad.dropped:
            self._compare(count)

    def numbered(self, bad: BadRows) -> Iterator[tuple[int, Request]]:
        """(row number, request) for each row that is one; whether it may stand where it stands is not looked at."""
        return ((number, request) for number, request, _ in self._encoded(bad))

    def _encoded(self, bad: BadRows) -> Iterator[tuple[int, Request, bytes]]:
        """As ``numbered``, each row with its canonical encoding."""
        decode, encode = msgspec.json.Decoder(Request).decode, msgspec.json.Encoder().encode
        for number, line in enumerate(lines(self.path), 1):
            if number == 1:
                continue
            try:
                request = decode(line)
            except (msgspec.MsgspecError, RecursionError) as error:
                bad.bad(number, "not a request" if line.strip() else "a hole", str(error) if line.strip() else "")
                continue
            canonical = encode(request)
            # To compare takes 18 ns of the 1.06 us that a row takes, to count quotes of every row 92 ns.
            if line != canonical and (fault := _doubled(line, canonical)):
                bad.bad(number, "a doubled key", fault)
                continue
            yield number, request, canonical

    def _compare(self, count: int) -> None:
        header = self.header
        if header.requests is not None and header.requests != count:
            raise InputFileError(
                f"{self.path}: {count:,} requests, its header says {header.requests:,}: cut short or edited; "
                f"get it again, or `loraledger trace import trace` writes it anew as it is"
            )
        if header.digest is not None and header.digest != self.digest:
            raise InputFileError(
                f"{self.path}: its content is not what its header's digest says: edited; "
                f"get it again, or `loraledger trace import trace` writes it anew as it is"
            )


def write_trace(
    path: Path,
    header: Header,
    rows: Iterable[tuple[int, Request]],
    bad: BadRows | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Header:
    """Write (row number, request) pairs behind ``header``; the header as written, with the count and the digest.

    Each request is checked as a reader would. A file of that name is replaced once the new one is complete. Raises
    ``InputFileError`` for a bad row (as ``bad`` says), when no good one is there, and when the file cannot be written.
    """
    bad = bad or BadRows(path)
    _check_header(path, header)
    with replacing(path) as staged, tempfile.TemporaryFile(dir=path.parent) as body:
        with _packed(path, body) as out:
            header = _write_body(out, header, rows, bad, max_tokens)
        if not header.requests:
            raise no_request(bad.file, bad.dropped)
        body.seek(0)
        with staged.open("wb") as whole:
            with _packed(path, whole) as out:
                out.write(msgspec.json.encode(header))
            shutil.copyfileobj(body, whole, 1 << 20)
    return header


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to, which takes its place when the block ends well. Raises ``InputFileError`` when it
    cannot be written; a full disk stays an ``OSError``."""
    staged = path.with_name(f".{path.name}.new")
    try:
        yield staged
        staged.replace(path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise InputFileError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            staged.unlink(missing_ok=True)


def _write_body(
    out: _Sink, header: Header, rows: Iterable[tuple[int, Request]], bad: BadRows, max_tokens: int
) -> Header:
    fault, digest, count = RowCheck(header, max_tokens).fault, Digest(), 0
    encode, waiting = msgspec.json.Encoder().encode, [b""]
    for number, request in rows:
        if found := fault(request):
            bad.bad(number, *found)
            continue
        line = encode(request)
        digest.add(line)
        waiting.append(line)
        count += 1
        if len(waiting) > _BATCH:
            out.write(b"\n".join(waiting))
            waiting = [b""]
    out.write(b"\n".join(waiting) + b"\n")
    return msgspec.structs.replace(header, requests=count, digest=digest.end(header))


def _packed(path: Path, out: IO[bytes]) -> AbstractContextManager[_Sink]:
    """``out``, behind gzip if the name asks for it; the same bytes for the same content. Leaving it leaves ``out`` open."""
    if path.suffix == ".gz":
        return gzip.GzipFile(filename="", mode="wb", fileobj=out, compresslevel=6, mtime=0)
    return nullcontext(out)


def _read_header(path: Path) -> Header:
    first = next(iter(lines(path, MAX_LINE)), b"")
    try:
        header = msgspec.json.decode(first, type=Header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputFileError(
            f"{path}: row 1: not the header of a trace of version {VERSION}: {error}; `loraledger trace import` reads other formats"
        ) from error
    if first != msgspec.json.encode(header) and (fault := _doubled(first)):
        raise InputFileError(f"{path}: row 1: {fault}")
    _check_header(path, header)
    return header


def _doubled(line: bytes, canonical: bytes | None = None) -> str | None:
    """What is wrong with a ``line`` that decodes and gives a key twice; ``None`` if it does not.

    ``canonical`` is the row's own encoding, if the line has every key of it. Then a key more is two quotes more; only an escape
    could make up for them, as it spells a quote without one.
    """
    if canonical is not None and line.count(b'"') == canonical.count(b'"') and b"\\" not in line:
        return None
    try:
        json.loads(line, object_pairs_hook=_keep_one)
    except (ValueError, RecursionError) as error:
        return str(error)
    return None


def _keep_one(pairs: list[tuple[str, object]]) -> None:
    """Raises ``ValueError`` for a key that an object has twice."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"{key[:MAX_NAME]!r} is given twice: keep one")
        seen.add(key)


def _check_header(path: Path, header: Header) -> None:
    names = [adapter.name for adapter in header.adapters]
    fault = None
    if len(names) > MAX_ADAPTERS:
        fault = f"{len(names):,} adapters, limit {MAX_ADAPTERS:,}"
    elif max(map(len, (header.name, header.source, header.licence))) > MAX_TEXT:
        fault = f"name, source and licence have up to {MAX_TEXT:,} characters each"
    elif not all(0 < len(name) <= MAX_NAME for name in names):
        fault = f"the name of an adapter has 1 to {MAX_NAME} characters"
    elif len(set(names)) != len(names):
        fault = f"adapter {next(n for n, c in Counter(names).items() if c > 1)!r} is there twice: keep one of the two"
    elif any(number is not None and number < 1 for a in header.adapters for number in (a.rank, a.bytes)):
        fault = "rank and bytes of an adapter are 1 or more"
    elif header.block_tokens is not None and header.block_tokens < 1:
        fault = "block_tokens is 1 or more"
    if fault is not None:
        raise InputFileError(f"{path}: row 1: {fault}")
