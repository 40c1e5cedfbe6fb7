"""Which rows are looked at, and how they come back: what all queries of signals share.

Theory of operation. A query is one SELECT with CTEs, in the portable subset: integer epoch columns and sums over CASE. The first
CTE is ``picked``: the requests that arrived in the window. The bounds stand on ``arrived_ns`` itself, so that Parquet row groups
are passed over. What nests above it is put together by ``with_``, and values only ever come in as parameters.

Columns of a window are scanned a few times and never pulled into Python: what comes back is a row for each group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final, Literal

import msgspec

from loraledger.record.tables import Row
from loraledger.signals.facts import Facts
from loraledger.signals.figures import Version, Window

Kind = Literal["total", "replica", "tenant", "adapter", "class"]
Key = tuple[Kind, str]
"""A group: its kind and its name. All of them: ``TOTAL``."""
TOTAL: Final[Key] = ("total", "")
KINDS: Final[tuple[Kind, ...]] = ("replica", "tenant", "adapter", "class")

FINEST: Final = "replica, tenant, adapter, class"
_PICKED: Final = "SELECT * FROM requests WHERE arrived_ns >= $since AND arrived_ns < $until"
_ONCE: Final = """SELECT * FROM (
    SELECT *, ROW_NUMBER() OVER (
        PARTITION BY id
        ORDER BY COALESCE(finished_ns, -1) DESC, arrived_ns DESC, COALESCE(generated_tokens, -1) DESC
    ) AS place
    FROM requests WHERE arrived_ns >= $since AND arrived_ns < $until
) WHERE (id IS NULL OR place = 1)"""
_OF_VERSION: Final = """ AND (replica IS NULL OR (
    engine_version IS NOT DISTINCT FROM $engine_version AND base IS NOT DISTINCT FROM $base
    AND config_digest IS NOT DISTINCT FROM $config_digest AND gateway_version IS NOT DISTINCT FROM $gateway_version
))"""
_SIZES: Final = "SELECT UNNEST(CAST($names AS VARCHAR[])) AS name, UNNEST(CAST($sizes AS BIGINT[])) AS bytes"


class Scope(msgspec.Struct, frozen=True):
    """The requests of a window. ``once``: ids occur more than once and the row that ended last counts. ``version``: its rows
    only, and those that were sent nowhere."""

    window: Window
    once: bool = False
    version: Version | None = None

    @property
    def picked(self) -> str:
        """SQL of these requests."""
        return (_ONCE if self.once else _PICKED) + (_OF_VERSION if self.version is not None else "")

    def parameters(self, **others: object) -> dict[str, object]:
        """Those of ``picked``, and ``others``."""
        names = ("engine_version", "base", "config_digest", "gateway_version")
        of_version = {name: getattr(self.version, name) for name in names} if self.version is not None else {}
        return {**bounds(self.window), **of_version, **others}


def bounds(window: Window) -> dict[str, object]:
    """The parameters ``since`` and ``until``."""
    return {"since": window.since_ns, "until": window.until_ns}


def with_(tables: Iterable[tuple[str, str]], query: str) -> str:
    """``query`` over CTEs, given by name and SQL in their order."""
    return "WITH " + ",\n".join(f"{name} AS ({sql})" for name, sql in tables) + "\n" + query


def select(columns: Iterable[str], table: str, by: str) -> str:
    """``columns`` of a table, grouped."""
    return "\n".join(("SELECT", ", ".join(columns), "FROM", table, "GROUP BY", by))


def kind_of(columns: str) -> str:
    """SQL: ``kind`` and ``name`` of a row of GROUPING SETS over (some of) these columns; the first that is in its set says it."""
    names = columns.split(", ")
    kinds = " ".join(f"WHEN GROUPING({name}) = 0 THEN '{name}'" for name in names)
    values = " ".join(f"WHEN GROUPING({name}) = 0 THEN {name}" for name in names)
    return f"CASE {kinds} ELSE 'total' END AS kind, CASE {values} ELSE '' END AS name"


def by_class(columns: Iterable[str], table: str, kinds: Collection[Kind] = KINDS, also: str = "") -> str:
    """SQL: ``columns`` of all, of each hit class, and of the groups of ``kinds``, these by hit class too (``of_class``).

    ``also``: a column that groups as well.
    """
    named = [kind for kind in KINDS if kind in kinds and kind != "class"]
    sets = ", ".join(("()", "(class)", *(f"({kind}), ({kind}, class)" for kind in named)))
    within = " OR ".join(f"GROUPING({kind}) = 0" for kind in named) or "FALSE"
    of_class = f"CASE WHEN GROUPING(class) = 0 AND ({within}) THEN class END AS of_class"
    by = f"GROUPING SETS ({sets})"
    return select((kind_of(", ".join((*named, "class"))), of_class, *columns), table, f"{also}, {by}" if also else by)


def sizes(facts: Facts) -> tuple[tuple[str, str], dict[str, object]]:
    """The CTE ``sizes`` (``name``, ``bytes``) of the adapters whose bytes are known, and its parameters."""
    known = facts.adapter_bytes
    return ("sizes", _SIZES), {"names": list(known), "sizes": list(known.values())}


def key_of(row: Row) -> Key | None:
    """The group of a row with columns ``kind`` and ``name``; ``None`` for what has no name."""
    kind, name = row["kind"], row["name"]
    if kind == "total":
        return TOTAL
    return (kind, name) if isinstance(name, str) else None  # type: ignore[return-value]


def whole(value: object) -> int:
    """A count. Null is none."""
    return 0 if value is None else int(value)  # type: ignore[call-overload]


def maybe_whole(value: object) -> int | None:
    """A count, or unknown."""
    return None if value is None else whole(value)


def maybe_float(value: object) -> float | None:
    """A finite number, or unknown."""
    if value is None:
        return None
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else None


def share(part: float, of: float) -> float | None:
    """``part / of``; of nothing there is none."""
    return part / of if of else None
