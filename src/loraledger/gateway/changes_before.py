"""What both parts of a rollout were like before it began: blocks from the record, read in a process of their own.

Theory of operation. The members of a rollout differ from the others before anything is changed, so what it does to them is held
against the same blocks of the time before. That time is as long as the rollout may take, and shorter where another change began or
ended in it. Reading a record folds the journal's last segments, which takes seconds: a thread would hold up the data plane, so this
is run as ``python -m loraledger.gateway.changes_before``, with what is asked for as JSON on stdin and the blocks on stdout.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final, Literal

import msgspec

from loraledger.conductor.reading import open_record
from loraledger.errors import InputFileError
from loraledger.operate.blocks import Block, Blocks
from loraledger.units import NS_PER_S

MOST: Final = 1000
"""Blocks that are read at most."""
SLICE: Final = 300 * NS_PER_S
"""Of the record, so much is in memory at once, ns."""
EARLIER: Final = 3600 * NS_PER_S
"""Partitions are by arrival; what arrived so long before a moment may have ended after it."""
SQL: Final = (
    "SELECT tenant, replica, adapter, hit_class, status, stream, preemptions, generated_tokens, itl_mean_ns, arrived_ns,"
    " first_token_ns, finished_ns FROM requests WHERE finished_ns >= ? AND finished_ns < ? ORDER BY finished_ns"
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Whole blocks of ``block_ns`` that end at ``until_ns`` and begin at ``since_ns`` at the earliest."""

    record: str
    unit: Literal["tenant", "replica"]
    members: tuple[str, ...]
    since_ns: int
    until_ns: int
    block_ns: int


def read(asked: Asked) -> list[Block]:
    """The blocks, oldest first; those of a time without a row of either part are left out. Raises InputFileError, OSError."""
    count = min(MOST, (asked.until_ns - asked.since_ns) // asked.block_ns)
    if count < 1:
        return []
    began = asked.until_ns - count * asked.block_ns
    taker, found = Blocks(asked.unit, frozenset(asked.members), began, asked.block_ns), list[Block]()
    with open_record(Path(asked.record), since_ns=began - EARLIER, until_ns=asked.until_ns) as reader:
        for at in range(began, asked.until_ns, SLICE):
            for row in reader.query(SQL, [at, min(at + SLICE, asked.until_ns)]):
                found += taker.take(row)
    found += taker.until(asked.until_ns)
    return [block for block in found if block.treated_requests or block.control_requests]


async def read_apart(asked: Asked) -> list[Block]:
    """The same in a process of its own. Raises InputFileError, with what it complained of, when that failed."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "loraledger.gateway.changes_before"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        found, complaint = await child.communicate(msgspec.json.encode(asked))
    except asyncio.CancelledError:
        child.kill()
        await child.wait()
        raise
    if child.returncode:
        raise InputFileError(complaint.decode(errors="replace").strip().rpartition("\n")[2])
    return msgspec.json.decode(found, type=list[Block])


def main() -> None:
    """Answer what stdin asks for."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    sys.stdout.buffer.write(msgspec.json.encode(read(asked)))


if __name__ == "__main__":
    main()
