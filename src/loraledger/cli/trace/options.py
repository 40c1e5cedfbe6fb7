"""What several trace verbs share: options as they are typed, and the mix that they spell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraledger.cli.options import as_option, usage
from loraledger.units import parse_bytes

if TYPE_CHECKING:
    from loraledger.replay.traces.trace import Adapter
    from loraledger.replay.workloads.generate import Mix

OutOption = Annotated[Path, typer.Option("--out", "-o", help="File to write; compressed if it ends in .gz.")]
NameOption = Annotated[
    str | None, typer.Option("--name", help="What the trace is called. Default: made from its source.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Same seed, same trace.")]
TenantsOption = Annotated[
    int | None, typer.Option("--tenants", min=1, help="Adapters are dealt to so many tenants. Default: 1.")
]
BaseOption = Annotated[
    float | None, typer.Option("--base-share", min=0.0, max=1.0, help="Share to the base model. Default: 0.")
]
ActiveOption = Annotated[
    int | None, typer.Option("--active", min=1, help="Adapters in use at a time, for --churn. Default: all.")
]
DriftOption = Annotated[
    str | None,
    typer.Option(
        "--drift",
        metavar="PERIOD[:N]",
        help="Each period every adapter falls N ranks (1 if left out); the last come first.",
    ),
]
ChurnOption = Annotated[
    str | None,
    typer.Option(
        "--churn", metavar="PERIOD[:N]", help="Each period N active adapters (1 if left out) give way to others."
    ),
]
RanksOption = Annotated[
    str | None,
    typer.Option("--ranks", metavar="R,R,...", help="Ranks, dealt to the adapters in turn. Default: unknown."),
]
BytesOption = Annotated[
    int | None,
    typer.Option(
        "--bytes-per-rank",
        parser=as_option(parse_bytes),
        metavar="SIZE",
        help="Bytes of an adapter per rank; needs --ranks. Default: unknown.",
    ),
]


def mix_from(
    adapters: int,
    popularity: str,
    tenants: int | None,
    base_share: float | None,
    active: int | None,
    drift: str | None,
    churn: str | None,
) -> Mix:
    """The mix that the options spell, every part of it checked. Raises ``typer.BadParameter``."""
    from loraledger.replay.workloads.generate import Assigner, Mix
    from loraledger.replay.workloads.popularity import shares
    from loraledger.replay.workloads.roster import parse_every

    with usage():
        mix = Mix(
            adapters=adapters,
            popularity=popularity,
            tenants=tenants or 1,
            base_share=base_share or 0.0,
            active=active,
            drift=None if drift is None else parse_every(drift),
            churn=None if churn is None else parse_every(churn),
        )
        shares(popularity, 1)
        Assigner(mix, 0)
    return mix


def adapters_from(count: int, ranks: str | None, bytes_per_rank: int | None) -> tuple[Adapter, ...]:
    """a0, a1, ... with the ranks and bytes that the options spell. Raises ``typer.BadParameter``."""
    from loraledger.replay.workloads.generate import named_adapters

    if bytes_per_rank is not None and ranks is None:
        raise typer.BadParameter("--bytes-per-rank needs --ranks")
    with usage():
        return named_adapters(count, [int(part) for part in ranks.split(",")] if ranks else (), bytes_per_rank)
