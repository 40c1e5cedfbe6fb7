"""What an answer says: usage, errors, content; and its model name, changed back to the one the client knows.

Theory of operation. Engines know a versioned name (``support@3fa9c1d20b7e``), clients the plain one. The name is changed at the
top level of each JSON document, and of the ``response`` or ``message`` inside it: ``/v1/responses`` and ``/v1/messages`` send whole
answers within events. The cheap way finds the compact ``"model":"<engine name>"``: unescaped quotes cannot occur
inside a JSON string, so the bytes are a key and its value, and they are at the top level if the document's first ``{`` is the
only one before them. In a stream this beginning is the same in each frame, so it is looked at once and then only compared (0.2
us). A document without the word is passed as it is. Everything else is decoded one level deep, or two, and encoded again, all other
values byte for byte; there it shows whether the answer is of another model than the adapter that was asked (``Renamer.stranger``).

A document says itself of which kind it is, so none of this depends on the path: chunks have ``choices``, events have a ``type``
(``response.output_text.delta``, ``content_block_delta``), and each kind names its token counts in its own words.

Usage is unknown, not 0, when the engine does not say it.
"""

from __future__ import annotations

import contextlib
import re
from typing import Final

import msgspec

from loraledger.events import parse_engine_name

ABSENT: Final = msgspec.Raw(b"")
"""The value of a field that is not there, always this very object."""
_SILENT: Final = frozenset({b"", b"null", b'""', b"[]"})
_REASON_LENGTH: Final = 200
_INNER: Final = ("response", "message")

_Fields = dict[str, msgspec.Raw]
_FIELDS: Final = msgspec.json.Decoder(_Fields)
_NAME: Final = msgspec.json.Decoder(str)
_ENCODER: Final = msgspec.json.Encoder()


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts as the engine reports them. ``cached_tokens``: those of the prompt that were found in the prefix cache."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def after(self, earlier: Usage | None) -> Usage:
        """This, with what only ``earlier`` says."""
        if earlier is None:
            return self
        return Usage(
            earlier.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens,
            earlier.completion_tokens if self.completion_tokens is None else self.completion_tokens,
            earlier.cached_tokens if self.cached_tokens is None else self.cached_tokens,
        )


UNKNOWN: Final = Usage()


class _Cached(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct, frozen=True, gc=False):
    """Usage in the words of chat, completions and embeddings, then of responses, then of messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Cached | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def usage(self) -> Usage:
        if self.input_tokens is None and self.output_tokens is None:
            return Usage(self.prompt_tokens, self.completion_tokens, _cached(self.prompt_tokens_details))
        read, created = self.cache_read_input_tokens, self.cache_creation_input_tokens
        prompt = self.input_tokens
        if prompt is not None:  # messages count apart what was read from the cache and what was put there
            prompt += (read or 0) + (created or 0)
        return Usage(prompt, self.output_tokens, _cached(self.input_tokens_details) if read is None else read)


def _cached(details: _Cached | None) -> int | None:
    return None if details is None else details.cached_tokens


class _Delta(msgspec.Struct, frozen=True, gc=False):
    content: msgspec.Raw = ABSENT
    reasoning_content: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    tool_calls: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT


class _Choice(msgspec.Struct, frozen=True, gc=False):
    text: msgspec.Raw = ABSENT
    delta: _Delta | None = None


class _BlockDelta(msgspec.Struct, frozen=True, gc=False):
    """What a ``content_block_delta`` adds. A signature is not generated."""

    text: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    partial_json: msgspec.Raw = ABSENT


class _Inner(msgspec.Struct, frozen=True, gc=False):
    """A whole answer inside an event: as it begins, or as it has ended."""

    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One data frame of a stream, as far as it matters. ``usage`` and ``error`` are raw JSON, ``ABSENT`` without the field."""

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    type: str | None = None
    delta: msgspec.Raw = ABSENT
    response: _Inner | None = None
    message: _Inner | str | None = None

    @property
    def has_content(self) -> bool:
        """Whether it carries generated content on any channel: text, reasoning, a tool call. A role is not content."""
        if self.choices is None:
            return self._adds_text() or self._adds_other()
        for choice in self.choices:  # not any(): a generator costs as much as all the rest of this
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
        if self.choices is None:
            return self._adds_text()
        return any(_says(choice.text if choice.delta is None else choice.delta.content) for choice in self.choices)

    @property
    def failure(self) -> msgspec.Raw | None:
        """The error that it speaks of, as raw JSON; empty if the whole frame is the error."""
        if self.error is not ABSENT and bytes(self.error) != b"null":
            return self.error
        if self.response is not None and bytes(self.response.error) not in _SILENT:
            return self.response.error
        return ABSENT if self.type == "error" else None

    @property
    def counts(self) -> Usage | None:
        """The usage that it, or the answer in it, reports; an answer that begins has not counted its output."""
        if self.usage is not ABSENT:
            return read_usage(self.usage)
        if self.response is not None:
            return read_usage(self.response.usage)
        if isinstance(self.message, _Inner):
            begun = read_usage(self.message.usage)
            return None if begun is None else Usage(begun.prompt_tokens, None, begun.cached_tokens)
        return None

    def _adds_text(self) -> bool:
        if self.type == "content_block_delta":
            return _says(self._block().text)
        return self.type == "response.output_text.delta" and _says(self.delta)

    def _adds_other(self) -> bool:
        if self.type == "content_block_delta":
            block = self._block()
            return _says(block.thinking) or _says(block.partial_json)
        return self.type is not None and self.type.endswith(".delta") and _says(self.delta)

    def _block(self) -> _BlockDelta:
        try:
            return _BLOCK.decode(self.delta)
        except msgspec.DecodeError:
            return _NO_BLOCK


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
_BLOCK: Final = msgspec.json.Decoder(_BlockDelta)
_NO_BLOCK: Final = _BlockDelta()
_COUNTS: Final = msgspec.json.Decoder(_Counts)
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
        return None if bytes(raw) in _SILENT else _COUNTS.decode(raw).usage()
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

    __slots__ = ("_beginning", "_engine", "_public", "_same", "_shown", "engine_name", "public_name", "stranger")

    def __init__(self, engine_name: str, public_name: str) -> None:
        self.engine_name = engine_name
        self.public_name = public_name
        self._same = engine_name == public_name
        self._public = _ENCODER.encode(public_name)
        self._engine = b'"model":' + _ENCODER.encode(engine_name)
        self._beginning = b""
        """What the last document began with, up to and with its model, if that was compact; ``_shown`` instead of it."""
        self._shown = b""
        self.stranger = False
        """A document named another model than the adapter that was asked for. A base may come back under its main name."""

    def document(self, payload: bytes, *, drop_usage: bool = False) -> bytes:
        """The JSON document with its ``model`` and that of an answer in it changed; with ``drop_usage`` also without ``usage``.

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
        if at < 0 and b'"model"' not in payload:
            return payload
        if at < 0 or not payload.startswith(b"{") or payload.count(b"{", 0, at) != 1:
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
            fields["model"] = self._instead_of(fields["model"])
        for name in _INNER:
            if name in fields:
                fields[name] = self._inside(fields[name])
        return _ENCODER.encode(fields)

    def _instead_of(self, name: msgspec.Raw) -> msgspec.Raw:
        """What the client is shown for ``name``; notes whether that is of a stranger. What is no string names nobody."""
        if not self.stranger and parse_engine_name(self.engine_name) is not None:
            # A value that cannot be read may come here: the decoder of the document copied it without a look.
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                self.stranger = _NAME.decode(name) != self.engine_name
        return msgspec.Raw(self._public)

    def _inside(self, raw: msgspec.Raw) -> msgspec.Raw:
        try:
            answer = _FIELDS.decode(raw)
        except (
            msgspec.DecodeError,
            RecursionError,
        ):  # no object, or one that the decoder around it copied without a look
            return raw
        if "model" not in answer:
            return raw
        answer["model"] = self._instead_of(answer["model"])
        return msgspec.Raw(_ENCODER.encode(answer))

    def text(self, words: str) -> str:
        """Any text with the engine's name replaced wherever it stands as a word of its own, for messages."""
        if self._same:
            return words
        name = rf"(?<![\w@-]){re.escape(self.engine_name)}(?![\w@-])"
        return re.sub(name, lambda _: self.public_name, words)

    def message(self, body: bytes) -> bytes:
        """An error body with the engine's name replaced in the same way."""
        return (
            body
            if self._same
            else self.text(body.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        )
