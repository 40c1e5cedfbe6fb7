"""The requests of the last week's busiest hour, one by one: what gains, bursts and oddities are worked out on.

Theory of operation. Counts over weeks do not say what followed what. The busiest hour does, and it is the hour that slots are
bought for. It is read request by request, in order of arrival, up to ``LIMIT`` of them: what comes later is left out and the
window says where it ends. An id that comes twice (a crash of the gateway can double a row) counts once.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.signals.durations import parted
from loraledger.signals.figures import Version, Window
from loraledger.signals.scope import Scope, bounds, maybe_float, whole, with_

LIMIT: Final = 200_000
"""Requests that are read at most: some 200 MB while they are read, and a few seconds for all that is worked out on them."""
MINUTE_NS: Final = 60 * 10**9

_REQUESTS: Final = """
SELECT tenant, adapter, replica, class, access, arrived_ns, dispatched_ns, first_token_ns, last_token_ns, finished_ns,
    prompt_tokens, preemptions, ttft, CASE WHEN prepared = 1 THEN cut_2 - cut_1 + cut_4 - cut_3 END AS preparation,
    queued + engine_queue AS queue
FROM parted WHERE ours = 1 AND back = 0
ORDER BY arrived_ns, first_token_ns, replica, tenant, adapter LIMIT $limit
"""
_KV: Final = """
SELECT replica, at_ns - at_ns % $minute_ns AS minute, MAX(kv_usage) AS usage FROM samples
WHERE at_ns >= $since AND at_ns < $until AND kv_usage IS NOT NULL GROUP BY replica, at_ns - at_ns % $minute_ns
"""


class Seen(msgspec.Struct, frozen=True, gc=False):
    """One request: columns as in ``durations.parted``, times in ns. ``preparation``: ``None`` where nobody told it."""

    tenant: str | None
    adapter: str | None
    replica: str | None
    hit_class: str = msgspec.field(name="class")
    access: str
    arrived_ns: int
    dispatched_ns: int | None
    first_token_ns: int | None
    last_token_ns: int | None
    finished_ns: int | None
    prompt_tokens: int | None
    preemptions: int | None
    ttft: int | None
    preparation: int | None
    queue: int
    """In the gateway's queue and the engine's, as far as that is known."""

    @property
    def hit(self) -> bool:
        """Its adapter was in a slot when the kernel decided."""
        return self.adapter is not None and self.hit_class == "gpu"

    @property
    def miss(self) -> bool:
        """It was somewhere else, as far as that is known."""
        return self.adapter is not None and self.hit_class in ("host", "disk", "remote")

    @property
    def ended_ns(self) -> int | None:
        """When it left its replica."""
        return self.finished_ns if self.finished_ns is not None else self.last_token_ns


class Sample(msgspec.Struct, frozen=True):
    """What was read. ``kv``: the most KV in use, as a share, by replica and beginning of a minute."""

    window: Window
    cut: bool
    """The window is shorter than what was asked for."""
    seen: list[Seen]
    kv: dict[tuple[str, int], float]


def read_sample(reader: RecordReader, window: Window, version: Version | None) -> Sample:
    """The requests that arrived in ``window``, in order of arrival; those whose clock went back are left out."""
    scope = Scope(window, once=True, version=version)
    rows = reader.query(with_(parted(scope), _REQUESTS), scope.parameters(limit=LIMIT + 1))
    cut = len(rows) > LIMIT
    if cut:
        window = Window(window.since_ns, max(window.since_ns + 1, whole(rows[LIMIT]["arrived_ns"])))
        del rows[LIMIT:]
    usage = reader.query(_KV, bounds(window) | {"minute_ns": MINUTE_NS})
    kv = {(str(row["replica"]), whole(row["minute"])): maybe_float(row["usage"]) or 0.0 for row in usage}
    return Sample(window, cut, [msgspec.convert(row, Seen) for row in rows], kv)
