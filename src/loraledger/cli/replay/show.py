"""What the runs of a sweep came to, side by side: tables for people, one document for programs.

Theory of operation. Rows of every table are the runs in one order, told apart by what was varied. What clients waited, what
adapters and KV cost, and waiting by where the adapter was are tables of their own, each narrow enough for a terminal. What cannot
be put into a cell is said in a sentence below, folded to fit a terminal: how many clients were served in time, which runs are
saturated (their waiting says how long the trace is, not how good the fleet), which guardrail failed, and why.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Self

import msgspec

from loraledger.cli.output import print_json, print_table, printable
from loraledger.replay.results.guardrails import Guardrails, Verdict, judge
from loraledger.replay.results.pairing import AdapterChange, Pairing, pair
from loraledger.replay.results.report import Report, summarize
from loraledger.replay.scenarios.axes import Changes
from loraledger.units import NS_PER_S

CLASSES: Final = ("base", "gpu", "host", "disk", "remote", "unknown", "undecided")
_WAITING: Final = ("ok", "ttft", "p50", "p90", "p99", "long", "itl", "met", "kept up", "worst")
_COSTS: Final = ("gpu", "else host", "loads", "activated", "evicted", "preempt", "saved", "bound", "guards")
_BY_CLASS: Final = ("adapter in", "requests", "share", "ttft", "p50", "p90", "p99", "itl", "itl p90")
_PAIRED: Final = ("pairs", "mean", "95 %", "p50", "p90", "better", "worse", "gpu hit", "was")
_WORDS: Final = ("kept up", "worst", "guards", "adapter in")
WIDTH: Final = 100
"""Columns that a sentence takes at most."""
MANY: Final = 8
"""Runs above which waiting by class is left to ``--json``, and below the tables only what is wrong is said of each."""


@dataclass(frozen=True)
class Compared:
    """The runs of a sweep, in order; the first is the one that guardrails are relative to."""

    changes: Sequence[Changes]
    directories: Sequence[Path]
    reports: Sequence[Report]
    verdicts: Sequence[tuple[Verdict, ...]]
    pairings: Sequence[Pairing]
    """With the run that was named; none if none was."""

    @classmethod
    def read(
        cls,
        changes: Sequence[Changes],
        directories: Sequence[Path],
        slo_s: float,
        guardrails: Guardrails,
        against: Path | None,
    ) -> Self:
        """From the folders of the runs. Raises ``InputFileError``."""
        reports = [summarize(directory, slo_s=slo_s) for directory in directories]
        verdicts = [judge(report, reports[0], guardrails) for report in reports]
        pairings = [] if against is None else [pair(directory, against) for directory in directories]
        return cls(changes, directories, reports, verdicts, pairings)

    def failed(self) -> str:
        """What is not as it must be, in a sentence; empty if all is."""
        saturated = sum(bool(report.saturation.saturated) for report in self.reports)
        failed = sum(any(v.verdict == "fail" for v in verdicts) for verdicts in self.verdicts)
        said = [f"{saturated} saturated"] * bool(saturated) + [f"{failed} with a guardrail that fails"] * bool(failed)
        return f"of {len(self.reports)} runs {' and '.join(said)}" if said else ""


def guards(preemptions: float, long_ratio: float, long_ns: int | None) -> Guardrails:
    """The guardrails that the options spell. Raises ``ValueError``."""
    long_s = None if long_ns is None else long_ns / NS_PER_S
    return Guardrails(preemptions_per_1000=preemptions, long_ttft_ratio=long_ratio, long_ttft_s=long_s)


def show(found: Compared, warnings: Sequence[str], as_json: bool) -> None:
    """Print the comparison on stdout."""
    if as_json:
        print_json("replay", _document(found, warnings))
        return
    varied = list(dict.fromkeys(key for changes in found.changes for key in changes.typed)) or ["run"]
    told = [_told(changes, varied) for changes in found.changes]
    slo, long = _slo(found.reports[0]), _count(found.reports[0].long_above)
    print(f"what clients waited: ttft in s (long: p90 over {long} tokens; met: within {slo}), itl in ms")
    _table(varied, _WAITING, [[*row, *_waiting(report)] for row, report in zip(told, found.reports, strict=True)])
    print("\nwhat adapters and KV cost: hits, evictions slot/host, load seconds saved, their share of the bound")
    rows = zip(told, found.reports, found.verdicts, strict=True)
    _table(varied, _COSTS, [[*row, *_costs(report, verdicts)] for row, report, verdicts in rows])
    if len(told) <= MANY:
        print("\nby where the adapter was when the request was placed")
        by_class = (_by_class(one, report) for one, report in zip(told, found.reports, strict=True))
        _table(varied, _BY_CLASS, list(chain.from_iterable(by_class)))
    if found.pairings:
        print(
            f"\nagainst {printable(found.pairings[0].theirs)}, request by request: ours less theirs (s; below 0 is better)"
        )
        _table(varied, _PAIRED, [[*row, *_paired(one)] for row, one in zip(told, found.pairings, strict=True)])
    print()
    for line in _sentences(found):
        print(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    sys.stdout.flush()


def _table(varied: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print_table([*varied, *figures], rows, right=[name for name in figures if name not in _WORDS])


def _told(changes: Changes, varied: Sequence[str]) -> list[str]:
    if varied == ["run"]:
        return [changes.label]
    return [printable(changes.typed.get(key, "-")) for key in varied]


def _waiting(report: Report) -> list[object]:
    ok = report.by_status.get("ok", 0) / report.requests if report.requests else None
    ttft, itl, met, saturated = report.ttft, report.itl, report.attainment, report.saturation.saturated
    long = None if saturated else report.ttft_long  # of those who were not refused: shorter the more of them were
    worst = met.worst_adapter
    return [
        _share(ok),
        *(_seconds(getattr(ttft, name, None)) for name in ("mean", "p50", "p90", "p99")),
        _seconds(None if long is None else long.p90),
        _ms(None if itl is None else itl.mean),
        _share(met.overall),
        {True: "NO", False: "yes", None: None}[saturated],
        None if worst is None else f"{_share(worst.attainment)} {printable(worst.name)[:24]}",
    ]


def _costs(report: Report, verdicts: Sequence[Verdict]) -> list[object]:
    work = report.work
    return [
        _share(report.hits.gpu_rate),
        _share(report.hits.host_rate),
        _count(report.loads),
        _count(report.activations),
        f"{_count(report.evictions_slot)}/{_count(report.evictions_host)}",
        _count(report.preemptions),
        None if work is None else f"{work.saved:,.1f} s",
        None if work is None else _share(work.share),
        _guarded(verdicts),
    ]


def _guarded(verdicts: Sequence[Verdict]) -> str:
    failed = [verdict.guardrail for verdict in verdicts if verdict.verdict == "fail"]
    if failed:
        return f"FAIL {', '.join(dict.fromkeys(name.partition('_')[0] for name in failed))}"
    return "unknown" if any(verdict.verdict == "unknown" for verdict in verdicts) else "ok"


def _by_class(told: Sequence[str], report: Report) -> Iterator[list[object]]:
    """A row for each class that occurs; what was varied stands in the first one only."""
    begun = list(told)
    for name in CLASSES:
        number = getattr(report.hits, name)
        if not number:
            continue
        ttft, itl = report.ttft_by_class.get(name), report.itl_by_class.get(name)
        figures = (_seconds(getattr(ttft, field, None)) for field in ("mean", "p50", "p90", "p99"))
        share = _share(number / report.requests)
        between = (_ms(None if itl is None else itl.mean), _ms(None if itl is None else itl.p90))
        yield [*begun, name, _count(number), share, *figures, *between]
        begun = [""] * len(told)


def _paired(pairing: Pairing) -> list[object]:
    found = pairing.ttft
    hits = [_share(pairing.gpu_rate_ours), _share(pairing.gpu_rate_theirs)]
    if found is None:
        return [0, *[None] * 6, *hits]
    low, high = found.mean_low, found.mean_high
    interval = None if low is None or high is None else f"{low:+.3f} to {high:+.3f}"
    spread = [f"{found.mean:+.3f}", interval, f"{found.p50:+.3f}", f"{found.p90:+.3f}"]
    return [_count(found.n), *spread, _share(found.better), _share(found.worse), *hits]


def _sentences(found: Compared) -> Iterator[str]:
    few = len(found.reports) <= MANY
    for report, verdicts in zip(found.reports, found.verdicts, strict=True):
        label, saturation = printable(report.label), report.saturation
        if saturation.saturated or few:
            over = "SATURATED, " if saturation.saturated else ""
            yield f"{label}: {over}{_share(report.attainment.overall) or '-'} within {_slo(report)}; {saturation.reason}"
        for verdict in verdicts:
            if verdict.verdict == "fail" and few:
                yield f"{label}: guardrail: {verdict.words}"
        if report.by_status.get("open"):
            yield f"{label}: {report.by_status['open']:,} requests had not ended when nothing more could happen"
    if not few:
        calm = sum(report.saturation.saturated is False for report in found.reports)
        failed = sum(any(verdict.verdict == "fail" for verdict in verdicts) for verdicts in found.verdicts)
        yield f"{calm} of {len(found.reports)} runs are not saturated; a guardrail fails in {failed} (--json has the words)"
    if dropped := found.reports[0].dropped:
        yield "left out of every run: " + ", ".join(f"{number:,} {why}" for why, number in dropped.items())
    if len(found.pairings) == 1:
        yield from _changed(found.pairings[0])
    yield f"runs: {found.directories[0].parent}"


def _changed(pairing: Pairing) -> Iterator[str]:
    """Of one pairing: who moved where, and who gained and lost most."""
    for moved in pairing.by_class[:5]:
        yield f"{moved.theirs} -> {moved.ours}: {moved.n:,} requests, {moved.mean:+.3f} s on average"
    for what, adapters in (("slower", pairing.lost), ("faster", pairing.gained)):
        if adapters:
            yield f"adapters that became {what}: {', '.join(map(_adapter, adapters))}"


def _adapter(change: AdapterChange) -> str:
    return f"{printable(change.adapter)} {change.mean:+.3f} s ({change.n})"


def _slo(report: Report) -> str:
    return f"{report.attainment.slo_s:g} s"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value * 1000:.1f}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _document(found: Compared, warnings: Sequence[str]) -> dict[str, object]:
    runs = [
        {
            "directory": str(directory),
            "changes": dict(changes.typed),
            "report": msgspec.to_builtins(report),
            "guardrails": msgspec.to_builtins(verdicts),
            "against": msgspec.to_builtins(found.pairings[index]) if found.pairings else None,
        }
        for index, (directory, changes, report, verdicts) in enumerate(
            zip(found.directories, found.changes, found.reports, found.verdicts, strict=True)
        )
    ]
    return {"warnings": list(warnings), "runs": runs}
