"""One change that is being tried: the rows that its trial has seen, as blocks of time, and the verdict on them.

Theory of operation. A finished row is put aside, with the few columns that count; that is all that the data plane waits for. When a
block of time is over, and ``LAG`` more, so that what an engine's probe tells late is there, the rows of it are made into figures
and judged, in a thread. Rows are taken in the order in which they ended, so that a trial that a restart interrupted has the same
blocks as one that nothing did: the rows before the restart are read again from the record, those after it come as ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from loraledger.conductor.fold import ENGINE_WAIT
from loraledger.conductor.reading import open_record
from loraledger.errors import InputFileError
from loraledger.operate.blocks import Block, Blocks
from loraledger.operate.change import Change
from loraledger.operate.watch import Verdict, judge
from loraledger.record.tables import Row
from loraledger.units import NS_PER_S

log = logging.getLogger("loraledger")
LAG: Final = ENGINE_WAIT + NS_PER_S
"""A block is looked at so long after its end, ns."""
SLICE: Final = 300 * NS_PER_S
"""Of the record, so much is in memory at once, ns."""
_EARLIER: Final = 3600 * NS_PER_S
"""Partitions are by arrival; what arrived so long before a rollout may have ended in it."""
_SQL: Final = (
    "SELECT tenant, replica, adapter, hit_class, status, stream, preemptions, generated_tokens, itl_mean_ns, arrived_ns,"
    " first_token_ns, finished_ns FROM requests WHERE finished_ns >= ? AND finished_ns < ? ORDER BY finished_ns"
)
_COLUMNS: Final = tuple(_SQL.removeprefix("SELECT ").partition(" FROM ")[0].split(", "))
TRIES: Final = 4
"""Of reading the record."""


class Watched:
    """A change that is rolling out. ``since_ns``: rows that ended before are read from the record; later ones are handed in."""

    def __init__(self, change: Change, members: tuple[str, ...], since_ns: int) -> None:
        assert change.began_ns is not None
        self.change = change
        self.blocks: list[Block] = []
        self.verdict: Verdict | None = None
        self._began = change.began_ns
        self._members = frozenset(members)
        self._since = since_ns
        self._seen = self._began
        self._taker = self._new_taker(self._began)
        self._rows: list[Row] = []
        self._whole = since_ns <= self._began

    def _new_taker(self, began_ns: int) -> Blocks:
        return Blocks(self.change.population.unit, self._members, began_ns, self.change.block_ns)

    def take(self, row: Row) -> None:
        """A request ended."""
        ended = row.get("finished_ns")
        if isinstance(ended, int) and ended >= self._since:
            self._rows.append({name: row.get(name) for name in _COLUMNS})

    @property
    def next_ns(self) -> int:
        """When to look next, ns since the epoch: the lag after the end of the block in hand, or after the stated time."""
        length = self.change.block_ns
        block = self._began + ((self._seen - self._began) // length + 1) * length
        end = self._began + self.change.window_ns
        return (min(block, end) if self._seen < end else block) + LAG

    async def look(self, record: Path, now_ns: int) -> Verdict:
        """Take in what ended up to ``LAG`` before ``now_ns``, and judge."""
        if not self._whole:
            await asyncio.to_thread(self._catch_up, record)
            self._whole = True
        rows, self._rows = self._rows, []
        self._seen = max(self._seen, now_ns - LAG)
        late = await asyncio.to_thread(self._count, rows, self._seen)
        self._rows = late + self._rows
        assert self.verdict is not None
        return self.verdict

    def _count(self, rows: list[Row], seen_ns: int) -> list[Row]:
        """Count the ``rows`` that ended before ``seen_ns``; returns the others."""
        for row in sorted((row for row in rows if _ended(row) < seen_ns), key=_ended):
            self.blocks += self._taker.take(row)
        self.blocks += self._taker.until(seen_ns)
        self.verdict = judge(self.change, self.blocks, seen_ns)
        return [row for row in rows if _ended(row) >= seen_ns]

    def _catch_up(self, record: Path) -> None:
        """Have the blocks of what ended before ``since_ns``. Compaction, which moves rows while they are read, is waited for."""
        for again in range(TRIES):
            try:
                self.blocks, self._taker = self._read(record)
                return
            except (InputFileError, OSError) as error:
                log.warning("change %s: what the record has of it could not be read: %s", self.change.id, error)
                time.sleep(again)
        log.error("change %s: its blocks before the restart are left out", self.change.id)
        length = self.change.block_ns
        self._taker = self._new_taker(self._began + -(-(self._since - self._began) // length) * length)

    def _read(self, record: Path) -> tuple[list[Block], Blocks]:
        blocks: list[Block] = []
        taker = self._new_taker(self._began)
        with open_record(record, since_ns=self._began - _EARLIER, until_ns=self._since) as reader:
            for at in range(self._began, self._since, SLICE):
                for row in reader.query(_SQL, [at, min(at + SLICE, self._since)]):
                    blocks += taker.take(row)
        return blocks, taker


def _ended(row: Row) -> int:
    ended = row["finished_ns"]
    assert isinstance(ended, int)
    return ended
