"""Reported faults about slots and KV, with their numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from adapters.build_weights import BASE_8B, CASES, Dims, build, expected, spec_of
from adapters.conftest import CONFIG
from loraledger.adapters.reading.folder import read_folder
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.sizing.footprint import adapter_device_bytes
from loraledger.ledger.accounts import ledger_of
from loraledger.ledger.budget import BLOCK_TOKENS, Plan, at_rank, exact_budget
from loraledger.ledger.figures import configured, unknown
from loraledger.ledger.limit import limiting
from loraledger.ledger.overcommit import BlockCount, overcommit

from .replicas import GIB, adapter, replica, seen

BASE_7B = Dims(hidden=4096, ff=11008, layers=32, heads=32, kv_heads=32)


def plain(dims: Dims, tmp_path: Path) -> BaseModel:
    """A base of the class that gives token tables no room in a slot, as the cases assume."""
    return dims.write(tmp_path / "base", "MistralForCausalLM")


def flags(case: str) -> EngineSettings:
    """The settings of a command line that was reported."""
    words = (CASES / case / "serve_args.txt").read_text().split()
    given = {name: int(value) for name, value in pairwise(words) if name.startswith("--max-")}
    return replace(EngineSettings(), **{name[2:].replace("-", "_"): value for name, value in given.items()})  # type: ignore[arg-type]


def dims_of(case: str, name: str, key: str | None = None) -> Dims:
    raw = json.loads((CASES / case / name).read_text())
    raw = raw[key] if key else raw
    head = 128
    return Dims(raw["h"], raw["ff"], raw["L"], raw["q"] // head, raw["kv"] // head, head, raw["V"])


def test_slots_reserved_60(tmp_path: Path) -> None:
    want = expected("slots-reserved-60")
    dims = dims_of("slots-reserved-60", "base_dims.json")
    assert dims == BASE_8B
    plan = Plan(80 * GIB, plain(dims, tmp_path), flags("slots-reserved-60"))
    found = exact_budget(plan)
    assert (found.slots.count, found.slots.max_lora_rank) == (60, 64)
    assert found.slots.one.total == want["slot_bytes_rank64"]
    assert found.slots.total == want["reserved_bytes_60_slots"] == want["reserved_gib"] * GIB
    assert found.kv_bytes_per_token == want["kv_bytes_per_token"]
    assert found.slots.kv_tokens == found.tokens(found.slots.total) == want["kv_tokens_given_up"]
    assert found.slots.kv_tokens // BLOCK_TOKENS == want["kv_blocks_given_up"]
    smaller = at_rank(plan, 16)
    assert smaller.slots.total == want["at_max_rank_16"]["reserved_bytes"]
    assert smaller.slots.kv_tokens == want["at_max_rank_16"]["kv_tokens_given_up"]
    assert smaller.kv_tokens - found.kv_tokens == 115_200
    assert "115,200 KV tokens" in want["right_answer"]
    halved = exact_budget(replace(plan, engine=replace(plan.engine, tensor_parallel=2)))
    assert halved.slots.one.total == want["tp2_per_gpu_slot_bytes_rank64"]


def test_slots_reserved_60_the_account_shows_padded_against_real_bytes(tmp_path: Path) -> None:
    want, base, engine = expected("slots-reserved-60"), plain(BASE_8B, tmp_path), flags("slots-reserved-60")
    sizes = []
    for rank in (8, 16):
        spec = spec_of("slots-reserved-60", f"tensors_r{rank}.json")
        folder = read_folder("a", build(tmp_path / f"r{rank}", {**CONFIG, "r": rank}, spec))
        sizes.append(adapter_device_bytes(folder, base, engine))
    assert sizes == [want["real_bytes_r8"], want["real_bytes_r16"]]
    found = ledger_of(
        replica(
            slots=configured(60, "slots"),
            slots_used=seen(2, "slots"),
            slot_bytes=configured(want["slot_bytes_rank64"], "bytes"),
            adapters=(adapter("r8", "gpu", sizes[0]), adapter("r16", "gpu", sizes[1])),
        )
    ).adapters
    assert found.pool.value == want["reserved_bytes_60_slots"]
    assert found.fragmentation.value == 2 * want["slot_bytes_rank64"] - want["real_bytes_r8"] - want["real_bytes_r16"]


def test_slots_reserved_60_names_the_lever(tmp_path: Path) -> None:
    want, base, engine = expected("slots-reserved-60"), plain(BASE_8B, tmp_path), flags("slots-reserved-60")
    budget = exact_budget(Plan(80 * GIB, base, engine))
    facts = replica(
        weights=seen(budget.weights, "bytes"),
        slots=configured(60, "slots"),
        slot_bytes=configured(budget.slots.one.total, "bytes"),
        max_lora_rank=64,
        needed_max_rank=16,
        kv_bytes=seen(budget.kv, "bytes"),
        blocks_total=seen(budget.kv_tokens // 16, "blocks"),
        blocks_free=seen(10, "blocks"),
        waiting_requests=seen(4, "requests"),
        waiting_tokens=seen(4096, "tokens"),
    )
    found = limiting(ledger_of(facts))
    assert (found.pool, found.also) == ("kv", ())
    (lever,) = [lever for lever in found.levers if lever.name == "lower rank"]
    freed = want["reserved_bytes_60_slots"] - want["at_max_rank_16"]["reserved_bytes"]
    assert lever.frees.value == freed
    assert f"{freed / GIB:.1f} GiB or 115,200 KV tokens" in lever.statement


def question() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CASES / "sixteen-distinct/question.json").read_text())
    return found


def test_sixteen_distinct(tmp_path: Path) -> None:
    want, asked = expected("sixteen-distinct"), question()
    dims = dims_of("sixteen-distinct", "question.json", "base")
    assert dims == BASE_7B
    engine = EngineSettings(max_loras=want["max_loras_needed"], max_lora_rank=16)
    plan = Plan(asked["gpu_bytes"], plain(dims, tmp_path), engine, asked["gpu_memory_utilization"])
    found = exact_budget(plan)
    assert found.weights == asked["weights_bytes"]
    assert found.slots.one.total == want["slot_bytes"]
    assert found.slots.total == want["slots_bytes"]
    assert f"{found.slots.total / GIB:.2f} GiB" in want["right_answer"]
    assert found.kv_bytes_per_token == want["kv_bytes_per_token"]
    assert found.slots.kv_tokens == 2440
    assert "2,440 fewer KV tokens" in want["right_answer"]
    assert found.fits
    assert found.largest_slots >= 16


def test_sixteen_distinct_adapters_are_not_the_limit_there(tmp_path: Path) -> None:
    asked = question()
    engine = EngineSettings(max_loras=16, max_lora_rank=16)
    plan = Plan(asked["gpu_bytes"], plain(BASE_7B, tmp_path), engine, 0.9)
    found = exact_budget(plan)
    blocks = found.kv_tokens // 16
    some: dict[str, Any] = {
        "device_bytes": configured(found.device, "bytes"),
        "safety": configured(0, "bytes"),
        "weights": seen(found.weights, "bytes"),
        "slots": configured(16, "slots"),
        "slots_used": seen(16, "slots"),
        "slot_bytes": configured(found.slots.one.total, "bytes"),
        "kv_bytes": seen(found.kv, "bytes"),
        "blocks_total": seen(blocks, "blocks"),
        "blocks_free": seen(0, "blocks"),
        "working_set": seen(16, "adapters"),
    }
    assert limiting(ledger_of(replica(**some))).pool == "kv"
    some |= {"blocks_free": seen(blocks, "blocks"), "slots": configured(15, "slots")}
    some |= {"blocked_requests": seen(1, "requests"), "waiting_requests": seen(1, "requests")}
    assert limiting(ledger_of(replica(**some))).pool == "adapters"


def test_max_loras_default_one(tmp_path: Path) -> None:
    want, engine = expected("max-loras-default-one"), flags("max-loras-default-one")
    assert (engine.max_loras, engine.max_lora_rank, engine.host_entries) == (
        want["max_loras"],
        want["max_lora_rank"],
        want["max_cpu_loras"],
    )
    base = plain(BASE_8B, tmp_path)
    one, two = (exact_budget(Plan(80 * GIB, base, replace(engine, max_loras=slots))) for slots in (1, 2))
    assert two.slots.total - one.slots.total == 83_886_080
    assert "+83,886,080 bytes" in want["right_answer"]
    found = limiting(
        ledger_of(
            replica(
                slots=configured(1, "slots"),
                slots_used=seen(1, "slots"),
                slot_bytes=configured(one.slots.one.total, "bytes"),
                host_limit=configured(1, "adapters"),
                working_set=seen(2, "adapters"),
                loads=seen(40, "per minute"),
                activations=seen(40, "per minute"),
                adapters=(adapter("alpha", "gpu"), adapter("beta", "disk")),
            )
        )
    )
    assert found.pool == "adapters"
    assert [(lever.name, lever.frees.value) for lever in found.levers[:2]] == [
        ("more slots", -83_886_080),
        ("more host entries", 0),
    ]
    assert "1 more hold the working set" in found.levers[0].statement


def test_v0_kv_overcommit(tmp_path: Path) -> None:
    want = expected("v0-kv-overcommit")
    log = (CASES / "v0-kv-overcommit/engine_log.txt").read_text()
    blocks = [int(count) for count in re.findall(r"# GPU blocks: (\d+)", log)]
    slots = int(re.findall(r"max_loras=(\d+) max_lora_rank", log)[0])
    rank = int(re.findall(r"max_lora_rank=(\d+)", log)[0])
    budget = exact_budget(Plan(80 * GIB, plain(BASE_8B, tmp_path), EngineSettings(max_loras=slots, max_lora_rank=rank)))
    block = budget.kv_bytes_per_token * BLOCK_TOKENS
    found = overcommit([BlockCount(slots, blocks[0]), BlockCount(1, blocks[1])], budget.slots.one.total, block)
    assert (found.verdict, found.bytes) == ("overcommitted", want["slots_bytes"])
    assert "5 GiB are over-committed on top of KV" in found.statement
    assert "old engine" in found.statement
    assert "free" not in found.statement.replace("profile", "")


def test_v0_kv_overcommit_shows_as_headroom_below_zero() -> None:
    want = expected("v0-kv-overcommit")
    weights, peak, kv = int(14.96 * GIB), int(1.21 * GIB), 21_540 * 16 * 131_072
    ledger = ledger_of(
        replica(
            device_bytes=configured(weights + peak + kv, "bytes"),
            weights=seen(weights, "bytes"),
            overhead={"peak": seen(peak, "bytes")},
            slots=configured(16, "slots"),
            slot_bytes=configured(335_544_320, "bytes"),
            kv_bytes=seen(kv, "bytes"),
        )
    )
    assert ledger.promised_twice
    assert ledger.headroom.value == -want["slots_bytes"]
    assert limiting(ledger).pool == "floor"


@pytest.mark.parametrize("tier", ["gpu", "host"])
def test_a_name_that_was_forgotten_still_holds_its_place(tier: Any) -> None:
    some = (adapter("a", tier, ghost=True, registered=False), adapter("a.2", "gpu"))
    found = ledger_of(replica(adapters=some, slots_used=unknown("slots"))).adapters
    assert found.ghosts.value == 1
    assert found.used.value == (2 if tier == "gpu" else 1)
    assert found.host_entries.value == 2
