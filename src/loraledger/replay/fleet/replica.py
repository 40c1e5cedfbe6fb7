"""One replica of a virtual fleet: its twin, what it counts, and what of it is on the way to the kernel."""

from __future__ import annotations

from loraledger import events as ev
from loraledger.replay.fleet.observation import PS_PER_NS, Observation, Probe
from loraledger.replay.fleet.outcome import ReplicaCounts
from loraledger.twin.events import Activated, Evicted, Loaded, Preempted, TwinEvent
from loraledger.twin.profile import TwinProfile
from loraledger.twin.replica import ReplicaTwin


class Replica:
    """State that ``VirtualFleet`` keeps of one replica.

    ``open``: requests that were sent and have not ended. ``reach``: tokens of a block of the trace if the twin can reuse these,
    else 0. ``sizes``: bytes of what was sent there, by engine-side name. ``watched``: when the twin is looked at next, ns.
    ``scraped``: a sample that was taken and has not arrived. ``up``: its process answers (``restart``).
    """

    __slots__ = (
        "activation_ps",
        "activations",
        "evictions_host",
        "evictions_slot",
        "kv_used_max",
        "load_ps",
        "loads",
        "name",
        "open",
        "preemptions",
        "probe",
        "profile",
        "reach",
        "requests",
        "scraped",
        "sizes",
        "twin",
        "up",
        "watched",
    )

    def __init__(self, name: str, profile: TwinProfile, observation: Observation, block_tokens: int | None) -> None:
        self.name = name
        self.up = True
        self.profile = profile
        self.twin = ReplicaTwin(profile)
        self.sizes: dict[str, int] = {}
        self.probe = Probe(name, profile, observation.probe_delay, self.sizes) if observation.probe else None
        own = profile.prefix_block_tokens or profile.block_size
        self.reach = own if profile.prefix_caching and own == block_tokens else 0
        self.watched: int | None = None
        self.scraped: ev.ReplicaSampled | None = None
        self.requests = self.open = self.loads = self.activations = self.evictions_slot = self.evictions_host = 0
        self.preemptions = self.load_ps = self.activation_ps = self.kv_used_max = 0

    def count(self, event: TwinEvent) -> None:
        """Take note of what moved."""
        match event:
            case Loaded():
                self.loads += 1
                self.load_ps += event.took
            case Activated():
                self.activations += 1
                self.activation_ps += event.took
            case Evicted(tier="gpu"):
                self.evictions_slot += 1
            case Evicted():
                self.evictions_host += 1
            case Preempted():
                self.preemptions += 1
            case _:
                pass

    def sample(self, now: int, seen: int) -> ev.ReplicaSampled:
        """What a scrape at ``now`` tells when it arrives at ``seen``, ns; the twin must have been advanced to ``now``."""
        sample, profile = self.twin.sample(now * PS_PER_NS), self.profile
        self.kv_used_max = max(self.kv_used_max, sample.kv_used_blocks)
        return ev.ReplicaSampled(
            seen,
            self.name,
            now,
            sample.running,
            sample.waiting,
            sample.kv_used_blocks / sample.kv_blocks,
            profile.kv_tokens,
            sample.active,
            None,
            profile.block_size,
            sample.preemptions,
        )

    def counts(self) -> ReplicaCounts:
        """What was counted so far."""
        places = self.profile.layout == "slots"
        return ReplicaCounts(
            replica=self.name,
            requests=self.requests,
            loads=self.loads,
            activations=self.activations,
            evictions_slot=self.evictions_slot,
            evictions_host=self.evictions_host,
            preemptions=self.preemptions,
            load_ps=self.load_ps,
            activation_ps=self.activation_ps,
            kv_blocks=self.profile.kv_blocks,
            kv_used_max=self.kv_used_max,
            slots=self.profile.slots if places else 0,
            host_entries=self.profile.host_entries if places else 0,
        )
