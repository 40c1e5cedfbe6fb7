"""What an answer says: usage, errors, content; and its model name, changed back to the one the client knows.

Theory of operation. Engines know a versioned name (``support@3fa9c1d20b7e``), clients the plain one. The name is changed at the
top level of each JSON document. The cheap way finds the compact ``"model":"<engine name>"``: unescaped quotes cannot occur
inside a JSON string, so the bytes are a key and its value, and they are at the top level if the document's first ``{`` is the
only one before them. In a stream this beginning is the same in each frame, so it is looked at once and then only compared (0.2
us). Everything else is decoded one level deep and encoded again, all other values byte for byte.

Usage is unknown, not 0, when the engine does not say it.
"""

from __future__ import annotations

from typing import Final

import msgspec

ABSENT: Final = msgspec.Raw(b"")
"""The value of a field that is not there, always this very object."""
_SILENT: Final = frozenset({b"", b"null", b'""', b"[]"})
_REASON_LENGTH: Final = 200

_Fields = dict[str, msgspec.Raw]
_FIELDS: Final = msgspec.json.Decoder(_Fields)
_ENCODER: Final = msgspec.json.Encoder()


class _Cached(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts as the engine reports them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; None if the engine does not say."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


UNKNOWN: Final = Usage()


class _Delta(msgspec.Struct, frozen=True, gc=False):
    content: msgspec.Raw = ABSENT
    reasoning_content: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    tool_calls: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT


class _Choice(msgspec.Struct, frozen=True, gc=False):
    text: msgspec.Raw = ABSENT
    delta: _Delta | None = None


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One data frame of a stream, as far as it matters. ``usage`` and ``error`` are raw JSON, ``ABSENT`` without the field."""

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT

    @property
    def has_content(self) -> bool:
        """Whether it carries generated content on any channel: text, reasoning, a tool call. A role is not content."""
        for choice in self.choices or ():  # not any(): a generator costs as much as all the rest of this
            delta = choice.delta
            if delta is None:
                if _says(choice.text):
                    return True
            elif (
                _says(delta.content)
                or _says(delta.reasoning_content)
                or _says(delta.reasoning)
                or _says(delta.tool_calls)
                or _says(delta.function_call)
            ):
                return True
        return False

    @property
    def has_answer(self) -> bool:
        """Whether it carries some of the answer itself: text, neither reasoning nor a tool call."""
        return any(
            _says(choice.text if choice.delta is None else choice.delta.content) for choice in self.choices or ()
        )


class _Body(msgspec.Struct, frozen=True, gc=False):
    usage: msgspec.Raw = ABSENT


class _ErrorDetail(msgspec.Struct, frozen=True, gc=False):
    message: str = ""
    code: int | str | None = None


class _ErrorBody(msgspec.Struct, frozen=True, gc=False):
    error: msgspec.Raw = ABSENT
    message: str = ""
    detail: msgspec.Raw = ABSENT


_CHUNK: Final = msgspec.json.Decoder(Chunk)
_BODY: Final = msgspec.json.Decoder(_Body)
_USAGE: Final = msgspec.json.Decoder(Usage)
_DETAIL: Final = msgspec.json.Decoder(_ErrorDetail)
_ERROR: Final = msgspec.json.Decoder(_ErrorBody)


def _says(raw: msgspec.Raw) -> bool:
    return raw is not ABSENT and bytes(raw) not in _SILENT


def read_chunk(payload: bytes) -> Chunk | None:
    """The frame in ``payload``; None if it is not JSON of that shape, which is passed on unread."""
    try:
        return _CHUNK.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None


def read_usage(raw: bytes | msgspec.Raw) -> Usage | None:
    """The usage in ``raw``; None when it is absent, ``null`` or of another shape."""
    try:
        return None if bytes(raw) in _SILENT else _USAGE.decode(raw)
    except msgspec.DecodeError:
        return None


def body_usage(body: bytes) -> Usage | None:
    """The usage in a whole answer; None when it has none."""
    try:
        return read_usage(_BODY.decode(body).usage)
    except (msgspec.DecodeError, RecursionError):
        return None


def is_json(body: bytes) -> bool:
    """Whether ``body`` is a whole JSON document: an answer that ends with its connection may have been cut."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def error_text(body: bytes | msgspec.Raw) -> tuple[str, int | None]:
    """The engine's own words for an error, short, and the HTTP status that it names in the body, if any.

    Knows ``{"error": {"message", "code"}}``, ``{"error": "..."}``, ``{"message"}``, ``{"detail"}`` and plain text.
    """
    text, code = bytes(body).decode("utf-8", "replace"), None
    try:
        found = _ERROR.decode(body)
        detail = bytes(found.error) or bytes(found.detail)
        text = found.message or detail.decode("utf-8", "replace") or text
        inner = _DETAIL.decode(detail if bytes(found.error) else body)
        text = inner.message or text
        code = int(inner.code) if inner.code is not None and str(inner.code).isdecimal() else None
    except (msgspec.DecodeError, RecursionError):
        pass  # not of that shape: what was found so far is the text
    text = " ".join(text.split())
    return (text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3] + "..."), code


class Renamer:
    """Changes the engine's name of a model back to the client's, in the documents of one answer."""

    __slots__ = ("_beginning", "_engine", "_public", "_same", "_shown", "engine_name", "public_name")

    def __init__(self, engine_name: str, public_name: str) -> None:
        self.engine_name = engine_name
        self.public_name = public_name
        self._same = engine_name == public_name
        self._public = _ENCODER.encode(public_name)
        self._engine = b'"model":' + _ENCODER.encode(engine_name)
        self._beginning = b""
        """What the last document began with, up to and with its model, if that was compact; ``_shown`` instead of it."""
        self._shown = b""

    def document(self, payload: bytes, *, drop_usage: bool = False) -> bytes:
        """The JSON document with its top-level ``model`` changed; with ``drop_usage`` also without ``usage``.

        What is not a JSON object is returned as it is.
        """
        if drop_usage:
            return self._slowly(payload, drop_usage=True)
        if self._same:
            return payload
        beginning = self._beginning
        if beginning and payload.startswith(beginning):
            return self._shown + payload[len(beginning) :]
        at = payload.find(self._engine)
        if at < 0 or payload.count(b"{", 0, at) != 1:
            return self._slowly(payload, drop_usage=False)
        end = at + len(self._engine)
        self._beginning, self._shown = payload[:end], b'%b"model":%b' % (payload[:at], self._public)
        return self._shown + payload[end:]

    def _slowly(self, payload: bytes, *, drop_usage: bool) -> bytes:
        try:
            fields = _FIELDS.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            return payload
        if drop_usage:
            fields.pop("usage", None)
        if "model" in fields:
            fields["model"] = msgspec.Raw(self._public)
        return _ENCODER.encode(fields)

    def text(self, words: str) -> str:
        """Any text with the engine's name replaced, for messages."""
        return words if self._same else words.replace(self.engine_name, self.public_name)

    def message(self, body: bytes) -> bytes:
        """An error body with the engine's name replaced wherever it stands."""
        return body if self._same else body.replace(self.engine_name.encode(), self.public_name.encode())
