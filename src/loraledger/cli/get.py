"""``loraledger get``: what the record and a running gateway know."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from loraledger.cli.ask import ask_gateway
from loraledger.cli.options import ConfigOption, JsonOption, RecordOption, record_directory
from loraledger.cli.output import between, print_json, print_table, seconds
from loraledger.errors import TargetError
from loraledger.record.tables import Row

app = typer.Typer(
    help="List requests and decisions of the record; replicas, adapters and tenants of a running gateway.",
    no_args_is_help=True,
)
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, help="How many of the newest.")]


@app.command("requests")
def requests(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Only for this adapter.")] = None,
    status: Annotated[str | None, typer.Option(help="Only with this status.")] = None,
    limit: LimitOption = 20,
    record: RecordOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """The newest requests, one row each."""
    from loraledger.conductor.reading import open_record

    where = {"tenant": tenant, "adapter": adapter, "status": status}
    with open_record(record_directory(record, config)) as reader:
        rows = reader.requests({k: v for k, v in where.items() if v is not None}, limit=limit)
    if as_json:
        print_json("requests", rows)
        return
    columns = [
        "id",
        "arrived",
        "tenant",
        "adapter",
        "replica",
        "hit",
        "queued",
        "load",
        "ttft",
        "total",
        "tokens",
        "status",
    ]
    print_table(columns, [_request_line(row) for row in rows], right=["queued", "load", "ttft", "total", "tokens"])


@app.command("decisions")
def decisions(
    request: Annotated[str | None, typer.Option(help="Only for this request.")] = None,
    limit: LimitOption = 20,
    record: RecordOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """The newest routing decisions."""
    from loraledger.conductor.reading import open_record

    with open_record(record_directory(record, config)) as reader:
        rows = reader.rows("decisions", {} if request is None else {"request_id": request}, limit=limit)
    if as_json:
        print_json("decisions", rows)
        return
    columns = ["decision", "at", "request", "adapter", "replica", "policy", "reason"]
    lines = [
        [r["decision_id"], _clock(r["at_ns"]), r["request_id"], r["adapter"], r["replica"], r["policy"], r["reason"]]
        for r in rows
    ]
    print_table(columns, lines, right=["decision"])


@app.command("replicas")
def replicas(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """The replicas of the running gateway: load, slots, KV, each with its source."""
    items = _from_gateway("replicas", config)
    if as_json:
        print_json("replicas", items)
        return
    columns = ["name", "state", "in flight", "running", "waiting", "kv", "slots used", "reason"]
    lines = [
        [
            item["name"],
            "down" if not item["up"] else "draining" if item["draining"] else "up",
            _value(item["in_flight"]),
            _value(item["running"]),
            _value(item["waiting"]),
            _share(item["kv_usage"]),
            f"{_shown(item['slots_used'])}/{_shown(item['slots'])}",
            item["reason"],
        ]
        for item in items
    ]
    print_table(columns, lines)


@app.command("adapters")
def adapters(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """The adapters of the running gateway and where they are ready."""
    items = _from_gateway("adapters", config)
    if as_json:
        print_json("adapters", items)
        return
    columns = ["name", "rank", "bytes", "ready", "parked"]
    lines = [[i["name"], i["rank"], i["bytes"], i["ready"], (i.get("parked") or {}).get("reason")] for i in items]
    print_table(columns, lines, right=["rank", "bytes"])


@app.command("tenants")
def tenants(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """The tenants of the running gateway and what they have in flight and queued."""
    items = _from_gateway("tenants", config)
    if as_json:
        print_json("tenants", items)
        return
    columns = list(items[0]) if items else ["name"]
    print_table(columns, [[_value(item[column]) for column in columns] for item in items])


def _from_gateway(what: str, config: Path | None) -> list[dict[str, Any]]:
    """A list of the control plane. Raises ``TargetError`` when no gateway answers."""
    items = ask_gateway("GET", what, config).get(what)
    if not isinstance(items, list):
        raise TargetError("what answers is not a gateway's control plane: correct control.port")
    return items


def _value(figure: object) -> object:
    return figure.get("value") if isinstance(figure, dict) else figure


def _share(figure: object) -> str | None:
    from loraledger.cli.signals.shown import share

    value = _value(figure)
    return share(value) if isinstance(value, int | float) else None


def _shown(figure: object) -> object:
    value = _value(figure)
    return "-" if value is None else value


def _clock(ns: object) -> str | None:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%H:%M:%S.%f")[:-3] if isinstance(ns, int) else None


def _request_line(row: Row) -> list[object]:
    return [
        row["id"],
        _clock(row["arrived_ns"]),
        row["tenant"],
        row["adapter"] or "(base)",
        row["replica"],
        row["hit_class"],
        seconds(row["queued_ns"]),
        seconds(between(row, "load_start_ns", "load_end_ns")),
        seconds(between(row, "arrived_ns", "first_token_ns")),
        seconds(between(row, "arrived_ns", "finished_ns")),
        row["generated_tokens"],
        row["status"] or "open",
    ]
