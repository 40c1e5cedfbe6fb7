"""``loraledger change replay``: a proposed change on a trace, before and after, with what it came to attached to the change.

Theory of operation. What is played is what ``loraledger replay`` plays, by the same code: the settings' fleet as it was and the
whole fleet changed. Before that, the profile is held against the newest requests of the record: one of another engine version or
another model answers for a fleet that is not there, so such a replay is refused. What the two runs came to is attached whether it
speaks for the change or against it; the exit code says which.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraledger.cli.change.asking import ask_changes, path_of
from loraledger.cli.change.options import IdArgument, WhoOption, who_asks
from loraledger.cli.change.playing import as_trace, check_fresh, newest, play_both
from loraledger.cli.change.shown import change_of, changes_of, trial_table
from loraledger.cli.options import ConfigOption, JsonOption, as_option, load_settings, usage
from loraledger.cli.output import print_json
from loraledger.cli.signals.shown import fold
from loraledger.errors import ObjectiveError
from loraledger.units import parse_bytes

if TYPE_CHECKING:
    from loraledger.cli.change.playing import Newest, Played
    from loraledger.operate.change import Change
    from loraledger.operate.trial import Trial
    from loraledger.twin.calibrated import Calibrated

_Trace = Annotated[
    Path, typer.Option("--trace", metavar="FILE|RECORD", help="A trace of ours; or the folder of a record, all of it.")
]
_Profile = Annotated[
    str | None,
    typer.Option("--profile", metavar="FILE|NAME", help="Step times and costs, of `loraledger calibrate`."),
]
_Fleet = Annotated[
    Path | None, typer.Option("--fleet", help="Settings of the fleet that is played. Default: the gateway's.")
]
_Engine = Annotated[
    str | None,
    typer.Option(
        "--engine-version", help="What the fleet runs. Default: what the newest requests of the record ran on."
    ),
]
_Rank = Annotated[int | None, typer.Option("--adapter-rank", min=1, help="Of adapters of which nobody knows it.")]
_Bytes = Annotated[
    int | None,
    typer.Option("--adapter-bytes", parser=as_option(parse_bytes), metavar="SIZE", help="The same for their files."),
]
_SkipUnfit = Annotated[
    bool, typer.Option("--skip-unfit", help="Leave out, and count, requests that no replica of a run could take.")
]
_Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time. Default: one a core.")]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="Keep both runs in this folder. Default: figures only.")]


def replay(
    id_: IdArgument,
    trace: _Trace,
    profile: _Profile = None,
    fleet: _Fleet = None,
    engine_version: _Engine = None,
    adapter_rank: _Rank = None,
    adapter_bytes: _Bytes = None,
    skip_unfit: _SkipUnfit = False,
    jobs: _Jobs = None,
    out: _Out = None,
    who: WhoOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Play the change on a trace, before and after, and attach what it came to.

    Exit code 5: the profile is stale, so nothing was played; or the replay speaks against the change: that is attached too.
    """
    from loraledger.cli.replay.setup import Asked
    from loraledger.operate.trial import judge
    from loraledger.replay.scenarios.profiles import DEFAULT, read_profile

    with usage():
        asker = who_asks(who)
    change = change_of(ask_changes("GET", path_of(id_), config))
    _check_state(change)
    loaded = load_settings(fleet or config)
    measured = read_profile(profile or DEFAULT)
    seen = newest(loaded, trace, engine_version)
    check_fresh(loaded, measured, seen)
    asked = Asked(
        profile=profile,
        engine_version=seen.engine_version,
        adapter_rank=adapter_rank,
        adapter_bytes=adapter_bytes,
        skip_unfit=skip_unfit,
    )
    with as_trace(trace) as file:
        played = play_both(change, _held(change, config), loaded, file, asked, out, jobs)
    trial = judge(change, *played.reports)
    evidence = _evidence(played, trial, measured, seen)
    body = {"who": asker, "why": _why(trial), "evidence": evidence}
    change = change_of(ask_changes("POST", path_of(id_, "replay"), config, body))
    _show(change, played, trial, evidence, as_json)
    if not trial.ok:
        raise ObjectiveError(
            f"the replay speaks against {change.id}: {'; '.join(trial.reasons)}. It is attached; "
            f"`loraledger change rollout {change.id}` now asks for --although and a reason"
        )


def _check_state(change: Change) -> None:
    """Raises ``ObjectiveError`` before anything is played for a change that is past it."""
    try:
        change.step("replay", 0, "")
    except ValueError as error:
        raise ObjectiveError(str(error)) from error


def _held(change: Change, config: Path | None) -> list[Change]:
    """Accepted changes of other variables that the gateway holds beside its settings."""
    accepted = [
        other
        for other in changes_of(ask_changes("GET", "", config))
        if other.state == "accepted" and other.live and other.variable != change.variable
    ]
    return [other for other in accepted if ask_changes("GET", path_of(other.id), config).get("held") is True]


def _evidence(played: Played, trial: Trial, profile: Calibrated, seen: Newest) -> dict[str, object]:
    """What the change keeps of the two runs: figures, and the digests by which they can be made again."""
    import msgspec

    from loraledger import __version__

    sides = dict(zip(("before", "after"), played.outcomes, strict=True))
    return {
        "trace": sides["before"].trace,
        "requests": sides["before"].requests,
        "runs": {side: outcome.record_digest for side, outcome in sides.items()},
        "scenarios": {side: outcome.scenario for side, outcome in sides.items()},
        "saturated": {side: outcome.saturation.saturated for side, outcome in sides.items()},
        "figures": {"before": dict(trial.before), "after": dict(trial.after)},
        "guardrails": msgspec.to_builtins(trial.checks),
        "ttft_paired": msgspec.to_builtins(played.pairing.ttft),
        "profile": {
            "name": profile.name,
            "engine": profile.engine,
            "engine_version": profile.engine_version,
            "model": profile.model,
            "device": profile.device,
            "date": profile.date,
        },
        "newest": seen._asdict(),
        "version": __version__,
        "warnings": list(played.warnings),
        "stale": False,
        "ok": trial.ok,
        "reasons": list(trial.reasons),
    }


def _why(trial: Trial) -> str:
    if not trial.ok:
        return f"it speaks against the change: {'; '.join(trial.reasons)}"
    target = trial.checks[0]
    return f"{target.metric} {target.before:.4g} before, {target.after:.4g} after, every guardrail holds"


def _show(change: Change, played: Played, trial: Trial, evidence: dict[str, object], as_json: bool) -> None:
    if as_json:
        import msgspec

        print_json("change-replay", {"change": msgspec.to_builtins(change), "evidence": evidence})
        return
    print(
        f"{change.id}: {change.variable}, the whole fleet before and after, on {played.outcomes[0].requests:,} requests\n"
    )
    trial_table(trial, played.reports)
    print()
    if (ttft := played.pairing.ttft) is not None:
        ends = "" if ttft.mean_low is None else f" ({ttft.mean_low:+.3f} to {ttft.mean_high:+.3f}, 95 %)"
        print(
            fold(
                f"request by request: first token {ttft.mean:+.3f} s{ends}, {ttft.better:.1%} sooner, {ttft.worse:.1%} later"
            )
        )
    for side, report in zip(("before", "after"), played.reports, strict=True):
        print(fold(f"{side}: {report.saturation.reason}"))
    if trial.ok:
        print(f"\nnow: loraledger change rollout {change.id}")
    sys.stdout.flush()
