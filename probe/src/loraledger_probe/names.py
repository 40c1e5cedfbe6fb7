"""Request ids: from vLLM's inside back to what the client sent as X-Request-Id.

A client's ``K`` becomes ``chatcmpl-K`` or, per prompt, ``cmpl-K-0``; inside the engine a dash and eight hex digits follow, and
parallel samples of one request get a number in front.
"""

from __future__ import annotations

import re

_INTERNAL = re.compile(r"-[0-9a-f]{8}\Z")
_EXTERNAL = re.compile(r"(?:\d+_)?(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<text>.+)-\d+)\Z", re.DOTALL)
MAX_REQUESTS = 256
"""Request ids listed in one event."""

MAX_LENGTH = 256
"""Characters of a request id, which a client may make as long as it likes."""


def client_id(external: str) -> str:
    """Return what the client sent, given the id in its answer; any other id comes back as it is. Cut to `MAX_LENGTH`."""
    match = _EXTERNAL.match(external)
    return ((match["chat"] or match["text"]) if match else external)[:MAX_LENGTH]


def client_id_inside(internal: str) -> str:
    """Return what the client sent, given the id that scheduler and workers use."""
    return client_id(_INTERNAL.sub("", internal))
