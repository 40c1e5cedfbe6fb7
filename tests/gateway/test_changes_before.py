"""The time before a rollout, read from a record: here, and by a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraledger.errors import InputFileError
from loraledger.gateway import changes_before
from loraledger.gateway.changes_before import Asked, read, read_apart
from loraledger.record.parquet import write_parquet
from loraledger.record.tables import Row

from .fleets import NOW

SECOND = 10**9
BLOCK = 10 * SECOND


def row(tenant: str, ended: int, hit: bool) -> Row:
    return {
        "id": f"{tenant}-{ended}", "tenant": tenant, "replica": "r1", "adapter": "a", "status": "ok", "stream": True,
        "hit_class": "gpu" if hit else "disk", "arrived_ns": ended - SECOND, "first_token_ns": ended, "finished_ns": ended,
    }  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A minute in which the requests of t1 find their adapter and those of t2 do not, ten of either in ten seconds."""
    ends = range(NOW - 60 * SECOND, NOW, SECOND)
    rows = [row(tenant, ended, tenant == "t1") for ended in ends for tenant in ("t1", "t2")]
    write_parquet({"requests": rows}, tmp_path, "then")
    return tmp_path


def asked(record: Path, **fields: Any) -> Asked:
    plain: dict[str, Any] = {
        "record": str(record),
        "unit": "tenant",
        "members": ("t1",),
        "since_ns": NOW - 35 * SECOND,
        "until_ns": NOW,
        "block_ns": BLOCK,
    }
    return Asked(**(plain | fields))


def test_whole_blocks_up_to_the_beginning_of_the_rollout(record: Path) -> None:
    found = read(asked(record))
    assert [block.began_ns for block in found] == [NOW - 30 * SECOND, NOW - 20 * SECOND, NOW - 10 * SECOND]
    assert {(block.treated["hit_rate"], block.control["hit_rate"]) for block in found} == {(1.0, 0.0)}
    assert {(block.treated_requests, block.control_requests) for block in found} == {(10, 10)}


def test_a_time_without_requests_gives_no_block(record: Path) -> None:
    assert len(read(asked(record, since_ns=NOW - 10_000 * SECOND))) == 6
    assert read(asked(record, since_ns=NOW - 9 * SECOND)) == []
    assert read(asked(record, since_ns=NOW + SECOND)) == []


def test_long_times_are_cut_to_the_newest_blocks(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_before, "MOST", 2)
    assert [block.began_ns for block in read(asked(record))] == [NOW - 20 * SECOND, NOW - 10 * SECOND]


async def test_a_process_of_its_own_says_the_same(record: Path) -> None:
    assert await read_apart(asked(record)) == read(asked(record))


async def test_what_it_complains_of_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="there is no record in"):
        await read_apart(asked(tmp_path / "nothing"))
