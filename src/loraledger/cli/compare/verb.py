"""The options of ``loraledger compare``, and from them what is compared.

Theory of operation. All that can be refused is refused before the first replay: offers, base, adapters, trace, profile, policies.
Replays are then played in rounds into a folder that keeps what they came to, so that a second start goes on where a first was
stopped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraledger.cli.options import JsonOption, as_option, usage
from loraledger.cli.replay.verb import INTERRUPTED
from loraledger.errors import InputFileError
from loraledger.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from loraledger.plan.canary import Canary, Twins
    from loraledger.plan.candidates import Setup
    from loraledger.plan.hardware import Catalogue
    from loraledger.plan.offers import Offers
    from loraledger.plan.trials import Objective

POLICIES: Final = ("bounded-affinity", "least-loaded")
MAX_SLOTS: Final = 100_000
_Size = as_option(parse_bytes)

_Offers = Annotated[Path, typer.Argument(help="What can be had: CSV or JSON (docs/plan.md).")]
_Trace = Annotated[
    Path, typer.Option("--trace", help="The canary: a trace as `loraledger trace` writes it, the same for all.")
]
_Base = Annotated[Path, typer.Option("--base", help="Folder of the base model (config.json).")]
_Adapters = Annotated[
    list[Path] | None, typer.Option("--adapters", help="Adapter folder, or folder of such folders; repeatable.")
]
_Policy = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="P", help="Repeatable. Default: bounded-affinity and least-loaded."),
]
_Slo = Annotated[
    str, typer.Option("--slo", metavar="ttft=TIME[,itl=TIME]", help="First token, and time between tokens, within.")
]
_Share = Annotated[float, typer.Option("--share", help="Of requests that have to be met, above 0 up to 1.")]
_Preemptions = Annotated[
    float, typer.Option("--max-preemptions", min=0.0, help="Guardrail: KV preemptions for 1,000 requests.")
]
_Slots = Annotated[
    str | None,
    typer.Option("--slots", metavar="N[,N...]", help="Ladder of slots. Default: 4,8,16,32,64 up to all adapters."),
]
_Host = Annotated[
    int | None, typer.Option("--host-entries", min=1, help="Host cache of each replica. Default: twice the most slots.")
]
_Replicas = Annotated[int, typer.Option("--replicas-max", min=1, max=1024, help="How many replicas are tried at most.")]
_Speed = Annotated[str, typer.Option("--speed", metavar="N", help="Play the trace so many times as fast.")]
_Profile = Annotated[
    str | None, typer.Option("--profile", metavar="FILE|NAME", help="Step times. Default: llama-3.1-8b-h100.")
]
_ProfileGpu = Annotated[
    str | None, typer.Option("--profile-gpu", metavar="NAME", help="What it was measured on. Default: as it says.")
]
_Hardware = Annotated[
    Path | None, typer.Option("--hardware", help="More GPUs in a file (docs/plan.md); they win over the shipped ones.")
]
_Overhead = Annotated[
    int | None,
    typer.Option(
        "--overhead", parser=_Size, metavar="SIZE", help="Of a device, beside weights, slots and KV. Default: unknown."
    ),
]
_Utilization = Annotated[
    float | None, typer.Option("--gpu-memory-utilization", min=0.01, max=1.0, help="Default: 0.92, as vLLM 0.32.")
]
_MaxRank = Annotated[
    int | None, typer.Option("--max-lora-rank", min=1, help="Default: the smallest that takes all adapters.")
]
_Rank = Annotated[int | None, typer.Option("--adapter-rank", min=1, help="Of adapters of which nobody knows it.")]
_Bytes = Annotated[
    int | None, typer.Option("--adapter-bytes", parser=_Size, metavar="SIZE", help="The same for their files.")
]
_Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time. Default: one a core.")]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="Keeps what runs came to. Default: ./compare-DIGEST.")]


def compare(
    offers: _Offers,
    trace: _Trace,
    base: _Base,
    adapters: _Adapters = None,
    policy: _Policy = None,
    slo: _Slo = "ttft=1s",
    share: _Share = 0.99,
    max_preemptions: _Preemptions = 10.0,
    slots: _Slots = None,
    host_entries: _Host = None,
    replicas_max: _Replicas = 8,
    speed: _Speed = "1",
    profile: _Profile = None,
    profile_gpu: _ProfileGpu = None,
    hardware: _Hardware = None,
    overhead: _Overhead = None,
    gpu_memory_utilization: _Utilization = None,
    max_lora_rank: _MaxRank = None,
    adapter_rank: _Rank = None,
    adapter_bytes: _Bytes = None,
    jobs: _Jobs = None,
    out: _Out = None,
    as_json: JsonOption = False,
) -> None:
    """Offers and policies on one trace: memory after the floor, replicas that keep the objectives, what they cost.

    Exit code 2: an option cannot be; 3: offers, trace, base, adapters or profile are bad, or no offer fits;
    130 and 143: ended by Ctrl-C and SIGTERM: the same command goes on from there.
    """
    from loraledger.cli.compare.show import Shown, show
    from loraledger.cli.replay.progress import watching
    from loraledger.plan.candidates import candidates
    from loraledger.plan.compare import Asked, default_ladder
    from loraledger.plan.compare import compare as compared
    from loraledger.plan.hardware import catalogue
    from loraledger.plan.runs import runs

    with usage():
        policies, objective, pace = _policies(policy), _objective(slo, share, max_preemptions), _pace(speed)
        ladder = None if slots is None else _ladder(slots)
    gpus = catalogue(hardware)
    offered = _offered(offers, gpus)
    canary = _canary(trace, adapters or [], adapter_rank, adapter_bytes, pace)
    steps = ladder or default_ladder(len(canary.adapters))
    entries = host_entries or 2 * steps[-1]
    setup = _setup(base, adapters or [], canary, steps[0], entries, max_lora_rank, overhead, gpu_memory_utilization)
    twins = _twins(profile, profile_gpu, gpus, entries, setup)
    asked = Asked(policies=policies, ladder=steps, replicas_max=replicas_max, objective=objective)
    judged = candidates(offered.offers, setup)
    for one in judged:
        if one.replicas > replicas_max:
            _warn(
                f"{one.offer.name} is not tried: one of it is {one.replicas} replicas (--replicas-max {replicas_max})"
            )
    with _interruptible(), runs(out, canary, objective, jobs or len(os.sched_getaffinity(0)), watching) as played:
        found = compared(judged, canary, twins, asked, played)
    show(Shown(offered, canary, setup, twins, asked, judged, found), as_json)


def _offered(path: Path, gpus: Catalogue) -> Offers:
    """The offers, of which at least one can be compared with the others."""
    from loraledger.plan.offers import read_offers

    found = read_offers(path, gpus)
    for unknown in found.unknown:
        hint = f"; {unknown.hint}" if unknown.hint else ""
        _warn(f"{unknown.name} is set aside: {unknown.gpu!r} is no GPU that is known{hint} (--hardware FILE adds one)")
    for note in found.notes:
        _warn(note)
    if not found.offers:
        raise InputFileError(f"{path}: no offer of a GPU that is known")
    if len(found.currencies) > 1:
        raise InputFileError(
            f"{path}: prices are in {' and '.join(found.currencies)}, which cannot be compared: convert them to one"
        )
    return found


def _canary(trace: Path, folders: Sequence[Path], rank: int | None, size: int | None, pace: tuple[int, int]) -> Canary:
    from loraledger.plan.canary import read_canary

    found = read_canary(trace, tuple(folders), rank=rank, size=size, speed=pace)
    for warning in found.warnings:
        _warn(warning)
    return found


def _setup(
    base: Path,
    folders: Sequence[Path],
    canary: Canary,
    slots: int,
    entries: int,
    rank: int | None,
    overhead: int | None,
    utilization: float | None,
) -> Setup:
    """The engine with the fewest slots; what fits must hold the canary's largest request."""
    from loraledger.adapters.sizing.engine import EngineSettings, smallest_max_rank
    from loraledger.cli.engine_flags import check_flags
    from loraledger.ledger.budget import BLOCK_TOKENS, UTILIZATION
    from loraledger.plan.candidates import read_setup

    needed = smallest_max_rank(max(canary.largest_rank, 1))
    if needed is None or (rank is not None and rank < canary.largest_rank):
        limit = "any max_lora_rank" if needed is None else f"--max-lora-rank {rank}"
        raise InputFileError(f"{canary.path}: its adapters have ranks up to {canary.largest_rank}, above {limit}")
    engine = EngineSettings(max_loras=slots, max_cpu_loras=max(entries, slots), max_lora_rank=rank or needed)
    check_flags(engine)
    setup = read_setup(base, folders, engine, max_lora_rank=rank)
    for reason in setup.unreadable:
        _warn(reason)
    if setup.engine.max_lora_rank < needed:
        setup = replace(setup, engine=replace(setup.engine, max_lora_rank=needed))
    blocks = -(-canary.most_tokens // BLOCK_TOKENS)
    return replace(
        setup,
        least_kv_tokens=blocks * BLOCK_TOKENS,
        utilization=utilization or UTILIZATION,
        overhead=overhead,
    )


def _twins(profile: str | None, gpu: str | None, gpus: Catalogue, entries: int, setup: Setup) -> Twins:
    from loraledger.adapters.survey import kv_bytes_of
    from loraledger.plan.canary import Twins
    from loraledger.plan.scaling import measured_on
    from loraledger.replay.fleet.observation import Observation
    from loraledger.replay.scenarios.profiles import DEFAULT, read_profile

    read = read_profile(profile or DEFAULT)
    found = measured_on(read.device, gpus) if gpu is None else gpus.find(gpu)
    if found is None:
        named = read.device if gpu is None else gpu
        raise InputFileError(f"profile {read.name} is of {named!r}{gpus.hint(named)}: say which with --profile-gpu")
    if read.profile.layout != "slots":
        raise InputFileError(f"profile {read.name} has one pool and no slots to compare: give one of a vLLM")
    block = kv_bytes_of(setup.base, setup.engine) * read.profile.block_size
    if profile is None:
        _warn(f"no profile was given: step times are those of {read.name} ({read.model} on {read.device})")
    if read.block_bytes is not None and read.block_bytes != block:
        _warn(
            f"profile {read.name} is of another model ({read.model}, {read.block_bytes:,} bytes a KV block) than --base "
            f"({setup.base.name}, {block:,}): its step times are not those of this base"
        )
    return Twins(calibrated=read, measured_on=found, gpus=gpus, host_entries=entries, observation=Observation())


def _policies(names: Sequence[str] | None) -> tuple[str, ...]:
    from loraledger.config.checks import nearest
    from loraledger.kernel.policies import policy_names

    found = tuple(dict.fromkeys(names or POLICIES))
    for name in found:
        if name not in policy_names():
            raise ValueError(f"--policy {name}: no such policy{nearest(name, policy_names())}")
    return found


def _objective(slo: str, share: float, preemptions: float) -> Objective:
    """``ttft=1s,itl=50ms``. Raises ``ValueError``."""
    from loraledger.plan.trials import Objective

    given: dict[str, int] = {}
    for part in slo.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in ("ttft", "itl") or not equals or name in given:
            raise ValueError(f"--slo {slo}: write ttft=TIME and, if you like, itl=TIME, as in ttft=1s,itl=50ms")
        try:
            given[name] = parse_duration(value)
        except ValueError as error:
            raise ValueError(f"--slo {part.strip()}: {error}") from error
        if given[name] < 1:
            raise ValueError(f"--slo {part.strip()}: nothing is that quick")
    if "ttft" not in given:
        raise ValueError(f"--slo {slo}: ttft is missing, as in ttft=1s,itl=50ms")
    if not 0 < share <= 1:
        raise ValueError(f"--share {share:g}: a number above 0 and up to 1 is wanted")
    return Objective(ttft_ns=given["ttft"], itl_ns=given.get("itl"), share=share, preemptions_per_1000=preemptions)


def _ladder(text: str) -> tuple[int, ...]:
    """``4,8,16``. Raises ``ValueError``."""
    steps: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        value = int(part) if part.isascii() and part.isdecimal() and len(part) < 10 else 0
        if not 1 <= value <= MAX_SLOTS or value in steps:
            raise ValueError(f"--slots {text}: whole numbers from 1 to {MAX_SLOTS:,} are wanted, each once")
        steps.append(value)
    return tuple(sorted(steps))


def _pace(text: str) -> tuple[int, int]:
    from loraledger.replay.scenarios.axes import parse_axes

    try:
        (axis,) = parse_axes([], [f"speed={text}"])
    except ValueError as error:
        raise ValueError(str(error).replace("--set speed=", "--speed ")) from error
    value = axis.values[0][1]
    if len(axis.values) > 1 or not isinstance(value, Fraction):
        raise ValueError(f"--speed {text}: one number or fraction is wanted, such as 1.5 or 4/3")
    return value.as_integer_ratio()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C in the middle of a query is Ctrl-C. What was played before is kept, whoever ends the process."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != INTERRUPTED:
            raise
        raise KeyboardInterrupt from error


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
