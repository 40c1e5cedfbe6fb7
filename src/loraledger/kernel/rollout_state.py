"""Changes that are being tried, or were accepted: plain data of the kernel's state. ``rollout`` has the rules."""

from __future__ import annotations

import msgspec

from loraledger.kernel.shares import Shares


class Rollout(msgspec.Struct):
    """One variable with another value than the settings give it. ``members``: for whom; ``None``: for everybody."""

    variable: str
    value: str
    """JSON."""
    members: tuple[str, ...] | None


class Books(msgspec.Struct):
    """What a policy keeps from one decision to the next, as the fields of the same names in ``FleetState``."""

    round_robin: int = 0
    shares: Shares | None = None
