"""``loraledger trace generate``: draw a workload from a seed and write it as a trace.

A kind is either a published generator, with its published defaults (``slora``, ``punica-...``), published data (``servegen``),
or a popularity by formula under free arrivals, lengths, drift and churn. An option that a kind does not take is a usage error:
it would be ignored, and the trace would not be what its author thinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraledger.cli.options import DurationType, JsonOption, usage
from loraledger.cli.output import watched
from loraledger.cli.trace.describing import show
from loraledger.cli.trace.options import (
    ActiveOption,
    BaseOption,
    BytesOption,
    ChurnOption,
    DriftOption,
    NameOption,
    OutOption,
    RanksOption,
    SeedOption,
    TenantsOption,
    adapters_from,
    mix_from,
)
from loraledger.units import NS_PER_S, spell_bytes, spell_duration

if TYPE_CHECKING:
    from loraledger.replay.traces.trace import Adapter, Request
    from loraledger.replay.workloads.draws import Draw

KINDS: Final = "slora, punica-distinct, punica-uniform, punica-skewed, punica-identical, servegen"
GENERATED: Final = "generated: no licence needed"

RATE, DURATION, LENGTHS, ADAPTERS = 10.0, 600 * NS_PER_S, "8-511", 100
"""What a popularity has unless told otherwise; the published generators have their own below."""
SLORA_ADAPTERS, SLORA_RATE, SLORA_S = 200, 2.0, 300.0
PUNICA_REQUESTS: Final = 1024

_Adapters = Annotated[
    int | None,
    typer.Option(
        "--adapters", min=1, help=f"How many adapters there are. Default: {ADAPTERS}; slora {SLORA_ADAPTERS}."
    ),
]
_Rate = Annotated[float | None, typer.Option("--rate", help=f"Requests/s. Default: {RATE:g}; slora {SLORA_RATE:g}.")]
_Duration = Annotated[
    int | None,
    typer.Option(
        "--duration",
        parser=DurationType,
        metavar="TIME",
        help=f"Such as 30m. Default: {spell_duration(DURATION)} unless --requests; slora {SLORA_S:g}s.",
    ),
]
_Requests = Annotated[
    int | None,
    typer.Option("--requests", min=1, help=f"Stop after so many. Default: no limit; punica {PUNICA_REQUESTS}."),
]
_Arrivals = Annotated[
    str | None,
    typer.Option(
        "--arrivals", help="poisson, constant, at-once, gamma:CV, weibull:SHAPE. Default: poisson; punica at-once."
    ),
]
_Lengths = "N, A-B (both may be drawn) or pmf:FILE (JSON, tokens to weight)."
_OWN = "slora, punica and servegen have their own"
_Prompt = Annotated[str | None, typer.Option("--prompt", help=f"Prompt tokens: {_Lengths} Default: {LENGTHS}; {_OWN}.")]
_Output = Annotated[str | None, typer.Option("--output", help=f"Output tokens: {_Lengths} Default: {LENGTHS}; {_OWN}.")]
_Alpha = Annotated[
    float | None, typer.Option("--alpha", help="slora: skew, which grows as it falls; 1 is uniform. Default: 1.")
]
_Cv = Annotated[float | None, typer.Option("--cv", help="slora: coefficient of variation of gaps. Default: 1.")]
_Data = Annotated[Path | None, typer.Option("--data", help="servegen: folder of chunk-N-trace.csv.")]
_Start = Annotated[
    int | None,
    typer.Option("--start", parser=DurationType, metavar="TIME", help="servegen: where to begin. Default: 0s."),
]
_Scale = Annotated[float | None, typer.Option("--rate-scale", help="servegen: multiplies every rate. Default: 1.")]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options as typed; ``None`` where not given. Times in ns."""

    kind: str
    seed: int
    rate: float | None
    duration: int | None
    requests: int | None
    adapters: int | None
    tenants: int | None
    base_share: float | None
    active: int | None
    drift: str | None
    churn: str | None
    arrivals: str | None
    prompt: str | None
    output: str | None
    alpha: float | None
    cv: float | None
    data: Path | None
    start: int | None
    rate_scale: float | None
    ranks: str | None
    bytes_per_rank: int | None


@dataclass(frozen=True)
class Made:
    """A workload: where it comes from, under what licence, its adapters, its requests, and how many if that is known."""

    source: str
    adapters: tuple[Adapter, ...]
    requests: Iterable[Request]
    total: int | None = None
    licence: str = GENERATED


def generate(
    kind: Annotated[
        str, typer.Argument(help=f"{KINDS}, or a popularity: uniform, identical, zipf:S, exponential:C, power:ALPHA.")
    ],
    out: OutOption,
    seed: SeedOption = 42,
    rate: _Rate = None,
    duration: _Duration = None,
    requests: _Requests = None,
    adapters: _Adapters = None,
    tenants: TenantsOption = None,
    base_share: BaseOption = None,
    active: ActiveOption = None,
    drift: DriftOption = None,
    churn: ChurnOption = None,
    arrivals: _Arrivals = None,
    prompt: _Prompt = None,
    output: _Output = None,
    alpha: _Alpha = None,
    cv: _Cv = None,
    data: _Data = None,
    start: _Start = None,
    rate_scale: _Scale = None,
    ranks: RanksOption = None,
    bytes_per_rank: BytesOption = None,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a workload and write it as a trace; say how skewed it came out."""
    from loraledger.replay.traces.trace import Header, Trace, write_trace

    given = dict(locals())
    wanted = Wanted(**{field: given[field] for field in Wanted.__dataclass_fields__})
    made = _make(wanted)
    header = Header(name=name or kind, source=made.source, licence=made.licence, seed=seed, adapters=made.adapters)
    with usage():
        write_trace(out, header, enumerate(watched(made.requests, "writing", made.total), 1))
    show(Trace(out), as_json)


def _make(wanted: Wanted) -> Made:
    if wanted.kind == "slora":
        return _slora(wanted)
    if wanted.kind.startswith("punica-"):
        return _punica(wanted)
    return _servegen(wanted) if wanted.kind == "servegen" else _popular(wanted)


_SPELLED: Final[dict[str, Callable[[Any], str]]] = {
    "duration": spell_duration,
    "start": spell_duration,
    "bytes_per_rank": spell_bytes,
}
_ALWAYS: Final = frozenset({"kind", "seed", "ranks", "bytes_per_rank"})


def _takes(wanted: Wanted, *options: str) -> str:
    """The options that were given, spelled out, after refusing those that the kind does not take."""
    given = {option: value for option, value in asdict(wanted).items() if value is not None}
    if other := sorted(given.keys() - _ALWAYS - set(options)):
        spelled = ", ".join(f"--{option.replace('_', '-')}" for option in other)
        raise typer.BadParameter(f"{wanted.kind} does not take {spelled}")
    words = [f"loraledger trace generate {wanted.kind}"]
    for option, value in given.items():
        if option not in ("kind", "data"):
            spelled = _SPELLED.get(option, str)(value)
            words.append(f"--{option.replace('_', '-')} {spelled}")
    return " ".join(words)


def _slora(wanted: Wanted) -> Made:
    from loraledger.replay.workloads.generate import slora

    source = _takes(wanted, "rate", "duration", "adapters", "alpha", "cv")
    count, rate = wanted.adapters or SLORA_ADAPTERS, SLORA_RATE if wanted.rate is None else wanted.rate
    duration_s = SLORA_S if wanted.duration is None else wanted.duration / NS_PER_S
    requests = slora(
        adapters=count,
        alpha=1.0 if wanted.alpha is None else wanted.alpha,
        rate=rate,
        cv=1.0 if wanted.cv is None else wanted.cv,
        duration_s=duration_s,
        seed=wanted.seed,
    )
    adapters = adapters_from(count, wanted.ranks, wanted.bytes_per_rank)
    return Made(f"{source} (the sequence of S-LoRA's benchmark)", adapters, requests, max(0, int(rate * duration_s)))


def _punica(wanted: Wanted) -> Made:
    from loraledger.replay.workloads.draws import parse_arrivals
    from loraledger.replay.workloads.generate import punica
    from loraledger.replay.workloads.popularity import punica_counts

    source = _takes(wanted, "rate", "requests", "arrivals")
    kind, number = wanted.kind.removeprefix("punica-"), wanted.requests or PUNICA_REQUESTS
    with usage():
        counts = punica_counts(kind, number)
        gap = parse_arrivals(wanted.arrivals or ("at-once" if wanted.rate is None else "poisson"))
    requests = punica(kind, requests=number, gap=gap, rate=_rate(wanted), seed=wanted.seed)
    adapters = adapters_from(len(counts), wanted.ranks, wanted.bytes_per_rank)
    return Made(f"{source} (the popularity and lengths of Punica's benchmark)", adapters, requests, number)


def _servegen(wanted: Wanted) -> Made:
    from loraledger.replay.workloads.draws import parse_lengths
    from loraledger.replay.workloads.servegen import read_clients, servegen

    source = _takes(wanted, "data", "start", "duration", "rate_scale", "prompt", "output")
    if wanted.data is None or (wanted.prompt is None) != (wanted.output is None):
        raise typer.BadParameter("servegen needs --data DIR, and --prompt and --output both or neither")
    clients = read_clients(wanted.data)
    with usage():
        given = [parse_lengths(text) for text in (wanted.prompt, wanted.output) if text is not None]
    requests = servegen(
        clients,
        start_s=(wanted.start or 0) / NS_PER_S,
        duration_s=(DURATION if wanted.duration is None else wanted.duration) / NS_PER_S,
        rate_scale=1.0 if wanted.rate_scale is None else wanted.rate_scale,
        seed=wanted.seed,
        lengths=(given[0], given[1]) if given else None,
    )
    adapters = _renamed(adapters_from(len(clients), wanted.ranks, wanted.bytes_per_rank), [c.number for c in clients])
    source += f" ({len(clients)} clients of {wanted.data.absolute().name})"
    return Made(source, adapters, requests, licence="drawn from ServeGen's data: Apache-2.0, cite arXiv 2505.09999")


def _renamed(adapters: tuple[Adapter, ...], numbers: list[int]) -> tuple[Adapter, ...]:
    from msgspec.structs import replace

    return tuple(replace(adapter, name=f"a{number}") for adapter, number in zip(adapters, numbers, strict=True))


_FREE: Final = ("rate", "duration", "requests", "adapters", "tenants", "base_share", "active", "drift", "churn")


def _popular(wanted: Wanted) -> Made:
    from loraledger.replay.workloads.draws import parse_arrivals
    from loraledger.replay.workloads.generate import workload

    source = _takes(wanted, *_FREE, "arrivals", "prompt", "output")
    count = wanted.adapters or ADAPTERS
    mix = mix_from(count, wanted.kind, wanted.tenants, wanted.base_share, wanted.active, wanted.drift, wanted.churn)
    with usage():
        gap = parse_arrivals(wanted.arrivals or "poisson")
    prompt, output = _lengths(wanted.prompt), _lengths(wanted.output)
    requests, duration = wanted.requests, wanted.duration
    if duration is None and requests is None:
        duration = DURATION
    if requests is None and wanted.arrivals == "at-once":
        raise typer.BadParameter("--arrivals at-once never ends by time: give --requests")
    rate = _rate(wanted)
    drawn = workload(mix, gap, prompt, output, rate=rate, requests=requests, duration=duration, seed=wanted.seed)
    return Made(source, adapters_from(count, wanted.ranks, wanted.bytes_per_rank), drawn, requests)


def _rate(wanted: Wanted) -> float:
    return RATE if wanted.rate is None else wanted.rate


def _lengths(text: str | None) -> Draw:
    from loraledger.replay.workloads.draws import parse_lengths

    with usage():
        return parse_lengths(text or LENGTHS)
