"""The look into a request body, and the body that goes to a replica instead.

Theory of operation. The body must be UTF-8, and is decoded once, one level deep: names to raw JSON. The few fields that matter
are decoded from there, the ``Form`` of the path says which; all others are copied byte for byte, so that a number of 30 digits or
an unknown field arrives as it was sent. Where a name comes twice, engines take the last one and so does the decoder, and since the
body is written anew from the one level, what was looked at is what the engine gets.

What Python's ``json``, the reader inside an engine, takes beyond JSON is refused here: ``NaN`` and ``Infinity``, UTF-16, a byte
order mark, half a surrogate pair. Engines read a yes out of ``"stream": 1`` as well; a stream that is not known as one would report
no usage, so flags that are looked at must be true, false or null. Any other field of the wrong type is only passed on, for the
engine to answer.

Fields that steer an engine never pass, whatever the engine's version: any that begins with ``lora``, and the list ``STEERING``.
When they contradict ``model`` (``lora_adapter``), the explicit ``model`` wins by that. Fields without which the answer would be
another one are not dropped but refused, by name and with the reason: ``REFUSED`` and the form's ``unset``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from loraledger.errors import BadRequestError
from loraledger.gateway.paths import Form

STEERING: Final = frozenset(
    {
        # another model's weights
        *("adapter_id", "adapter_source"),
        # which rank of the engine, which peer of it
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        # KV and encoder caches moved between engines, at addresses that the request names
        *("kv_transfer_params", "ec_transfer_params"),
        # a place before other tenants' requests
        "priority",
        # names inside the engine that another tenant's request may have, or that outlive the request
        *("request_id", "rid", "session_id", "session_params"),
        # code, or arguments for code that the operator has plugged in
        *("custom_logit_processor", "logits_processors", "vllm_xargs"),
        # opting out of the mark that the operator has put on all output
        "watermarking",
    }
)
_TEMPLATE: Final = "a template is a program, and it would run in the engine's front, for all tenants"
_READING: Final = "it changes what the engine spends on images and sounds"
REFUSED: Final[Mapping[str, str]] = {
    "chat_template": _TEMPLATE,
    "media_io_kwargs": _READING,
    "mm_processor_kwargs": _READING,
}
"""Why a client may not set these. vLLM 0.32 refuses them too, unless started with ``--trust-request-...``; older ones do not."""
_TEMPLATE_KWARGS: Final = ("chat_template", "tokenize")
"""Arguments of the renderer itself, which a client could pass off as arguments of the template."""
_WATCHED: Final = STEERING | REFUSED.keys()
_LORA: Final = "lora"
_DIGITS: Final = 9
"""Longer numbers are no counts of tokens, and do not fit into the journal once multiplied."""
_LARGE: Final = 64 * 1024
_MEDIA: Final = re.compile(rb'"(?:(?:audio_|image_|video_)?url"\s*:\s*"data:|data"\s*:\s*")[^"\\]{4096,}+"')
_UNSET: Final = frozenset({b"", b"false", b"null"})
_EMPTY: Final = _UNSET | {b"{}", b'""'}

_Fields = dict[str, msgspec.Raw]
_FIELDS: Final = msgspec.json.Decoder(_Fields)
_STRING: Final = msgspec.json.Decoder(str)
_INTEGER: Final = msgspec.json.Decoder(int)
_ENCODER: Final = msgspec.json.Encoder()
_NOTHING: Final = msgspec.Raw(b"")
_TRUE: Final = msgspec.Raw(b"true")


class Peek(msgspec.Struct, frozen=True, gc=False):
    """What the gateway needs to know of a request body.

    ``asked_usage``: nothing of the usage is to be hidden, because the client itself asked for it, or because this path always
    tells it. ``max_tokens``: most tokens that may be generated, over all ``n`` answers; None if not stated. ``prompt_bytes``: size
    of the JSON of what the model reads, without images and sounds: what those cost in tokens has nothing to do with their size.
    """

    fields: _Fields
    model: str
    stream: bool
    asked_usage: bool
    max_tokens: int | None
    prompt_bytes: int

    def rewrite(self, model: str) -> bytes:
        """The body to send: with the engine's name of the model, and with usage asked for if it is a stream."""
        self.fields["model"] = msgspec.Raw(_ENCODER.encode(model))
        return _ENCODER.encode(self.fields)


def peek(body: bytes, form: Form) -> Peek:
    """Look into ``body``, sent to the path of ``form``.

    Raises BadRequestError for invalid JSON, a ``model`` that is not a string, a flag that is none, and fields that are refused.
    """
    fields = _decode(body)
    model = _model(fields)
    for name in [name for name in fields if name in _WATCHED or name.startswith(_LORA)]:
        if name in REFUSED and bytes(fields[name]) not in _EMPTY:
            raise BadRequestError(f"{name} is not taken from clients: {REFUSED[name]}", param=name)
        del fields[name]
    if "chat_template_kwargs" in fields:
        _check_template(fields["chat_template_kwargs"])
    for name in form.unset:
        if bytes(fields.pop(name, _NOTHING)) not in _UNSET:
            raise BadRequestError(f"{name} is not served: nothing of an answer is kept between requests", param=name)
    for name, known in form.only.items():
        if name in fields and bytes(fields[name]) not in known:
            among = ", ".join(sorted(value.decode() for value in known))
            raise BadRequestError(f"{name} must be one of {among}", param=name)
    fields.update(form.fixed)
    stream = form.streams and _flag(fields, "stream", "stream")
    return Peek(
        fields=fields,
        model=model,
        stream=stream,
        asked_usage=not form.stream_options or (stream and _ask_usage(fields)),
        max_tokens=_max_tokens(fields, form),
        prompt_bytes=sum([_text_bytes(fields[name]) for name in form.prompt if name in fields]),
    )


def _decode(body: bytes) -> _Fields:
    if not body.isascii():
        try:
            body.decode()  # the decoder does not look inside the strings that it copies
        except UnicodeDecodeError as error:
            raise BadRequestError(f"the body is not UTF-8: {error.reason} (byte {error.start})") from error
    try:
        return _FIELDS.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequestError("the body must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error


def _model(fields: _Fields) -> str:
    raw = fields.get("model")
    if raw is None or bytes(raw) == b"null":
        raise BadRequestError("model is missing: name an adapter or the base model", param="model")
    try:
        return _STRING.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequestError("model must be a string", param="model") from error


def _check_template(raw: msgspec.Raw) -> None:
    """Raise BadRequestError if arguments for the chat template hold more than that. Anything but an object is the engine's."""
    if bytes(raw) in _UNSET:
        return
    try:
        arguments = _FIELDS.decode(raw)
    except msgspec.DecodeError:
        return
    for name in _TEMPLATE_KWARGS:
        if name in arguments:
            at = f"chat_template_kwargs.{name}"
            raise BadRequestError(f"{at} is not taken from clients: {_TEMPLATE}", param=at)


def _flag(fields: _Fields, name: str, param: str) -> bool:
    said = bytes(fields.get(name, _NOTHING))
    if said == b"true":
        return True
    if said in _UNSET:
        return False
    raise BadRequestError(f"{param} must be true or false", param=param)


def _ask_usage(fields: _Fields) -> bool:
    """Make a streamed request report usage; whether the client would see it without that.

    Options that are not an object are left for the engine to answer.
    """
    raw = fields.get("stream_options", _NOTHING)
    options: _Fields = {}
    if bytes(raw) not in _UNSET:
        try:
            options = _FIELDS.decode(raw)
        except msgspec.DecodeError:
            return True
    if _flag(options, "include_usage", "stream_options.include_usage"):
        return True
    # It depends on include_usage, so that with it on the engine would send usage in each chunk, and here only to be removed.
    options.pop("continuous_usage_stats", None)
    options["include_usage"] = _TRUE
    fields["stream_options"] = msgspec.Raw(_ENCODER.encode(options))
    return False


def _max_tokens(fields: _Fields, form: Form) -> int | None:
    if not form.limits:
        return 0
    limit = None
    for name in form.limits:
        limit = _integer(fields, name)
        if limit is not None:
            break
    if limit is None or limit < 0:
        return None
    answers = _integer(fields, "n") if form.choices else None
    return limit * answers if answers is not None and answers > 1 else limit


def _text_bytes(raw: msgspec.Raw) -> int:
    view = memoryview(raw)
    if view.nbytes < _LARGE:
        return view.nbytes
    return view.nbytes - sum(found.end() - found.start() for found in _MEDIA.finditer(view))


def _integer(fields: _Fields, name: str) -> int | None:
    raw = fields.get(name)
    if raw is None or memoryview(raw).nbytes > _DIGITS:
        return None
    try:
        return _INTEGER.decode(raw)
    except msgspec.DecodeError:
        return None
