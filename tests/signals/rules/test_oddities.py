from __future__ import annotations

from collections.abc import Sequence

import pytest

from loraledger.signals.facts import Facts
from loraledger.signals.figures import Window
from loraledger.signals.rules.advice import Oddity, Targets
from loraledger.signals.rules.oddities import harmless_misses, slow_hits
from loraledger.signals.rules.sample import MINUTE_NS, Sample, Seen
from signals.records import NOON

MS = 1_000_000
MIB = 2**20


def seen(adapter: str | None, number: int, ttft_ms: int | None, **columns: object) -> Seen:
    """The ``number``-th request: a second after the one before, and over before the next."""
    at = NOON + number * 1000 * MS
    row: dict[str, object] = {
        "tenant": "acme",
        "adapter": adapter,
        "replica": "r1",
        "hit_class": "gpu",
        "access": "undecided",
        "arrived_ns": at,
        "dispatched_ns": at,
        "first_token_ns": None if ttft_ms is None else at + ttft_ms * MS,
        "last_token_ns": at + 900 * MS,
        "finished_ns": at + 900 * MS,
        "prompt_tokens": 100,
        "preemptions": None,
        "ttft": None if ttft_ms is None else ttft_ms * MS,
        "preparation": 0,
        "queue": 0,
    }
    return Seen(**(row | columns))  # type: ignore[arg-type]


def sample(rows: Sequence[Seen], kv: dict[tuple[str, int], float] | None = None) -> Sample:
    return Sample(Window(NOON, NOON + 60 * MINUTE_NS), False, list(rows), kv or {})


def usual(n: int = 50, start: int = 1000) -> list[Seen]:
    return [seen("usual", start + k, 100) for k in range(n)]


def slow(**columns: object) -> list[Seen]:
    """Ten hits, six of them slow."""
    return [seen("odd", k, 400 if k < 6 else 100, **(columns if k < 6 else {})) for k in range(10)]


def only(found: tuple[Oddity, ...]) -> Oddity:
    assert len(found) == 1
    return found[0]


# --- slow hits --------------------------------------------------------------------------------------------------------


def test_an_adapter_with_slow_hits_is_listed_with_its_figures() -> None:
    one = only(slow_hits(sample([*slow(), *usual()]), Facts(), Targets()))
    assert (one.adapter, one.kind, one.n, one.of) == ("odd", "slow hits", 6, 10)
    assert (one.ttft_p50, one.other_p50) == (0.4, 0.1)
    assert one.causes == ()  # nothing in the record is different


@pytest.mark.parametrize("targets", [Targets(slow=4.1), Targets(slow=4.0)])
def test_slow_is_a_multiple_of_the_median_of_hits(targets: Targets) -> None:
    assert bool(slow_hits(sample([*slow(), *usual()]), Facts(), targets)) == (targets.slow <= 4.0)


def test_a_few_slow_hits_are_of_any_adapter() -> None:
    rows = [seen("odd", k, 400) for k in range(4)] + usual()
    assert slow_hits(sample(rows), Facts(), Targets()) == ()
    rows = [seen("odd", k, 400 if k < 6 else 100) for k in range(61)] + usual()
    assert slow_hits(sample(rows), Facts(), Targets()) == ()


def test_misses_and_base_requests_are_no_slow_hits() -> None:
    rows = [seen("odd", k, 400, hit_class="disk") for k in range(9)] + [
        seen(None, 20 + k, 400, hit_class="base") for k in range(9)
    ]
    assert slow_hits(sample([*rows, *usual()]), Facts(), Targets()) == ()


def causes(
    rows: Sequence[Seen], facts: Facts | None = None, kv: dict[tuple[str, int], float] | None = None
) -> list[str]:
    found = [one for one in slow_hits(sample(rows, kv), facts or Facts(), Targets()) if one.adapter == "odd"]
    return [cause.split(":")[0] for cause in only(tuple(found)).causes]


def test_a_large_adapter_is_likely_slow_by_its_rank() -> None:
    facts = Facts(adapter_bytes={"odd": 320 * MIB, "usual": 20 * MIB})
    rows = [seen("odd", k, 400) for k in range(6)] + usual()
    assert causes(rows, facts) == ["likely its rank", "likely mixed ranks"]
    one = only(slow_hits(sample(rows), facts, Targets()))
    assert "it has 320 MiB, adapters of other hits 20 MiB" in one.causes[0]


def beside(adapter: str | None, each: int, different: bool = False) -> list[Seen]:
    """Requests that are in flight beside each of the slow ones."""
    name = adapter or ""
    return [
        seen(
            f"{name}{n}" if different else adapter,
            k,
            None,
            dispatched_ns=NOON + k * 1000 * MS - 1,
            arrived_ns=NOON + k * 1000 * MS - 1,
        )
        for k in range(6)
        for n in range(each)
    ]


def test_a_large_adapter_beside_it_is_named() -> None:
    facts = Facts(adapter_bytes={"odd": 20 * MIB, "usual": 20 * MIB, "large": 320 * MIB})
    assert causes([*slow(), *beside("large", 1), *usual()], facts)[0] == "likely mixed ranks"


def test_many_adapters_and_many_requests_are_told_apart() -> None:
    assert set(causes([*slow(), *beside("other", 5, different=True), *usual()])) == {
        "likely diversity",
        "likely crowding",
    }
    assert causes([*slow(), *beside("odd", 5), *usual()]) == ["likely crowding"]


def test_what_runs_on_another_replica_is_not_beside_it() -> None:
    elsewhere = [
        seen("other", k, None, replica="r2", dispatched_ns=NOON + k * 1000 * MS - 1) for k in range(6) for _ in range(5)
    ]
    assert causes([*slow(), *elsewhere, *usual()]) == []


def test_kv_pressure_shows_in_preemptions_or_in_the_samples_of_its_minute() -> None:
    assert causes([*slow(preemptions=1), *(seen("usual", 1000 + k, 100, preemptions=0) for k in range(50))]) == [
        "likely KV pressure"
    ]
    later = NOON + 1000 * 1000 * MS
    kv = {("r1", NOON): 0.95} | {
        ("r1", minute): 0.2 for minute in range(later - later % MINUTE_NS, later + 2 * MINUTE_NS, MINUTE_NS)
    }
    assert causes([*slow(), *usual()], kv=kv) == ["likely KV pressure"]


def test_loads_of_others_and_long_prompts_are_named() -> None:
    assert causes([*slow(preparation=250 * MS), *usual()]) == ["likely loads of others"]
    assert causes([*slow(prompt_tokens=4000), *usual()]) == ["likely long prompts"]


# --- harmless misses --------------------------------------------------------------------------------------------------


def misses(ttft_ms: int = 90, n: int = 6, **columns: object) -> list[Seen]:
    return [seen("odd", k, ttft_ms, **({"hit_class": "disk", "preparation": 50 * MS} | columns)) for k in range(n)]


def test_misses_no_slower_than_hits_are_listed() -> None:
    one = only(harmless_misses(sample([*misses(), *usual()])))
    assert (one.adapter, one.kind, one.n, one.of) == ("odd", "harmless misses", 6, 6)
    assert (one.ttft_p50, one.other_p50) == (0.09, 0.1)
    assert one.causes == ()
    assert only(harmless_misses(sample([*misses(100), *usual()]))).n == 6


def test_misses_slower_than_hits_or_few_are_not() -> None:
    assert harmless_misses(sample([*misses(101), *usual()])) == ()
    assert harmless_misses(sample([*misses(n=4), *usual()])) == ()
    assert harmless_misses(sample(misses())) == ()  # no hit to hold them against


def test_an_adapter_with_hits_is_held_against_its_own() -> None:
    own = [seen("odd", 100 + k, 50) for k in range(5)]
    assert harmless_misses(sample([*misses(), *own, *usual()])) == ()


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ({"access": "gpu"}, "likely a wrong belief: the engine found it in a slot in 6 of 6"),
        ({"queue": 80 * MS}, "likely hidden: they waited 0.08 s in queues anyway, and for 0.05 s of preparation"),
        ({"hit_class": "host"}, "likely cheap: 6 of 6 needed only a copy from the host cache"),
        ({"prompt_tokens": 20}, "likely short prompts: 20 tokens, the hits' 100"),
    ],
)
def test_why_a_miss_did_no_harm(columns: dict[str, object], cause: str) -> None:
    assert only(harmless_misses(sample([*misses(90, 6, **columns), *usual()]))).causes == (cause,)
