"""What one append to the journal costs, alone and while another thread syncs. Run: python benchmarks/journal.py [DIR].

Two readings. Batches of 10,000 appends of 200 bytes give the mean cost of an append, with the spread over batches:
first alone, then with a thread that syncs each 50 ms. Single appends, timed one by one at a fixed rate beside the same
thread, give the tail: a store to a page that is just being written back waits for the file system.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

from loraledger.record.frames import Kind
from loraledger.record.journal import Journal

PAYLOAD = bytes(range(200))
BATCH = 10_000
BATCHES = 60
SEGMENT_BYTES = 64 << 20
SYNC_INTERVAL_S = 0.05
PACED_S = 5.0
PACED_PER_S = 4_000


def head() -> tuple[bytes, bytes]:
    return b"settings", bytes(10_000)


def batch_costs(journal: Journal) -> list[float]:
    """Microseconds an append, one figure a batch."""
    costs = []
    for _ in range(BATCHES):
        start = time.perf_counter_ns()
        for _ in range(BATCH):
            journal.append(Kind.EVENT, PAYLOAD)
        costs.append((time.perf_counter_ns() - start) / BATCH / 1e3)
    return costs


def paced_costs(journal: Journal) -> list[float]:
    """Microseconds of single appends, sent at a fixed rate."""
    costs = []
    begin = time.perf_counter()
    for number in range(int(PACED_S * PACED_PER_S)):
        while (wait := begin + number / PACED_PER_S - time.perf_counter()) > 0:
            time.sleep(wait)
        start = time.perf_counter_ns()
        journal.append(Kind.EVENT, PAYLOAD)
        costs.append((time.perf_counter_ns() - start) / 1e3)
    return costs


def keep_syncing(journal: Journal, stop: threading.Event) -> None:
    while not stop.wait(SYNC_INTERVAL_S):
        journal.sync()


def show(name: str, costs: list[float], digits: int = 2) -> None:
    costs.sort()
    points = " ".join(
        f"{label} {costs[int(share * (len(costs) - 1))]:.{digits}f}"
        for label, share in (("p10", 0.1), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))
    )
    print(f"{name:<34} median {statistics.median(costs):.{digits}f} us   {points}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, help="where to write (default: a temporary folder)")
    with (
        tempfile.TemporaryDirectory(dir=parser.parse_args().directory) as folder,
        Journal.open(Path(folder), SEGMENT_BYTES, head) as journal,
    ):
        batch_costs(journal)  # the first touch of the code, not of the pages: each batch has pages of its own
        show("batches, alone", batch_costs(journal))
        stop = threading.Event()
        thread = threading.Thread(target=keep_syncing, args=(journal, stop))
        thread.start()
        show("batches, with a syncing thread", batch_costs(journal))
        journal.sync()  # so that the tail is that of the paced load, not of the backlog which the batches left
        show("single, with a syncing thread", paced_costs(journal))
        stop.set()
        thread.join()
        rotations = []
        for _ in range(10):
            start = time.perf_counter_ns()
            journal.rotate()
            rotations.append((time.perf_counter_ns() - start) / 1e3)
        show("rotation", rotations, 0)


if __name__ == "__main__":
    main()
