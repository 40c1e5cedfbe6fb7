"""Chaos: one real vLLM and three emulators behind one gateway, and something breaks every 15 seconds.

Run: python -m benchmarks.chaos [--minutes 10] [--seed 1] [--emulated]

Three tenants call eight adapters and the base model all the while. Replicas are killed, frozen and restarted; the gateway is
killed and restarted; its record's disk is full or slow; its wall clock steps by up to three days. Printed are the faults, what
they cost, and whether the promises of ``judge.py`` held; the exit code is 1 when one did not. ``--emulated`` leaves vLLM out.

The full and the slow disk take root (a loop mount), the clock a C compiler; what cannot be had is said in the table's notes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.chaos.faults import Chaos
from benchmarks.chaos.judge import Verdict, judge, table
from benchmarks.chaos.stand import TENANTS, stand
from benchmarks.chaos.traffic import Traffic

CALLERS = 8
LIMIT_S = 30.0


async def play(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    real: bool,
    pace: float = 15.0,
    scale: float = 1.0,
    limit_s: float = LIMIT_S,
) -> tuple[Verdict, str]:
    """Faults for so long, then calm for ``limit_s`` and 5 s more; returns the verdict and all that is to be shown."""
    with stand(folder, real=real, speed=4.0 / scale) as running:
        gateway, start = running.gateway, time.monotonic()
        traffic = Traffic(gateway.url, TENANTS, running.models, seed, CALLERS)
        chaos = Chaos(running, seed, pace, scale)
        await asyncio.sleep(pace / 3)
        over = await chaos.run(seconds)
        await asyncio.sleep(limit_s + 5.0)
        await traffic.stop()
        calls = traffic.calls
        await asyncio.to_thread(gateway.stop)
        await chaos.verify()
        verdict = judge(running, chaos, calls, gateway.rows(), over, limit_s)
        if "Traceback" in gateway.log():
            verdict.broken.append("the gateway's log has a traceback")
        return verdict, "\n".join([table(chaos, calls, start), "", *summary(verdict, chaos, traffic)])


def summary(verdict: Verdict, chaos: Chaos, traffic: Traffic) -> list[str]:
    """What is said below the table."""
    calls = traffic.calls
    identical = sum("identical" in words for words in chaos.verified)
    errors = Counter(call.error.split(":")[0] for call in calls if call.error is not None)
    return [
        f"requests: {len(calls)}, answered well {sum(call.well for call in calls)}, left {sum(call.left for call in calls)}, "
        f"failed {sum(errors.values())} {dict(errors.most_common())}",
        f"answers compared with their adapter's own: {verdict.compared}",
        f"rows: {sum(verdict.statuses.values())} {dict(verdict.statuses.most_common())}; "
        f"{verdict.unwritten} requests have none because the disk was full",
        f"journals that replay to the same commands: {identical} of {len(chaos.verified)}",
        f"last failure {verdict.recovered_s:.1f} s after the last fault",
        *(f"BROKEN: {what}" for what in verdict.broken),
        "every promise held" if not verdict.broken else f"{len(verdict.broken)} promises did not hold",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--emulated", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        played = play(Path(name), seconds=given.minutes * 60, seed=given.seed, real=not given.emulated)
        verdict, shown = asyncio.run(played)
    print(shown)
    sys.exit(1 if verdict.broken else 0)


if __name__ == "__main__":
    main()
