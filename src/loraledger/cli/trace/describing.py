"""``loraledger trace describe``: what a trace holds, for people at a glance and for programs as one document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraledger.cli.options import JsonOption
from loraledger.cli.output import print_json, printable, watched
from loraledger.units import format_duration

if TYPE_CHECKING:
    from loraledger.replay.traces.describe import Description, Spread
    from loraledger.replay.traces.trace import Header, Trace

_BARS = ("▁▂▃▄▅▆▇█", "_.-:=+*#")
_MINUTE_NS = 60 * 10**9
_SHOWN = 5
"""Adapters whose share is shown by name."""

SkipOption = Annotated[
    bool, typer.Option("--skip-bad", help="Drop bad rows and count them, instead of refusing the file.")
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=2,
        help="Prompt and output of a request, such as max_model_len; more is bad. Default: 10,000,000.",
    ),
]


def describe(
    trace: Annotated[Path, typer.Argument(help="A trace of ours, plain or .gz.", show_default=False)],
    skip_bad: SkipOption = False,
    max_tokens: MaxTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much a trace holds, how bursty and how skewed it is, and how many adapters a minute needs.

    Exit code 3: the file is no trace, a row is bad, or its digest is not that of its content.
    """
    from loraledger.replay.traces.trace import MAX_TOKENS, Trace

    show(Trace(trace, skip_bad=skip_bad, max_tokens=max_tokens or MAX_TOKENS), as_json)


def show(trace: Trace, as_json: bool) -> None:
    """Read ``trace`` once, and print what it holds. Raises ``InputFileError``."""
    from loraledger.replay.traces.describe import describe as read
    from loraledger.replay.traces.trace import no_request

    try:
        found = read(watched(trace, "reading", trace.header.requests), len(trace.header.adapters))
    except ValueError as error:
        raise no_request(trace.path, trace.dropped) from error
    if as_json:
        print_json("trace", _document(trace, found))
    else:
        for name, text in _lines(trace, found):
            print(f"{name:<12}{text}")
    if trace.dropped:
        print(f"loraledger: {dropped_text(trace.dropped)}", file=sys.stderr)


def dropped_text(dropped: dict[str, int]) -> str:
    """How many rows were dropped and why."""
    return f"{sum(dropped.values()):,} bad rows dropped: " + ", ".join(
        f"{n:,} {why}" for why, n in sorted(dropped.items())
    )


def _document(trace: Trace, found: Description) -> dict[str, object]:
    import msgspec

    header: Header = trace.header
    about: dict[str, object] = {
        "name": header.name,
        "source": header.source,
        "licence": header.licence,
        "seed": header.seed,
        "block_tokens": header.block_tokens,
        "digest": trace.digest,
        "dropped": dict(trace.dropped),
    }
    figures: dict[str, object] = msgspec.to_builtins(found)
    for name in ("prompt", "output", "working_set", "concentration"):
        part = getattr(found, name)
        figures[name] = None if part is None else part._asdict()
    figures["top"] = [{"adapter": name, "share": share} for name, share in found.top]
    return about | figures


def _lines(trace: Trace, found: Description) -> list[tuple[str, str]]:
    header = trace.header
    lines = [
        ("trace", printable(header.name)),
        ("source", printable(header.source)),
        ("licence", printable(header.licence) or "not said"),
        ("digest", trace.digest or "unknown"),
        ("requests", _requests(found)),
        ("arrivals", _picture(found)),
        ("prompt", f"{_spread(found.prompt)} tokens"),
        ("output", f"{_spread(found.output)} tokens"),
        ("tenants", f"{found.tenants:,}"),
        (
            "adapters",
            f"{found.adapters_used:,} used of {found.adapters_named:,}; {found.base_share:.1%} of requests to the base",
        ),
    ]
    if found.concentration is not None:
        skew = found.concentration
        top = ", ".join(f"{printable(name)} {share:.1%}" for name, share in found.top[:_SHOWN])
        lines += [
            ("popularity", f"top-1 {skew.top1:.1%}, top-10 {skew.top10:.1%} of requests with an adapter ({top})"),
            (
                "effective",
                f"{skew.entropy_number:.1f} adapters (exp of entropy), {skew.simpson_number:.1f} (inverse Simpson)",
            ),
            ("working set", f"{_spread(found.working_set)} distinct adapters a minute"),
        ]
    if found.prefix_share:
        lines.append(("prefixes", f"{found.prefix_share:.1%} of requests name blocks of {header.block_tokens} tokens"))
    return lines


def _requests(found: Description) -> str:
    text = f"{found.requests:,} in {format_duration(found.duration_ns)}"
    if found.rate is not None:
        text += f", {found.rate:.4g}/s"
        text += f", busiest minute {found.peak_minute_rate:.4g}/s" if found.duration_ns >= _MINUTE_NS else ""
        text += f", longest gap {format_duration(found.longest_gap_ns)}"
    return text if found.gap_cv is None else f"{text}, CV of gaps {found.gap_cv:.2f}"


def _picture(found: Description) -> str:
    """One sign a bin, as high as its share of the fullest one; an empty bin is blank."""
    bars = _BARS[0] if (sys.stdout.encoding or "").lower().startswith("utf") else _BARS[1]
    most = max(found.bins)
    signs = "".join(" " if n == 0 else bars[min(len(bars) - 1, n * len(bars) // (most + 1))] for n in found.bins)
    return f"|{signs}| {format_duration(found.bin_ns)} a column, up to {most:,}"


def _spread(found: Spread) -> str:
    return f"p50 {found.p50:,}, p90 {found.p90:,}, p99 {found.p99:,}, mean {found.mean:,.1f}, max {found.max:,}"
