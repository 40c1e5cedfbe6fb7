"""What a change makes of the settings, as a unified diff.

Theory of operation. An accepted change is held by the running gateway; the file that the next one reads still has the old value. So
the diff is of that part of ``loraledger.yaml`` alone: the sections on the way to the value, with the names of the replicas and
tenants that have it. It is not a patch of the file's own text, which may be written in many ways: the notes say in which line of
the file the value stands. Pins lie in a file of their own, which ``policy.pins`` names: that one is shown whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import yaml

from loraledger.cli.change.shown import FILE
from loraledger.config.origin import dotted
from loraledger.operate.change import Change, Value
from loraledger.operate.trial import ranking_file

if TYPE_CHECKING:
    from loraledger.config import Loaded
    from loraledger.config.origin import Where

PINS: Final = "pins.json"
_FIELDS: Final = ("slots", "host_entries")


class Difference(NamedTuple):
    """The diff, and what there is to say beside it."""

    text: str
    notes: tuple[str, ...]


def difference(change: Change, loaded: Loaded | None) -> Difference:
    """Of ``change``, in the words of the settings of ``loaded``; ``None``: they cannot be read here."""
    before, after = (_document(change.variable, value, loaded) for value in (change.before, change.after))
    text = _unified(yaml.safe_dump(before, sort_keys=False), yaml.safe_dump(after, sort_keys=False), FILE)
    if change.variable == "pins":
        text += _unified(_ranking(change.before), _ranking(change.after), PINS)
    return Difference(text, tuple(_notes(change, loaded)))


def _unified(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{name}", f"b/{name}", n=10)
    return "".join(lines)


def _document(variable: str, value: Value, loaded: Loaded | None) -> object:
    """The part of the settings in which ``variable`` is ``value``."""
    if variable == "policy":
        return {"policy": {"name": value}}
    if variable.startswith("policy."):
        return {"policy": {"params": {variable.removeprefix("policy."): value}}}
    if variable == "pins":
        return {"policy": {"residency": "ranked", "pins": PINS} if value else {"residency": "lru"}}
    if variable == "replicas":
        count = value if isinstance(value, int) else 0
        return {"replicas": [{"name": name} for name in _names("replicas", loaded, count)[:count]]}
    section = "replicas" if variable in _FIELDS else "tenants"
    return {section: [{"name": name, **_inner(variable, value)} for name in _names(section, loaded, 1)]}


def _inner(variable: str, value: Value) -> dict[str, object]:
    """Made anew for each: YAML would write one that is there twice as an alias."""
    return {variable: value} if variable in _FIELDS else {"limits": {"concurrency": value}}


def _names(section: str, loaded: Loaded | None, least: int) -> list[str]:
    """Those of the settings; made up where there are not ``least``."""
    found: list[str] = []
    if loaded is not None:
        found = [entry.name for entry in getattr(loaded.settings, section)]
    made = (f"a new {section[:-1]} ({number})" for number in range(len(found) + 1, least + 1))
    return [*found, *made]


def _ranking(value: Value) -> str:
    return ranking_file(value) if isinstance(value, list) and value else ""


def _notes(change: Change, loaded: Loaded | None) -> Iterator[str]:
    """Whether the change holds, and where its value stands in the file."""
    if change.state != "accepted":
        yield f"{change.id} is {change.state}: the settings are as before it"
    if loaded is None:
        yield "the settings cannot be read here: names of replicas and tenants are left out"
        return
    origins = {where: loaded.tree.origin_of(where) for where in _places(change.variable, loaded)}
    for where, origin in origins.items():
        yield f"{dotted(where)} is from {origin}"


def _places(variable: str, loaded: Loaded) -> Iterator[Where]:
    if variable == "policy":
        yield "policy", "name"
    elif variable.startswith("policy."):
        yield "policy", "params", variable.removeprefix("policy.")
    elif variable == "pins":
        yield "policy", "residency"
        yield "policy", "pins"
    elif variable == "tenant.concurrency":
        for index in range(len(loaded.settings.tenants)):
            yield "tenants", index, "limits", "concurrency"
    elif variable in _FIELDS:
        for index in range(len(loaded.settings.replicas)):
            yield "replicas", index, variable
