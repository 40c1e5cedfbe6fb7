"""The next experiment: a replay of the recorded traffic with one thing changed, ready to paste.

Theory of operation. The first value of each option is what there is now, since ``loraledger replay`` judges the others against the
first run. What is not known of the fleet (its slots, its host entries) is not guessed: another thing is varied then. A replay does
not model restarts, a slow disk only as far as its profile says so, and no neighbour that takes memory: where the cause is one of
these, the experiment asks what else would carry the traffic meanwhile.
"""

from __future__ import annotations

import shlex
from typing import Final

from loraledger.signals.diagnosis.rules import Ruling, Signs
from loraledger.signals.diagnosis.verdict import Cause, Experiment
from loraledger.signals.diagnosis.view import largest
from loraledger.signals.facts import Facts

TRACE: Final = "diagnosis.jsonl"
MOST_REPLICAS: Final = 1023
"""One less than a replay takes."""
MOST_PLACES: Final = 10**9
"""As many as a replay takes."""
_SPEED: Final = ("where the limit is: the same requests arrive faster", "--set speed=1,3/2,2")


def experiment(signs: Signs | None, ruling: Ruling | None, facts: Facts, record: str, settings: str) -> Experiment:
    """What to replay next. ``signs`` and ``ruling`` are ``None`` where nothing was found."""
    question, options = _SPEED if signs is None or ruling is None else _options(signs, ruling.cause, facts)
    return Experiment(
        question=question,
        before=f"loraledger trace import record {shlex.quote(record)} --out {TRACE}",
        command=f"loraledger replay {TRACE} --fleet {shlex.quote(settings)} {options}",
    )


def _options(signs: Signs, cause: Cause, facts: Facts) -> tuple[str, str]:
    if cause in ("hot adapter", "skew"):
        policies = "--policy bounded-affinity --policy least-loaded"
        return "whether another policy spreads this traffic better", policies
    if cause == "cold adapters":
        return "whether fewer loads a minute spare the others", "--set limits.loads_per_minute=120,60,30"
    if cause == "slots" and (found := _more_slots(signs)):
        return "whether more slots are worth the KV that they take", found
    if cause == "slow loads" and (found := _more_entries(signs)):
        return "whether more host entries spare reads of the disk", found
    if cause in ("kv", "floor") and (found := _fewer_slots(signs)):
        return "whether slots that are not needed are worth more as KV", found
    count = min(MOST_REPLICAS, max(1, len(facts.replicas), len(signs.view.now.replicas)))
    return "whether another replica carries it", f"--set replicas={count},{count + 1}"


def _more_slots(signs: Signs) -> str | None:
    places = signs.misses.working
    if places is None or places.slots is None or not 0 < places.slots <= MOST_PLACES // 2:
        return None
    wanted = max(places.adapters, places.in_flight_max or 0)
    more = wanted if places.slots < wanted <= 2 * places.slots else 2 * places.slots
    return f"--set slots={places.slots},{more}"


def _more_entries(signs: Signs) -> str | None:
    places = signs.misses.working
    entries = None if places is None else places.host_entries
    return f"--set host_entries={entries},{2 * entries}" if entries and entries <= MOST_PLACES // 2 else None


def _fewer_slots(signs: Signs) -> str | None:
    """As many as were in flight at once, where that is less than there are."""
    sets = [group.working_set for group in signs.view.now.replicas.values() if group.working_set is not None]
    most = largest(each.in_flight_max for each in sets)
    slots = min((each.slots for each in sets if each.slots is not None), default=None)
    if most is None or slots is None or not 0 < most < slots <= MOST_PLACES:
        return None
    return f"--set slots={slots},{int(most)}"
