"""``loraledger change propose``: one variable, what it is to improve, what it must not harm, and by when.

Without ``--guard`` three guardrails are set, and the answer says so: nobody who forgets them changes a fleet without any. Two are
fixed; how much later the slowest first tokens may come is a tenth of what they take now, by the last hour of the record.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraledger.cli.change.asking import ask_changes
from loraledger.cli.change.options import (
    Limit,
    WhoOption,
    naming,
    read_limit,
    read_limits,
    read_share,
    read_time,
    read_value,
    unit_of,
    who_asks,
)
from loraledger.cli.options import ConfigOption, JsonOption, load_settings, usage
from loraledger.cli.output import print_json, printable
from loraledger.units import NS_PER_S

if TYPE_CHECKING:
    from loraledger.config import Loaded

_HOUR_NS: Final = 3600 * NS_PER_S
_PART: Final = 0.1
_FEW: Final = 100
"""Answered requests of the last hour that its 99th percentile needs."""
_USUAL_TTFT_S: Final = 0.1
"""Where the record does not tell: a tenth of the usual objective of 1 s."""

_Variable = Annotated[
    str,
    typer.Argument(
        metavar="VARIABLE",
        help="policy, policy.PARAM, pins, tenant.concurrency; slots, host_entries, replicas (engines are restarted).",
        show_default=False,
    ),
]
_From = Annotated[str, typer.Option("--from", metavar="V", help="The value that is in force.")]
_To = Annotated[
    str, typer.Option("--to", metavar="V", help="The value to try; pins: @FILE of `loraledger advise --pins`.")
]
_Target = Annotated[
    str, typer.Option("--target", metavar="METRIC:N", help="What is to get better by more than N, in its unit.")
]
_Guard = Annotated[
    list[str] | None,
    typer.Option("--guard", metavar="METRIC:N", help="What must not get worse by more than N; repeatable."),
]
_Share = Annotated[str, typer.Option("--share", metavar="PART", help="Of the tenants or replicas, that get it first.")]
_Within = Annotated[str, typer.Option("--within", metavar="TIME", help="By when the target has to be better.")]
_Block = Annotated[str, typer.Option("--block", metavar="TIME", help="Both parts are compared over blocks of this.")]
_Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="What the change is for.")]


def propose(
    variable: _Variable,
    before: _From,
    after: _To,
    target: _Target,
    why: _Why,
    guard: _Guard = None,
    share: _Share = "10%",
    within: _Within = "1h",
    block: _Block = "30s",
    who: WhoOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Propose one change. It goes nowhere before it was replayed.

    Exit code 2: an option cannot be; 4: no gateway answers; 5: another open change is in its way.
    """
    from loraledger.operate.change import check_variable

    with usage():
        asker = who_asks(who)
        with naming("VARIABLE"):
            check_variable(variable)
        values = {}
        for option, text in (("--from", before), ("--to", after)):
            with naming(option):
                values[option] = read_value(variable, text)
        with naming("--target"):
            wanted = read_limit(target)
        with naming("--guard"):
            rails = read_limits(guard or [])
        with naming("--share"):
            part = read_share(share)
        times = {}
        for option, text in (("--within", within), ("--block", block)):
            with naming(option):
                times[option] = read_time(text)
    loaded = load_settings(config)
    said: list[str] = []
    if not guard:
        rails, said = _usual(loaded, wanted)
    body = {
        "who": asker,
        "why": why,
        "variable": variable,
        "before": values["--from"],
        "after": values["--to"],
        "target": {"metric": wanted.metric, "least": wanted.amount},
        "guardrails": [{"metric": rail.metric, "worse_by": rail.amount} for rail in rails],
        "window_ns": times["--within"],
        "block_ns": times["--block"],
        "share": part,
    }
    _show(ask_changes("POST", "", config, body), said, as_json)


def _usual(loaded: Loaded, target: Limit) -> tuple[list[Limit], list[str]]:
    """The guardrails where none was given, and why so: all but the one that is the target, and what nobody would tell."""
    allowed, reason = _slower(loaded.settings.record.dir)
    usual = {
        "preemptions": (Limit("preemptions", 10.0), "KV preemptions are computed again"),
        "refused": (Limit("refused", 0.01), "one more of a hundred requests"),
        "ttft_p99": (Limit("ttft_p99", allowed), reason),
    }
    probed = all(replica.probe is not None for replica in loaded.settings.replicas)
    if not probed:
        del usual["preemptions"]
    usual.pop(target.metric, None)
    said = [
        f"guardrail {rail.metric}: worse by {rail.amount:g}{unit_of(rail.metric)} at most (default: {why})"
        for rail, why in usual.values()
    ]
    if not probed and target.metric != "preemptions":
        said.append("no guardrail on preemptions: it takes a probe in every engine, which tells them of each request")
    return [rail for rail, _ in usual.values()], said


def _slower(record: Path) -> tuple[float, str]:
    """How much later the slowest first tokens may come, in s, and the reason."""
    p99 = _p99(record)
    if p99 is None:
        return _USUAL_TTFT_S, "a tenth of an objective of 1 s; the record's last hour has too few requests to go by"
    return float(f"{p99 * _PART:.2g}"), f"a tenth of {p99:.3f} s, the p99 of the record's last hour"


def _p99(record: Path) -> float | None:
    from loraledger.conductor.reading import open_record
    from loraledger.errors import LedgerError

    if not record.is_dir():
        return None
    try:
        with open_record(record) as reader:
            (row,) = reader.query(
                "FROM requests SELECT count(*) AS n, quantile_cont((first_token_ns - arrived_ns) / 1e9, 0.99) AS p99 "
                "WHERE first_token_ns IS NOT NULL AND arrived_ns >= ?",
                [time.time_ns() - _HOUR_NS],
            )
    except LedgerError:
        return None  # then it is said that the record does not tell
    n, p99 = row["n"], row["p99"]
    return p99 if isinstance(n, int) and n >= _FEW and isinstance(p99, float) else None


def _show(answer: dict[str, object], said: list[str], as_json: bool) -> None:
    import msgspec

    from loraledger.cli.change.shown import aims, change_of, headline, sentences

    change = change_of(answer)
    if as_json:
        print_json("change", {"change": msgspec.to_builtins(change), "defaults": said})
        return
    print(printable(headline(change)))
    sentences(aims(change))
    sentences(said)
    print(f"\nnow: loraledger change replay {change.id} --trace FILE --profile FILE")
    sys.stdout.flush()
