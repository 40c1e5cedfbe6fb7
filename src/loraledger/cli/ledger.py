"""``loraledger ledger``: the three accounts of each replica of the running gateway, and which of them limits it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from loraledger.cli.ask import ask_gateway
from loraledger.cli.options import ConfigOption, JsonOption
from loraledger.cli.output import print_json
from loraledger.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Item = dict[str, Any]
SHOWN = 12
"""Adapters of a replica that a table shows; ``--json`` has all."""


def ledger(
    replica: Annotated[str | None, typer.Option("--replica", "-r", help="Only this one.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew every two seconds until Ctrl-C.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where each replica's memory went: base floor, adapters, KV cache; what limits it, and what would help.

    A figure's source is marked: ``~`` believed, ``=`` configured, none observed; ``-`` is unknown, never zero.
    """
    if as_json and watch:
        raise typer.BadParameter("--json prints one document: leave out --watch")
    if as_json:
        print_json("ledger", _ask(replica, config))
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    if not watch:
        console.print(_shown(_ask(replica, config)))
        return
    import time

    if not console.is_terminal:
        while True:
            console.print(_shown(_ask(replica, config)))
            time.sleep(2.0)
    with Live(_shown(_ask(replica, config)), console=console, screen=True) as live:
        while True:
            time.sleep(2.0)
            live.update(_shown(_ask(replica, config)))


def _ask(replica: str | None, config: Path | None) -> list[Item]:
    path = "ledger" if replica is None else f"ledger?replica={quote(replica, safe='')}"
    found: list[Item] = ask_gateway("GET", path, config)["ledger"]
    return found


def _shown(ledgers: list[Item]) -> RenderableType:
    from rich.console import Group

    return Group(*(part for item in ledgers for part in _replica(item)))


def _replica(item: Item) -> list[RenderableType]:
    from rich.text import Text

    limit = item["limit"]
    also = f", also {', '.join(limit['also'])}" if limit["also"] else ""
    words = {"none": "no pool limits", "unknown": "which pool limits is not known"}
    head = words.get(limit["pool"], f"limited by {limit['pool']}{also}")
    if not item["up"]:
        return [
            Text(f"{item['replica']}: down, what follows is of its settings", style="bold"),
            _memory(item),
            Text(""),
        ]
    parts: list[RenderableType] = [Text(f"{item['replica']}: {head}", style="bold")]
    parts += [Text(f"  {evidence['pool']}: {evidence['statement']}") for evidence in limit["evidence"]]
    parts += [Text(f"  helps: {_lever(lever)}") for lever in limit["levers"]]
    parts += [Text(f"  not known, so not ruled out: {unknown}") for unknown in limit["unknown"]]
    if any(unknown.startswith("floor") for unknown in limit["unknown"]):
        parts.append(
            Text("  the probe tells, or base.path, replicas[].device_bytes and replicas[].overhead in the settings")
        )
    parts += [_memory(item), _adapters(item["adapters"]), Text("")]
    return parts


def _lever(lever: Item) -> str:
    return f"{lever['name']}: {lever['statement']}"


def _memory(item: Item) -> RenderableType:
    floor, adapters, kv = item["floor"], item["adapters"], item["kv"]
    table = _table("account", "size", "of it", right=("size",))
    slots = f"{_count(adapters['used'])} of {_count(adapters['slots'])} slots used"
    if adapters["padding"]["value"] is not None:
        slots += f", {_bytes(adapters['filled'])} of {_bytes(adapters['taken'])} filled"
    host = f"{_count(adapters['host_entries'])} of {_count(adapters['host_limit'])} host entries, {_bytes(adapters['host_bytes'])}"
    free = f"{_count(kv['blocks_free'])} of {_count(kv['blocks_total'])} blocks free"
    requests = f"{_count(kv['active_requests'])} running, {_count(kv['waiting_requests'])} waiting"
    pressure = f"{_rate(kv['preemptions'])} preemptions a minute, {_rate(kv['recomputed_tokens'])} tokens again"
    table.add_row(
        "floor", _bytes(floor["total"]), f"weights {_bytes(floor['weights'])}, engine {_bytes(floor['engine'])}"
    )
    table.add_row("adapters", _bytes(adapters["pool"]), slots)
    table.add_row("", "", f"{host}; store {_bytes(adapters['store_bytes'])}")
    table.add_row(
        "",
        "",
        f"{_rate(adapters['loads'])} loads, {_rate(adapters['activations'])} activations a minute{_times(adapters)}",
    )
    table.add_row("kv", _bytes(kv["bytes"]), f"{_count(kv['tokens'])} tokens, {free}; {requests}")
    table.add_row("", "", pressure)
    table.add_row("headroom", _bytes(item["headroom"]), f"to keep {_bytes(item['safety'])}")
    table.add_row("device", _bytes(item["device"]), "")
    return table


def _times(adapters: Item) -> str:
    found = [
        f"{tier} {_duration(each['p50'])} / {_duration(each['p90'])} (n {each['n']})"
        for tier, each in adapters["latencies"].items()
    ]
    return f"; from {', '.join(found)} p50 / p90" if found else ""


def _adapters(account: Item) -> RenderableType:
    table = _table(
        "adapter", "tier", "rank", "slot", "host", "disk", "req/s", right=("rank", "slot", "host", "disk", "req/s")
    )
    resident = [a for a in account["adapters"] if a["tier"] in ("gpu", "host")]
    for adapter in resident[:SHOWN]:
        notes = "".join(f" {word}" for word in ("pinned", "ghost") if adapter[word])
        mark = "~" if adapter["tier_source"] == "believed" else ""
        table.add_row(
            adapter["name"],
            f"{mark}{adapter['tier']}{notes}",
            "-" if adapter["rank"] is None else str(adapter["rank"]),
            _bytes(adapter["device"]),
            _bytes(adapter["host"]),
            _bytes(adapter["disk"]),
            "-" if adapter["rate"]["value"] is None else f"{adapter['rate']['value']:.2f}",
        )
    if len(resident) > SHOWN:
        table.add_row(f"and {len(resident) - SHOWN} more", "", "", "", "", "", "")
    return table


def _table(*columns: str, right: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.upper(), justify="right" if column in right else "left", overflow="fold")
    return table


def _marked(figure: Item, text: str) -> str:
    return f"{ {'believed': '~', 'configured': '='}.get(figure['source'], '') }{text}"


def _bytes(figure: Item) -> str:
    return "-" if figure["value"] is None else _marked(figure, format_bytes(int(figure["value"])))


def _count(figure: Item) -> str:
    return "-" if figure["value"] is None else _marked(figure, f"{figure['value']:,}")


def _rate(figure: Item) -> str:
    return "-" if figure["value"] is None else _marked(figure, f"{figure['value']:.1f}")


def _duration(figure: Item) -> str:
    return "-" if figure["value"] is None else format_duration(int(figure["value"]))
