"""From the kernel's state to a replica's ledger: each figure from the best place that has it, and nothing made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.build_weights import SMALL, build, pairs
from loraledger.adapters.sizing.base import read_base
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.sizing.footprint import slot_bytes
from loraledger.config import Settings, hash_key, settings_from
from loraledger.events import (
    ActivationObserved,
    AdapterDeclared,
    Event,
    FloorObserved,
    LoadObserved,
    ProbeLost,
    ReplicaDown,
    ReplicaSampled,
    ReplicaUp,
    ScrapeStarted,
    StepsObserved,
    TiersObserved,
    engine_name,
)
from loraledger.gateway.accounts import Accountant
from loraledger.gateway.assemble import fleet_settings
from loraledger.gateway.ledger_view import ledger_series, ledger_view
from loraledger.gateway.shelf import Shelf
from loraledger.kernel.fleet import Fleet
from loraledger.ledger import Ledger, ReplicaFacts, ledger_of, limiting
from loraledger.record.tables import Row

SECOND = 10**9
NOW = 1_700_000_000 * SECOND
DEVICE = 2**30


class Desk:
    """One replica's kernel, shelf and accountant; ``tell`` steps the kernel a second later."""

    def __init__(self, tmp_path: Path, **replica: Any) -> None:
        self.at = NOW
        self.settings = self._settings(tmp_path, replica)
        self.shelf = Shelf(self.settings)
        self.fleet = Fleet(fleet_settings(self.settings, self.shelf.catalog))
        base = None if self.settings.base.path is None else read_base(self.settings.base.path)
        self.accountant = Accountant(self.settings.replicas, base)

    @staticmethod
    def _settings(tmp_path: Path, replica: dict[str, Any]) -> Settings:
        path = replica.pop("base", "base")
        return settings_from(
            {
                "base": {"names": ["base"], "path": path},
                "replicas": [
                    {
                        "name": "r1",
                        "url": "http://127.0.0.1:8000",
                        "slots": 2,
                        "host_entries": 4,
                        "max_rank": 16,
                        **replica,
                    }
                ],
                "adapters": {"folder": "scan"},
                "tenants": [{"name": "acme", "key_hashes": [hash_key("k")], "adapters": ["*"]}],
            },
            root=tmp_path,
        )

    def tell(self, make: Any, *fields: Any) -> None:
        self.at += SECOND
        event: Event = make(self.at, "r1", *fields)
        self.fleet.step(event)

    def sample(self, kv_usage: float = 0.25, waiting: int = 0, preemptions: int = 0) -> None:
        self.at += SECOND
        self.fleet.step(ScrapeStarted(self.at, "r1"))
        self.fleet.step(ReplicaSampled(self.at, "r1", self.at, 1, waiting, kv_usage, 1600, None, None, 16, preemptions))

    def name(self, adapter: str) -> str:
        return engine_name(adapter, self.fleet.state.adapters[adapter].spec.digest)

    @property
    def facts(self) -> ReplicaFacts:
        store = (self.shelf.store.bytes, None)
        (facts,) = self.accountant.facts(self.fleet.state, self.shelf.catalog, store, (), self.at)
        return facts

    @property
    def ledger(self) -> Ledger:
        return ledger_of(self.facts)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    SMALL.write(tmp_path / "base")
    every = SMALL.projections()
    names = sorted(name.rpartition(".")[2] for name in every)
    for name, rank in (("a", 8), ("b", 16), ("c", 4)):
        config = {"r": rank, "lora_alpha": 16, "peft_type": "LORA", "target_modules": names}
        build(tmp_path / "scan" / name, config, pairs(every, rank, SMALL.layers))
    return tmp_path


@pytest.fixture
def desk(folders: Path) -> Iterator[Desk]:
    desk = Desk(folders, device_bytes=DEVICE, overhead="1MiB")
    yield desk
    desk.shelf.close()


def held(desk: Desk, *names: str) -> None:
    """The replica is up and lists these adapters."""
    desk.tell(ReplicaUp, 1, tuple(desk.name(name) for name in names), "0.32.0")


def test_without_a_probe_the_settings_and_the_bases_shapes_close_the_account(desk: Desk) -> None:
    held(desk)
    desk.sample()
    ledger = desk.ledger
    assert desk.settings.base.path is not None
    base = read_base(desk.settings.base.path)
    slot = slot_bytes(base, EngineSettings(max_loras=2, max_lora_rank=16))
    assert slot is not None
    assert (ledger.floor.weights.value, ledger.floor.weights.source) == (base.weight_bytes, "configured")
    assert ledger.adapters.pool.value == 2 * slot.total
    assert (ledger.kv.bytes.value, ledger.kv.bytes.source) == (1600 * base.kv_bytes_per_token(), "believed")
    parts = (ledger.floor.total, ledger.adapters.pool, ledger.kv.bytes, ledger.headroom)
    assert sum(part.value or 0 for part in parts) == DEVICE
    assert ledger.headroom.source == "believed", "no sum with a believed part passes for more"
    assert (ledger.kv.blocks_total.value, ledger.kv.blocks_used.value) == (100, 25)
    assert limiting(ledger).pool == "none"


def test_without_a_base_and_a_probe_what_depends_on_them_is_unknown(folders: Path) -> None:
    desk = Desk(folders, base=None)
    try:
        held(desk)
        desk.sample()
        ledger = desk.ledger
        unknown = (ledger.device, ledger.floor.weights, ledger.adapters.pool, ledger.kv.bytes, ledger.headroom)
        assert [figure.value for figure in unknown] == [None] * 5
        assert ledger.kv.tokens.value == 1600
        assert limiting(ledger).pool == "unknown"
    finally:
        desk.shelf.close()


def test_the_probe_replaces_settings_and_belief_and_its_silence_brings_them_back(desk: Desk) -> None:
    held(desk, "a", "b", "c")
    desk.sample()
    assert desk.ledger.adapters.used.source == "believed"
    desk.tell(
        lambda at, r: FloorObserved(at, r, weights=700, activations=50, slot_pool=200, kv_bytes=40, device=1000,
                                    slots=2, slot_bytes=100, host_entries=4, max_rank=16, kv_blocks=10, block_tokens=16)
    )  # fmt: skip
    a, b, c = (desk.name(name) for name in "abc")
    desk.tell(lambda at, r: TiersObserved(at, r, at, (c, a, b), (a, b), (b,), (10, 20, 30)))
    ledger = desk.ledger
    assert (ledger.floor.total.value, ledger.adapters.pool.value, ledger.kv.bytes.value) == (750, 200, 40)
    assert (ledger.headroom.value, ledger.headroom.source) == (10, "observed")
    account = ledger.adapters
    assert (account.used.value, account.used.source, account.pinned.value) == (2, "observed", 1)
    assert (account.host_entries.value, account.host_bytes.value) == (3, 60)
    assert [(x.name, x.tier, x.pinned) for x in account.adapters] == [
        ("a", "gpu", False), ("b", "gpu", True), ("c", "host", False)
    ]  # fmt: skip
    desk.tell(ProbeLost, "timeout")
    assert desk.ledger.adapters.used.source == "believed"
    assert desk.ledger.adapters.pinned.value is None


def test_a_ghost_fills_its_slot_and_is_listed_apart(desk: Desk) -> None:
    held(desk, "a")
    old = engine_name("a", "f" * 64)
    desk.tell(lambda at, r: TiersObserved(at, r, at, (old, desk.name("a")), (old, desk.name("a"))))
    account = desk.ledger.adapters
    assert (account.used.value, account.ghosts.value) == (2, 1)
    assert account.filled.value is None, "nobody knows what the ghost fills"
    assert [x.name for x in account.adapters if x.ghost] == [old]


def test_moves_and_steps_become_rates_and_quantiles(desk: Desk) -> None:
    held(desk, "a")
    desk.tell(lambda at, r: TiersObserved(at, r, at, (), ()))
    for took in (10, 20, 30):
        desk.tell(lambda at, r, took=took: LoadObserved(at, r, desk.name("a"), took, 5))
        desk.tell(lambda at, r, took=took: ActivationObserved(at, r, desk.name("a"), took))
    desk.tell(lambda at, r: StepsObserved(at, r, 5, 50, 7, 3, 99, {desk.name("a"): 2}, 1, 6))
    account = desk.ledger.adapters
    assert account.loads.value == pytest.approx(3 * 0.6931, rel=0.1)
    assert account.loads.source == "observed"
    assert (account.latencies["host"].n, account.latencies["host"].p50.value) == (3, 20)
    assert account.blocked.value == 2
    assert desk.ledger.kv.recomputed_tokens.value == pytest.approx(99 * 0.6931, rel=0.1)


def test_preemptions_are_counted_from_the_engines_own_count(desk: Desk) -> None:
    held(desk)
    desk.sample(preemptions=100)
    assert desk.ledger.kv.preemptions.value == 0
    desk.sample(preemptions=110)
    assert desk.ledger.kv.preemptions.value == pytest.approx(6.93, rel=0.05)
    desk.sample(preemptions=2)  # a restart that was not seen
    assert (desk.ledger.kv.preemptions.value or 0) < 7


def test_a_replica_that_is_down_shows_nothing_of_its_last_life(desk: Desk) -> None:
    held(desk, "a")
    desk.sample()
    desk.tell(ReplicaDown, "connection refused")
    ledger = desk.ledger
    shown = (ledger.kv.active_requests, ledger.kv.blocks_free, ledger.adapters.used, ledger.adapters.host_entries)
    assert [figure.value for figure in shown] == [None] * 4


def test_adapters_that_are_on_disk_can_be_left_out(desk: Desk) -> None:
    held(desk, "a", "b")
    desk.tell(lambda at, r: TiersObserved(at, r, at, (desk.name("a"),), ()))
    state, catalog = desk.fleet.state, desk.shelf.catalog
    (facts,) = desk.accountant.facts(state, catalog, (0, None), (), desk.at, on_disk=False)
    assert [x.name for x in facts.adapters] == ["a"]
    assert len(desk.facts.adapters) == 2


def test_refusals_of_the_last_minute_are_counted_by_reason(desk: Desk) -> None:
    rows: list[Row] = [
        {"status": "rejected", "reason": "queue_full", "finished_ns": NOW},
        {"status": "rejected", "reason": "queue_full", "finished_ns": NOW - 61 * SECOND},
        {"status": "ok", "reason": None, "finished_ns": NOW},
    ]
    (facts,) = desk.accountant.facts(desk.fleet.state, desk.shelf.catalog, (0, None), rows, NOW)
    assert {reason: figure.value for reason, figure in facts.rejections.items()} == {"queue_full": 1}


def test_the_view_has_every_figure_with_unit_source_and_age(desk: Desk) -> None:
    held(desk, "a")
    desk.sample()
    view: Any = ledger_view(desk.ledger, limiting(desk.ledger))
    assert view["device"] == {"value": DEVICE, "unit": "bytes", "source": "configured", "age_s": None}
    assert view["kv"]["blocks_total"]["age_s"] == 0.0
    assert view["limit"]["pool"] == "none"


def test_series_are_named_and_unknown_has_none(desk: Desk) -> None:
    held(desk, "a")
    desk.sample()
    ledger = desk.ledger
    families = {family.name: family.values for family in ledger_series([(ledger, limiting(ledger))])}
    assert families["loraledger_memory_bytes"]["r1", "device", "configured"] == DEVICE
    assert families["loraledger_kv_blocks"] == {("r1", "used"): 25, ("r1", "free"): 75}
    assert families["loraledger_limiting"] == {}
    assert ("r1", "recomputed_tokens") not in families["loraledger_per_minute"]


def test_new_files_are_priced_anew(desk: Desk, folders: Path) -> None:
    held(desk, "a")
    before = desk.facts.adapters[0].device.value
    every = SMALL.projections()
    config = {"r": 4, "lora_alpha": 16, "peft_type": "LORA", "target_modules": ["q_proj"]}
    for path in (folders / "scan" / "a").iterdir():
        path.unlink()
    (folders / "scan" / "a").rmdir()
    build(folders / "scan" / "a", config, pairs({"self_attn.q_proj": every["self_attn.q_proj"]}, 4, SMALL.layers))
    desk.shelf.swap(desk.shelf.read())
    spec = desk.fleet.state.adapters["a"].spec
    digest = next(entry.digest for entry in desk.shelf.catalog.entries if entry.name == "a")
    desk.fleet.step(AdapterDeclared(desk.at, type(spec)("a", digest, 4, 100, spec.tenants, 0)))
    held(desk, "a")
    after = next(x for x in desk.facts.adapters if x.name == "a").device.value
    assert before is not None
    assert after is not None
    assert after < before / 10


def test_the_working_set_is_what_was_sent_there_within_the_last_minute(desk: Desk) -> None:
    held(desk, "a", "b")
    desk.fleet.state.adapters["a"].placed["r1"] = desk.at
    desk.fleet.state.adapters["b"].placed["r1"] = desk.at - 61 * SECOND
    assert desk.facts.working_set.value == 1


def test_weights_are_shared_by_the_rank_processes(folders: Path) -> None:
    desk = Desk(folders, tensor_parallel=2)
    try:
        held(desk)
        assert desk.settings.base.path is not None
        assert desk.ledger.floor.weights.value == -(-read_base(desk.settings.base.path).weight_bytes // 2)
    finally:
        desk.shelf.close()
