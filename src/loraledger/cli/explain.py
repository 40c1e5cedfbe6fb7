"""``loraledger explain``: why a request went where it went, and where its time was spent."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from loraledger.cli.options import ConfigOption, JsonOption, RecordOption, record_directory
from loraledger.cli.output import between, print_json, print_table, seconds
from loraledger.errors import ConfigError
from loraledger.record.tables import Row

TERMS = ("queue_s", "slot_wait_s", "prepare_s", "prefill_s", "externality_s", "cost_s")


def explain(
    request_id: Annotated[str, typer.Argument(help="The gateway's id of the request, or the client's X-Request-Id.")],
    record: RecordOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain one request: every decision taken for it with the best three candidates, each cost term in seconds."""
    from loraledger.conductor.reading import open_record

    with open_record(record_directory(record, config)) as reader:
        row = reader.request(request_id)
        if row is None:
            found = reader.requests({"client_id": request_id}, limit=1)
            if not found:
                raise ConfigError(f"the record has no request {request_id!r}: see `loraledger get requests`")
            row = found[0]
        decisions = reader.decisions_of(str(row["id"]))
    if as_json:
        items = [{**d, "candidates": json.loads(str(d["candidates"]))} for d in decisions]
        print_json("explanation", {"request": row, "decisions": items})
        return
    print_request(row)
    for decision in decisions:
        print()
        print_decision(decision)


def print_request(row: Row) -> None:
    """What is known of the request, a line a fact."""
    model = row["adapter"] or f"{row['base']} (base)"
    print(
        f"request {row['id']}: tenant {row['tenant']}, model {model}, on {row['replica'] or 'no replica'}: "
        f"{row['status'] or 'open'}"
    )
    spent = {
        "gateway queue": seconds(row["queued_ns"]),
        "load waited for": seconds(between(row, "load_start_ns", "load_end_ns")),
        "to first byte": seconds(between(row, "arrived_ns", "first_byte_ns")),
        "to first token": seconds(between(row, "arrived_ns", "first_token_ns")),
        "to the end": seconds(between(row, "arrived_ns", "finished_ns")),
    }
    print("  " + ", ".join(f"{what} {time} s" for what, time in spent.items() if time is not None))
    if row["reason"]:
        print(f"  reason: {row['reason']}")


def print_decision(decision: Row) -> None:
    """One decision: the reason, then its candidates with every term in seconds."""
    print(
        f"decision {decision['decision_id']} ({decision['policy']}): {decision['replica']}, {decision['reason']}; "
        f"{decision['considered']} considered"
    )
    candidates = json.loads(str(decision["candidates"]))
    print_table(
        ["replica", "tier", *(term.removesuffix("_s") for term in TERMS)],
        [[c["replica"], c["tier"], *(f"{c[term]:.3f}" for term in TERMS)] for c in candidates],
        right=[term.removesuffix("_s") for term in TERMS],
    )
