"""Which version of the system a window is measured of.

Theory of operation. A row was made by one engine version, base model, configuration and gateway version. Figures over rows of two
of them describe neither, so the most frequent one is measured and the others are listed, unless pooling is asked for. A row without
a replica (refused, or still queued) was made by no engine: it belongs to every version.

Samples and moves name no version. A replica that served only other versions in the window is left out; one that changed
its version in the window is in with all of them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.record.reader import RecordReader
from loraledger.signals.figures import Version, Window
from loraledger.signals.scope import Scope, bounds, whole, with_

_FIELDS: Final = ("engine_version", "base", "config_digest", "gateway_version")
_WORDS: Final = ("engine", "model", "configuration", "gateway")

_IDS: Final = """
SELECT COUNT(id) AS ids, COUNT(DISTINCT id) AS different FROM requests WHERE arrived_ns >= $since AND arrived_ns < $until
"""
_VERSIONS: Final = """
SELECT engine_version, base, config_digest, gateway_version, replica, COUNT(*) AS requests,
       MIN(arrived_ns) AS first_ns, MAX(arrived_ns) AS last_ns
FROM picked GROUP BY engine_version, base, config_digest, gateway_version, replica
"""


class Choice(msgspec.Struct, frozen=True):
    """What is measured. ``elsewhere``: replicas that served other versions alone."""

    scope: Scope
    versions: tuple[Version, ...]
    version: Version | None
    measure_again: str | None
    duplicates: int
    elsewhere: frozenset[str]


def choose(reader: RecordReader, window: Window, like: Version | None, pool: bool) -> Choice:
    """The version with most requests; ``like`` if it has any; all together with ``pool``."""
    ids = reader.query(_IDS, bounds(window))[0]
    duplicates = whole(ids["ids"]) - whole(ids["different"])
    scope = Scope(window, once=duplicates > 0)
    rows = reader.query(with_([("picked", scope.picked)], _VERSIONS), scope.parameters())
    served: dict[tuple[object, ...], set[str]] = {}
    found: dict[tuple[object, ...], Version] = {}
    sent = [row for row in rows if row["replica"] is not None]
    for row in sent or rows:
        fields = tuple(row[name] for name in _FIELDS)
        served.setdefault(fields, set()).add(str(row["replica"]))
        part = msgspec.convert({name: row[name] for name in Version.__struct_fields__}, Version)
        found[fields] = _joined(found.get(fields), part)
    versions = tuple(sorted(found.values(), key=lambda version: (-version.requests, -version.last_ns, spell(version))))
    version = None if pool or not versions else _picked(versions, like)
    elsewhere: set[str] = set()
    if version is not None:
        elsewhere = set().union(*served.values()) - served[_key(version)]
    again = _measure_again(versions, version, like)
    return Choice(Scope(window, scope.once, version), versions, version, again, duplicates, frozenset(elsewhere))


def spell(version: Version) -> str:
    """For people: ``engine 0.11.0, model base-8b, configuration sha256:1234, gateway 0.1.0``; what is unknown is ``?``."""
    return ", ".join(f"{word} {value or '?'}" for word, value in zip(_WORDS, _key(version), strict=True))


def _key(version: Version) -> tuple[str | None, ...]:
    return (version.engine_version, version.base, version.config_digest, version.gateway_version)


def _joined(one: Version | None, other: Version) -> Version:
    if one is None:
        return other
    first, last = min(one.first_ns, other.first_ns), max(one.last_ns, other.last_ns)
    return msgspec.structs.replace(one, requests=one.requests + other.requests, first_ns=first, last_ns=last)


def _picked(versions: tuple[Version, ...], like: Version | None) -> Version:
    if like is not None:
        for version in versions:
            if _key(version) == _key(like):
                return version
    return versions[0]


def _measure_again(versions: tuple[Version, ...], version: Version | None, like: Version | None) -> str | None:
    if like is not None and versions and all(_key(each) != _key(like) for each in versions):
        return (
            f"Measure again: no request here is of {_differences(like, versions[0])}: figures of the two windows are of "
            "different systems."
        )
    if len(versions) < 2:
        return None
    others = ", ".join(f"{each.requests} of {_differences(each, versions[0])}" for each in versions[1:4])
    what = "all are pooled" if version is None else f"measured are the {version.requests} of {spell(version)}"
    return (
        f"Measure again once a window has one version: this one has {len(versions)} ({versions[0].requests} requests of "
        f"{spell(versions[0])}; {others}); {what}."
    )


def _differences(version: Version, from_: Version) -> str:
    """The parts of a version in which it differs from another."""
    pairs = zip(_WORDS, _key(version), _key(from_), strict=True)
    return ", ".join(f"{word} {mine or '?'}" for word, mine, theirs in pairs if mine != theirs)
