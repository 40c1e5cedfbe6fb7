from __future__ import annotations

from functools import partial

import pytest

from loraledger import events as ev
from loraledger.kernel.settings import SECOND
from loraledger.record.tables import TABLES, Row, check
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.restart import GONE, restart
from loraledger.replay.fleet.virtual import VirtualFleet
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import TwinProfile
from replay.fleet.test_virtual import Tap
from replay.fleets import PROFILE, adapters, settings_for, zipf_trace


def fleet_of(replicas: int, *, probe: bool = True, count: int = 4) -> VirtualFleet:
    settings = settings_for(replicas, adapters(count))
    profiles = {spec.name: PROFILE for spec in settings.replicas}
    return VirtualFleet(settings, profiles, Observation(probe=probe))


def request(at: float, adapter: str | None = "a0", output: int = 1) -> Request:
    return Request(round(at * SECOND), "acme", adapter, 50, output)


def _at(row: Row) -> int:
    at = row["at_ns"]
    assert isinstance(at, int)
    return at


@pytest.mark.parametrize("probe", [True, False])
def test_every_request_ends_and_those_with_no_token_yet_are_answered_elsewhere(probe: bool) -> None:
    fleet = fleet_of(2, probe=probe)
    for second in (2, 5, 8):
        fleet.at(second * SECOND, partial(restart, fleet, "r1", SECOND))
    fleet.run(zipf_trace(300, 4, 30))
    rows = fleet.rows["requests"]
    assert len(rows) == 300
    assert fleet.conductor.fleet.state.requests == {}
    assert all(replica.open == 0 for replica in fleet.replicas.values())
    assert fleet.backlog.open == fleet.backlog.waiting == 0
    assert {row["status"] for row in rows} == {"ok", "upstream_reset"}
    assert {row["reason"] for row in rows if row["status"] != "ok"} == {GONE}
    for name, table in TABLES.items():
        for row in fleet.rows[name]:
            check(table, row)


def test_an_answer_that_had_begun_is_cut_and_one_that_had_not_is_tried_on_the_other_replica() -> None:
    fleet = fleet_of(2)
    # A prompt of several steps has no token yet after a few milliseconds; an answer of a thousand tokens has begun.
    long = Request(3 * SECOND - 10_000_000, "acme", "a0", 6000, 1)
    fleet.run([request(0.0), request(1.0, output=1000), long], 3 * SECOND - 1)
    busy = next(str(row["replica"]) for row in fleet.rows["requests"])
    assert fleet.replicas[busy].open == 2
    restart(fleet, busy, SECOND)
    fleet.run([])
    cut, moved = (next(row for row in fleet.rows["requests"] if row["id"] == key) for key in ("q2", "q3"))
    assert (cut["status"], cut["http_status"], cut["replica"], cut["retries"]) == ("upstream_reset", 200, busy, 0)
    assert (moved["status"], moved["retries"]) == ("ok", 1)
    assert moved["replica"] != busy


def test_a_load_call_in_hand_fails_and_the_request_that_waited_for_it_goes_elsewhere() -> None:
    fleet = fleet_of(2)
    for name in fleet.replicas:  # whichever it was
        fleet.at(1, partial(_restart_if_busy, fleet, name))
    fleet.run([request(0.0)])
    (row,) = fleet.rows["requests"]
    (down,) = [sample for sample in fleet.rows["samples"] if not sample["up"]]
    assert row["status"] == "ok"
    assert row["replica"] != down["replica"]
    assert fleet.conductor.fleet.state.counters["loads_failed"] == 1


def test_the_next_process_has_no_adapters_and_its_own_memory() -> None:
    small = TwinProfile(slots=2, host_entries=2, kv_blocks=100)
    fleet = fleet_of(1)
    fleet.at(3 * SECOND, partial(restart, fleet, "r1", SECOND, small))
    fleet.run([request(at / 2) for at in range(14)])
    samples = [row for row in fleet.rows["samples"] if row["up"]]
    before = [row for row in samples if _at(row) < 4 * SECOND]
    after = [row for row in samples if _at(row) > 4 * SECOND]
    assert {row["kv_tokens"] for row in before} == {PROFILE.kv_tokens}
    assert {row["kv_tokens"] for row in after} == {small.kv_tokens}
    assert {row["process_start_ns"] for row in before} == {1}
    assert {row["process_start_ns"] for row in after} == {4 * SECOND}
    assert fleet.replicas["r1"].loads == 2
    floor = fleet.conductor.fleet.state.replicas["r1"].floor
    assert floor is not None
    assert floor.slots == 2


def test_a_replica_that_is_down_tells_nothing_and_says_so_once() -> None:
    fleet = fleet_of(2)
    tap = Tap(fleet)
    fleet.at(2 * SECOND + 1, partial(restart, fleet, "r2", 6 * SECOND))
    fleet.at(3 * SECOND, partial(restart, fleet, "r2", 6 * SECOND))  # it is down: nothing to end
    fleet.run([request(float(at)) for at in range(12)])
    mine = [row for row in fleet.rows["samples"] if row["replica"] == "r2"]
    assert [row["at_ns"] for row in mine if not row["up"]] == [2 * SECOND + 1]
    assert [row for row in mine if row["up"] and 2 * SECOND + 1 < _at(row) < 8 * SECOND] == []
    assert any(_at(row) > 8 * SECOND for row in mine)
    told = [event for event in tap.events if getattr(event, "replica", None) == "r2"]
    meanwhile = [event for event in told if 2 * SECOND + 1 < event.at <= 8 * SECOND + 1]
    assert [type(event) for event in meanwhile] == [ev.ReplicaUp, ev.FloorObserved, ev.TiersObserved]


@pytest.mark.parametrize("adapter", [None, "a0"])
def test_what_is_on_its_way_to_a_process_that_ends_never_reaches_the_next_one(adapter: str | None) -> None:
    settings = settings_for(2, adapters(1))
    slow = Observation(boundary=SECOND, load_call=SECOND)
    fleet = VirtualFleet(settings, {spec.name: PROFILE for spec in settings.replicas}, slow)
    for name in fleet.replicas:
        fleet.at(SECOND // 2, partial(_restart_if_busy, fleet, name))
    fleet.run([request(0.0, adapter), request(9.0, None), request(9.0, None)])
    rows = {str(row["id"]): row for row in fleet.rows["requests"]}
    assert [rows[key]["status"] for key in ("q1", "q2", "q3")] == ["ok"] * 3
    assert rows["q1"]["retries"] == (1 if adapter is None else 0)
    assert fleet.conductor.fleet.state.counters["engine_exits"] == 1
    assert sum(replica.loads for replica in fleet.replicas.values()) == (0 if adapter is None else 1)


def _restart_if_busy(fleet: VirtualFleet, name: str) -> None:
    """It was asked for something; it is away for two seconds, so that whatever was on its way comes meanwhile."""
    known = fleet.conductor.fleet.state.replicas[name]
    if (known.in_flight or known.loading) and all(replica.up for replica in fleet.replicas.values()):
        restart(fleet, name, 2 * SECOND)


def test_a_process_is_away_for_a_while() -> None:
    with pytest.raises(ValueError, match="down is 0 ns"):
        restart(fleet_of(1), "r1", 0)


def test_what_waited_for_the_only_replica_is_sent_as_it_comes_back_and_its_probe_knows_of_it() -> None:
    fleet = fleet_of(1)
    fleet.at(2 * SECOND, partial(restart, fleet, "r1", SECOND))
    fleet.run([request(0.0), request(2.5, adapter=None), request(5.0)])
    rows = {row["id"]: row for row in fleet.rows["requests"]}
    assert [rows[key]["status"] for key in ("q1", "q2", "q3")] == ["ok"] * 3
    assert rows["q2"]["dispatched_ns"] == 3 * SECOND
    assert rows["q2"]["engine_access"] == "base"
