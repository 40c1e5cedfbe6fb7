"""A verb of loraledger under a sampling profiler, and what its samples come to.

Run: python -m benchmarks.profiled FILE WORD ... (``loraledger WORD ...``); SIGUSR1 begins, SIGUSR2 ends and writes FILE.

For each tick of CPU that the process uses (ITIMER_PROF; 4 ms where the kernel has 250 ticks a second, whatever is asked for) a
signal comes, and its handler notes which Python function runs. A tracing profiler would make small functions look dear; this one
costs a few microseconds a tick. Time in C counts for the Python function that called it, or, where the event loop itself is at
work (reading from a socket, waiting), for the one that it calls next. Ticks of other threads count for the main thread's function.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

TICK_S: Final = 0.001
WRITTEN_S: Final = 20.0
_TREE: Final = "src/loraledger/"
ROOMS: Final = ("gateway", "kernel", "conductor", "record", "engines", "events", "adapters", "config", "ledger", "cli")

Where = tuple[str, str]
"""A file, shortened, and a function's qualified name."""


class Sampler:
    """Samples of this process, from SIGUSR1 to SIGUSR2; then ``path`` holds them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Counter[Where] = Counter()

    def install(self) -> None:
        """From now on it listens to its signals."""
        signal.signal(signal.SIGPROF, self._note)
        signal.siginterrupt(signal.SIGPROF, False)  # calls that wait go on
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)

    def _begin(self, _: int, __: FrameType | None) -> None:
        self._seen.clear()
        signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)

    def _note(self, _: int, frame: FrameType | None) -> None:
        if frame is not None:
            self._seen[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def _end(self, _: int, __: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps([[*where, count] for where, count in self._seen.items()]), encoding="utf-8")
        part.rename(self._path)


def begin(pid: int) -> None:
    """Tell a profiled process to take samples."""
    os.kill(pid, signal.SIGUSR1)


def end(pid: int, path: Path) -> Counter[Where]:
    """Tell it to stop; its samples by function. Raises RuntimeError when it does not write them."""
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + WRITTEN_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the profiled process wrote no samples in {WRITTEN_S:.0f} s")
        time.sleep(0.05)
    found: Counter[Where] = Counter()
    for file, function, count in json.loads(path.read_text(encoding="utf-8")):
        found[shortened(file), function] += count
    path.unlink()
    return found


def shortened(file: str) -> str:
    """``gateway/exchange.py`` of this product's modules; of others the package and file."""
    if _TREE in file:
        return file.rpartition(_TREE)[2]
    return "/".join(file.split("/")[-2:])


def room(where: Where) -> str:
    """The part of the product that a function belongs to; *other* for libraries and the interpreter's own."""
    first, _, rest = where[0].partition("/")
    return first if rest and first in ROOMS else "other"


def main() -> None:
    """Run the verb, with the sampler in place."""
    out, *words = sys.argv[1:]
    Sampler(Path(out)).install()
    sys.argv = ["loraledger", *words]
    from loraledger.cli.main import main as verb

    verb()


if __name__ == "__main__":
    main()
