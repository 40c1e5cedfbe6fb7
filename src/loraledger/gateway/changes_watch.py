"""One change that is being tried: the rows that its trial has seen, as blocks of time, and the verdict on them.

Theory of operation. A finished row is put aside, with the few columns that count; that is all that the data plane waits for. When a
block of time is over, and ``LAG`` more, so that what an engine's probe tells late is there, the rows of it are made into figures
and judged, in a thread. Rows are taken in the order in which they ended, so that a trial that a restart interrupted has the same
blocks as one that nothing did: the rows before the restart are read again from the record, those after it come as ever.

Both parts are held against what they were before the rollout (``changes_before``). While nobody can say that, nothing is judged but
the stated time.
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
from loraledger.gateway.changes_before import EARLIER, SLICE, SQL, Asked, read_apart
from loraledger.operate.blocks import Block, Blocks
from loraledger.operate.change import Change
from loraledger.operate.watch import Verdict, judge
from loraledger.record.tables import Row
from loraledger.units import NS_PER_S

log = logging.getLogger("loraledger")
LAG: Final = ENGINE_WAIT + NS_PER_S
"""A block is looked at so long after its end, ns."""
_COLUMNS: Final = tuple(SQL.removeprefix("SELECT ").partition(" FROM ")[0].split(", "))
TRIES: Final = 4
"""Of reading the record."""


class Watched:
    """A change that is rolling out. ``since_ns``: rows that ended before are read from the record; later ones are handed in.

    ``usual``: the time, from and to, that both parts are known by; ``None``: there is none, as of replicas that are new.
    """

    def __init__(
        self, change: Change, members: tuple[str, ...], since_ns: int, usual: tuple[int, int] | None = None
    ) -> None:
        assert change.began_ns is not None
        self.change = change
        self.before: list[Block] | None = None
        self.blocks: list[Block] = []
        self.verdict: Verdict | None = None
        self._began = change.began_ns
        self._members = frozenset(members)
        self._since = since_ns
        self._seen = self._began
        self._taker = self._new_taker(self._began)
        self._rows: list[Row] = []
        self._whole = since_ns <= self._began
        self._usual = usual
        self._tries = TRIES

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
        if self.before is None and self._usual is not None:
            await self._know(record, self._usual)
        rows, self._rows = self._rows, []
        self._seen = max(self._seen, now_ns - LAG)
        late = await asyncio.to_thread(self._count, rows, self._seen)
        self._rows = late + self._rows
        assert self.verdict is not None
        return self.verdict

    async def _know(self, record: Path, usual: tuple[int, int]) -> None:
        """Have the blocks from before; none at all where the record cannot be read, over and over."""
        members, unit = tuple(sorted(self._members)), self.change.population.unit
        since, until = usual
        asked = Asked(
            record=str(record),
            unit=unit,
            members=members,
            since_ns=since,
            until_ns=until,
            block_ns=self.change.block_ns,
        )
        try:
            self.before = await read_apart(asked)
        except (InputFileError, OSError) as error:
            log.warning("change %s: the record of the time before could not be read: %s", self.change.id, error)
            self._tries -= 1
            self.before = None if self._tries else []

    def _count(self, rows: list[Row], seen_ns: int) -> list[Row]:
        """Count the ``rows`` that ended before ``seen_ns``; returns the others."""
        for row in sorted((row for row in rows if _ended(row) < seen_ns), key=_ended):
            self.blocks += self._taker.take(row)
        self.blocks += self._taker.until(seen_ns)
        before = None if self._usual is None else self.before or []
        self.verdict = judge(self.change, self.blocks, seen_ns, before)
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
        with open_record(record, since_ns=self._began - EARLIER, until_ns=self._since) as reader:
            for at in range(self._began, self._since, SLICE):
                for row in reader.query(SQL, [at, min(at + SLICE, self._since)]):
                    blocks += taker.take(row)
        return blocks, taker


def _ended(row: Row) -> int:
    ended = row["finished_ns"]
    assert isinstance(ended, int)
    return ended
