"""One adapter on one replica: a state machine written as a table.

::

    absent --want--> wanted --start--> loading --done--> registered --forget--> evicting --done--> absent
                                         |                  |  ^
                                         +--fail--> parked  |  +-- seen (a listing shows the name)
                                                     |      +-- gone (a listing lacks it), lost (the replica went down)
                                                     +--want (its back-off is over)--> wanted

``registered`` means that the replica knows the name. Where the bytes are (slot, host, disk) is another fact, kept in the
replica's ``EngineTiers``: unloading forgets a name and leaves the bytes, a restart loses both.

An illegal step of our *own* raises ``ValueError``: the kernel is wrong. An *observed* contradiction (the engine lists what was
never loaded, or lacks what was) follows the table too, and is counted as drift by the caller.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["absent", "wanted", "loading", "registered", "evicting", "parked", "unknown"]
Trigger = Literal["want", "start", "done", "fail", "forget", "seen", "gone", "lost"]

TABLE: dict[tuple[State, Trigger], State] = {
    ("absent", "want"): "wanted",
    ("unknown", "want"): "wanted",
    ("parked", "want"): "wanted",
    ("registered", "want"): "wanted",  # verify again under a new name
    ("wanted", "start"): "loading",
    ("loading", "done"): "registered",
    ("loading", "fail"): "parked",
    ("registered", "forget"): "evicting",
    ("evicting", "done"): "absent",
    ("evicting", "fail"): "registered",
    # what a listing of the engine's names shows
    ("absent", "seen"): "registered",
    ("unknown", "seen"): "registered",
    ("registered", "seen"): "registered",
    ("wanted", "seen"): "registered",
    ("parked", "seen"): "registered",
    ("loading", "seen"): "loading",
    ("evicting", "seen"): "evicting",
    ("absent", "gone"): "absent",
    ("unknown", "gone"): "absent",
    ("registered", "gone"): "absent",
    ("wanted", "gone"): "wanted",
    ("parked", "gone"): "parked",
    ("loading", "gone"): "loading",
    ("evicting", "gone"): "absent",
    # the replica cannot be asked
    ("absent", "lost"): "unknown",
    ("unknown", "lost"): "unknown",
    ("registered", "lost"): "unknown",
    ("wanted", "lost"): "unknown",
    ("loading", "lost"): "unknown",
    ("evicting", "lost"): "unknown",
    ("parked", "lost"): "parked",
}


class Registration(msgspec.Struct):
    """What is known of one adapter on one replica. ``waiters`` are requests that wait for the load in hand."""

    state: State = "absent"
    engine_name: str = ""
    generation: int = 0
    since: int = 0
    command: int = 0
    started: int = 0
    expected: int = 0
    """How long the load in hand is expected to take, ns."""
    waiters: dict[str, None] = {}
    failures: int = 0
    retry_at: int = 0
    permanent: bool = False
    reason: str | None = None
    verified: int = 0
    """When an explicit load last proved that its files can be read there."""
    known: bool = False
    """Whether this kernel ever saw it used or loaded there: otherwise its tier is unknown, not ``disk``."""

    def step(self, trigger: Trigger, now: int) -> State:
        """Walk the table; returns the state before. Raises ``ValueError`` on an illegal pair."""
        before = self.state
        after = TABLE.get((before, trigger))
        if after is None:
            raise ValueError(f"adapter in state {before!r} cannot take {trigger!r}")
        if after != before:
            self.state = after
            self.since = now
        return before
