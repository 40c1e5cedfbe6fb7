"""``loraledger replay``: a recorded or generated trace through the live kernel, in front of twins of the fleet.

The settings of the gateway say what the fleet is, a profile says how long its steps take, ``--policy`` and ``--set`` say what is
tried. Every combination is one run, kept as a folder that other verbs read like a live record; a table compares them. A SIGTERM
ends it as Ctrl-C does, with nothing left half done: 143 and 130, as shells have it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from loraledger.cli.options import STOPPED, DurationType, JsonOption, as_option, load_settings, usage
from loraledger.cli.trace.describing import MaxTokensOption, SkipOption
from loraledger.errors import ObjectiveError
from loraledger.units import NS_PER_S, parse_bytes

INTERRUPTED = "Query interrupted"
"""What DuckDB makes of anything that a signal's handler raises during a query."""

_Trace = Annotated[Path, typer.Argument(help="A trace of ours, plain or .gz.", show_default=False)]
_Fleet = Annotated[
    Path | None,
    typer.Option("--fleet", "--config", "-c", help="Settings of the gateway. Default: as for every verb."),
]
_Profile = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="FILE|NAME", help="Step times and costs. Default: llama-3.1-8b-h100, with a warning."
    ),
]
_Policy = Annotated[
    list[str] | None, typer.Option("--policy", metavar="P", help="A policy to try; repeatable. Default: the settings'.")
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=V[,V...]",
        help="What to vary; repeatable: slots, host_entries, max_rank, max_seqs, token_budget, kv_blocks, replicas, "
        "speed, profile, policy.*, limits.*, tenants.*.",
    ),
]
_KeepKv = Annotated[bool, typer.Option("--keep-kv", help="More slots take nothing from KV: a larger device.")]
_Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time. Default: one a core.")]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the runs. Default: ./replay-DIGEST.")]
_Against = Annotated[
    Path | None,
    typer.Option("--against", metavar="RUN", help="Folder of one run: each is compared with it, request by request."),
]
_Probe = Annotated[
    bool | None,
    typer.Option("--probe/--no-probe", help="The kernel sees what moves in engines. Default: as configured."),
]
_ScrapeInterval = Annotated[
    int | None, typer.Option("--scrape-interval", parser=DurationType, metavar="TIME", help="Default: as configured.")
]
_ScrapeDelay = Annotated[
    int | None, typer.Option("--scrape-delay", parser=DurationType, metavar="TIME", help="How late an answer is: 5ms.")
]
_Rank = Annotated[int | None, typer.Option("--adapter-rank", min=1, help="Of adapters of which nobody knows it.")]
_Bytes = Annotated[
    int | None,
    typer.Option("--adapter-bytes", parser=as_option(parse_bytes), metavar="SIZE", help="The same for their files."),
]
_Engine = Annotated[
    str | None, typer.Option("--engine-version", help="What the fleet runs, to warn of a profile of another version.")
]
_SkipUnfit = Annotated[
    bool, typer.Option("--skip-unfit", help="Leave out, and count, requests that no replica of some run could take.")
]
_Clients = Annotated[
    int | None, typer.Option("--clients", min=1, help="A closed loop of so many clients, whatever times the trace has.")
]
_Slo = Annotated[
    int | None,
    typer.Option(
        "--slo", parser=DurationType, metavar="TIME", help="Attainment: first token within this. Default: 1s."
    ),
]
_Preemptions = Annotated[
    float, typer.Option("--max-preemptions", min=0.0, help="Guardrail: KV preemptions for 1,000 requests.")
]
_LongRatio = Annotated[
    float, typer.Option("--max-long-ratio", min=0.0, help="Guardrail: p90 TTFT of long prompts over the first run's.")
]
_LongTtft = Annotated[
    int | None,
    typer.Option("--max-long-ttft", parser=DurationType, metavar="TIME", help="Guardrail: p90 TTFT of long prompts."),
]
_Require = Annotated[bool, typer.Option("--require", help="Exit with 5 if a guardrail fails or a run is saturated.")]


def replay(
    trace: _Trace,
    fleet: _Fleet = None,
    profile: _Profile = None,
    policy: _Policy = None,
    set_: _Set = None,
    keep_kv: _KeepKv = False,
    jobs: _Jobs = None,
    out: _Out = None,
    against: _Against = None,
    probe: _Probe = None,
    scrape_interval: _ScrapeInterval = None,
    scrape_delay: _ScrapeDelay = None,
    adapter_rank: _Rank = None,
    adapter_bytes: _Bytes = None,
    engine_version: _Engine = None,
    skip_bad: SkipOption = False,
    skip_unfit: _SkipUnfit = False,
    max_tokens: MaxTokensOption = None,
    clients: _Clients = None,
    slo: _Slo = None,
    max_preemptions: _Preemptions = 10.0,
    max_long_ratio: _LongRatio = 1.1,
    max_long_ttft: _LongTtft = None,
    require: _Require = False,
    as_json: JsonOption = False,
) -> None:
    """Try configurations on a trace: the live kernel on a virtual clock, in front of twins of the replicas.

    Exit code 2: a key or value of --set cannot be; 3: trace, settings or profile are bad, or a combination cannot exist;
    5: with --require, a guardrail failed or a run was saturated; 130 and 143: ended by Ctrl-C and SIGTERM.
    """
    from loraledger.cli.replay.setup import Asked, observed, play, prepare
    from loraledger.cli.replay.show import Compared, guards, show
    from loraledger.replay.results.report import DEFAULT_SLO_S
    from loraledger.replay.scenarios.axes import combinations, parse_axes

    loaded = load_settings(fleet)
    with usage():
        changes = combinations(parse_axes(policy or [], set_ or []), loaded.settings.policy.name)
    asked = Asked(
        profile=profile,
        keep_kv=keep_kv,
        engine_version=engine_version,
        adapter_rank=adapter_rank,
        adapter_bytes=adapter_bytes,
        skip_bad=skip_bad,
        skip_unfit=skip_unfit,
        max_tokens=max_tokens,
        clients=clients,
    )
    with usage():
        observation = observed(loaded, probe, scrape_interval, scrape_delay)
        guardrails = guards(max_preemptions, max_long_ratio, max_long_ttft)
    with _stoppable("nothing was written"):
        prepared = prepare(loaded, trace, changes, observation, asked, _warn)
    slo_s = DEFAULT_SLO_S if slo is None else slo / NS_PER_S
    with _stoppable("runs that were complete are kept"):
        directories = play(prepared, out, jobs, against)
        found = Compared.read(changes, directories, slo_s, guardrails, against)
    show(found, prepared.warnings, as_json)
    if require and (failed := found.failed()):
        raise ObjectiveError(failed)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


@contextmanager
def _stoppable(left: str) -> Iterator[None]:
    """The first SIGTERM ends the block as an interrupt would, and then the process; later ones wait until all is cleared up.

    A line on stderr says that it was stopped and what is ``left`` of it.
    """

    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(STOPPED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        try:
            yield
        except RuntimeError as error:
            if str(error) != INTERRUPTED:
                raise
            raise SystemExit(STOPPED) if stopped else KeyboardInterrupt from error
    except (KeyboardInterrupt, SystemExit):
        print(f"replay: stopped; {left}", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
