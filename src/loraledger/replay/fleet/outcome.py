"""What one replayed run came to, beside its record files: the part that rows do not hold.

A run is a folder: ``record/`` in the live record's schema and layout, and ``run.json``, which is this.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from loraledger.replay.fleet.observation import Observation

RUN_FILE: Final = "run.json"
RECORD_FOLDER: Final = "record"


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """Whether arrivals outran service. ``saturated``: figures of waiting say how long the trace is, not how good the fleet is;
    ``None``: too short to tell. Rates are ``None`` when everything arrived at one instant."""

    saturated: bool | None
    offered_per_s: float | None
    """Arrivals over the trace's span."""
    served_per_s: float | None
    """Requests that ended over the same span, while arrivals went on."""
    backlog: int
    """Requests that were open when the last one arrived."""
    reason: str
    """One sentence for a person, with the numbers that it rests on."""


class ReplicaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The twin's own truth of one replica over the run, which the kernel saw only through the observation model."""

    replica: str
    requests: int
    loads: int
    """Disk to host, explicit and implicit."""
    activations: int
    """Host to slot."""
    evictions_slot: int
    evictions_host: int
    preemptions: int
    load_ps: int
    """Time that the engine stood still for loads, in ps."""
    activation_ps: int
    kv_blocks: int
    kv_used_max: int
    """Most blocks in use at any scrape."""
    slots: int
    """0 where the layout has no fixed number of places (``unified``)."""
    host_entries: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``. Times in ns, virtual unless named ``wall``."""

    loraledger_run: Literal[1] = 1
    label: str
    trace: str
    """Digest of the trace."""
    policy: str
    scenario: str
    """Digest over settings, profiles and observation: equal digests of trace and scenario give equal record files."""
    observation: Observation
    requests: int
    open: int
    """Requests that had not ended when the run did."""
    ended: dict[str, int] = {}
    """Requests that ended, by how: ``ok``, or status and reason, as in ``client_error: too_long``."""
    dropped: dict[str, int] = {}
    """Rows of the trace that were dropped, by reason, because a flag allowed it."""
    start_ns: int
    simulated_ns: int
    last_arrival_ns: int
    """After the start."""
    clients: int | None = None
    """A closed loop of so many; ``None``: requests arrived when the trace says."""
    saturation: Saturation
    replicas: tuple[ReplicaCounts, ...]
    load_costs_ps: dict[str, int] = {}
    """What one load (disk to host) of each adapter that was used takes, by public name; the least if profiles differ."""
    activation_costs_ps: dict[str, int] = {}
    """The same for one activation."""
    warnings: tuple[str, ...] = ()
    record_digest: str | None = None
    """Of the record files (``record.parquet``)."""
    wall_s: float | None = None
    """Left out of comparisons: the only figures that differ between two equal runs."""
    kernel_share: float | None = None
    """Share of the CPU time that was spent in the kernel."""
