"""What the diagnosis says of incidents whose cause is known: the confusion matrix.

    python -m benchmarks.diagnosis [--seeds 5] [--first-seed 0] [--quick] [--jobs 2] [--markdown] [--json FILE]

Eleven kinds of incident, recorded on virtual replicas in front of the live kernel, probe on (``benchmarks.incidents``: fleets,
traffic and strengths are drawn by seed, and a draw counts only if the twins' own books say that the baseline was calm and the
incident took place). Each is measured and diagnosed as ``loraledger diagnose`` does: its window of four minutes against a baseline
as long.

Rows are kinds, columns the pools that the diagnosis named; the pool that truly limits is in the second column. ``--quick``: two
minutes each, two seeds. Other seeds than those that anything was tuned on: ``--first-seed``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from multiprocessing import Pool
from pathlib import Path
from typing import Final, get_args

import msgspec

from benchmarks import printed
from benchmarks.incidents.kinds import KINDS, POOLS, Incident, Kind, TruePool
from benchmarks.incidents.play import MINUTES, play
from loraledger.conductor.reading import open_record
from loraledger.signals.diagnosis import diagnose
from loraledger.signals.measure import measure

AIM: Final = 0.9
"""Share of the incidents that are to be told right."""
QUICK_MINUTES: Final = 2.0


class Job(msgspec.Struct, frozen=True):
    """One incident to be played."""

    kind: Kind
    seed: int
    minutes: float


class Answer(msgspec.Struct, frozen=True):
    """What was said of one incident. ``redraws``: draws that would not do before it. ``cpu_s``: to play it, and to diagnose it."""

    kind: Kind
    seed: int
    true: TruePool
    said: str
    confidence: str
    sentence: str
    redraws: int
    cpu_s: tuple[float, float]

    @property
    def right(self) -> bool:
        """Whether the pool is the one that truly limits."""
        return self.said == self.true


def diagnosed(incident: Incident) -> tuple[str, str, str]:
    """The pool that the diagnosis names, how sure it is, and its sentence."""
    with open_record(incident.directory) as reader:
        now = measure(reader, incident.window, incident.facts)
        baseline = measure(reader, incident.baseline, incident.facts, like=now.version)
    verdict = diagnose(now, baseline, incident.facts)
    return verdict.pool, str(verdict.confidence), verdict.sentence


def answer(job: Job) -> Answer:
    """Play one incident and diagnose it."""
    with tempfile.TemporaryDirectory(prefix="loraledger-incident-") as folder:
        began = time.process_time()
        incident = play(job.kind, job.seed, Path(folder) / "record", job.minutes)
        played = time.process_time()
        said = diagnosed(incident)
        spent = (played - began, time.process_time() - played)
    redraws = incident.parameters["redraws"]
    assert isinstance(redraws, int)
    return Answer(job.kind, job.seed, incident.pool, *said, redraws, spent)


def played(seeds: range, minutes: float, jobs: int) -> list[Answer]:
    """Every kind with every seed, in that order."""
    work = [Job(kind, seed, minutes) for kind in KINDS for seed in seeds]
    answers = []
    with Pool(jobs) as pool:
        for number, each in enumerate(pool.imap(answer, work), 1):
            answers.append(each)
            print(f"\r{number}/{len(work)} incidents ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return answers


def matrix(answers: list[Answer]) -> list[list[str]]:
    """Kinds against the pools that were said; headings first."""
    pools = get_args(TruePool)
    rows = [["incident", "truly", *pools, "right"]]
    for kind in dict.fromkeys(each.kind for each in answers):
        mine = [each for each in answers if each.kind == kind]
        counts = [sum(each.said == pool for each in mine) for pool in pools]
        right = sum(each.right for each in mine)
        rows.append([kind, POOLS[kind], *(str(count) if count else "" for count in counts), f"{right}/{len(mine)}"])
    return rows


def summary(answers: list[Answer]) -> str:
    """The share right, and whether a calm window was accused."""
    right = sum(each.right for each in answers) / len(answers)
    calm = [each for each in answers if each.true == "nothing"]
    accused = sum(not each.right for each in calm)
    redraws = sum(each.redraws for each in answers)
    play_s, diagnose_s = (sum(each.cpu_s[part] for each in answers) / len(answers) for part in (0, 1))
    return (
        f"{right:.0%} of {len(answers)} incidents told right (aim {AIM:.0%}: {'met' if right >= AIM else 'missed'}); "
        f"nothing wrong was accused {accused} times of {len(calm)} (aim 0: {'missed' if accused else 'met'}). Before these, "
        f"{redraws} draws were no such incident. CPU for one: {play_s:.1f} s to play, {diagnose_s:.1f} s to measure and diagnose."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="the matrix and the summary alone")
    parser.add_argument("--json", type=Path, help="write every answer to this file")
    given = parser.parse_args()
    count = min(given.seeds, 2) if given.quick else given.seeds
    seeds = range(given.first_seed, given.first_seed + count)
    answers = played(seeds, QUICK_MINUTES if given.quick else MINUTES, given.jobs)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.encode(answers))
    printed.show(matrix(answers), given.markdown)
    print(summary(answers))
    if not given.markdown:
        for each in answers:
            if not each.right:
                print(f"\n{each.kind}, seed {each.seed}: {each.said} ({each.confidence}). {each.sentence}")


if __name__ == "__main__":
    main()
