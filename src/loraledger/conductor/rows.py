"""The columns of a row: what the boundary measured, what the kernel decided, and what the engine's probe told.

**Where the time to the first token went.** From the first byte of the request to the first token of the answer:

    gateway (queue and load waited for) + engine queue + stall (loads and activations) + prefill + unattributed

vLLM books loads and activations as prefill time (they run inside its step), so they are taken out of it. What is left over is
the network, the edge, rounding, tokens that are no text yet, and the wait for the engine to end the step in hand: only then does
it see a request and begin to count (up to a step). It is a column of its own and never spread over the others.
"""

from __future__ import annotations

import msgspec

from loraledger import events as ev
from loraledger.record.tables import Row


class OpenRow(msgspec.Struct):
    """A request that has not ended. Times in ns since the epoch; ``queued`` is what it spent in the gateway queue so far."""

    id: str
    client_id: str | None
    tenant: str
    adapter: str | None
    arrived: int
    stream: bool
    path: str
    predicted: int
    queue_since: int | None = None
    queued: int | None = None
    load_on: str | None = None
    load_start: int | None = None
    load_end: int | None = None
    dispatched: int | None = None
    attempt: int = 0
    replica: str | None = None
    decision: ev.Decision | None = None
    digest: str | None = None
    """Of the files that answer it: an adapter may get new ones while it runs."""
    engine: ev.EngineFinished | None = None
    """How it went inside its engine, where a probe tells."""
    change: str | None = None
    """What was being tried on its tenant when it came."""
    replica_change: str | None = None
    """What was being tried on the replica when it was sent there."""
    first_token: int | None = None
    """As the boundary told it when it came; what was measured takes its place at the end."""


class ReplicaView(msgspec.Struct):
    """What the fold must know of one replica to write its samples and its requests' rows."""

    version: str | None = None
    process_start: int | None = None
    in_flight: int = 0
    at_mark: int = 0
    mark: int = 0
    slots: dict[str, None] = {}
    probed: bool = False
    """A probe inside the engine answers: it will tell how each request went there."""
    steps: ev.StepsObserved | None = None
    """The last steps that it told of."""


class Tried(msgspec.Struct):
    """On whom a change is being tried: ``members`` are tenants or replicas, by ``unit``."""

    unit: str
    members: dict[str, None]


def tried_on(changes: dict[str, Tried], unit: str, name: str) -> str | None:
    """The change that is being tried on ``name``, the last that was set."""
    for change, tried in reversed(changes.items()):
        if tried.unit == unit and name in tried.members:
            return change
    return None


LARGEST = 2**60
"""Sums stay below what the record can hold, whatever an engine says."""


class Closed(msgspec.Struct):
    """A request that ended and whose row waits for what the engine's probe will tell of it."""

    row: OpenRow
    measured: ev.Measured
    status: ev.Status
    http_status: int | None
    reason: str | None
    finished: int


def add_steps(view: ReplicaView, event: ev.StepsObserved) -> None:
    """Sum up what was told since the last sample."""
    before = view.steps
    if before is None:
        view.steps = event
        return
    names = before.blocked.keys() | event.blocked.keys()
    view.steps = ev.StepsObserved(
        event.at,
        event.replica,
        min(before.steps + event.steps, LARGEST),
        min(before.tokens + event.tokens, LARGEST),
        min(before.took + event.took, LARGEST),
        min(before.preempted + event.preempted, LARGEST),
        min(before.recomputed + event.recomputed, LARGEST),
        {name: max(before.blocked.get(name, 0), event.blocked.get(name, 0)) for name in sorted(names)},
        event.adapters,
        event.kv_free,
    )


def request_columns(row: OpenRow, measured: ev.Measured) -> Row:
    """The columns of table ``requests`` that the request itself determines."""
    decision, sketch = row.decision, measured.itl_sketch
    return {
        "id": row.id,
        "client_id": row.client_id,
        "tenant": row.tenant,
        "adapter": row.adapter,
        "digest": row.digest,
        "policy": decision.policy if decision is not None else None,
        "decision_id": decision.id if decision is not None else None,
        "hit_class": decision.hit_class if decision is not None else None,
        "hit_source": decision.hit_source if decision is not None else None,
        "arrived_ns": row.arrived,
        "queued_ns": row.queued,
        "dispatched_ns": row.dispatched,
        "load_start_ns": row.load_start,
        "load_end_ns": row.load_end,
        "first_byte_ns": measured.first_byte,
        "first_token_ns": row.first_token if measured.first_token is None else measured.first_token,
        "first_answer_ns": measured.first_answer,
        "last_token_ns": measured.last_token,
        "itl_mean_ns": measured.itl_mean,
        "itl_max_ns": measured.itl_max,
        "itl_sketch": msgspec.json.encode(sketch).decode() if sketch is not None else None,
        "prompt_tokens": measured.prompt_tokens,
        "generated_tokens": measured.generated_tokens,
        "cached_tokens": measured.cached_tokens,
        "predicted_prompt_tokens": row.predicted,
        "stream": row.stream,
        "retries": max(0, row.attempt - 1),
        "path": row.path,
        "change_id": row.change or row.replica_change,
        **(_engine_columns(row, measured, row.engine) if row.engine is not None else {}),
    }


def _engine_columns(row: OpenRow, measured: ev.Measured, engine: ev.EngineFinished) -> Row:
    """What only the engine knows. ``unattributed_ns`` is null unless every other part of the time to first token is known."""
    stall = engine.stall or 0
    own = None if engine.prefill is None else max(0, engine.prefill - stall)
    rest = None
    if measured.first_token is not None and row.dispatched is not None and own is not None and engine.queue is not None:
        rest = measured.first_token - row.dispatched - engine.queue - stall - own
    return {
        "engine_access": engine.access,
        "engine_queue_ns": engine.queue,
        "engine_stall_ns": engine.stall,
        "engine_load_ns": engine.load,
        "engine_activation_ns": engine.activation,
        "engine_prefill_ns": own,
        "engine_decode_ns": engine.decode,
        "unattributed_ns": rest,
        "preemptions": engine.preemptions,
        "cached_tokens": measured.cached_tokens if measured.cached_tokens is not None else engine.cached_tokens,
    }


def sample_row(event: ev.ReplicaSampled, view: ReplicaView) -> Row:
    """A row of table ``samples``."""
    foreign = None
    if event.running is not None and event.waiting is not None and event.scrape_start == view.mark:
        foreign = max(0, event.running + event.waiting - view.at_mark)
    return {
        "at_ns": event.at,
        "replica": event.replica,
        "up": True,
        "running": event.running,
        "waiting": event.waiting,
        "kv_usage": event.kv_usage,
        "kv_tokens": event.kv_tokens,
        "own_in_flight": view.in_flight,
        "foreign_in_flight": foreign,
        "slots_used_believed": len(view.slots),
        "process_start_ns": view.process_start,
        "scrape_start_ns": event.scrape_start,
        "age_ns": event.at - event.scrape_start,
        **_step_columns(view),
    }


def _step_columns(view: ReplicaView) -> Row:
    """What the probe said of the steps since the sample before."""
    steps = view.steps
    if not view.probed or steps is None:
        return {}
    return {
        "steps": steps.steps,
        "step_tokens": steps.tokens,
        "step_ns": steps.took,
        "preempted": steps.preempted,
        "recomputed_tokens": steps.recomputed,
        "blocked": sum(steps.blocked.values()),
        "distinct_adapters": steps.adapters,
        "kv_blocks_free": steps.kv_free,
    }
