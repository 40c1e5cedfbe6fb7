"""One configuration to replay a trace against: the fleet as the kernel is told of it, and the twins behind it."""

from __future__ import annotations

import msgspec

from loraledger.kernel.settings import FleetSettings
from loraledger.replay.fleet.observation import Observation
from loraledger.twin.profile import TwinProfile


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """``label`` is what tells it apart from its neighbours in a table, as in ``slots=16 policy=round-robin``.

    ``profiles``: the twin of each replica, by the replica's name.
    """

    label: str
    settings: FleetSettings
    profiles: dict[str, TwinProfile]
    observation: Observation = Observation()
    warnings: tuple[str, ...] = ()
    """What a reader should doubt: a profile of another engine version, a guessed KV block count."""
    speed: tuple[int, int] = (1, 1)
    """Arrival times are divided by this fraction before they are played: a matter of the trace, not of the fleet."""
    slot_bytes: dict[str, int] = {}
    """Device bytes of one slot of each replica, on all its rank processes; none where unknown."""
