"""The tables of the record: each column once, with its type and its meaning.

Theory of operation. Four tables, one row each for a request, a decision, a change of an adapter's residency, and a
replica sample. A row is a plain dict: it becomes a line of JSON in one call, and a column that is left out is null,
which means unknown or not applicable, never zero. Times (``*_ns`` that name a moment) are int64 nanoseconds since the
Unix epoch, durations int64 nanoseconds, so that queries need no time types and mean the same in any warehouse. What
nests is JSON text. Names are added, never reused: old Parquet files are read beside new ones, and a column that they
lack is null.

A table's ``time`` column says in which hourly partition a row lies; it is the one column that is never null.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple, get_args

from loraledger import events
from loraledger.errors import InternalError

Row = dict[str, object]
TableName = Literal["requests", "decisions", "residency", "samples"]


class Column(NamedTuple):
    """A column: DuckDB type, meaning with its unit, and for a closed list the values that it may take besides null."""

    name: str
    type: Literal["BIGINT", "DOUBLE", "BOOLEAN", "VARCHAR"]
    doc: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table: its columns in order, and the one whose hour (UTC) names the partition."""

    name: TableName
    time: str
    columns: tuple[Column, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all columns."""
        return frozenset(column.name for column in self.columns)

    @cached_property
    def closed(self) -> tuple[Column, ...]:
        """The columns whose values are a closed list."""
        return tuple(column for column in self.columns if column.values)


TIERS: Final = get_args(events.Tier)
HIT_CLASSES: Final = get_args(events.HitClass)
SOURCES: Final = get_args(events.Source)
STATUSES: Final = get_args(events.Status)

_REQUESTS: Final = Table(
    "requests",
    "arrived_ns",
    (
        Column("id", "VARCHAR", "The gateway's own id of the request."),
        Column("client_id", "VARCHAR", "The client's X-Request-Id; null when it sent none."),
        Column("tenant", "VARCHAR", "Whose key the request carried."),
        Column("adapter", "VARCHAR", "Public name of the adapter; null for the base model."),
        Column("digest", "VARCHAR", "Content digest of the adapter's files; null for the base model."),
        Column("base", "VARCHAR", "Name of the base model."),
        Column("replica", "VARCHAR", "Replica of the last attempt; null when none was chosen."),
        Column("policy", "VARCHAR", "Routing policy that chose the replica."),
        Column("decision_id", "BIGINT", "The last decision, in table decisions; null when none was taken."),
        Column("hit_class", "VARCHAR", "Tier of the adapter on the replica when the kernel decided.", HIT_CLASSES),
        Column("hit_source", "VARCHAR", "Where the hit class comes from.", SOURCES),
        Column("engine_access", "VARCHAR", "Tier that the engine itself found; null without its probe.", HIT_CLASSES),
        Column(
            "engine_queue_ns",
            "BIGINT",
            "Time in the engine queue, the wait for a slot included, in ns; null without the probe.",
        ),
        Column(
            "engine_stall_ns",
            "BIGINT",
            "Loads and activations, in ns, in the step that first computed it; others' included.",
        ),
        Column("engine_load_ns", "BIGINT", "Of these, its own adapter's read from disk into the host cache, in ns."),
        Column("engine_activation_ns", "BIGINT", "Of these, its own adapter's copy into a slot, in ns."),
        Column("engine_prefill_ns", "BIGINT", "Prefill in the engine, in ns, without the stall that vLLM books there."),
        Column("engine_decode_ns", "BIGINT", "From first to last token in the engine, in ns."),
        Column(
            "unattributed_ns",
            "BIGINT",
            "What is left of the time from dispatch to first token, in ns; null unless all other parts are known.",
        ),
        Column("preemptions", "BIGINT", "How often the engine took its KV blocks away and computed it again."),
        Column("arrived_ns", "BIGINT", "When the request's first byte came."),
        Column("queued_ns", "BIGINT", "Time in the gateway queue, a duration in ns; null when it was not queued."),
        Column("dispatched_ns", "BIGINT", "When the last attempt was handed to its replica's connection."),
        Column(
            "load_start_ns", "BIGINT", "When the load that this request waited for began; null when it waited for none."
        ),
        Column("load_end_ns", "BIGINT", "When that load ended."),
        Column("first_byte_ns", "BIGINT", "When the first byte of the answer came."),
        Column("first_token_ns", "BIGINT", "When the first generated content came, on any channel."),
        Column(
            "first_answer_ns", "BIGINT", "When the first text of the answer itself came: no reasoning, no tool call."
        ),
        Column("last_token_ns", "BIGINT", "When the last generated content came."),
        Column("finished_ns", "BIGINT", "When the answer ended, well or not; null when the gateway died first."),
        Column("itl_mean_ns", "BIGINT", "Mean time between tokens, a duration in ns; null with fewer than two tokens."),
        Column("itl_max_ns", "BIGINT", "Longest time between two tokens, a duration in ns."),
        Column("itl_sketch", "VARCHAR", "Times between tokens in ns: JSON object of log-bucket index to count."),
        Column("prompt_tokens", "BIGINT", "Prompt tokens that the engine counted."),
        Column("generated_tokens", "BIGINT", "Tokens that the engine generated."),
        Column("cached_tokens", "BIGINT", "Prompt tokens that the engine took from its prefix cache."),
        Column(
            "predicted_prompt_tokens", "BIGINT", "Prompt tokens estimated at admission, to be held against the count."
        ),
        Column("status", "VARCHAR", "How the request ended.", STATUSES),
        Column("http_status", "BIGINT", "HTTP status that the client got; null when it got none."),
        Column("reason", "VARCHAR", "Machine-readable reason of an end other than ok."),
        Column("stream", "BOOLEAN", "Whether the client asked for a streamed answer."),
        Column("retries", "BIGINT", "Attempts beyond the first."),
        Column("path", "VARCHAR", "Path that was called, without a query string."),
        Column("engine_version", "VARCHAR", "Version that the replica's engine reported."),
        Column("config_digest", "VARCHAR", "Digest of the settings in force."),
        Column("change_id", "VARCHAR", "The rollout that the request was part of; null outside of one."),
        Column("gateway_version", "VARCHAR", "Version of the gateway."),
    ),
)

_DECISIONS: Final = Table(
    "decisions",
    "at_ns",
    (
        Column("decision_id", "BIGINT", "Number of the decision, rising."),
        Column("request_id", "VARCHAR", "The request that it was taken for."),
        Column("at_ns", "BIGINT", "When it was taken."),
        Column("policy", "VARCHAR", "Routing policy that took it."),
        Column("replica", "VARCHAR", "The replica chosen; null when none could be."),
        Column("adapter", "VARCHAR", "Public name of the adapter; null for the base model."),
        Column("reason", "VARCHAR", "Why this replica, or why none: one of the policy's reasons."),
        Column(
            "candidates", "VARCHAR", "The best three candidates, chosen one first, each cost term in s: JSON array."
        ),
        Column("considered", "BIGINT", "How many replicas were candidates."),
    ),
)

_RESIDENCY: Final = Table(
    "residency",
    "at_ns",
    (
        Column("at_ns", "BIGINT", "When the change was made or noticed."),
        Column("replica", "VARCHAR", "Where."),
        Column("adapter", "VARCHAR", "Public name of the adapter; null when the engine-side name is not ours."),
        Column("digest", "VARCHAR", "Content digest of its files."),
        Column("engine_name", "VARCHAR", "Versioned name under which the replica knows it."),
        Column("from_state", "VARCHAR", "State before, in the kernel's residency table."),
        Column("to_state", "VARCHAR", "State after."),
        Column("tier_before", "VARCHAR", "Tier before the change.", TIERS),
        Column("tier_after", "VARCHAR", "Tier after it.", TIERS),
        Column("cause", "VARCHAR", "What brought it about: a request, a command, an eviction, a restart, ..."),
        Column("source", "VARCHAR", "Whether the engine said so or the gateway concluded it.", SOURCES),
        Column("took_ns", "BIGINT", "Duration of the load or activation, in ns; null when it was not timed."),
        Column("bytes", "BIGINT", "Bytes that were moved."),
    ),
)

_SAMPLES: Final = Table(
    "samples",
    "at_ns",
    (
        Column("at_ns", "BIGINT", "When the sample reached the gateway."),
        Column("replica", "VARCHAR", "Whose sample."),
        Column("up", "BOOLEAN", "Whether the engine answered; the other figures are null when it did not."),
        Column("running", "BIGINT", "Requests in the engine's batch."),
        Column("waiting", "BIGINT", "Requests in the engine queue."),
        Column("kv_usage", "DOUBLE", "Share of KV blocks in use, 0 to 1."),
        Column("kv_tokens", "BIGINT", "Capacity of the KV cache, in tokens."),
        Column("own_in_flight", "BIGINT", "Requests of this gateway that were in flight there."),
        Column("foreign_in_flight", "BIGINT", "Requests there that this gateway did not send."),
        Column("slots_used_believed", "BIGINT", "Adapter slots in use, as the gateway believes."),
        Column("process_start_ns", "BIGINT", "When the engine process started; a new value means a restart."),
        Column("scrape_start_ns", "BIGINT", "When the scrape began: what was sent later is not in its figures."),
        Column("age_ns", "BIGINT", "How old the figures were at at_ns, a duration in ns."),
        Column(
            "steps", "BIGINT", "Engine steps since the last sample, by the probe; null without it, as all that follow."
        ),
        Column("step_tokens", "BIGINT", "Tokens that these steps computed."),
        Column("step_ns", "BIGINT", "Time that they took, a duration in ns."),
        Column("preempted", "BIGINT", "Preemptions in these steps."),
        Column("recomputed_tokens", "BIGINT", "Tokens computed again after a preemption."),
        Column("blocked", "BIGINT", "Most requests that waited for a slot in one of these steps."),
        Column("distinct_adapters", "BIGINT", "Distinct adapters in the last step's batch."),
        Column("kv_blocks_free", "BIGINT", "Free KV blocks after the last step."),
    ),
)

TABLES: Final[dict[TableName, Table]] = {table.name: table for table in (_REQUESTS, _DECISIONS, _RESIDENCY, _SAMPLES)}


def check(table: Table, row: Row) -> int:
    """The time of ``row`` in ns, after checking it.

    Raises InternalError for a missing time, for a column that the table lacks, and for a value outside a closed list:
    read back from JSON, the first two would be lost without a word.
    """
    at = row.get(table.time)
    if not isinstance(at, int):
        raise InternalError(f"a row of {table.name} needs {table.time}, an integer in ns; it has {at!r}")
    if unknown := row.keys() - table.names:
        raise InternalError(f"{table.name} has no column {', '.join(sorted(unknown))}")
    for column in table.closed:
        if (value := row.get(column.name)) is not None and value not in column.values:
            raise InternalError(
                f"{table.name}.{column.name} cannot be {value!r}; it is one of {', '.join(column.values)}"
            )
    return at
