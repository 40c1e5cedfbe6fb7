"""The need of a record: each figure from its inputs, and unknown where one of them is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.plan.peak import ActiveTokens, Peak, read_peak
from loraledger.plan.requirement import Requirement, Sizes, requirement
from loraledger.record.tables import Row
from loraledger.signals.facts import Facts, ReplicaFacts
from loraledger.signals.figures import Window
from signals.records import MINUTE, NOON, SECOND, move, record, request, sample

HOUR = 60 * MINUTE
PERIOD = Window(NOON, NOON + 24 * HOUR)
MIB = 2**20
FACTS = Facts(
    replicas={"r1": ReplicaFacts(slots=2, host_entries=4, kv_tokens=10_000)},
    adapter_bytes={f"a{n}": (n + 1) * MIB for n in range(4)},
    source="looked up in a test",
)
SIZES = Sizes(slot_bytes=10 * MIB, kv_bytes_per_token=1000, floor_bytes=7, floor_source="guessed", source="a base")
LATER = NOON + 3 * HOUR


def traffic() -> list[Row]:
    """On r1 two adapters at once, on r2 one at a time; 4 in all."""
    rows = [request(arrived_ns=NOON + n * SECOND, adapter=f"a{k}", replica="r1") for n in range(5) for k in (0, 1)]
    return rows + [request(arrived_ns=NOON + (10 + k) * SECOND, adapter=f"a{k}", replica="r2") for k in (2, 3)]


@pytest.fixture
def peak_of(tmp_path: Path) -> Callable[..., Peak]:
    def read(requests: list[Row], facts: Facts = FACTS, **tables: list[Row]) -> Peak:
        with record(tmp_path, requests, **tables) as reader:
            return read_peak(reader, PERIOD, facts)

    return read


def worked(
    peak: Peak, growth: float = 1.0, headroom: float = 1.0, facts: Facts = FACTS, sizes: Sizes = SIZES
) -> Requirement:
    return requirement(peak, facts, growth, headroom=headroom, sizes=sizes, now_ns=LATER)


def values(found: Requirement) -> dict[str, int | None]:
    return {need.name: need.value for need in found.needs}


def day() -> list[Row]:
    """The first and the last moment of the period: two requests of no adapter."""
    bare = {"adapter": None, "digest": None, "hit_class": "base"}
    return [request(arrived_ns=at, **bare) for at in (PERIOD.since_ns, PERIOD.until_ns - SECOND)]


def test_each_figure_follows_from_the_peak_hour(peak_of: Callable[..., Peak]) -> None:
    loads = [move("disk", "gpu", at_ns=NOON + n * SECOND, replica="r1", took_ns=SECOND) for n in range(6)]
    peak = peak_of([*traffic(), *day()], residency=loads)
    found = worked(msgspec.structs.replace(peak, active=ActiveTokens(high=3000, most=4000, requests=12)))
    assert values(found) == {
        "usable memory": 3 * 10 * MIB + 3000 * 1000,
        "floor of a replica": 7,
        "slots": 3,  # two on r1, one on r2
        "KV tokens": 3000,
        "host entries": 4,
        "host bytes": (1 + 2 + 3 + 4) * MIB,
        "host link": 4 * MIB * 50,  # the largest in 20 ms
        "disk rate": -(-6 * 5 * MIB // 2 // 3600),
    }
    assert (found.requests, found.replicas, found.peak) == (13, 2, Window(NOON, NOON + HOUR))
    assert found.seen == found.peak
    assert found.need("disk rate").words.startswith("6 loads x 2,621,440 bytes / 3,600 s, x 1 growth")
    assert found.need("host entries").words.startswith("4 distinct adapters in the hour, x 1")


def test_a_rate_is_over_the_seconds_on_record_and_its_line_gives_the_figure(peak_of: Callable[..., Peak]) -> None:
    loads = [move("disk", "gpu", at_ns=NOON + n * SECOND, replica="r1", took_ns=SECOND) for n in range(6)]
    last = sample(at_ns=NOON + 40 * SECOND - 1)
    found = worked(peak_of(traffic(), residency=loads, samples=[last]), growth=1.5, headroom=1.25)
    assert found.seen == Window(NOON, NOON + 40 * SECOND)
    need = found.need("disk rate")
    assert need.words.startswith("6 loads x 2,621,440 bytes / 40 s, x 1.5 growth x 1.25 headroom; a mean")
    assert need.value == 6 * 2_621_440 * 15 * 125 // 40 // 1000
    assert "in flight or less in 99 % of the 40 s seen (at most" in found.need("KV tokens").words
    assert "4 distinct adapters in the 40 s seen, x 1.5" in found.need("host entries").words


def test_growth_and_headroom_multiply_counts_and_not_the_link(peak_of: Callable[..., Peak]) -> None:
    peak = peak_of(traffic())
    once, more = values(worked(peak)), values(worked(peak, growth=1.5, headroom=1.25))
    assert (once["slots"], more["slots"]) == (3, 6)  # 5.625
    assert (once["host entries"], more["host entries"]) == (4, 8)  # 7.5
    assert once["KV tokens"] is not None
    assert more["KV tokens"] == -(-once["KV tokens"] * 15 * 125 // 1000)
    assert once["host link"] == more["host link"]
    told = msgspec.structs.replace(peak, active=ActiveTokens(high=3000, most=3000, requests=12))
    tenth = values(worked(told, growth=1.1))
    assert tenth["slots"] == 4, "3.3 slots are 4"
    assert tenth["KV tokens"] == 3300, "what a float product is over is no token"


def test_ages_and_sources_are_said(peak_of: Callable[..., Peak]) -> None:
    found = worked(peak_of(traffic()))
    assert found.need("slots").age_ns == LATER - NOON - HOUR
    assert found.need("slots").source == "observed"
    assert found.need("usable memory").source == "configured"
    assert found.need("floor of a replica").age_ns is None
    assert found.need("slots").words == (
        "3 distinct adapters in flight at once, over 2 replicas, x 1 growth x 1 headroom"
    )
    assert found.facts == "looked up in a test"
    with pytest.raises(KeyError):
        found.need("luck")


def test_what_is_not_known_is_none_and_says_what_would_supply_it(peak_of: Callable[..., Peak]) -> None:
    facts = Facts(source="no settings")
    found = worked(peak_of(traffic(), facts), facts=facts, sizes=Sizes())
    for name in ("usable memory", "floor of a replica", "host bytes", "host link", "disk rate"):
        assert found.need(name).value is None, name
        assert found.need(name).age_ns is None
    assert "--base DIR" in found.need("usable memory").words
    assert "settings that name their files" in found.need("host bytes").words
    assert found.need("slots").value == 3
    assert found.need("host entries").value == 4


def test_one_adapter_of_unknown_size_makes_host_bytes_unknown(peak_of: Callable[..., Peak]) -> None:
    facts = msgspec.structs.replace(FACTS, adapter_bytes={"a0": MIB, "a1": MIB, "a2": MIB})
    assert worked(peak_of(traffic(), facts), facts=facts).need("host bytes").value is None


def test_kv_in_use_by_samples_stands_in_for_tokens_that_nobody_told(peak_of: Callable[..., Peak]) -> None:
    silent = [{**row, "prompt_tokens": None, "generated_tokens": None} for row in traffic()]
    samples = [sample(at_ns=NOON + n * SECOND, replica="r1", kv_usage=0.1 * n, kv_tokens=10_000) for n in range(1, 6)]
    found = worked(peak_of(silent, samples=samples))
    assert found.need("KV tokens").value == 5000
    assert "by samples (50% of 10,000 tokens)" in found.need("KV tokens").words
    assert worked(peak_of(silent)).need("KV tokens").value is None
    assert worked(peak_of(silent)).need("usable memory").value is None


def test_without_a_request_everything_but_the_floor_is_unknown(peak_of: Callable[..., Peak]) -> None:
    found = worked(peak_of([request(arrived_ns=NOON - HOUR)]))
    assert {name for name, value in values(found).items() if value is not None} == {"floor of a replica"}
    assert found.requests == 0


def test_base_requests_alone_need_no_slot(peak_of: Callable[..., Peak]) -> None:
    found = worked(peak_of([request(arrived_ns=NOON, adapter=None, digest=None, hit_class="base")]))
    assert found.need("host entries").value is None
    assert found.need("KV tokens").value is not None


def test_a_short_period_is_said_to_be_one(peak_of: Callable[..., Peak]) -> None:
    peak = peak_of([*traffic(), *day()])
    assert not any("may hold a higher peak" in note for note in worked(peak).notes)
    short = msgspec.structs.replace(peak, covered=Window(NOON, NOON + 21 * SECOND))
    assert "the traffic is 21 s long: a day or a week may hold a higher peak" in worked(short).notes


@pytest.mark.parametrize(
    ("growth", "headroom"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1), (1, float("inf")), (2000, 1)]
)
def test_a_factor_that_is_none_is_refused(peak_of: Callable[..., Peak], growth: float, headroom: float) -> None:
    with pytest.raises(ValueError, match="must be more than 0 and at most 1000"):
        worked(peak_of(traffic()), growth, headroom)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], dict[str, int | None]]:
    """The figures of ``traffic`` by growth."""
    with record(tmp_path_factory.mktemp("record"), traffic()) as reader:
        peak = read_peak(reader, PERIOD, FACTS)
    return lambda growth: values(worked(peak, growth))


@given(growths=st.lists(st.floats(0.1, 20), min_size=2, max_size=2).map(sorted))
def test_more_growth_never_needs_less(grown: Callable[[float], dict[str, int | None]], growths: list[float]) -> None:
    less, more = map(grown, growths)
    for name, value in less.items():
        other = more[name]
        assert value is not None
        assert other is not None
        assert value <= other, name
