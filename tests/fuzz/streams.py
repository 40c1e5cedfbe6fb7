"""What the reader of event streams promises, with the standard library's ``json`` as the second reader.

However a stream is cut, the same comes out; no frame is lost but usage that is hidden; the model's name is changed where a client
looks for it, and nothing else is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from fuzz.pieces import pieces
from loraledger.gateway.answers import Renamer, read_chunk
from loraledger.gateway.sse import SseReader

ENGINE_NAME: Final = "alpaca@3fa9c1d20b7e"
NOW: Final = 1


def sse(data: bytes, _: Path) -> bytes:
    """Read ``data`` as a stream, for a client that asked for usage and for one that did not. Returns what the former gets."""
    shown = b""
    for hide_usage in (True, False):
        read = _stream([data], hide_usage)
        shown = read[0]
        for parts in pieces(data):
            assert _stream(parts, hide_usage) == read, parts
        _check_frames(data, shown, hide_usage)
    return shown


def _stream(parts: list[bytes], hide_usage: bool) -> tuple[bytes, tuple[object, ...]]:
    """What the client gets, and what was understood."""
    reader = SseReader(Renamer(ENGINE_NAME, "alpaca"), hide_usage=hide_usage)
    shown = b"".join([reader.feed(part, NOW) for part in parts]) + reader.finish(NOW)
    assert reader.pending == 0
    first = (reader.first_token is None, reader.first_answer is None)
    return shown, (reader.done, reader.error, reader.usage, reader.tokens_seen, *first)


def frames(stream: bytes) -> list[tuple[list[bytes], bytes | None]]:
    """Its events: lines that are no data, and the data, None without any."""
    found = []
    for frame in re.split(rb"\n\n", re.sub(rb"\r\n|\r", b"\n", stream)):
        lines = [line for line in frame.split(b"\n") if line]
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        if lines:
            others = [line for line in lines if not line.startswith(b"data:")]
            found.append((others, b"\n".join(data) if data else None))
    return found


def _check_frames(stream: bytes, shown: bytes, hide_usage: bool) -> None:
    """No frame is lost but hidden usage, none changed but for the name of the model."""
    try:
        stream.decode()
    except UnicodeDecodeError:
        return  # one reader looks inside of what the other copies
    got = iter(frames(shown))
    for others, payload in frames(stream):
        fields = None if payload is None else _object(payload)
        if payload is not None and hide_usage and _is_usage(payload):
            continue
        found = next(got, None)
        assert found is not None, f"lost: {others} {payload!r}"
        assert found[0] == others
        if payload is None or fields is None or read_chunk(payload) is None:
            assert (found[1] is None) == (payload is None)
        elif not _fails(fields) and not _is_both(fields):
            assert json.dumps(json.loads(found[1] or b"")) == json.dumps(_shown(payload, fields, hide_usage)), (
                payload,
                found[1],
            )
    assert next(got, None) is None, "more was shown than came"


def _object(payload: bytes) -> dict[str, Any] | None:
    """The object in ``payload`` if it is one that every reader reads alike: strict JSON, no name twice where it matters."""
    try:
        msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
        pairs = json.loads(payload, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return None
    return pairs if isinstance(pairs, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _is_usage(payload: bytes) -> bool:
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        return False
    if not isinstance(fields, dict) or fields.get("error") is not None or read_chunk(payload) is None:
        return False
    return fields.get("choices") == [] and fields.get("usage") is not None


def _fails(fields: dict[str, Any]) -> bool:
    inner = fields.get("response")
    return "error" in fields or fields.get("type") == "error" or (isinstance(inner, dict) and "error" in inner)


def _is_both(fields: dict[str, Any]) -> bool:
    """An answer, and an event that holds one: no engine sends that, and only the outer model need be changed."""
    return "model" in fields and any(isinstance(fields.get(name), dict) for name in ("response", "message"))


def _shown(payload: bytes, fields: dict[str, Any], hide_usage: bool) -> dict[str, Any]:
    """What becomes of a frame: usage is hidden in chunks, never in events, which have a ``type`` and no ``choices``.

    The name of a field is taken as it is written: nobody escapes the letters of ``model``.
    """
    changed = dict(fields)
    is_event = fields.get("type") is not None and fields.get("choices") is None
    if hide_usage and not is_event:
        changed.pop("usage", None)
    for inner in (changed, *(changed.get(name) for name in ("response", "message"))):
        if isinstance(inner, dict) and "model" in inner and b'"model"' in payload:
            inner["model"] = "alpaca"
    return changed
