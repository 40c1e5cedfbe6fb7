"""Candidates: the floor comes off before anything is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adapters.build_weights import BASE_8B, SMALL, build, spec_of
from adapters.conftest import CONFIG
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.errors import InputFileError
from loraledger.plan.candidates import Candidate, Setup, candidate, candidates, ranked, read_setup
from loraledger.plan.hardware import catalogue
from loraledger.plan.offers import Offer, read_offers

GIB = 2**30
GPUS = catalogue()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BASE_8B.write(tmp_path_factory.mktemp("base-8b"))


@pytest.fixture(scope="module")
def ready(base: BaseModel) -> Callable[..., Setup]:
    """``setup`` of ``base``: a function, since a model is too long to be shown with an example that fails."""
    return lambda slots=4, **more: setup(base, slots, **more)


def setup(base: BaseModel, slots: int = 4, **more: int | None) -> Setup:
    given: dict[str, int | None] = {"overhead": 2 * GIB, **more}
    return Setup(base, EngineSettings(max_loras=slots), **given)  # type: ignore[arg-type]


def offer(memory: int, count: int = 1, name: str = "o", price: float = 1.0) -> Offer:
    return Offer(name, "market-a", GPUS.gpus["l4"], count, memory, None, price, "USD", "spot", None, "2026-11-30")


def test_floor_slots_and_kv_add_up_to_the_devices(base: BaseModel) -> None:
    found = candidate(offer(80 * GIB), setup(base))
    assert found.fits
    assert found.floor_bytes is not None
    assert found.budget is not None
    assert found.floor_bytes + found.usable_bytes == found.headline_bytes == 80 * GIB
    budget = found.budget
    assert found.usable_bytes == budget.slots.total + budget.kv + budget.left


def test_two_small_devices_and_a_large_one_have_one_headline_and_two_floors(base: BaseModel) -> None:
    two, one = candidates([offer(40 * GIB, 2, "two"), offer(80 * GIB, 1, "one")], setup(base))[::-1]
    assert (two.offer.name, one.offer.name) == ("two", "one")
    assert two.headline_bytes == one.headline_bytes
    assert (two.replicas, one.replicas) == (2, 1)
    assert two.floor_bytes is not None
    assert one.floor_bytes is not None
    # Each replica has weights and overhead of its own; the share that is kept free is one of both.
    assert two.floor_bytes - one.floor_bytes == pytest.approx(base.weight_bytes + 2 * GIB, abs=2)


@given(
    memory=st.integers(18, 200),
    count=st.sampled_from([1, 2, 4, 8]),
    overheads=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    widths=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    prices=st.tuples(st.floats(0, 50), st.floats(0, 50)),
)
def test_of_two_with_the_same_headline_the_smaller_floor_ranks_first(
    ready: Callable[..., Setup],
    memory: int,
    count: int,
    overheads: tuple[int, int],
    widths: tuple[int, int],
    prices: tuple[float, float],
) -> None:
    first, second = (
        candidate(
            offer(memory * GIB, count, f"o{n}", prices[n]), ready(slots=1, overhead=overheads[n] * GIB), widths[n]
        )
        for n in (0, 1)
    )
    assert first.headline_bytes == second.headline_bytes
    assume(first.fits and second.fits and first.floor_bytes != second.floor_bytes)
    assert first.floor_bytes is not None
    assert second.floor_bytes is not None
    winner, loser = ranked([first, second])
    assert winner is (first if first.floor_bytes < second.floor_bytes else second)
    assert winner.usable_bytes > loser.usable_bytes


@given(
    sizes=st.lists(st.tuples(st.integers(4, 200), st.sampled_from([1, 2, 4]), st.floats(0, 9)), min_size=2, max_size=6)
)
def test_the_ranking_is_by_usable_memory_whatever_the_headline_and_the_price(
    ready: Callable[..., Setup], sizes: list[tuple[int, int, float]]
) -> None:
    found = candidates(
        [offer(size * GIB, count, f"o{n}", price) for n, (size, count, price) in enumerate(sizes)], ready()
    )
    usable = [one.usable_bytes for one in found]
    assert usable == sorted(usable, reverse=True)
    for one in found:
        assert one.fits == (one.usable_bytes > 0)
        assert one.usable_bytes + (one.floor_bytes or 0) <= one.headline_bytes or not one.fits


def test_a_base_that_one_device_does_not_hold_is_cut_over_as_few_as_do(base: BaseModel) -> None:
    found = candidate(offer(12 * GIB, 4), setup(base, overhead=GIB))
    assert (found.tensor_parallel, found.replicas) == (2, 2)
    assert found.words == "2 replicas, 2 devices each"
    assert found.budget is not None
    assert found.budget.weights == pytest.approx(base.weight_bytes / 2, abs=1)
    assert found.usable_bytes + (found.floor_bytes or 0) == 48 * GIB


def test_a_wider_cut_has_fewer_floors(base: BaseModel) -> None:
    narrow, wide = (candidate(offer(40 * GIB, 4), setup(base), width) for width in (1, 4))
    assert (narrow.replicas, wide.replicas) == (4, 1)
    assert wide.usable_bytes - narrow.usable_bytes == pytest.approx(3 * base.weight_bytes, abs=4)
    assert (
        candidate(offer(40 * GIB, 4), setup(base), 3).words
        == "does not fit: 4 devices are no replicas of 3 devices each"
    )


def test_what_does_not_fit_says_by_how_much(base: BaseModel) -> None:
    found = candidate(offer(16 * GIB), setup(base))
    assert not found.fits
    assert (found.replicas, found.usable_bytes, found.kv_blocks(1)) == (0, 0, 0)
    assert found.shortage is not None
    assert found.shortage > 0
    assert found.words.startswith("does not fit: ")
    assert candidate(offer(16 * GIB + found.shortage * 100 // 91), setup(base)).fits
    assert not candidate(offer(16 * GIB + found.shortage), setup(base)).fits  # a share of what is added is kept free


def test_the_shortage_is_exact(base: BaseModel) -> None:
    tight = replace(setup(base), utilization=1.0)
    short = candidate(offer(16 * GIB), tight).shortage
    assert short is not None
    assert candidate(offer(16 * GIB + short), tight).fits
    assert not candidate(offer(16 * GIB + short - 1), tight).fits


def test_the_least_kv_is_part_of_what_must_fit(base: BaseModel) -> None:
    tight = replace(setup(base), utilization=1.0)
    enough = candidate(offer(24 * GIB), tight)
    assert enough.budget is not None
    tokens = enough.budget.kv_tokens
    assert candidate(offer(24 * GIB), replace(tight, least_kv_tokens=tokens)).fits
    lacking = candidate(offer(24 * GIB), replace(tight, least_kv_tokens=tokens + 1))
    assert lacking.shortage is not None
    assert candidate(offer(24 * GIB + lacking.shortage), replace(tight, least_kv_tokens=tokens + 1)).fits
    assert not candidate(offer(24 * GIB + lacking.shortage - 1), replace(tight, least_kv_tokens=tokens + 1)).fits


def test_heads_that_cannot_be_cut_leave_a_narrower_cut(tmp_path: Path) -> None:
    six = replace(SMALL, hidden=384, heads=6).write(tmp_path)
    found = candidate(offer(2 * 2**20, 4), setup(six, slots=1, overhead=0))
    assert not found.fits
    assert found.tensor_parallel == 2, "6 heads are cut over 1 and 2 of 4 devices, though all widths can be cut over 4"
    alone = candidate(offer(2 * 2**20, 4), setup(six, slots=1, overhead=0), 4)
    assert alone.words == "does not fit: 6 attention heads cannot be cut over 4 devices"
    assert (alone.shortage, alone.floor_bytes, alone.usable_bytes) == (None, None, 0)


def test_more_slots_leave_less_kv_until_none_fit(base: BaseModel) -> None:
    found = candidate(offer(24 * GIB), setup(base))
    blocks = [found.kv_blocks(slots) for slots in (1, 2, 4, 8)]
    assert blocks == sorted(blocks, reverse=True)
    assert len(set(blocks)) == 4
    assert found.kv_blocks(10_000) == 0
    assert found.at_slots(10_000) is None


def test_an_unknown_overhead_makes_the_usable_memory_an_upper_bound(base: BaseModel) -> None:
    unknown, known = (candidate(offer(80 * GIB), setup(base, overhead=each)) for each in (None, GIB))
    assert (unknown.at_most, known.at_most) == (True, False)
    assert unknown.usable_bytes - known.usable_bytes == GIB


def test_the_link_is_the_offers_where_it_states_one(base: BaseModel) -> None:
    assert candidate(offer(24 * GIB), setup(base)).host_link == GPUS.gpus["l4"].host_link.value
    assert candidate(replace(offer(24 * GIB), host_link=7), setup(base)).host_link == 7


def test_the_committed_offers_of_the_same_headline_rank_by_their_floors(base: BaseModel) -> None:
    offers = read_offers(Path(__file__).parent / "offers.csv", GPUS).offers
    found = candidates(offers, setup(base))
    names = [one.offer.name for one in found]
    assert names.index("a100-80-1") < names.index("a100-40-2")
    assert all(one.fits for one in found)


def test_the_folders_give_the_rank_and_the_entries(tmp_path: Path) -> None:
    BASE_8B.write(tmp_path / "base", "MistralForCausalLM")
    for rank in (8, 16):
        build(
            tmp_path / "many" / f"r{rank}", {**CONFIG, "r": rank}, spec_of("slots-reserved-60", f"tensors_r{rank}.json")
        )
    engine = EngineSettings(max_loras=4, max_lora_rank=64, max_cpu_loras=10)
    found = read_setup(tmp_path / "base", [tmp_path / "many"], engine)
    assert (found.engine.max_lora_rank, found.adapters, found.unreadable) == (16, 2, ())
    assert read_setup(tmp_path / "base", [], engine).engine.max_lora_rank == 64
    assert read_setup(tmp_path / "base", [tmp_path / "many"], engine, max_lora_rank=32).engine.max_lora_rank == 32
    whole: Candidate = candidate(offer(80 * GIB, 2), found)
    assert found.entry_bytes is not None
    assert whole.host_bytes == 2 * 10 * found.entry_bytes
    assert candidate(offer(80 * GIB), read_setup(tmp_path / "base", [], engine)).host_bytes is None


def test_adapters_of_which_none_can_be_read_are_refused(tmp_path: Path) -> None:
    BASE_8B.write(tmp_path / "base")
    with pytest.raises(InputFileError, match="no adapter can be read"):
        read_setup(tmp_path / "base", [tmp_path / "nowhere"], EngineSettings())
