"""The look into a request body, and the body that goes to a replica instead.

Theory of operation. The body is decoded once, one level deep: names to raw JSON. The few fields that matter are decoded from
there; all others are copied byte for byte, so that a number of 30 digits or an unknown field arrives as it was sent. Where a
name comes twice, engines take the last one and so does the decoder, and since the body is written anew from the one level,
what was looked at is what the engine gets.

JSON that is not JSON is answered here. A field of the wrong type that is only passed on (``"stream": null``) is the engine's to
answer. Fields that steer an engine never pass, whatever the engine's version: any that begins with ``lora``, and the list
``STEERING``. When they contradict ``model`` (``lora_adapter``), the explicit ``model`` wins by that.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.errors import BadRequestError

STEERING: Final = frozenset(
    {
        "adapter_id",
        "adapter_source",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "custom_logit_processor",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "ec_transfer_params",
        "kv_transfer_params",
        "logits_processors",
        "priority",
        "request_id",
        "rid",
        "routed_dp_rank",
        "session_id",
        "session_params",
        "vllm_xargs",
    }
)
_LORA: Final = "lora"
_PROMPT: Final = ("messages", "prompt", "tools")
_DIGITS: Final = 9
"""Longer numbers are no counts of tokens, and do not fit into the journal once multiplied."""
_UNSET: Final = frozenset({b"", b"false", b"null"})

_Fields = dict[str, msgspec.Raw]
_FIELDS: Final = msgspec.json.Decoder(_Fields)
_STRING: Final = msgspec.json.Decoder(str)
_INTEGER: Final = msgspec.json.Decoder(int)
_ENCODER: Final = msgspec.json.Encoder()
_NOTHING: Final = msgspec.Raw(b"")
_TRUE: Final = msgspec.Raw(b"true")


class Peek(msgspec.Struct, frozen=True, gc=False):
    """What the gateway needs to know of a request body.

    ``asked_usage``: the client itself asked for a usage chunk. ``max_tokens``: most tokens that may be generated, over all
    ``n`` answers. ``prompt_bytes``: size of the JSON of what the model reads.
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


def peek(body: bytes) -> Peek:
    """Look into ``body``. Raises BadRequestError for invalid JSON and for a ``model`` that is not a string."""
    try:
        fields = _FIELDS.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequestError("the body must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    model = _model(fields)
    for name in [name for name in fields if name in STEERING or name.startswith(_LORA)]:
        del fields[name]
    stream = bytes(fields.get("stream", _NOTHING)) == b"true"
    return Peek(
        fields=fields,
        model=model,
        stream=stream,
        asked_usage=stream and _ask_usage(fields),
        max_tokens=_max_tokens(fields),
        prompt_bytes=sum(memoryview(fields[name]).nbytes for name in _PROMPT if name in fields),
    )


def _model(fields: _Fields) -> str:
    raw = fields.get("model")
    if raw is None or bytes(raw) == b"null":
        raise BadRequestError("model is missing: name an adapter or the base model", param="model")
    try:
        return _STRING.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequestError("model must be a string", param="model") from error


def _ask_usage(fields: _Fields) -> bool:
    """Make a streamed request report usage; whether the client would see it without that.

    Options that are not an object, or say neither yes nor no, are left for the engine to answer.
    """
    raw = fields.get("stream_options", _NOTHING)
    options: _Fields = {}
    if bytes(raw) not in _UNSET:
        try:
            options = _FIELDS.decode(raw)
        except msgspec.DecodeError:
            return True
    if bytes(options.get("include_usage", _NOTHING)) not in _UNSET:
        return True
    # It depends on include_usage, so that with it on the engine would send usage in each chunk, and here only to be removed.
    options.pop("continuous_usage_stats", None)
    options["include_usage"] = _TRUE
    fields["stream_options"] = msgspec.Raw(_ENCODER.encode(options))
    return False


def _max_tokens(fields: _Fields) -> int | None:
    limit = _integer(fields, "max_completion_tokens")
    if limit is None:
        limit = _integer(fields, "max_tokens")
    if limit is None or limit < 0:
        return None
    answers = _integer(fields, "n")
    return limit * answers if answers is not None and answers > 1 else limit


def _integer(fields: _Fields, name: str) -> int | None:
    raw = fields.get(name)
    if raw is None or memoryview(raw).nbytes > _DIGITS:
        return None
    try:
        return _INTEGER.decode(raw)
    except msgspec.DecodeError:
        return None
