"""An engine's process ends in mid run, and another one answers in its place.

Theory of operation. What the gateway would have seen, in its order. Connections break first: a request that no byte came of is a
failed attempt, which the kernel may send elsewhere; one whose stream had begun is broken off and over; a load call in hand has
failed. Then the replica is down. Meanwhile nothing is sampled there and no probe answers. After ``down`` ns another process
answers: another start, no adapter registered, empty tiers, its own memory.

All of it is noticed at once, where a live gateway needs up to a look at the engine (a second) to know that one is down.

A part of ``VirtualFleet``, and at home in its books; apart from it because few runs need it.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from loraledger import events as ev
from loraledger.replay.fleet.observation import Probe
from loraledger.replay.fleet.replica import Replica
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin

GONE: Final = "the replica closed the connection"


def restart(fleet: VirtualFleet, name: str, down: int, profile: TwinProfile | None = None) -> None:
    """The process of replica ``name`` ends at ``fleet.now``; the next one answers ``down`` ns later, with ``profile`` if given.

    Call it from ``VirtualFleet.at``. One that is down already is left alone. Raises ``ValueError`` for a ``down`` below 1.
    """
    if down < 1:
        raise ValueError(f"down is {down} ns: must be at least 1")
    replica = fleet.replicas[name]
    if not replica.up:
        return
    replica.up = False
    replica.profile = profile or replica.profile
    replica.twin = ReplicaTwin(replica.profile)
    replica.probe = replica.scraped = replica.watched = None
    for key in [key for key in fleet._loads if key[0] == name]:
        command, _ = fleet._loads.pop(key)
        fleet.conductor.feed(ev.CommandFailed(fleet.now, command, GONE, permanent=False))
    _break_off(fleet, replica)
    fleet.conductor.feed(ev.ReplicaDown(fleet.now, name, GONE))
    fleet.at(fleet.now + down, partial(_answer, fleet, replica))


def _break_off(fleet: VirtualFleet, replica: Replica) -> None:
    """Whatever was in flight there ends, or is tried elsewhere."""
    state, feed, now = fleet.conductor.fleet.state, fleet.conductor.feed, fleet.now
    for key in list(state.replicas[replica.name].in_flight):
        replica.open -= 1
        request = state.requests[key]
        if request.phase == "streaming":
            first = fleet._first_token[key]
            fleet._over(key, "upstream_reset", GONE)
            measured = ev.Measured(first, first, first_answer=first)
            feed(ev.RequestFinished(now, key, "upstream_reset", 200, GONE, measured))
        else:
            feed(ev.AttemptFailed(now, key, request.attempt, "upstream_failed", None, GONE))


def _answer(fleet: VirtualFleet, replica: Replica) -> None:
    """The next process is there."""
    replica.up = True
    if (
        fleet.observation.probe
    ):  # before the kernel hears of it: what waited is sent there at once, and the probe sees it come
        replica.probe = Probe(replica.name, replica.profile, fleet.observation.probe_delay, replica.sizes)
    fleet.conductor.feed(ev.ReplicaUp(fleet.now, replica.name, fleet.now, ()))
    if replica.probe is not None:
        fleet.begin_probe(replica, replica.probe)
