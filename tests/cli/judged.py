"""A record whose figures are known: a window at noon beside the ten minutes before, on two replicas with two slots each."""

from __future__ import annotations

from pathlib import Path

from loraledger.record.parquet import write_parquet
from loraledger.record.tables import Row
from signals.records import MINUTE, NOON, SECOND, base_request, move, request, sample

WINDOW = ("--from", "2026-09-21T12:00:00Z", "--to", "2026-09-21T12:10:00Z")
SETTINGS = {
    "base": {"names": ["base"]},
    "replicas": [
        {"name": name, "url": f"http://127.0.0.1:{port}", "slots": 2, "host_entries": 4, "kv_tokens": 100_000}
        for name, port in (("r1", 1), ("r2", 2))
    ],
    "tenants": [{"name": "acme", "key_hashes": ["0" * 64], "adapters": ["*"]}],
}


def requests() -> list[Row]:
    """90 in the window: 80 with an adapter of which 60 find it in a slot, 10 of the base; 40 before it, all hits of a0."""
    before = [request(arrived_ns=NOON - 5 * MINUTE + n * SECOND, adapter="a0") for n in range(40)]
    now: list[Row] = []
    for n in range(80):
        at, hit = NOON + n * SECOND, n % 4 != 3
        late = (
            {}
            if hit
            else {"first_token_ns": at + 2 * SECOND, "last_token_ns": at + 3 * SECOND, "finished_ns": at + 3 * SECOND}
        )
        now.append(
            request(
                arrived_ns=at,
                adapter=f"a{n % 5}",
                tenant="acme" if n % 2 else "birch",
                replica="r1" if n % 2 else "r2",
                hit_class="gpu" if hit else "disk",
                **late,
            )
        )
    return before + now + [base_request(arrived_ns=NOON + n * SECOND) for n in range(10)]


def write_record(folder: Path) -> Path:
    """The record in ``folder``."""
    samples = [sample(at_ns=NOON + n * SECOND, replica=name) for n in range(-300, 300, 10) for name in ("r1", "r2")]
    moves = [move("disk", "gpu", at_ns=NOON + n * SECOND, replica="r1", took_ns=SECOND // 2) for n in range(20)]
    moves += [move("gpu", "host", at_ns=NOON + n * SECOND, replica="r1", cause="eviction") for n in range(10)]
    write_parquet({"requests": requests(), "samples": samples, "residency": moves}, folder, "made")
    return folder
