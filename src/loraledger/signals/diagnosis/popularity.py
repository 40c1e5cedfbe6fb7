"""Which adapters the requests are for, now against before: growth of the usual ones, one that got hot, a scan of rare ones.

Theory of operation. *Rare* adapters are those that the baseline asked for at most ``K`` times, K a quarter of an even share. Some
of a window's requests are always for adapters that were rare before; how many to expect follows Good and Turing (Biometrika 40,
1953): those seen r times get together what those seen r + 1 times got before, so all seen up to K times get what all seen up to
K + 1 times got. What is beyond that came from a change in who is asked for. The *usual* growth is that of all others without
the one adapter that grew most; a scan or a hot adapter thus does not look like a surge, nor a surge like either of them.

*Diversity* is the number of equally popular adapters that would be as likely to give two requests the same one (inverse Simpson
index, unbiased for sampling): a surge leaves it as it is.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraledger.signals.diagnosis.statistics import ratio_z
from loraledger.signals.diagnosis.thresholds import FEW, HOT, RARE
from loraledger.signals.diagnosis.view import Both, View, quotient
from loraledger.signals.figures import Signals

_BASE: Final = ""
"""Stands for the base model, which is as usual as an adapter can be."""


class Popularity(msgspec.Struct, frozen=True):
    """``usual``: ratio of requests for usual adapters, and its standard errors above 1. ``rare``: share beyond the expected one."""

    usual: float | None = None
    usual_z: float = 0.0
    rare: float | None = None
    hottest: str | None = None
    """The adapter that grew most beyond the usual growth, if by a tenth of all requests and twofold."""
    hot_share: float | None = None
    """What it grew by beyond the usual growth, as a share of all requests."""
    diversity: Both = (None, None)


def popularity(view: View) -> Popularity:
    """Compare the requests of both windows by adapter."""
    diversity = view.signals(_diversity)
    if view.base is None or view.before is None:
        return Popularity(diversity=diversity)
    now, before = _counts(view.now), _counts(view.base)
    grown = {name: count - view.scale * before.get(name, 0) for name, count in now.items() if name != _BASE}
    hottest = max(grown, key=lambda name: (grown[name], name), default=None)
    few = max(2.0, RARE * _even(before))
    usual = [name for name, count in before.items() if name != hottest and (name == _BASE or count > few)]
    count, expected = sum(now.get(name, 0) for name in usual), sum(before[name] for name in usual)
    if expected < FEW:
        count, expected = view.total.requests, view.before.requests
    growth = quotient(count, view.scale * expected)
    if growth is None or not view.total.requests:
        return Popularity(diversity=diversity)
    hot_share = _beyond(now, before, hottest, growth * view.scale) / view.total.requests
    hot = hot_share >= HOT and hottest is not None
    return Popularity(
        usual=growth,
        usual_z=ratio_z(growth, count, expected),
        rare=_rare(now, before, few, growth * view.scale, hottest) / view.total.requests,
        hottest=hottest if hot else None,
        hot_share=hot_share if hot else None,
        diversity=diversity,
    )


def _counts(signals: Signals) -> dict[str, int]:
    counts = {name: group.requests for name, group in signals.adapters.items() if name}
    if signals.total is not None and signals.total.hits.base:
        counts[_BASE] = signals.total.hits.base
    return counts


def _even(counts: dict[str, int]) -> float:
    adapters = [count for name, count in counts.items() if name != _BASE]
    return sum(adapters) / len(adapters) if adapters else 0.0


def _beyond(now: dict[str, int], before: dict[str, int], name: str | None, growth: float) -> float:
    """Requests for ``name`` beyond the usual growth; 0 when they did not double."""
    if name is None:
        return 0.0
    expected = growth * before.get(name, 0)
    return now[name] - expected if now[name] >= 2 * expected else 0.0


def _rare(now: dict[str, int], before: dict[str, int], few: float, growth: float, hottest: str | None) -> float:
    """Requests for rare adapters beyond what Good and Turing expect."""
    rare = [name for name in now if name not in (_BASE, hottest) and before.get(name, 0) <= few]
    expected = growth * sum(count for name, count in before.items() if name != _BASE and count <= few + 1)
    return max(0.0, sum(now[name] for name in rare) - expected)


def _diversity(signals: Signals) -> float | None:
    counts = [count for name, count in _counts(signals).items() if name != _BASE]
    total, pairs = sum(counts), sum(count * (count - 1) for count in counts)
    return total * (total - 1) / pairs if pairs > 0 else None
