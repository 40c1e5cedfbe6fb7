"""The versioned name under which a replica knows an adapter."""

from __future__ import annotations

import re

_ENGINE_NAME = re.compile(r"(.+)@([0-9a-f]{12})(?:~([2-9]|[1-9][0-9]{1,8}))?", re.DOTALL)


def short_digest(digest: str) -> str:
    """As much of a content digest as engine-side names carry."""
    return digest[:12]


def engine_name(adapter: str, digest: str, generation: int = 1) -> str:
    """The name under which a replica knows this version of an adapter: ``support@3fa9c1d20b7e``, then ``...~2``.

    A new version or a re-verified registration gets a new name: engines keep prefix cache and old weights under the old one.
    """
    suffix = "" if generation == 1 else f"~{generation}"
    return f"{adapter}@{short_digest(digest)}{suffix}"


def parse_engine_name(name: str) -> tuple[str, str, int] | None:
    """``(adapter, first twelve digits of its digest, generation)`` of an engine-side name; ``None`` if it is not ours.

    The last ``@`` with twelve hex digits ends the public name, so the way back is plain even for ``org/adapter@main``.
    """
    match = _ENGINE_NAME.fullmatch(name)
    return None if match is None else (match[1], match[2], int(match[3] or 1))
