"""How often the test of a rollout errs: replayed A/A and A/B runs through the live kernel, judged after every block.

    python -m benchmarks.sequential [--runs 1000] [--quick] [--jobs 2] [--json FILE] [--of FILE] [--markdown]

A run is a fleet of 4 replicas (6 slots and 6 sequences each, twins of an 8B model on one H100) and 24 tenants under
``least-loaded``, 60 requests in each block of 5 s: 5 blocks to warm up, 40 that both parts are known by before the change, 40 of
the rollout. Half of the tenants get it, by hash with a salt of the run's own. Each run has a seed of its own, which also draws
what no two tenants have in common: their share of the traffic, their two adapters, their lengths of prompts, and how many of
their requests (20 to 80 %) are for an adapter that all of them call.

- **A/A**: the same policy again, by the same way (``RolloutSet``), so that nothing changes. Whatever is called is an error.
- **A/B, good**: ``bounded-affinity``: more hits, and first tokens no later. And once more with three times as many blocks, before
  and since: to be sure takes time.
- **A/B, bad**: ``strict-affinity``: as many hits more, and first tokens later, by far more than the guardrail on their p90 allows.

Whoever is in a part has it for good, so the parts differ before the change. *Taken to be alike* is the same test without the
blocks from before, on the same runs: what it would err without them. Intervals are Wilson's, 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from benchmarks import printed
from loraledger.events import AdapterSpec, RolloutSet
from loraledger.kernel.settings import MS, SECOND, FleetSettings, ReplicaSpec, TenantSpec
from loraledger.operate.blocks import Block, Blocks, replayed
from loraledger.operate.change import Change, Guardrail, Metric, Population, Target
from loraledger.operate.population import treated
from loraledger.operate.watch import Verdict, judge
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import PS_PER_MS, TwinProfile

REPLICAS, SLOTS, SEQS, TENANTS = 4, 6, 6, 24
NAMES: Final = tuple(f"t{number}" for number in range(TENANTS))
ADAPTERS = 2 * TENANTS + 1
BLOCK = 5 * SECOND
WARM = 5
PER_BLOCK = 60
OUTPUT = 200
ADAPTER_BYTES = 50_000_000
SHARED = 0.2, 0.8
POLICY = "least-loaded"
GOOD, LONG, BAD = "A/B, good", "A/B, good, for longer", "A/B, bad"
KINDS: Final = {
    "A/A": (POLICY, 40),
    GOOD: ("bounded-affinity", 40),
    LONG: ("bounded-affinity", 120),
    BAD: ("strict-affinity", 40),
}
"""The policy that is tried, and the blocks of the rollout: as many as before it."""
LEAST = 0.02
GUARDED: Final = (Guardrail("ttft_p90", 0.05), Guardrail("itl_mean", 0.002), Guardrail("refused", 0.01))
AIM = 0.05
ALIKE = ", parts taken to be alike"


class Run(NamedTuple):
    """What one run is."""

    kind: str
    seed: int

    @property
    def blocks(self) -> int:
        """Before the change, and since."""
        return KINDS[self.kind][1]

    @property
    def began(self) -> int:
        return (WARM + self.blocks) * BLOCK


class Ended(NamedTuple):
    """How a rollout ended: ``accept`` or ``roll_back``, after how many blocks, and whether a guardrail was what ended it."""

    action: str
    blocks: int
    guarded: bool


def trace(run: Run) -> Iterator[Request]:
    """Requests of tenants that differ."""
    rng = random.Random(f"sequential/{run.seed}")
    blocks = WARM + 2 * run.blocks
    times = sorted(rng.randrange(blocks * BLOCK) for _ in range(blocks * PER_BLOCK))
    weights = [rng.uniform(0.5, 2.0) for _ in NAMES]
    shared = [rng.uniform(*SHARED) for _ in NAMES]
    prompts = [rng.choice((150, 300, 600, 1200)) for _ in NAMES]
    for at in times:
        (tenant,) = rng.choices(range(TENANTS), weights)
        own = 2 * tenant + (rng.random() < 0.25)
        adapter = ADAPTERS - 1 if rng.random() < shared[tenant] else own
        prompt = max(1, round(rng.lognormvariate(math.log(prompts[tenant]), 0.5)))
        yield Request(at, NAMES[tenant], f"a{adapter}", prompt, max(1, round(rng.expovariate(1 / OUTPUT))))


def fleet() -> VirtualFleet:
    profile = TwinProfile(
        slots=SLOTS,
        host_entries=ADAPTERS,
        max_seqs=SEQS,
        load_overhead_ps=100 * PS_PER_MS,
        load_bytes_per_s=10**12,
        activation_ps=20 * PS_PER_MS,
    )
    replicas = tuple(
        ReplicaSpec(
            f"r{number}",
            SLOTS,
            ADAPTERS,
            max_seqs=SEQS,
            load_bytes_per_s=10**12,
            load_overhead=100 * MS,
            activation=20 * MS,
            prefill_tokens_per_s=40_000,
            itl=8 * MS,
        )
        for number in range(REPLICAS)
    )
    adapters = tuple(AdapterSpec(f"a{number}", f"{number:064x}", 16, ADAPTER_BYTES) for number in range(ADAPTERS))
    tenants = tuple(TenantSpec(name, 10**6, 10**6, 10**6 * SECOND) for name in NAMES)
    settings = FleetSettings(replicas, adapters, tenants, policy=POLICY)
    return VirtualFleet(settings, {spec.name: profile for spec in replicas})


def play(run: Run) -> tuple[list[Block], list[Block]]:
    """The blocks before the change, and those since."""
    played, members = fleet(), treated(NAMES, 0.5, f"{run.kind}/{run.seed}")

    def change() -> None:
        value = json.dumps(KINDS[run.kind][0])
        played.conductor.feed(RolloutSet(played.now, "c1", "policy", value, "tenant", members))

    played.at(run.began, change)
    played.run(trace(run))
    rows = played.rows["requests"]
    before = replayed(rows, Blocks("tenant", members, WARM * BLOCK, BLOCK), run.began)
    since = replayed(rows, Blocks("tenant", members, run.began, BLOCK), run.began + run.blocks * BLOCK)
    return before[: run.blocks], since


def change(run: Run, target: Metric, least: float, guardrails: Sequence[Guardrail]) -> Change:
    """What is asked of a run."""
    return Change(
        id="c1",
        who="benchmark",
        why="errors",
        variable="policy",
        before=POLICY,
        after="another",
        target=Target(target, least),
        guardrails=tuple(guardrails),
        window_ns=run.blocks * BLOCK,
        block_ns=BLOCK,
        population=Population("tenant", 0.5, "c1"),
        state="rolling_out",
        began_ns=run.began,
    )


def ended(run: Run, asked: Change, blocks: Sequence[Block], before: Sequence[Block] | None) -> Ended:
    """Looked at after every block, as a gateway does."""
    for number in range(1, len(blocks) + 1):
        verdict = judge(asked, blocks[:number], run.began + number * BLOCK, before)
        if verdict.action != "keep":
            return Ended(verdict.action, number, _guarded(verdict))
    raise AssertionError("the stated time is over")


def _guarded(verdict: Verdict) -> bool:
    return any(reading.role == "guardrail" and reading.called == "above" for reading in verdict.readings)


def judged(run: Run) -> dict[str, Any]:
    """All judgments of one run, by what they are called."""
    before, since = play(run)
    found: dict[str, Ended] = {}
    if run.kind == "A/A":
        for metric in ("hit_rate", "ttft_p90"):
            rails = [rail for rail in GUARDED if rail.metric != metric]
            found[f"target {metric}"] = ended(run, change(run, metric, 0.0, rails), since, before)
            found[f"target {metric}{ALIKE}"] = ended(run, change(run, metric, 0.0, rails), since, None)
        tight = [msgspec.structs.replace(rail, worse_by=0.0) for rail in GUARDED]
        found["guardrails of 0"] = ended(run, change(run, "hit_rate", 0.0, tight), since, before)
        found[f"guardrails of 0{ALIKE}"] = ended(run, change(run, "hit_rate", 0.0, tight), since, None)
    else:
        found["target hit_rate"] = ended(run, change(run, "hit_rate", LEAST, GUARDED), since, before)
    return {"kind": run.kind, "seed": run.seed, "ended": {name: list(one) for name, one in found.items()}}


def interval(found: int, n: int) -> tuple[float, float]:
    """Of a share, 95 % (Wilson 1927)."""
    z, p = 1.959964, found / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def show(results: list[dict[str, Any]], markdown: bool) -> None:
    """How often what happened."""
    rows = [["runs", "what", "of", "share", "95 %", "aim"]]
    asked = [(judgment, "accepted") for judgment in ("target hit_rate", "target ttft_p90")]
    for judgment, what in (*asked, ("guardrails of 0", "guarded")):
        rows.append(_row(results, "A/A", judgment, what, aimed=True))
        rows.append(_row(results, "A/A", judgment + ALIKE, what))
    for kind, error in ((GOOD, "guarded"), (LONG, "guarded"), (BAD, "accepted")):
        rows += [_row(results, kind, "target hit_rate", what, aimed=what == error) for what in _WORDS]
    printed.show(rows, markdown)
    for kind, action, words in (
        (GOOD, "accept", "accepted"),
        (LONG, "accept", "accepted"),
        (BAD, "roll_back", "taken back"),
    ):
        took = [one.blocks for one in _ended(results, kind, "target hit_rate") if one.action == action]
        if took:
            print(f"{kind}: {words} after {printed.ranged(took)} of {KINDS[kind][1]} blocks, median and range.")


_WORDS: Final = {
    "accepted": "accepted",
    "guarded": "taken back for a guardrail's sake",
    "missed": "taken back at the stated time, for want of a sure effect",
}


def _row(results: list[dict[str, Any]], kind: str, judgment: str, what: str, aimed: bool = False) -> list[str]:
    found = _ended(results, kind, judgment)
    n, hits = len(found), sum(_is(one, what) for one in found)
    if not n:
        return [kind, f"{judgment}: {_WORDS[what]}", "0", "-", "-", "-"]
    low, high = interval(hits, n)
    aim = f"{AIM:.0%}: " + ("met" if hits / n <= AIM else "missed") if aimed else ""
    return [kind, f"{judgment}: {_WORDS[what]}", f"{n:,}", f"{hits / n:.1%}", f"{low:.1%} to {high:.1%}", aim]


def _is(one: Ended, what: str) -> bool:
    if what == "accepted":
        return one.action == "accept"
    return one.action == "roll_back" and one.guarded == (what == "guarded")


def _ended(results: list[dict[str, Any]], kind: str, judgment: str) -> list[Ended]:
    return [Ended(*result["ended"][judgment]) for result in results if result["kind"] == kind]


def played(runs: int, jobs: int) -> list[dict[str, Any]]:
    """Every run of every kind."""
    work = [Run(kind, seed) for seed in range(runs) for kind in KINDS]
    began, results = time.monotonic(), []
    with Pool(jobs) as pool:
        for number, result in enumerate(pool.imap_unordered(judged, work, chunksize=4), 1):
            results.append(result)
            if number % 20 == 0:
                left = (time.monotonic() - began) / number * (len(work) - number)
                print(f"\r{number}/{len(work)} runs, {left:.0f} s left ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return sorted(results, key=lambda result: (result["kind"], result["seed"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="40 of each kind")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write how every run ended to this file")
    parser.add_argument("--of", type=Path, help="run nothing: print what --json wrote to this file")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    if given.of is not None:
        results = json.loads(given.of.read_text(encoding="utf-8"))
    else:
        results = played(40 if given.quick else given.runs, given.jobs)
    if given.json is not None:
        given.json.write_text(json.dumps(results), encoding="utf-8")
    show(results, given.markdown)


if __name__ == "__main__":
    main()
