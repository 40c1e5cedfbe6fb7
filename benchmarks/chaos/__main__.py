"""Chaos: two real vLLM servers and two emulators behind one gateway, and something breaks every 15 seconds.

Run: python -m benchmarks.chaos [--minutes 10] [--seed 1] [--emulated] [--quick] [--markdown] [--json FILE]

Three tenants call eight adapters and the base model all the while. Replicas are killed, frozen and restarted; the gateway is
killed and restarted; its record's disk is full or slow; its wall clock steps by up to three days. Printed are the faults, what
they cost, and whether the promises of ``judge.py`` held; the exit code is 1 when one did not, or when a kind of fault never came up
(not so with ``--quick``). ``--emulated`` puts a third emulator in the place of vLLM. Ten minutes of faults take 14 with the start,
the calm after the last one, and the reading of the record.

The full and the slow disk take root (a loop mount), the clock a C compiler; what cannot be had is said in the table's notes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.chaos.faults import ON_GATEWAY, ON_REPLICAS, Chaos
from benchmarks.chaos.judge import Verdict, judge, table
from benchmarks.chaos.stand import TENANTS, stand
from benchmarks.chaos.traffic import Traffic
from benchmarks.processes import unwind_on_signals

CALLERS = 8
LIMIT_S = 30.0
PARK_S = 10.0
"""See ``stand``; shortened as the faults are."""


@dataclass(frozen=True)
class Plan:
    """What to break, how often (``pace``, seconds) and for how long (``scale``); ``limit_s``: until all must be well again."""

    seconds: float
    seed: int = 1
    engines: int = 0
    emulators: int = 3
    pace: float = 15.0
    scale: float = 1.0
    limit_s: float = LIMIT_S


async def play(folder: Path, plan: Plan) -> tuple[Verdict, Chaos, str]:
    """Faults for so long, then calm for the limit and 5 s more; returns the verdict, the faults, and all that is to be shown."""
    speed, park_s = 4.0 / plan.scale, PARK_S * plan.scale
    with stand(folder, engines=plan.engines, emulators=plan.emulators, speed=speed, park_s=park_s) as running:
        gateway, start = running.gateway, time.monotonic()
        traffic = Traffic(gateway.url, TENANTS, running.models, plan.seed, CALLERS)
        chaos = Chaos(running, plan.seed, plan.pace, plan.scale)
        await asyncio.sleep(plan.pace / 3)
        over = await chaos.run(plan.seconds)
        await asyncio.sleep(plan.limit_s + 5.0)
        await traffic.stop()
        calls = traffic.calls
        up = (await asyncio.to_thread(gateway.summary)).get("replicas_up", ())
        await asyncio.to_thread(gateway.stop)
        await chaos.verify()
        verdict = judge(running, chaos, calls, gateway.rows(), over, plan.limit_s)
        verdict.fail("replicas that are not up again", {replica.name for replica in running.replicas}.difference(up))
        if "Traceback" in gateway.log():
            verdict.broken.append("the gateway's log has a traceback")
        return verdict, chaos, "\n".join([table(chaos, calls, start), "", *summary(verdict, chaos, traffic, plan)])


def summary(verdict: Verdict, chaos: Chaos, traffic: Traffic, plan: Plan) -> list[str]:
    """What is said below the table."""
    calls = traffic.calls
    identical = sum("identical" in words for words in chaos.verified)
    errors = Counter(call.error.split(":")[0] for call in calls if call.error is not None)
    kinds = played(chaos)
    return [
        f"{plan.engines} vLLM servers, {plan.emulators} emulators, {plan.seconds / 60:.1f} minutes, seed {plan.seed}",
        f"faults: {kinds.total()} {dict(kinds.most_common())}; never played: {', '.join(unplayed(chaos)) or 'none'}",
        f"requests: {len(calls)}, answered well {sum(call.well for call in calls)}, left {sum(call.left for call in calls)}, "
        f"failed {sum(errors.values())} {dict(errors.most_common())}",
        f"answers compared with their adapter's own: {verdict.compared}; of another adapter: {verdict.wrong}",
        f"rows: {sum(verdict.statuses.values())} {dict(verdict.statuses.most_common())}; "
        f"{verdict.unwritten} requests have none because the disk was full",
        f"journals that replay to the same commands: {identical} of {len(chaos.verified)}",
        f"last failure {verdict.recovered_s:.1f} s after the last fault (limit {plan.limit_s:g} s)",
        *(f"BROKEN: {what}" for what in verdict.broken),
        "every promise held" if not verdict.broken else f"{len(verdict.broken)} promises did not hold",
    ]


def played(chaos: Chaos) -> Counter[str]:
    """Faults that came about, by kind."""
    return Counter(fault.kind for fault in chaos.faults if not fault.note.startswith("left out"))


def unplayed(chaos: Chaos) -> list[str]:
    """Kinds of faults that never came about."""
    kinds = played(chaos)
    return [kind for kind in (*ON_REPLICAS, *ON_GATEWAY) if kind not in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--emulated", action="store_true", help="no vLLM: three emulators")
    parser.add_argument("--quick", action="store_true", help="90 s of faults, one in 6 s, each shorter")
    parser.add_argument("--markdown", action="store_true", help="for docs/performance.md")
    parser.add_argument("--json", type=Path, help="write the faults and the verdict to this file")
    given = parser.parse_args()
    unwind_on_signals()
    engines, emulators = (0, 3) if given.emulated else (2, 2)
    plan = Plan(given.minutes * 60, given.seed, engines, emulators)
    if given.quick:
        plan = Plan(90.0, given.seed, engines, emulators, pace=6.0, scale=0.4)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        verdict, chaos, shown = asyncio.run(play(Path(name), plan))
    print(f"```text\n{shown}\n```" if given.markdown else shown)
    if given.json is not None:
        kept = {"plan": asdict(plan), "faults": [asdict(fault) for fault in chaos.faults], "verdict": vars(verdict)}
        given.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    sys.exit(1 if verdict.broken or (unplayed(chaos) and not given.quick) else 0)


if __name__ == "__main__":
    main()
