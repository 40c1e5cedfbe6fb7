"""``loraledger change rollout|rollback|withdraw``: what an operator has the gateway do with a change."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from loraledger.cli.change.asking import ask_changes, path_of
from loraledger.cli.change.options import IdArgument, WhoOption, naming, read_share, who_asks
from loraledger.cli.options import ConfigOption, JsonOption, usage
from loraledger.cli.output import print_json, printable
from loraledger.errors import ObjectiveError

_Share = Annotated[
    str | None, typer.Option("--share", metavar="PART", help="Of the tenants or replicas. Default: as proposed.")
]
_Although = Annotated[
    str | None,
    typer.Option("--although", metavar="TEXT", help="Why it goes live although its replay speaks against it."),
]
_Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for the journal.")]


def rollout(
    id_: IdArgument,
    share: _Share = None,
    although: _Although = None,
    who: WhoOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a replayed change to a part of the tenants or replicas; of what engines read at their start, the flags are given.

    Exit code 5: it was not replayed, or its replay speaks against it and there is no --although.
    """
    with usage():
        asker = who_asks(who)
        with naming("--share"):
            part = None if share is None else read_share(share)
    why = _reason(ask_changes("GET", path_of(id_), config), although)
    body: dict[str, object] = {"who": asker, "why": why}
    if part is not None:
        body["share"] = part
    if (although or "").strip():
        body["although"] = True
    answer = ask_changes("POST", path_of(id_, "rollout"), config, body)
    if as_json:
        print_json("change", answer)
        return
    _tell(answer)


def rollback(
    id_: IdArgument, why: _Why, who: WhoOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Take a change back that rolls out: everybody has what the settings say again."""
    _end("rollback", id_, why, who, config, as_json)


def withdraw(
    id_: IdArgument, why: _Why, who: WhoOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Give up a change that is not rolling out yet."""
    _end("withdraw", id_, why, who, config, as_json)


def _end(verb: str, id_: str, why: str, who: str | None, config: Path | None, as_json: bool) -> None:
    from loraledger.cli.change.shown import by_hand, change_of, headline

    with usage():
        asker = who_asks(who)
    answer = ask_changes("POST", path_of(id_, verb), config, {"who": asker, "why": why})
    if as_json:
        print_json("change", answer)
        return
    change = change_of(answer)
    print(printable(f"{headline(change)}: {change.reason}"))
    by_hand(answer)


def _reason(answer: Mapping[str, Any], although: str | None) -> str:
    """Why it goes live: what the replay said. Raises ``ObjectiveError`` when that is against it and nobody says why not."""
    from loraledger.cli.change.shown import change_of, replay_of

    change, evidence = change_of(answer), replay_of(answer)
    if evidence is None or change.state == "proposed":
        raise ObjectiveError(
            f"{change.id} was not replayed: `loraledger change replay {change.id} --trace FILE` comes before a rollout"
        )
    reasons = "; ".join(str(reason) for reason in evidence.get("reasons", ()))
    if evidence.get("ok") is not True:
        if not (although or "").strip():
            raise ObjectiveError(
                f"the replay of {change.id} speaks against it: {reasons}; give --although and a reason to roll it out all the same"
            )
        return f"although {although} (the replay: {reasons})"
    return f"its replay is for it{'' if although is None else f'; {although}'}"


def _tell(answer: Mapping[str, Any]) -> None:
    from loraledger.cli.change.shown import aims, by_hand, change_of, headline, sentences

    change = change_of(answer)
    print(printable(headline(change)))
    sentences(aims(change))
    if change.state == "waiting_restart":
        by_hand(answer)
        sentences(["the rollout begins by itself when they show it"])
    else:
        sentences([f"has it now: {', '.join(map(str, answer.get('members') or ())) or 'nobody yet'}"])
    print(f"\nnow: loraledger change watch {change.id}")
    sys.stdout.flush()
