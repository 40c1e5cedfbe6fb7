"""Step 1: is more asked for? Arrivals, tokens a request, and which adapters they are for.

Theory of operation. What comes from outside is told apart from what follows inside: arrivals and lengths do not depend on how the
fleet fares (answers do a little: while it is slow, short ones end first), tokens in flight do, since whoever waits stays in
flight. So the verdict goes by the former, and the latter stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from loraledger.signals.diagnosis.popularity import Popularity, popularity
from loraledger.signals.diagnosis.statistics import ratio_z
from loraledger.signals.diagnosis.thresholds import DEMAND, DEMAND_SLIGHT, SIGMA
from loraledger.signals.diagnosis.verdict import Finding, Verdict
from loraledger.signals.diagnosis.view import Both, Sheet, View, at_least, quotient, ratio
from loraledger.signals.figures import Group

QUESTION: Final = "Is more asked for: arrivals, tokens a request, tokens in flight?"
ARRIVALS: Final = "requests a minute"
USUAL: Final = "growth of usual adapters"
PROMPT: Final = "prompt tokens a request"
ANSWER: Final = "generated tokens a request"
PROMPTS: Final = "prompt tokens a minute"
IN_FLIGHT: Final = "tokens in flight"
HOTTEST: Final = "adapter that grew most"
HOT_SHARE: Final = "its growth"
RARE_SHARE: Final = "requests for rare adapters beyond the expected"
DIVERSITY: Final = "effective number of adapters"


class Demand(msgspec.Struct, frozen=True):
    """Ratios to the baseline, and whether they are more than chance; ``None``: not known."""

    finding: Finding
    popularity: Popularity
    usual: float | None
    grew: bool
    grew_slightly: bool
    more: bool
    """All arrivals together grew."""
    prompt: float | None
    longer_prompts: bool
    answer: float | None
    longer_answers: bool


def demand(view: View) -> Demand:
    """Take the step."""
    sheet, found = Sheet(), popularity(view)
    prompt = _each(view, lambda group: group.prompt_tokens)
    answer = _each(view, lambda group: group.generated_tokens)
    sheet.put(ARRIVALS, view.both(lambda group: group.per_minute), "a minute")
    sheet.put_one(USUAL, found.usual, "times")
    sheet.put(PROMPT, prompt, "tokens")
    sheet.put(ANSWER, answer, "tokens")
    sheet.put(PROMPTS, view.both(_prompts), "a minute")
    sheet.put(IN_FLIGHT, view.both(lambda group: group.active_tokens), "tokens")
    sheet.put_one(HOTTEST, found.hottest)
    sheet.put_one(HOT_SHARE, found.hot_share, "share")
    sheet.put_one(RARE_SHARE, found.rare, "share")
    sheet.put(DIVERSITY, found.diversity, "adapters")
    beyond_chance = found.usual_z >= SIGMA
    grew = beyond_chance and at_least(found.usual, DEMAND)
    longer_prompts, longer_answers = _longer(view, prompt), _longer(view, answer)
    verdict, sentence = _verdict(view, found, grew, longer_prompts, longer_answers)
    return Demand(
        finding=Finding(1, QUESTION, sheet.evidence, verdict, sentence),
        popularity=found,
        usual=found.usual,
        grew=grew,
        grew_slightly=beyond_chance and at_least(found.usual, DEMAND_SLIGHT),
        more=_more(view),
        prompt=ratio(prompt),
        longer_prompts=longer_prompts,
        answer=ratio(answer),
        longer_answers=longer_answers,
    )


def _verdict(view: View, found: Popularity, grew: bool, prompts: bool, answers: bool) -> tuple[Verdict, str]:
    if view.before is None:
        return "unknown", "There is no baseline, so nothing says whether this is more than usual."
    if found.usual is None:
        return "unknown", "Requests of both windows cannot be compared."
    said = [
        text
        for is_so, text in (
            (grew, f"usual adapters are asked for {found.usual:.2f} times as often"),
            (found.hottest is not None, "one adapter grew by a tenth of all requests or more"),
            (prompts, "prompts are longer"),
            (answers, "answers are longer"),
        )
        if is_so
    ]
    if said:
        return "seen", f"More is asked for: {', '.join(said)}."
    return "not seen", "About as much is asked for as before."


def told(group: Group) -> int:
    """Requests whose tokens are told: those that ended well, as far as it is known."""
    return group.by_status.get("ok", 0) or group.requests


def _each(view: View, read: Callable[[Group], int | None]) -> Both:
    return view.both(lambda group: quotient(read(group), told(group)))


def _prompts(group: Group) -> float | None:
    """As if those that have not told were as long as those that have: under load many have not ended."""
    each = quotient(group.prompt_tokens, told(group))
    return None if each is None else each * group.per_minute


def _more(view: View) -> bool:
    if view.before is None:
        return False
    times = quotient(view.total.requests, view.scale * view.before.requests)
    return at_least(times, DEMAND) and ratio_z(times, view.total.requests, view.before.requests) >= SIGMA


def _longer(view: View, tokens: Both) -> bool:
    """As if lengths vary as much as their mean is large, which is usual."""
    if view.before is None:
        return False
    times = ratio(tokens)
    return at_least(times, DEMAND) and ratio_z(times, told(view.total), told(view.before)) >= SIGMA
