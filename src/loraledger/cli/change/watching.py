"""``loraledger change watch``: follows a rollout until it is accepted or taken back.

Theory of operation. The gateway watches; this only looks. So ending it ends nothing else, and a gateway that is killed meanwhile is
waited for: the rollout goes on in the next one, from the journal. On a terminal one line is drawn over and over; in a pipe each
change of state is a line. What it came to is the exit code.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraledger.cli.change.asking import ask_changes, path_of
from loraledger.cli.change.options import IdArgument
from loraledger.cli.options import ConfigOption, DurationType, JsonOption
from loraledger.cli.output import print_json, printable
from loraledger.errors import ObjectiveError, TargetError
from loraledger.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from loraledger.operate.change import Change

PATIENCE_S: Final = 120.0
"""How long a gateway that does not answer is waited for."""
_USUAL_NS: Final = 2 * NS_PER_S
_Every = Annotated[
    int | None,
    typer.Option("--every", parser=DurationType, metavar="TIME", help="Time between two looks. Default: 2s."),
]


def watch(id_: IdArgument, every: _Every = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Follow a change that rolls out until it ends. Ctrl-C ends the following, not the rollout.

    Exit code 0: accepted; 5: taken back, withdrawn, or not rolled out yet; 4: no gateway answers; 130: Ctrl-C.
    """
    from loraledger.cli.change.shown import change_of
    from loraledger.cli.signals.shown import fold

    answer: Mapping[str, Any] = {}
    drawn = sys.stdout.isatty() and not as_json
    before = ""
    try:
        for answer in _looks(id_, _USUAL_NS if every is None else every, config):
            change = change_of(answer)
            if change.state in ("proposed", "replayed"):
                raise ObjectiveError(
                    f"{change.id} is {change.state}: nothing rolls out; `loraledger change rollout {change.id}`"
                )
            if drawn:
                line = _line(answer, drawn)
                print(f"\r\x1b[K{line[: _columns() - 1] if change.open else fold(line)}", end="", flush=True)
            elif not as_json and change.state != before:
                print(_line(answer, drawn), flush=True)
            before = change.state
            if not change.open:
                break
    except KeyboardInterrupt:
        print(f"{chr(10) * drawn}loraledger: no longer followed; the rollout of {id_} goes on", file=sys.stderr)
        raise
    _ended(change_of(answer), answer, drawn, as_json)


def _looks(id_: str, every: int, config: Path | None) -> Iterator[dict[str, Any]]:
    """What the gateway says, over and over. Raises ``TargetError`` when it did not answer at first, or for ``PATIENCE_S``."""
    lost: float | None = None
    seen = False
    while True:
        try:
            answer = ask_changes("GET", path_of(id_), config)
        except TargetError as error:
            now = time.monotonic()
            lost = now if lost is None else lost
            if not seen or now - lost > PATIENCE_S:
                raise
            if now == lost:
                print(f"loraledger: {error.message}; waiting for it", file=sys.stderr)
        else:
            if lost is not None:
                print("loraledger: the gateway answers again", file=sys.stderr)
            seen, lost = True, None
            yield answer
        time.sleep(every / NS_PER_S)


def _line(answer: Mapping[str, Any], drawn: bool) -> str:
    """State, what is left of the stated time, and how the target stands: in figures where it is ``drawn``, else in words."""
    from loraledger.cli.change.shown import change_of, figure, verdict_of

    change, verdict = change_of(answer), verdict_of(answer)
    if change.open and isinstance(note := answer.get("note"), str):
        return printable(f"{change.id} {change.state}: {note}")
    parts = []
    if change.state == "rolling_out" and change.began_ns is not None:
        left = change.began_ns + change.window_ns - time.time_ns()
        parts.append(f"{format_duration(left)} left" if left > 0 else "the stated time is over")
    if not change.open or verdict is None:
        parts.append(change.reason)
    elif not drawn or not verdict.readings:
        parts.append(verdict.reason)
    else:
        target = verdict.readings[0]
        with_it, without = figure(target.metric, target.treated), figure(target.metric, target.control)
        parts.append(
            f"{target.bounds.blocks} blocks, {target.metric} {with_it or '-'} with it, {without or '-'} without"
        )
    return printable(f"{change.id} {change.state}: {'; '.join(parts)}")


def _ended(change: Change, answer: Mapping[str, Any], drawn: bool, as_json: bool) -> None:
    from loraledger.cli.change.shown import by_hand, readings_table, verdict_of

    if as_json:
        print_json("change", answer)
    else:
        verdict = verdict_of(answer)
        print("\n" * drawn)
        if verdict is not None:
            readings_table(verdict)
        by_hand(answer)
    sys.stdout.flush()
    if change.state != "accepted":
        raise ObjectiveError(f"{change.id} is {change.state}: {change.reason}")


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns
