"""Sentences that the page and the Markdown both say."""

from __future__ import annotations

from typing import Final

from loraledger.operate.review import tables
from loraledger.operate.review.charts import Plot
from loraledger.operate.review.gather import Review, Worst
from loraledger.operate.review.proposals import Proposal
from loraledger.operate.review.spelled import moment, plain, span, version
from loraledger.operate.review.triggers import Fresh
from loraledger.units import NS_PER_S

_WEEK_S: Final = 7 * 86_400


def title(review: Review) -> str:
    """What it is of."""
    return "Weekly review" if review.window.seconds == _WEEK_S else "Review"


def earlier(review: Review) -> str:
    """What it is compared with."""
    return "the week before" if review.window.seconds == _WEEK_S else "the window before"


def current(review: Review) -> str:
    """What it is of, in a legend."""
    return "this week" if review.window.seconds == _WEEK_S else "this window"


def measured(review: Review) -> tuple[str, ...]:
    """What was measured, and a warning where that is of several systems."""
    of = "all versions together" if review.now.version is None else version(review.now.version)
    said = [f"{span(review.window)} UTC, beside {earlier(review)} ({span(review.baseline)})"]
    said.append(f"Measured: {of}." if review.now.total is not None else "No request arrived.")
    again = dict.fromkeys(text for text in (review.now.measure_again, review.before.measure_again) if text)
    return tuple(map(plain, (*said, *again)))


def worst(review: Review) -> str:
    """Which hour the diagnosis is of, and why."""
    if review.worst is None:
        return "There was no hour to diagnose: no request arrived."
    found, slo = review.worst, f"{review.now.slo_s:g} s"
    when = f"{moment(found.window.since_ns, '%a %d %b %H:%M')} to {moment(found.window.until_ns, '%H:%M')} UTC"
    if found.late:
        return f"{when}: {found.late:,} of {found.requests:,} requests got no first token within {slo}, the most of any hour."
    return f"{when}: the busiest hour, {found.requests:,} requests; in no hour was one later than {slo}."


def news(one: Fresh) -> str:
    """Something that the window saw for the first time."""
    name = one.name.rpartition(":")[2][:12] if one.kind == "settings" else one.name
    said = f"files of adapter {name}" if one.kind == "adapter files" else f"{one.kind} {name}"
    return plain(f"{said}, since {moment(one.first_ns)}")


def plots(review: Review) -> tuple[Plot, ...]:
    """What is drawn over time."""
    series, window = review.series, review.window
    return (
        Plot(name="GPU hit rate", unit="share", window=window, series=series, take=lambda p: p.hit_rate, top=1.0),
        Plot(name="Time to first token, p99, s", unit="s", window=window, series=series, take=lambda p: p.p99),
    )


def pieces(review: Review) -> str:
    """How long the pieces of the plots are."""
    seconds = review.series.piece_ns // NS_PER_S
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds % size == 0:
            count = seconds // size
            return f"a {name}" if count == 1 else f"{count} {name}s"
    return f"{seconds} seconds"


def limits(worst: Worst) -> str:
    """What limited the worst hour; without the experiment that the diagnosis names, for ``looks`` has that."""
    found = worst.diagnosis
    return plain(found.sentence.removesuffix(f"; next: {found.experiment.command}"))


def looks(worst: Worst) -> list[str]:
    """Commands: the figures of the diagnosis; the trace of the next experiment, and the experiment."""
    found = worst.diagnosis.experiment
    return [plain(command) for command in (worst.command, found.before, found.command)]


def nothing_to_try(review: Review) -> str:
    """Why there is no proposal."""
    if review.now.total is None:
        return "Nothing: no request arrived."
    return "Nothing: neither the rules nor the worst hour name a change of one variable that is worth a trial."


def open_changes(review: Review) -> str:
    """What has to end before another change of its kind; empty where nothing is open."""
    open_ = [one.change for one in review.changes if one.change.open]
    if not open_:
        return ""
    names = ", ".join(f"{change.id} ({change.variable}, {change.state.replace('_', ' ')})" for change in open_)
    return plain(f"Open: {names}. Changes on the same part of the fleet are refused until these have ended.")


def moved(proposal: Proposal) -> str:
    """From what to what."""
    return plain(f"{tables.value(proposal.before)} to {tables.value(proposal.after)}")
