import json
from pathlib import Path
from typing import Any

import msgspec

from loraledger.events import (
    AdapterDeclared,
    AdapterRetired,
    AttemptFailed,
    CommandDone,
    CommandFailed,
    DrainAsked,
    Evict,
    LoadAsked,
    Move,
    TiersObserved,
    UnloadAsked,
)
from loraledger.gateway.views import (
    adapter_view,
    adapters_view,
    readiness_view,
    replica_view,
    replicas_view,
    slots_used,
    tenants_view,
)
from loraledger.kernel.settings import FleetSettings, ReplicaSpec, TenantSpec
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import PS_PER_MS, TwinProfile

from .fleets import MS, NOW, SECOND, DrivenGateway, adapter, named, settings

CASES = Path(__file__).parents[1] / "cases"
SQL, CHAT, MAIL = adapter("sql"), adapter("chat", version="b"), adapter("org/mail", version="c")


def case(name: str, part: str) -> Any:
    return json.loads((CASES / name / f"{part}.json").read_text())


def replica(gateway: DrivenGateway, name: str = "r1") -> Any:
    return replica_view(gateway.state, name, gateway.at)


def shown(gateway: DrivenGateway, name: str) -> Any:
    return adapter_view(gateway.state, name, gateway.at)


def ready(gateway: DrivenGateway, name: str | None = None) -> Any:
    return readiness_view(gateway.state, gateway.at, name)


def loaded(gateway: DrivenGateway, name: str, where: str = "r1") -> None:
    gateway.feed(LoadAsked(gateway.at, name, where))
    gateway.loaded()


def test_case_ready_but_not_loaded_shows_what_the_engine_said() -> None:
    controller = case("ready-but-not-loaded", "controller_view")
    engine, expect = case("ready-but-not-loaded", "engine_view"), case("ready-but-not-loaded", "expect")
    name, (where,) = controller["adapter"], controller["instances"]
    gateway = DrivenGateway(settings(adapter(name), replicas=(where,)))
    gateway.up(where, registered=tuple(engine[where]["v1_models"]))
    gateway.feed(LoadAsked(gateway.at, name, where))
    gateway.refused(engine[where]["last_load_reply"]["body"]["message"], permanent=True)

    view = shown(gateway, name)
    assert view["status"] == expect["status"]
    assert view["replicas"][where]["reason"] == expect["reason"]
    assert (view["ready"], view["ready_on"]) == ("0", [])
    assert view["replicas"][where]["state"]["value"] == "parked"
    assert (view["replicas"][where]["permanent"], view["replicas"][where]["retry_in_s"]) == (True, None)
    readiness = ready(gateway, name)
    assert (readiness["ready"], readiness["loadable"]) == (False, False)
    assert expect["reason"] in readiness["reason"]
    assert ready(gateway)["ready"]


def test_case_one_replica_only_counts_per_replica_and_routes_to_the_one_that_has_it() -> None:
    desired, observed = case("one-replica-only", "desired"), case("one-replica-only", "observed")
    expect = case("one-replica-only", "expect")
    spec = adapter(desired["adapter"], replicas=desired["replicas"])
    gateway = DrivenGateway(settings(spec))
    for where in ("r1", "r2"):
        models = [named(spec) if model == spec.name else model for model in observed[where]["v1_models"]]
        gateway.up(where, registered=tuple(models))

    view = shown(gateway, spec.name)
    assert (view["ready"], view["ready_on"]) == (expect["ready"], expect["route_to"])
    assert view["missing"] == {"r2": "loading"}
    gateway.refused("the shared file system is away", permanent=False)
    view = shown(gateway, spec.name)
    assert (view["ready"], view["status"]) == (expect["ready"], "failed on r2")
    assert view["missing"] == {"r2": "load failed: the shared file system is away"}
    for _ in range(8):
        gateway.ask(spec.name, prompt=20)
    assert [where for _, where in gateway.dispatched()] == expect["route_to"] * 8


def test_what_was_never_seen_is_null_and_not_zero() -> None:
    view = replica(DrivenGateway(settings()))
    assert (view["up"], view["reason"]) == (False, "not contacted yet")
    for figure in ("running", "waiting", "foreign", "kv_usage", "kv_tokens", "slots_used", "host_used"):
        assert view[figure]["value"] is None, figure
        assert view[figure]["age_s"] is None, figure
    assert (view["sample_age_s"], view["engine_version"], view["process_start_at"]) == (None, None, None)
    assert view["in_flight"] == {"value": 0, "source": "observed", "age_s": 0.0}


def test_sampled_figures_carry_the_age_of_their_sample() -> None:
    gateway = DrivenGateway(settings())
    gateway.up("r1", start=NOW)
    gateway.sample("r1", 5, 2, kv_usage=0.25, kv_tokens=100_000)
    gateway.at += 400 * MS
    view = replica(gateway)
    assert view["running"] == {"value": 5, "source": "observed", "age_s": 0.4}
    assert view["foreign"] == {"value": 7, "source": "observed", "age_s": 0.4}
    assert view["kv_usage"] == {"value": 0.25, "source": "observed", "age_s": 0.4}
    assert view["kv_tokens"] == {"value": 100_000, "source": "observed", "age_s": 0.4}
    assert view["process_start_at"] == "2023-11-14T22:13:20.000Z"
    assert view["engine_version"] == "0.32.0"


def test_a_sample_without_counts_leaves_foreign_work_unknown() -> None:
    gateway = DrivenGateway(settings())
    gateway.up("r1")
    gateway.sample("r1", running=None, waiting=3)
    view = replica(gateway)
    assert (view["foreign"]["value"], view["running"]["value"], view["waiting"]["value"]) == (None, None, 3)


def test_figures_of_a_replica_that_went_away_are_not_kept() -> None:
    gateway = DrivenGateway(settings(SQL, kv_tokens=50_000))
    gateway.up("r1")
    loaded(gateway, "sql")
    gateway.sample("r1", 1, 1, kv_usage=0.5)
    assert replica(gateway)["kv_tokens"] == {"value": 50_000, "source": "configured", "age_s": None}
    gateway.sample("r1", 1, 1, kv_usage=0.5, kv_tokens=60_000)
    assert replica(gateway)["kv_tokens"] == {"value": 60_000, "source": "observed", "age_s": 0.0}
    gateway.down("r1", "health answered 503")
    view = replica(gateway)
    assert (view["up"], view["reason"]) == (False, "health answered 503")
    assert [view[name]["value"] for name in ("running", "foreign", "kv_tokens", "slots_used")] == [None] * 4
    assert view["sample_age_s"] is None
    assert view["adapters"][0]["state"]["value"] is None


def test_a_registered_adapter_is_shown_with_state_tier_and_age() -> None:
    gateway = DrivenGateway(settings(SQL))
    gateway.up("r1")
    loaded(gateway, "sql")
    gateway.at += 2 * SECOND
    (entry,) = replica(gateway)["adapters"]
    assert (entry["adapter"], entry["engine_name"], entry["ready"]) == ("sql", named(SQL), True)
    assert entry["state"] == {"value": "registered", "source": "observed", "age_s": 2.0}
    assert entry["tier"] == {"value": "gpu", "source": "believed", "age_s": 2.0}
    assert replica(gateway)["slots_used"] == {"value": 1, "source": "believed", "age_s": 2.0}


def test_use_renews_a_belief_and_others_push_an_adapter_to_the_host() -> None:
    gateway = DrivenGateway(settings(SQL, CHAT, slots=1, replicas=("r1",)))
    gateway.up("r1")
    loaded(gateway, "sql")
    gateway.at += 5 * SECOND
    loaded(gateway, "chat")
    tiers = {entry["adapter"]: entry["tier"]["value"] for entry in replica(gateway)["adapters"]}
    assert tiers == {"sql": "host", "chat": "gpu"}
    assert (replica(gateway)["slots_used"]["value"], replica(gateway)["host_used"]["value"]) == (1, 2)
    gateway.at += 5 * SECOND
    gateway.ask("sql")
    gateway.at += SECOND
    assert replica(gateway)["slots_used"]["age_s"] == 1.0
    assert shown(gateway, "sql")["replicas"]["r1"]["tier"] == {"value": "gpu", "source": "believed", "age_s": 1.0}
    assert shown(gateway, "sql")["placed"]["r1"] == {"age_s": 1.0}


def test_names_that_an_engine_brought_along_have_no_known_tier() -> None:
    gateway = DrivenGateway(settings(SQL, CHAT))
    gateway.up("r1", registered=("base", named(SQL), named(CHAT)))
    view = replica(gateway)
    assert [entry["tier"]["value"] for entry in view["adapters"]] == [None, None]
    assert (view["tier_unknown"], view["slots_used"]["value"], view["host_used"]["value"]) == (2, None, None)
    gateway.ask("sql")
    assert slots_used(gateway.state.replicas["r1"]) == 1
    assert replica(gateway)["tier_unknown"] == 1


def test_an_unloaded_adapter_stays_as_a_ghost_and_still_fills_its_slot() -> None:
    gateway = DrivenGateway(settings(SQL, CHAT))
    gateway.up("r1")
    loaded(gateway, "sql")
    loaded(gateway, "chat")
    assert replica(gateway)["ghosts"] == []
    gateway.feed(UnloadAsked(gateway.at, "sql", "r1"))
    (evict,) = gateway.take(Evict)
    gateway.feed(CommandDone(gateway.at, evict.id, MS))
    view = replica(gateway)
    assert [entry["adapter"] for entry in view["adapters"]] == ["chat"]
    (ghost,) = view["ghosts"]
    assert (ghost["engine_name"], ghost["adapter"], ghost["tier"]["value"]) == (named(SQL), "sql", "gpu")
    assert view["slots_used"]["value"] == 2
    assert shown(gateway, "sql")["status"] == "not loaded"


def test_a_version_that_was_replaced_is_a_ghost_beside_the_new_one() -> None:
    gateway = DrivenGateway(settings(SQL))
    gateway.up("r1")
    loaded(gateway, "sql")
    newer = adapter("sql", version="d")
    gateway.feed(AdapterDeclared(gateway.at, newer))
    loaded(gateway, "sql")
    view = replica(gateway)
    assert [entry["engine_name"] for entry in view["adapters"]] == [named(newer)]
    assert [ghost["engine_name"] for ghost in view["ghosts"]] == [named(SQL)]
    assert view["slots_used"]["value"] == 2


def test_estimates_say_whether_they_were_learnt() -> None:
    gateway = DrivenGateway(settings(SQL, itl=30 * MS))
    gateway.up("r1")
    prior = replica(gateway)["estimates"]["itl_s"]
    assert prior == {"value": 0.03, "source": "configured", "age_s": None, "n": 0, "prior": 0.03}
    loaded(gateway, "sql")
    gateway.answer(gateway.ask("sql"), itl_mean=20 * MS, generated_tokens=10)
    gateway.at += 3 * SECOND
    learnt = replica(gateway)["estimates"]
    assert (learnt["itl_s"]["source"], learnt["itl_s"]["n"], learnt["itl_s"]["age_s"]) == ("observed", 1, 3.0)
    assert 0.02 < learnt["itl_s"]["value"] < 0.03
    assert learnt["load_ratio"]["n"] == 1
    assert learnt["prefill_tokens_per_s"]["source"] == "configured"


def test_contradictions_are_counted_where_they_were_seen() -> None:
    gateway = DrivenGateway(settings(SQL))
    gateway.up("r1")
    gateway.sample("r1", registered=("base", named(SQL)))
    assert replica(gateway)["drift"] == {"registration_found": 1}
    assert replica(gateway, "r2")["drift"] == {}


def test_a_ranking_is_shown_with_how_far_each_of_it_has_come() -> None:
    pins = tuple(("r1", name) for name in ("sql", "chat", "org/mail"))
    ranked = msgspec.structs.replace(settings(SQL, CHAT, MAIL), residency="ranked", pins=pins)
    gateway = DrivenGateway(ranked)
    gateway.up("r1")
    assert replica(gateway)["ranking"]["reason"] == "no probe answers, so nothing is pinned and the engine's LRU stays"
    assert replica(gateway, "r2")["ranking"] is None

    loaded(gateway, "sql")
    gateway.feed(TiersObserved(gateway.at, "r1", gateway.at, (named(SQL),), (named(SQL),)))
    ranking = replica(gateway)["ranking"]
    assert ranking["reason"] is None
    assert [(pin["adapter"], pin["state"]) for pin in ranking["pins"]] == [
        ("sql", "asked"),
        ("chat", "not pinned"),
        ("org/mail", "not pinned"),
    ]
    (move,) = gateway.take(Move)
    gateway.feed(CommandFailed(gateway.at, move.id, "load_failed: gone", False))
    first = replica(gateway)["ranking"]["pins"][0]
    assert (first["state"], first["reason"], first["retry_in_s"]) == ("not pinned", "load_failed: gone", 1.0)


def test_an_adapter_that_all_should_hold_names_each_replica_that_lacks_it() -> None:
    gateway = DrivenGateway(settings(adapter("big", rank=128, replicas=-1), replicas=("r1", "r2", "r3")))
    gateway.up("r1", "r2")
    gateway.feed(DrainAsked(gateway.at, "r2", True))
    view = shown(gateway, "big")
    assert (view["ready"], view["held_by"], view["status"]) == ("0/3", 3, "not loaded")
    assert view["missing"] == {
        "r1": "rank 128 is over this replica's max_rank of 64",
        "r2": "draining",
        "r3": "down: not contacted yet",
    }


def test_an_adapter_on_demand_misses_nothing() -> None:
    gateway = DrivenGateway(settings(SQL))
    gateway.up("r1", "r2")
    assert [shown(gateway, "sql")[key] for key in ("status", "ready", "missing")] == ["not loaded", "0", {}]
    gateway.ask("sql")
    assert shown(gateway, "sql")["status"].startswith("loading on r")
    gateway.loaded()
    view = shown(gateway, "sql")
    assert [view[key] for key in ("status", "ready", "missing")] == ["ready", "1", {}]
    assert view["requests_per_s"]["value"] > 0
    assert (view["digest"], view["rank"], view["bytes"], view["tenants"]) == ("a" * 64, 16, 50 * 2**20, ["acme"])


def test_a_failed_load_says_when_it_is_tried_again() -> None:
    gateway = DrivenGateway(settings(SQL, replicas=("r1",)))
    gateway.up("r1")
    gateway.feed(LoadAsked(gateway.at, "sql", "r1"))
    gateway.refused("timed out", permanent=False)
    gateway.at += 250 * MS
    entry = shown(gateway, "sql")["replicas"]["r1"]
    assert (entry["retry_in_s"], entry["permanent"], entry["reason"]) == (0.75, False, "timed out")
    assert not ready(gateway, "sql")["loadable"]
    gateway.at += SECOND
    assert shown(gateway, "sql")["replicas"]["r1"]["retry_in_s"] == 0.0
    assert ready(gateway, "sql")["loadable"]


def crash(gateway: DrivenGateway, where: str) -> None:
    """A request breaks there, and then the engine is found gone and comes back."""
    request = gateway.ask("sql")
    gateway.loaded()
    assert gateway.dispatched() == [(request, where)]
    gateway.feed(AttemptFailed(gateway.at, request, 1, "upstream_failed", None, "closed"))
    gateway.down(where)
    gateway.up(where, start=gateway.at)
    gateway.loaded()
    gateway.take(Evict)
    gateway.dispatched()


def test_an_adapter_that_engines_died_of_is_suspect_and_then_parked() -> None:
    gateway = DrivenGateway(settings(SQL, replicas=("r1",)))
    gateway.up("r1")
    crash(gateway, "r1")
    view = shown(gateway, "sql")
    assert (view["suspect"]["strikes"], view["suspect"]["unverified_on"], view["parked"]) == (1, [], None)
    gateway.at += SECOND
    request = gateway.ask("sql")
    gateway.dispatched()
    gateway.feed(AttemptFailed(gateway.at, request, 1, "upstream_failed", None, "closed"))
    gateway.down("r1")
    view = shown(gateway, "sql")
    assert view["status"] == "parked"
    assert view["parked"] == {
        "reason": "its use coincided with 2 engine exits",
        "until_at": "2023-11-14T22:23:21.200Z",
        "retry_in_s": 600.0,
    }
    gateway.up("r1", start=gateway.at)
    readiness = ready(gateway, "sql")
    assert (readiness["ready"], readiness["loadable"]) == (False, False)
    assert readiness["reason"] == "parked: its use coincided with 2 engine exits"
    assert ready(gateway)["ready"]


def test_a_suspect_adapter_is_not_ready_where_it_was_not_proven_since() -> None:
    gateway = DrivenGateway(settings(SQL))
    gateway.up("r1", "r2")
    loaded(gateway, "sql", "r1")
    loaded(gateway, "sql", "r2")
    gateway.ask("sql")
    ((_, where),) = gateway.dispatched()
    other = {"r1": "r2", "r2": "r1"}[where]
    gateway.at += SECOND
    gateway.down(where)
    assert shown(gateway, "sql")["suspect"] == {"age_s": 0.0, "strikes": 1, "unverified_on": [other]}
    readiness = ready(gateway, "sql")
    assert (readiness["ready"], readiness["loadable"]) == (False, True)
    assert readiness["replicas"] == {
        where: "down: connection refused",
        other: "must be loaded again: an engine exited while it was in use",
    }
    gateway.ask("sql")
    gateway.loaded()
    assert ready(gateway, "sql")["replicas"] == {where: "down: connection refused", other: None}
    gateway.ask("sql")
    gateway.at += SECOND
    gateway.down(other)
    gateway.up("r1", "r2", start=gateway.at, registered=(named(SQL), named(SQL, 2)))
    parked = "parked: its use coincided with 2 engine exits"
    assert ready(gateway, "sql")["replicas"] == {"r1": parked, "r2": parked}


def test_the_gateway_is_ready_when_one_replica_can_serve_the_base() -> None:
    gateway = DrivenGateway(settings())
    assert ready(gateway) == {
        "ready": False,
        "reason": "r1, r2: down: not contacted yet",
        "replicas": {"r1": "down: not contacted yet", "r2": "down: not contacted yet"},
    }
    gateway.up("r2")
    assert ready(gateway)["ready"]
    assert ready(gateway)["reason"] is None
    gateway.feed(DrainAsked(gateway.at, "r2", True))
    assert (ready(gateway)["ready"], ready(gateway)["replicas"]["r2"]) == (False, "draining")


def test_an_adapter_is_ready_where_it_is_registered_and_loadable_elsewhere() -> None:
    gateway = DrivenGateway(settings(SQL))
    assert ready(gateway, "sql")["loadable"] is False
    gateway.up("r1", "r2")
    view = ready(gateway, "sql")
    assert (view["ready"], view["loadable"], view["reason"]) == (False, True, "r1, r2: not loaded")
    loaded(gateway, "sql", "r2")
    view = ready(gateway, "sql")
    assert (view["ready"], view["loadable"], view["reason"]) == (True, True, None)
    assert view["replicas"] == {"r1": "not loaded", "r2": None}
    gateway.feed(UnloadAsked(gateway.at, "sql", "r2"))
    assert ready(gateway, "sql")["replicas"]["r2"] == "being unloaded"


def test_a_restarted_engine_is_up_and_not_ready_for_what_it_forgot() -> None:
    gateway = DrivenGateway(settings(SQL, replicas=("r1",)))
    gateway.up("r1")
    loaded(gateway, "sql")
    gateway.down("r1")
    assert ready(gateway, "sql")["reason"] == "r1: down: connection refused"
    gateway.up("r1", start=gateway.at)
    assert ready(gateway)["ready"]
    assert ready(gateway, "sql")["ready"] is False


def test_tenants_show_what_runs_and_what_waits() -> None:
    gateway = DrivenGateway(settings(replicas=("r1",)))
    gateway.ask(None)
    gateway.at += SECOND
    gateway.ask(None)
    acme, other = (dict(view) for view in tenants_view(gateway.state, gateway.at))
    assert (acme["name"], acme["active"], acme["oldest_queued_s"]) == (
        "acme",
        {"value": 0, "source": "observed", "age_s": 0.0},
        1.0,
    )
    assert acme["queued"] == {"value": 2, "source": "observed", "age_s": 0.0}
    assert (acme["concurrency"], acme["queue"], acme["queue_deadline_s"]) == (8, 256, 30.0)
    assert other["oldest_queued_s"] is None
    gateway.up("r1")
    acme = next(tenants_view(gateway.state, gateway.at))
    assert acme["active"] == {"value": 2, "source": "observed", "age_s": 0.0}


def test_a_list_goes_on_when_an_adapter_leaves_meanwhile() -> None:
    gateway = DrivenGateway(settings(SQL, CHAT, MAIL))
    views = adapters_view(gateway.state, gateway.at)
    assert next(views)["name"] == "sql"
    gateway.feed(AdapterRetired(gateway.at, "chat"))
    assert [view["name"] for view in views] == ["org/mail"]


def test_views_of_a_busy_fleet_are_json_and_agree_with_each_other() -> None:
    specs = tuple(adapter(f"a{number}", version="0123456789"[number]) for number in range(8))
    profile = TwinProfile(
        slots=2, host_entries=4, max_seqs=4, token_budget=2048, step_base_ps=20 * PS_PER_MS, step_per_seq_ps=0,
        step_per_kv_token_ps=0, prefill_per_token_ps=0, prefill_floor_ps=0, prefill_offset_ps=0, adapter_step_ps=0,
        load_overhead_ps=50 * PS_PER_MS, activation_ps=PS_PER_MS,
    )  # fmt: skip
    replicas = tuple(ReplicaSpec(name, 2, 4, max_seqs=4) for name in ("r1", "r2"))
    fleet = VirtualFleet(
        FleetSettings(replicas, specs, (TenantSpec("t", 1000),)), {"r1": profile, "r2": profile}, start=NOW
    )
    trace = [Request(number * 20 * MS, "t", f"a{number * 7 % 8}", 64, 20) for number in range(200)]
    fleet.run(trace, until=NOW + 3 * SECOND)
    state, now = fleet.conductor.fleet.state, fleet.now
    assert state.requests
    adapters: list[Any] = list(adapters_view(state, now))
    everything = [*replicas_view(state, now), *adapters, *tenants_view(state, now), readiness_view(state, now)]
    assert json.loads(msgspec.json.encode(everything)) == everything
    assert sum(len(view["replicas"]) for view in adapters) >= 8
    for view in replicas_view(state, now):
        entries: Any = [*view["adapters"], *view["ghosts"]]  # type: ignore[misc]
        used: Any = view["slots_used"]
        assert sum(entry["tier"]["value"] == "gpu" for entry in entries) == used["value"] == 2
        for entry in view["adapters"]:  # type: ignore[attr-defined]
            of_adapter = next(other for other in adapters if other["name"] == entry["adapter"])
            assert of_adapter["replicas"][view["name"]]["tier"] == entry["tier"]
