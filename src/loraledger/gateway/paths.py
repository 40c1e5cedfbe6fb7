"""The paths that the data plane serves, and what it needs to know of each.

Theory of operation. One table, ``FORMS``: where a body says what the model reads, how much may be generated, whether it may ask for
a stream and for usage, and in which form its clients read an error. Everything else is the same for all paths: who may call what,
limits, retries, one row a request. What an answer says is not in the table, because answers and events say themselves what they
are (see ``answers``).

- *Nothing of an answer is kept.* ``/v1/responses`` is served without its store: an answer that one replica keeps can be fetched
  there by whoever knows its id, of whatever tenant. So ``store`` is always sent as false, the fields that lean on it (``unset``)
  are refused, and the paths that read it do not exist.
- *The tokenizer is the base model's.* A call that only counts or turns tokens is checked against the model that it names, and is
  then a request to the base model with a prompt and an output of no tokens: it needs no adapter on any replica.

vLLM 0.32 lets fields that it does not know pass on every path, and reports the usage of responses and messages unasked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

Errors = Literal["openai", "responses", "anthropic"]
"""``responses`` differs from ``openai`` only inside a stream."""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """One path that takes a body with a ``model``.

    ``prompt``: fields with what the model reads. ``limits``: fields with the most tokens to generate, the first that is set counts;
    none of them means that nothing is generated. ``choices``: whether ``n`` multiplies that. ``streams``: whether ``stream`` means
    anything. ``stream_options``: whether a stream reports usage only when asked there. ``unset``: fields that must be absent, null
    or false. ``only``: fields that may have only these values, as raw JSON. ``fixed``: fields that are sent like this whatever the
    client says. ``computes``: whether the model runs, not only its tokenizer.
    """

    path: str
    prompt: tuple[str, ...]
    limits: tuple[str, ...] = ()
    choices: bool = False
    streams: bool = False
    stream_options: bool = False
    unset: tuple[str, ...] = ()
    only: Mapping[str, frozenset[bytes]] = {}
    fixed: Mapping[str, msgspec.Raw] = {}
    computes: bool = True
    errors: Errors = "openai"


CHAT: Final = Form(
    path="/v1/chat/completions",
    prompt=("messages", "tools"),
    limits=("max_completion_tokens", "max_tokens"),
    choices=True,
    streams=True,
    stream_options=True,
)
COMPLETIONS: Final = Form(
    path="/v1/completions", prompt=("prompt",), limits=("max_tokens",), choices=True, streams=True, stream_options=True
)
RESPONSES: Final = Form(
    path="/v1/responses",
    prompt=("input", "instructions", "tools", "previous_input_messages"),
    limits=("max_output_tokens",),
    streams=True,
    unset=("background", "conversation", "previous_response_id"),
    fixed={"store": msgspec.Raw(b"false")},
    errors="responses",
)
MESSAGES: Final = Form(
    path="/v1/messages",
    prompt=("messages", "system", "tools"),
    limits=("max_tokens",),
    streams=True,
    errors="anthropic",
)
COUNT_TOKENS: Final = Form(
    path="/v1/messages/count_tokens", prompt=("messages", "system", "tools"), computes=False, errors="anthropic"
)
EMBEDDINGS: Final = Form(
    path="/v1/embeddings",
    prompt=("input", "messages"),
    only={"encoding_format": frozenset({b'"float"', b'"base64"', b"null"})},  # vLLM's others are no JSON
)
TOKENIZE: Final = Form(path="/tokenize", prompt=("messages", "prompt", "tools"), computes=False)
DETOKENIZE: Final = Form(path="/detokenize", prompt=("tokens",), computes=False)

FORMS: Final[Mapping[bytes, Form]] = {
    form.path.encode("ascii"): form
    for form in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, EMBEDDINGS, TOKENIZE, DETOKENIZE)
}
"""By path, as it stands in a request's head."""
ROUTES: Final[Mapping[bytes, bytes]] = {**dict.fromkeys(FORMS, b"POST"), b"/v1/models": b"GET"}
"""All that exists here, path to method, spelt exactly so: nothing is decoded, collapsed or folded before it is compared."""


def errors_of(path: bytes) -> Errors:
    """The form of errors on ``path``; OpenAI's where nothing is served."""
    form = FORMS.get(path)
    return "openai" if form is None else form.errors
