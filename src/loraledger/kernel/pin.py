"""One adapter that a replica's residency ranking would have pinned: plain data of the kernel's state."""

from __future__ import annotations

import msgspec


class Pin(msgspec.Struct):
    """How far it has come. ``ranked``: the settings name it; one that they no longer do is unpinned and forgotten."""

    ranked: bool = True
    engine_name: str = ""
    """Under which it was sent for to be pinned, and may be; empty: not by this gateway."""
    command: int = 0
    """The pin or unpin under way; 0: none."""
    leaving: bool = False
    """The command is an unpin."""
    since: int = 0
    """When the last command was sent or ended."""
    lost: int = 0
    """When it was found to be gone; 0: it was not, since it was last asked for."""
    failures: int = 0
    retry_at: int = 0
    reason: str | None = None
    """Why it is not pinned, as last told."""
