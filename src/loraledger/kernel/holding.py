"""What one tenant holds of one replica: counted in ``fairness``, and bounded there."""

from __future__ import annotations

import msgspec


class Holding(msgspec.Struct):
    """Of its requests in flight: seats, and streams among them; tokens of KV, and of prompts whose first token has not come."""

    seats: int = 0
    prompt: int = 0
    kv: int = 0
    drained: int = 0
    """When the prompts of its whole answers are reckoned to be through, ns."""
    whole: int = 0
    """What those in flight are reckoned to take together, ns."""
    streams: int = 0
