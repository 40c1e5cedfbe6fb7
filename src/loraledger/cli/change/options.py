"""What the options of ``loraledger change`` mean: values, targets, guardrails, shares, and who asks.

A value that cannot be is a usage error in one line that names the option.
"""

from __future__ import annotations

import getpass
import json
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from loraledger.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loraledger.operate.change import Metric, Value

IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The change, as `change list` has it.", show_default=False)
]
WhoOption = Annotated[
    str | None, typer.Option("--who", metavar="NAME", help="Who asks, for the journal. Default: the user.")
]


class Limit(NamedTuple):
    """A metric with a number, as ``hit_rate:0.02``."""

    metric: Metric
    amount: float


@contextmanager
def naming(option: str) -> Iterator[None]:
    """A ``ValueError`` of the block says which option it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def read_value(variable: str, text: str) -> Value:
    """``text`` as a value of ``variable``: JSON where it is some, else the text; for pins also ``@FILE``. Raises ``ValueError``."""
    from pathlib import Path

    from loraledger.config.pins import read_ranking
    from loraledger.operate.trial import check_value

    found: Value
    if variable == "pins" and text.startswith("@"):
        found = [list(pair) for pair in read_ranking(Path(text[1:]))]
    elif variable == "policy":
        found = text
    else:
        try:
            found = json.loads(text)
        except ValueError:
            if variable == "pins":
                raise ValueError(
                    f"{text!r} is no ranking: give @FILE, as `loraledger advise --pins` writes it"
                ) from None
            found = text
    check_value(variable, found)
    return found


def read_limit(text: str) -> Limit:
    """``METRIC:NUMBER``, or ``METRIC`` for 0. Raises ``ValueError``."""
    from loraledger.config.checks import nearest
    from loraledger.operate.change import BETTER

    name, colon, amount = text.partition(":")
    for metric in BETTER:
        if metric == name:
            break
    else:
        raise ValueError(f"{name!r} is no metric{nearest(name, BETTER)}")
    if not colon:
        return Limit(metric, 0.0)
    try:
        found = float(amount)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(f"{text!r}: after the colon a number from 0 on is wanted, in the metric's unit")
    return Limit(metric, found)


def read_limits(texts: Sequence[str]) -> list[Limit]:
    """Several of them, each metric once. Raises ``ValueError``."""
    found = [read_limit(text) for text in texts]
    for number, limit in enumerate(found):
        if limit.metric in {other.metric for other in found[:number]}:
            raise ValueError(f"{limit.metric} is given twice: keep one")
    return found


def read_share(text: str) -> float:
    """``10%`` or ``0.1``. Raises ``ValueError``."""
    number = text.strip().removesuffix("%")
    try:
        found = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise ValueError(
            f"{text!r}: a share above 0 and below 100% is wanted, such as 10%, to leave a rest to compare with"
        )
    return found


def read_time(text: str) -> int:
    """A duration above 0, in ns. Raises ``ValueError``."""
    found = parse_duration(text)
    if found < 1:
        raise ValueError(f"{text!r}: a time above 0 is wanted")
    return found


def who_asks(who: str | None) -> str:
    """The name for the journal: by default the user's. Raises ``ValueError`` where nobody says it."""
    if who is None:
        try:
            who = getpass.getuser()  # of $LOGNAME, $USER, then the system's list of users
        except (OSError, KeyError):
            who = ""
    if not who.strip():
        raise ValueError("--who: nobody is named, and the system has no name for this user: say who asks")
    return who.strip()


def spelled(value: Value) -> str:
    """``value`` in a few words, for people: a ranking by its length."""
    if isinstance(value, list):
        return f"{len(value)} pins" if value else "no pins"
    return value if isinstance(value, str) else json.dumps(value)


def unit_of(metric: Metric) -> str:
    """What stands behind a metric's number."""
    if metric == "preemptions":
        return " for 1,000 requests"
    return " s" if metric.startswith(("ttft", "itl")) else ""
