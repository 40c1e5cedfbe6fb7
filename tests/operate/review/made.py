"""Two weeks whose figures are known, with names that are up to no good; and the parts of a review, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from loraledger.operate.change import Change
from loraledger.operate.review import Names, Review, Standing, review
from loraledger.record.parquet import write_parquet
from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import Window
from loraledger.signals.rules.advice import (
    Advice,
    Burst,
    Condition,
    Gain,
    Pin,
    Ranking,
    SlotRule,
    Targets,
    Worth,
)
from signals.records import MINUTE, NOON, SECOND, move, request, sample

HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
WEEK: Final = 7 * DAY
WINDOW: Final = Window(NOON - WEEK, NOON)
SCRIPT: Final = "<script>alert('a')</script>"
IMAGE: Final = '"><img src=http://evil.example/x onerror=alert(1)>'
ODD: Final = "a|b`c*d_[e](f)\u202e\n# g"
FACTS: Final = Facts(
    replicas={"r1": ReplicaFacts(slots=2, host_entries=4), "r2": ReplicaFacts(slots=2, host_entries=4)},
    adapter_bytes={"a0": 20 * 2**20, SCRIPT: 80 * 2**20, "never": 10 * 2**20},
    source="looked up in loraledger.yaml",
)
NAMES: Final = Names("record", "loraledger.yaml")


def week(end: int, each: int, late: int, **columns: object) -> list[Row]:
    """``each`` requests in each of three hours on three days of the week; ``late`` of the last hour's took 3 s."""
    rows = []
    for number, since in enumerate((6 * DAY, 4 * DAY, 2 * DAY)):
        for n in range(each):
            at = end - since + n * 20 * SECOND
            slow = number == 2 and n < late
            first = at + (3 * SECOND if slow else SECOND // 5)
            row = {
                "adapter": ("a0", "a0", SCRIPT, ODD)[n % 4],
                "tenant": ("acme", IMAGE)[n % 2],
                "replica": ("r1", "r2")[n % 2],
                "hit_class": "disk" if n % 5 == 4 else "gpu",
                "first_token_ns": first,
                "last_token_ns": first + SECOND,
                "finished_ns": first + SECOND,
            }
            rows.append(request(**{"arrived_ns": at, **row, **columns}))
    return rows


def write_weeks(folder: Path, *, names: bool = True) -> Path:
    """The record: 40 requests an hour and 8 late ones in this week, 20 in the one before."""
    rows = week(NOON, 40, 8) + week(NOON - WEEK, 20, 2)
    if not names:
        rows = [{**row, "adapter": "a0", "tenant": "acme"} for row in rows]
    times = (NOON - 2 * DAY, NOON - WEEK - 2 * DAY)
    samples = [sample(at_ns=at + n * MINUTE, replica=name) for at in times for n in range(3) for name in ("r1", "r2")]
    moves = [move("disk", "gpu", at_ns=times[0] + n * SECOND, adapter="a0", took_ns=SECOND // 10) for n in range(4)]
    moves += [move("gpu", "host", at_ns=times[1] + n * SECOND, adapter="a0", cause="eviction") for n in range(3)]
    write_parquet({"requests": rows, "samples": samples, "residency": moves}, folder, "made")
    return folder


@contextmanager
def weeks(folder: Path, *, names: bool = True) -> Iterator[RecordReader]:
    """A reader of that record."""
    with RecordReader(write_weeks(folder, names=names)) as reader:
        yield reader


def reviewed(reader: RecordReader, changes: list[Change] | None = None, **given: Any) -> Review:
    """The review of the week, by ``FACTS``."""
    return review(
        reader, WINDOW, given.pop("facts", FACTS), given.pop("standing", Standing()), changes or [], NAMES, **given
    )


def advice(**fields: Any) -> Advice:
    """Advice that advises nothing; ``fields`` over it."""
    plain: dict[str, Any] = {
        "until_ns": NOON,
        "targets": Targets(),
        "version": None,
        "versions": (),
        "slots": rule("holds back", True, False, True),
        "ranking": None,
        "sample": None,
        "bursts": (),
        "slow_hits": (),
        "harmless_misses": (),
        "notes": (),
    }
    return Advice(**(plain | fields))


def rule(verdict: Any, *holds: bool | None) -> SlotRule:
    """The rule for slots, with its three conditions."""
    names: Any = ("hit_rate", "preparation", "preemptions")
    conditions = tuple(Condition(name, one, 0.5, 0.5, f"{name} is so") for name, one in zip(names, holds, strict=True))
    return SlotRule(verdict, (), conditions, "what it means")


def worth(replica: str, adapter: str, rank: int, *, pin: bool) -> Worth:
    """A row of the ranking."""
    return Worth(
        replica=replica,
        adapter=adapter,
        rank=rank,
        requests=100 // rank,
        misses=3,
        per_hour=1.0,
        penalty=0.1,
        penalty_from="its own misses",
        bytes=None,
        per_slot=1.0 / rank,
        per_mib=None,
        pin=pin,
    )


def ranking(lru: int = 50, pinned: int = 40) -> Ranking:
    """Two replicas, of which the best adapter of each is worth a pin, played over 100 uses."""
    worths = tuple(
        worth(replica, name, n, pin=n == 1) for replica in ("r1", "r2") for n, name in ((1, "a0"), (2, "a1"))
    )
    total = Gain(
        replica="all",
        slots=4,
        pins=2,
        uses=100,
        lru=lru,
        pinned=pinned,
        least=30,
        lru_s=None,
        pinned_s=None,
        least_s=None,
    )
    pins = tuple(Pin(one.replica, one.adapter) for one in worths if one.pin)
    return Ranking(
        window=WINDOW,
        worths=worths,
        left_out=0,
        pins=pins,
        evictions=(),
        sample=WINDOW,
        gains=(total,),
        total=total,
        words="what to expect",
    )


def burst(limit: int, held: int) -> Burst:
    """A tenant of 100 requests that comes in bursts."""
    return Burst(
        tenant="acme",
        requests=100,
        peak_to_mean=5.0,
        cv=2.0,
        dispersion=5.0,
        mean_in_flight=1.0,
        max_in_flight=9,
        limit=limit,
        held=held,
        held_s=1.0,
        words="what it needs",
    )
