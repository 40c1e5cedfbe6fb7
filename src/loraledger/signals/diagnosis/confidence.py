"""How sure the answer is, and why not surer.

Theory of operation. ``high`` needs a baseline, enough requests in both windows, one version, and a cause that came from outside and
stands alone. Each thing that lacks is a doubt in words, with what would supply it.
"""

from __future__ import annotations

from collections.abc import Iterator

from loraledger.signals.diagnosis import thresholds as at
from loraledger.signals.diagnosis.rules import Ruling, Signs
from loraledger.signals.diagnosis.verdict import Confidence
from loraledger.signals.figures import Signals, Version

Doubt = tuple[Confidence, str]
"""At most how sure, and why."""
_ORDER: tuple[Confidence, ...] = ("low", "medium", "high")


def confidence(doubts: list[Doubt]) -> Confidence:
    """The least of what ``doubts`` allow."""
    return min((most for most, _ in doubts), key=_ORDER.index, default="high")


def doubts(signs: Signs, base: Signals | None, found: list[Ruling]) -> Iterator[Doubt]:
    """What lacks."""
    yield from _of_windows(signs, base)
    if found:
        yield from _of_ruling(found)
    elif signs.limits:
        yield "low", "what is waited got worse or is bad, and no step shows why: look at a longer window"
    if not signs.limits and signs.waiting.finding.verdict == "unknown":
        yield "low", "no time to a first token is known: it takes streams, or a log that has them"
    if not signs.view.probed:
        yield "high", "no probe: what engines found and how they divided their time is believed or unknown"


def _of_windows(signs: Signs, base: Signals | None) -> Iterator[Doubt]:
    view, now = signs.view, signs.view.now
    if view.before is None:
        few = base is not None and base.total is not None
        yield (
            "medium",
            f"the baseline has fewer than {at.FEW} requests" if few else "there is no baseline to compare with",
        )
    fewest = min(view.total.requests, view.total.requests if view.before is None else view.before.requests)
    if fewest < at.SOME:
        yield "low", f"{fewest} requests are few"
    elif fewest < at.MANY:
        yield "medium", f"{fewest} requests: with {at.MANY} the tail of the waits would be known too"
    if now.measure_again is not None:
        yield "low", now.measure_again
    elif now.version is None:
        yield "low", "rows of several versions are pooled"
    elif view.base is not None and view.base.version is not None and _other(now, view.base):
        yield "low", "the baseline is of another version: measure it again"


def _other(now: Signals, base: Signals) -> bool:
    return _key(now.version) != _key(base.version)


def _key(version: Version | None) -> tuple[str | None, ...] | None:
    if version is None:
        return None
    return (version.engine_version, version.base, version.config_digest, version.gateway_version)


def _of_ruling(found: list[Ruling]) -> Iterator[Doubt]:
    first, *others = found
    if not first.outside:
        yield "medium", "nothing that came from outside explains it: it goes by what is short inside"
    pools = {ruling.pool for ruling in others} - {first.pool}
    if pools:
        causes = ", ".join(dict.fromkeys(ruling.cause for ruling in others if ruling.pool in pools))
        yield "medium", f"there are signs of something else too: {causes}"
