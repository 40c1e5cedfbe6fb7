from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.build_weights import SMALL, Dims, build, pairs
from adapters.conftest import CONFIG
from loraledger.adapters.sizing.basemodel import BaseModel, served_modules
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.survey import Totals, find, kv_bytes_of, sum_up, survey
from loraledger.config.schema import MAX_RANKS
from loraledger.errors import InputFileError
from loraledger.ledger.budget import (
    ExactBudget,
    Plan,
    exact_budget,
    folder_budget,
    kv_for,
    rank_weights,
    rough_budget,
)

MIB = 2**20
GIB = 2**30
SIZES = st.integers(0, 200 * GIB)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return SMALL.write(tmp_path_factory.mktemp("base"))


def parts_of(found: ExactBudget) -> int:
    return found.weights + (found.overhead or 0) + found.slots.total + found.kv + found.kept + found.left


def test_the_worked_example() -> None:
    found = rough_budget(80 * GIB, 48 * GIB, 4 * GIB, 20 * GIB, 240 * MIB)
    assert (found.left, found.adapters, found.spare) == (8 * GIB, 34, 32 * MIB)


@settings(deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.integers(1, 4 * GIB))
def test_an_estimate_divides_the_device_without_remainder(
    device: int, floor: int, safety: int, kv: int, adapter: int
) -> None:
    found = rough_budget(device, floor, safety, kv, adapter)
    parts = found.floor + found.safety + found.kv + found.adapters * found.adapter + found.spare
    assert parts == found.device
    assert found.spare < found.adapter
    assert found.adapters == 0 or found.spare >= 0


@settings(deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.integers(1, 4 * GIB), st.integers(0, 10 * GIB))
def test_more_memory_never_holds_fewer_adapters(
    device: int, floor: int, safety: int, kv: int, adapter: int, more: int
) -> None:
    fewer = rough_budget(device, floor, safety, kv, adapter).adapters
    assert rough_budget(device + more, floor, safety, kv, adapter).adapters >= fewer
    assert rough_budget(device, floor, safety, kv + more, adapter).adapters <= fewer


def test_an_adapter_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        rough_budget(GIB, 0, 0, 0, 0)
    assert rough_budget(GIB, 0, 0, 0, 1).adapters == GIB


PLANS = st.fixed_dictionaries(
    {
        "device": st.integers(1, 300 * MIB),
        "utilization": st.floats(0.1, 1.0),
        "safety": st.integers(0, 20 * MIB),
        "overhead": st.none() | st.integers(0, 20 * MIB),
        "kv": st.none() | st.integers(1, 60 * MIB),
    }
)
ENGINES = st.builds(EngineSettings, max_loras=st.integers(1, 70), max_lora_rank=st.sampled_from(MAX_RANKS[:6]))


@settings(deadline=None)
@given(values=PLANS, engine=ENGINES)
def test_the_parts_sum_to_the_device(base: BaseModel, values: dict[str, Any], engine: EngineSettings) -> None:
    found = exact_budget(Plan(base=base, engine=engine, **values))
    assert parts_of(found) == found.device
    assert found.fits == (found.left >= 0)


@settings(deadline=None)
@given(values=PLANS, engine=ENGINES)
def test_kv_takes_whole_blocks_and_leaves_less_than_one(
    base: BaseModel, values: dict[str, Any], engine: EngineSettings
) -> None:
    found = exact_budget(Plan(base=base, engine=engine, **{**values, "kv": None}))
    block = found.kv_bytes_per_token * found.block_tokens
    assert found.kv % block == 0
    assert found.kv_tokens * found.kv_bytes_per_token == found.kv
    assert found.left < block
    assert found.kv_at_most == (values["overhead"] is None)


@settings(deadline=None)
@given(values=PLANS, engine=ENGINES)
def test_the_largest_number_of_slots_is_the_one_that_trying_finds(
    base: BaseModel, values: dict[str, Any], engine: EngineSettings
) -> None:
    plan = Plan(base=base, engine=engine, **values)
    fitting = [
        slots for slots in range(1, 80) if exact_budget(replace(plan, engine=replace(engine, max_loras=slots))).fits
    ]
    assert min(79, exact_budget(plan).largest_slots) == max(fitting, default=0)


@settings(deadline=None)
@given(values=PLANS, engine=ENGINES, more=st.integers(0, 60 * MIB))
def test_a_larger_device_never_holds_fewer_slots_or_tokens(
    base: BaseModel, values: dict[str, Any], engine: EngineSettings, more: int
) -> None:
    plan = Plan(base=base, engine=engine, **values)
    small, large = exact_budget(plan), exact_budget(replace(plan, device=plan.device + more))
    assert large.largest_slots >= small.largest_slots
    assert large.kv_tokens >= small.kv_tokens


def test_what_the_engine_leaves_alone_is_the_rest_of_its_share_or_the_safety_if_more(base: BaseModel) -> None:
    plan = Plan(80_000_000_000, base, EngineSettings(), utilization=0.9)
    assert exact_budget(plan).kept == 8_000_000_000
    assert exact_budget(replace(plan, safety=7_000_000_000)).kept == 8_000_000_000
    assert exact_budget(replace(plan, safety=9_000_000_000)).kept == 9_000_000_000


def test_an_unknown_overhead_lies_in_kv_or_in_what_is_left(base: BaseModel) -> None:
    plan = Plan(GIB, base, EngineSettings())
    guess, known = exact_budget(plan), exact_budget(replace(plan, overhead=100 * MIB))
    assert guess.kv_at_most
    assert not known.kv_at_most
    block = guess.kv_bytes_per_token * guess.block_tokens
    assert 0 <= guess.kv - known.kv - 100 * MIB + block <= 2 * block
    wanted = exact_budget(replace(plan, kv=10 * MIB))
    assert not wanted.kv_at_most
    assert wanted.left == guess.kv + guess.left - 10 * MIB


def test_tokens_are_wanted_in_whole_blocks(base: BaseModel) -> None:
    token = kv_bytes_of(base, EngineSettings())
    assert kv_for(1, base, EngineSettings()) == kv_for(16, base, EngineSettings()) == 16 * token
    assert kv_for(17, base, EngineSettings()) == 32 * token
    found = exact_budget(Plan(GIB, base, EngineSettings(), kv=kv_for(17, base, EngineSettings())))
    assert found.kv_tokens == 32


def test_weights_are_counted_in_the_type_that_they_are_served_in(tmp_path: Path) -> None:
    half = SMALL.write(tmp_path / "half")
    full = SMALL.write(tmp_path / "full", torch_dtype="float32")
    assert full.weight_bytes == 2 * half.weight_bytes
    assert rank_weights(full, EngineSettings()) == half.weight_bytes
    assert rank_weights(full, EngineSettings(dtype="float32")) == full.weight_bytes
    assert rank_weights(half, EngineSettings()) == half.weight_bytes


def test_each_rank_has_a_share_of_the_weights(base: BaseModel) -> None:
    one, two = (exact_budget(Plan(GIB, base, EngineSettings(tensor_parallel=ranks))) for ranks in (1, 2))
    assert two.weights == -(-one.weights // 2)
    assert two.slots.total < one.slots.total < 2 * two.slots.total
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token


def test_a_base_without_shapes_or_that_cannot_be_cut_is_refused(base: BaseModel) -> None:
    with pytest.raises(InputFileError, match="slots need the base's own folder"):
        exact_budget(Plan(GIB, served_modules("model.layers.0.self_attn.q_proj"), EngineSettings()))
    with pytest.raises(InputFileError, match="choose another --tp"):
        exact_budget(Plan(GIB, base, EngineSettings(tensor_parallel=3)))


def folder(tmp_path: Path, base: BaseModel, dims: Dims, engine: EngineSettings, *ranks: int) -> Totals:
    for number, rank in enumerate(ranks):
        spec = pairs(dims.projections(), rank, dims.layers)
        build(tmp_path / "many" / f"a{number}", {**CONFIG, "r": rank}, spec)
    places, problems = find([tmp_path / "many"])
    assert not problems
    return sum_up(list(survey(places, base, engine)), engine)


def test_a_folder_says_the_smallest_rank_and_what_it_gives_back(tmp_path: Path, base: BaseModel) -> None:
    engine = EngineSettings(max_loras=2, max_lora_rank=64, max_cpu_loras=4, tensor_parallel=2)
    plan = Plan(GIB, base, engine)
    found = folder_budget(plan, folder(tmp_path, base, SMALL, engine, 8, 16, 4))
    assert (found.adapters, found.smallest_max_rank, found.turns) == (3, 16, True)
    assert found.at_smallest is not None
    assert found.at_smallest.slots.total * 4 == exact_budget(plan).slots.total
    a_rank = sum(into + out for into, out in SMALL.projections().values()) * SMALL.layers * 2
    assert found.host == (8 + 16 + 4) * a_rank * 2


def test_adapters_of_too_high_a_rank_for_any_setting_are_named_and_left_aside(tmp_path: Path, base: BaseModel) -> None:
    engine = EngineSettings(max_loras=1, max_lora_rank=16)
    found = folder_budget(Plan(GIB, base, engine), folder(tmp_path, base, SMALL, engine, 600, 8))
    assert (found.adapters, found.too_big, found.smallest_max_rank, found.turns) == (1, ("a0",), 8, False)


def test_a_rank_that_is_too_low_shows_what_the_right_one_costs(tmp_path: Path, base: BaseModel) -> None:
    engine = EngineSettings(max_lora_rank=8)
    plan = Plan(GIB, base, engine)
    found = folder_budget(plan, folder(tmp_path, base, SMALL, engine, 32))
    assert (found.adapters, found.smallest_max_rank) == (1, 32)
    assert found.at_smallest is not None
    assert found.at_smallest.slots.total == 4 * exact_budget(plan).slots.total


def test_targets_that_the_base_does_not_have_are_refused(base: BaseModel) -> None:
    with pytest.raises(InputFileError, match="correct --lora-target-modules"):
        exact_budget(Plan(GIB, base, EngineSettings(lora_target_modules=("nothing",))))


def test_a_rank_that_cannot_be_cut_has_no_budget(tmp_path: Path, base: BaseModel) -> None:
    engine = EngineSettings(max_lora_rank=16, tensor_parallel=2, fully_sharded_loras=True)
    found = folder_budget(Plan(GIB, base, engine), folder(tmp_path, base, SMALL, engine, 1))
    assert (found.smallest_max_rank, found.at_smallest) == (1, None)


def test_an_empty_folder_asks_for_nothing(base: BaseModel) -> None:
    found = folder_budget(Plan(GIB, base, EngineSettings()), sum_up([], EngineSettings()))
    assert (found.adapters, found.smallest_max_rank, found.at_smallest, found.host) == (0, None, None, None)
