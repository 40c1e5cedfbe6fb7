from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from kernel.world import REPLICAS, World, world_settings
from loraledger import events as ev
from loraledger.conductor.fold import RowFold, decode_fold, encode_fold
from loraledger.kernel.policies import policy_names
from loraledger.kernel.settings import MS, SECOND
from loraledger.record.tables import TABLES, Row, check

from .desk import DIGEST, T0, Desk, fold_of, settings_of


def times(row: Row, *names: str) -> list[int]:
    """Columns of a row in ms after the start."""
    return [round((int(str(row[f"{name}_ns"])) - T0) / MS) for name in names]


# --- how a request may end --------------------------------------------------------------------------------------------


def test_an_answer_to_its_end() -> None:
    desk = Desk(settings_of(1))
    desk.tick(3)
    desk.arrive("q1", received=T0)
    desk.tick(2)
    sent = desk.sent("q1")
    desk.tick(45)
    desk.first_token("q1")
    desk.tick(100)
    measured = ev.Measured(T0 + 49 * MS, T0 + 50 * MS, T0 + 150 * MS, 82, 21, 16, 5 * MS, 9 * MS, {12: 3, 4: 1}, 21)
    desk.finish("q1", measured=measured)
    row = desk.row("q1")
    assert times(row, "arrived", "dispatched", "first_byte", "first_token", "last_token", "finished") == [
        *(0, 5, 49, 50, 150, 150)
    ]
    assert row["queued_ns"] is None
    assert (row["load_start_ns"], row["load_end_ns"]) == (None, None)
    assert (row["status"], row["http_status"], row["reason"], row["retries"]) == ("ok", 200, None, 0)
    assert (row["prompt_tokens"], row["generated_tokens"], row["cached_tokens"]) == (82, 21, 16)
    assert (row["itl_mean_ns"], row["itl_max_ns"]) == (5 * MS, 9 * MS)
    assert json.loads(str(row["itl_sketch"])) == {"4": 1, "12": 3}
    assert (row["tenant"], row["adapter"], row["digest"], row["base"]) == ("acme", None, None, "base")
    assert (row["client_id"], row["path"], row["stream"]) == ("c-q1", "/v1/completions", True)
    assert (row["replica"], row["policy"], row["hit_class"]) == ("r1", "bounded-affinity", "base")
    assert (row["decision_id"], row["hit_source"]) == (sent.decision.id, "believed")
    assert (row["predicted_prompt_tokens"], row["engine_version"]) == (80, "0.32.0")
    assert (row["config_digest"], row["gateway_version"]) == ("cfg", "9.9")


def test_an_answer_that_broke_off() -> None:
    desk = Desk()
    desk.arrive("q1")
    desk.sent("q1")
    desk.first_token("q1")
    desk.finish("q1", "upstream_reset", ev.Measured(first_token=T0, tokens_seen=7))
    row = desk.row("q1")
    assert (row["status"], row["reason"], row["http_status"]) == ("upstream_reset", "upstream_reset", None)
    assert row["generated_tokens"] is None  # a lower bound is no count


def test_a_client_that_left_while_its_request_was_queued() -> None:
    desk = Desk(settings_of(1, 1))
    desk.arrive("q1")
    desk.arrive("q2")
    desk.tick(30)
    desk.feed(ev.RequestCancelled(desk.now, "q2", ev.Measured()))
    row = desk.row("q2")
    assert (row["status"], row["reason"], row["replica"], row["decision_id"]) == (
        "client_gone",
        "client_gone",
        None,
        None,
    )
    assert row["queued_ns"] == 30 * MS
    assert row["dispatched_ns"] is None


def test_a_client_that_left_in_the_middle_of_its_answer() -> None:
    desk = Desk()
    desk.arrive("q1")
    sent = desk.sent("q1")
    desk.tick(40)
    desk.first_token("q1")
    desk.tick(40)
    desk.feed(ev.RequestCancelled(desk.now, "q1", ev.Measured(first_token=T0 + 40 * MS, tokens_seen=4)))
    row = desk.row("q1")
    assert (row["status"], row["replica"], row["http_status"]) == ("client_gone", sent.replica, None)
    assert times(row, "first_token", "finished") == [40, 80]


def test_a_refusal_by_the_kernel() -> None:
    desk = Desk(settings_of(1, 1))
    desk.arrive("q1")
    desk.arrive("q2")
    alarm = desk.alarms[-1]
    assert alarm is not None
    desk.now = alarm
    desk.conductor.wake()
    row = desk.row("q2")
    assert (row["status"], row["http_status"], row["reason"]) == ("rejected", 503, "queue_deadline")
    assert (row["queued_ns"], row["finished_ns"]) == (20 * SECOND, alarm)
    assert desk.row("q2")["hit_class"] is None


def test_a_request_that_was_tried_twice() -> None:
    desk = Desk()
    desk.arrive("q1")
    first = desk.sent("q1")
    desk.tick(10)
    desk.feed(ev.AttemptFailed(desk.now, "q1", 1, "upstream_failed", None, "connect_refused"))
    second = desk.sent("q1")
    desk.tick(10)
    desk.first_token("q1")
    desk.finish("q1")
    row = desk.row("q1")
    assert (row["replica"], row["retries"], row["status"]) == (second.replica, 1, "ok")
    assert second.replica != first.replica
    assert times(row, "dispatched") == [10]
    assert [r["decision_id"] for r in desk.table("decisions")] == [first.decision.id, second.decision.id]
    assert row["decision_id"] == second.decision.id


def test_a_request_that_failed_twice_says_where_it_failed_last() -> None:
    desk = Desk()
    desk.arrive("q1")
    desk.sent("q1")
    desk.feed(ev.AttemptFailed(desk.now, "q1", 1, "upstream_failed", None, "connect_refused"))
    second = desk.sent("q1")
    desk.feed(ev.AttemptFailed(desk.now, "q1", 2, "engine_error", 500, "connect_reset"))
    row = desk.row("q1")
    assert (row["status"], row["http_status"], row["reason"]) == ("engine_error", 502, "upstream_failed")
    assert (row["replica"], row["retries"]) == (second.replica, 1)


def test_a_wait_for_a_look_at_the_replica_counts_as_queued() -> None:
    desk = Desk(settings_of(1))
    desk.arrive("q1")
    desk.sent("q1")
    desk.tick(10)
    desk.feed(ev.AttemptFailed(desk.now, "q1", 1, "upstream_failed", None, "reset"))
    desk.tick(600)
    desk.feed(ev.ScrapeStarted(desk.now, "r1"))
    desk.feed(ev.ReplicaSampled(desk.now, "r1", desk.now, 0, 0, 0.0, None))
    desk.finish("q1")
    assert desk.row("q1")["queued_ns"] == 600 * MS


def test_requests_that_share_a_load_carry_its_times() -> None:
    desk = Desk(settings_of(1))
    desk.arrive("q1", "a")
    desk.tick(20)
    desk.arrive("q2", "a")
    desk.tick(30)
    desk.load_ends()
    desk.sent("q1")
    desk.sent("q2")
    for request in ("q1", "q2"):
        desk.finish(request)
        row = desk.row(request)
        assert times(row, "load_start", "load_end", "dispatched") == [0, 50, 50]
        assert (row["hit_class"], row["queued_ns"], row["digest"]) == ("disk", None, DIGEST)
    assert times(desk.row("q2"), "arrived") == [20]
    desk.arrive("q3", "a")
    desk.finish("q3")
    assert (desk.row("q3")["load_start_ns"], desk.row("q3")["hit_class"]) == (None, "gpu")


def test_a_load_that_waits_behind_another_began_when_it_was_sent() -> None:
    desk = Desk(settings_of(1))
    desk.arrive("q1", "a")
    desk.arrive("q2", "b")
    desk.tick(50)
    desk.load_ends()
    desk.tick(70)
    desk.load_ends()
    desk.finish("q2")
    assert times(desk.row("q2"), "load_start", "load_end") == [50, 120]


def test_a_request_whose_first_load_failed_carries_the_times_of_the_second() -> None:
    desk = Desk(settings_of(2))
    desk.arrive("q1", "a")
    desk.tick(40)
    desk.load_ends("busy")
    desk.tick(60)
    desk.load_ends()
    desk.finish("q1")
    row = desk.row("q1")
    assert times(row, "load_start", "load_end", "dispatched") == [40, 100, 100]
    assert len(desk.table("decisions")) == 2


def test_requests_that_a_crash_cut_off() -> None:
    desk = Desk(settings_of(1, 1))
    desk.arrive("q1")
    desk.sent("q1")
    desk.arrive("q2")
    desk.tick(1_000)
    desk.feed(ev.GatewayStarted(desk.now, "10.0", "other"))
    for request in ("q1", "q2"):
        row = desk.row(request)
        assert (row["status"], row["reason"], row["finished_ns"]) == ("gateway_crashed", "the gateway stopped", None)
        assert (row["gateway_version"], row["config_digest"]) == ("9.9", "cfg")  # of the one that stopped
    desk.feed(ev.ReplicaUp(desk.now, "r1", 7, ()))
    desk.arrive("q3")
    desk.finish("q3")
    assert (desk.row("q3")["gateway_version"], desk.row("q3")["config_digest"]) == ("10.0", "other")


def test_the_digest_of_a_row_is_of_the_files_that_answered() -> None:
    desk = Desk(settings_of(1))
    desk.arrive("q1", "a")
    desk.load_ends()
    desk.sent("q1")
    desk.first_token("q1")
    new = "bb22".ljust(64, "0")
    desk.feed(ev.AdapterDeclared(desk.now, ev.AdapterSpec("a", new, 8, 10_000_000)))
    desk.arrive("q2", "a")
    desk.load_ends()
    desk.finish("q1")
    desk.finish("q2")
    assert (desk.row("q1")["digest"], desk.row("q2")["digest"]) == (DIGEST, new)
    for change in desk.table("residency"):
        if change["digest"] is not None and change["engine_name"]:
            assert f"@{str(change['digest'])[:12]}" in str(change["engine_name"])


def test_a_request_that_began_its_wait_under_old_files_is_recorded_with_the_new() -> None:
    desk = Desk(settings_of(1))
    desk.arrive("q1", "a")
    new = "bb22".ljust(64, "0")
    desk.feed(ev.AdapterDeclared(desk.now, ev.AdapterSpec("a", new, 8, 10_000_000)))
    desk.load_ends()
    desk.load_ends()
    desk.sent("q1")
    desk.finish("q1")
    assert desk.row("q1")["digest"] == new


def test_a_late_report_on_a_former_attempt_changes_no_row() -> None:
    desk = Desk()
    desk.arrive("q1")
    first = desk.sent("q1")
    desk.feed(ev.AttemptFailed(desk.now, "q1", 1, "upstream_failed", None, "connect_refused"))
    second = desk.sent("q1")
    desk.tick(5)
    desk.feed(ev.RequestDispatched(desk.now, "q1", 1))
    desk.feed(ev.AttemptFailed(desk.now, "q1", 1, "upstream_failed", None, "connect_refused"))
    views = desk.conductor.fold.state.replicas
    assert (views[first.replica].in_flight, views[second.replica].in_flight) == (0, 1)
    desk.finish("q1")
    assert times(desk.row("q1"), "dispatched") == [0]
    assert desk.row("q1")["replica"] == second.replica


# --- the other tables -------------------------------------------------------------------------------------------------


def test_a_decision_is_recorded_once_with_every_term_in_seconds() -> None:
    desk = Desk(settings_of(2))
    desk.arrive("q1", "a")
    desk.load_ends()
    (row,) = desk.table("decisions")
    queue = next(c for c in desk.done if isinstance(c, ev.Queue))
    assert queue.decision is not None
    assert (row["request_id"], row["adapter"], row["replica"]) == ("q1", "a", queue.decision.replica)
    assert (row["considered"], row["at_ns"]) == (2, T0)
    candidates = json.loads(str(row["candidates"]))
    assert [c["replica"] for c in candidates] == [c.replica for c in queue.decision.candidates]
    for shown, known in zip(candidates, queue.decision.candidates, strict=True):
        assert shown["cost_s"] == pytest.approx(known.cost / SECOND)
        terms = sum(shown[f"{term}_s"] for term in ("queue", "slot_wait", "prepare", "prefill", "externality"))
        assert shown["cost_s"] == pytest.approx(terms)


def test_samples_show_own_and_foreign_work_as_of_the_scrape() -> None:
    desk = Desk(settings_of(1))
    for request in ("q1", "q2"):
        desk.arrive(request)
        desk.sent(request)
    desk.feed(ev.ScrapeStarted(desk.now, "r1"))
    mark = desk.now
    desk.arrive("q3")
    desk.tick(12)
    desk.feed(ev.ReplicaSampled(desk.now, "r1", mark, 4, 1, 0.25, 9_000))
    desk.feed(ev.ReplicaDown(desk.now, "r1", "connect_failed"))
    up, down = desk.table("samples")
    assert (up["running"], up["waiting"], up["kv_usage"], up["kv_tokens"]) == (4, 1, 0.25, 9_000)
    assert (up["own_in_flight"], up["foreign_in_flight"]) == (3, 3)
    assert (up["age_ns"], up["process_start_ns"], up["up"]) == (12 * MS, 7, True)
    assert (down["up"], down.get("running")) == (False, None)


def test_residency_rows_tell_what_moved_why_and_how_long_it_took() -> None:
    desk = Desk(settings_of(1))
    for request, adapter in (("q1", "a"), ("q2", "b")):
        desk.arrive(request, adapter)
        desk.load_ends()
    rows = [row for row in desk.table("residency") if row["adapter"] == "a"]
    assert [(row["from_state"], row["to_state"]) for row in rows] == [
        ("absent", "wanted"),
        ("wanted", "loading"),
        ("loading", "registered"),
        ("registered", "registered"),
    ]
    assert (rows[2]["took_ns"], rows[3]["tier_before"], rows[3]["tier_after"]) == (5 * MS, "disk", "gpu")
    assert {row["source"] for row in rows} == {"believed"}
    assert {row["digest"] for row in rows} == {DIGEST}


def test_believed_slots_follow_evictions_and_restarts() -> None:
    adapters = [ev.AdapterSpec(name, DIGEST, 8, 1_000_000) for name in "abc"]
    desk = Desk(settings_of(1, 8, *adapters))
    slots = []

    def look(start: int = 7) -> None:
        desk.tick(1)
        desk.feed(ev.ReplicaUp(desk.now, "r1", start, ()))
        slots.append(len(desk.conductor.fold.state.replicas["r1"].slots))

    for name in "abc":
        desk.arrive(f"q-{name}", name)
        desk.load_ends()
        desk.finish(f"q-{name}")
        slots.append(len(desk.conductor.fold.state.replicas["r1"].slots))
    assert list(desk.conductor.fold.state.replicas["r1"].slots) == [ev.engine_name(n, DIGEST) for n in "bc"]
    look(8)
    assert slots == [1, 2, 2, 0]


# --- the fold as such -------------------------------------------------------------------------------------------------


def test_the_state_of_a_fold_survives_its_wire_form_in_its_order() -> None:
    desk = Desk(settings_of(1))
    for request in ("z", "a", "m"):
        desk.arrive(request, "a")
    state = desk.conductor.fold.state
    assert decode_fold(encode_fold(state)) == state
    assert list(decode_fold(encode_fold(state)).open) == ["z", "a", "m"]


def test_open_requests_are_shown_without_a_status_and_stay_open() -> None:
    desk = Desk(settings_of(1, 1))
    desk.arrive("q1")
    desk.arrive("q2")
    fold = desk.conductor.fold
    shown = [row for _, row in fold.open_rows()]
    assert [(row["id"], row["status"], row["finished_ns"]) for row in shown] == [("q1", None, None), ("q2", None, None)]
    assert list(fold.state.open) == ["q1", "q2"]
    assert [row["status"] for _, row in fold.close_open()] == ["gateway_crashed"] * 2
    assert fold.state.open == {}


def test_an_open_request_that_streams_is_not_shown_as_waiting_for_its_first_token() -> None:
    desk = Desk(settings_of(1, 1))
    desk.arrive("q1")
    desk.sent("q1")
    desk.first_token("q1")
    came = desk.now
    fold = desk.conductor.fold
    ((_, shown),) = fold.open_rows()
    assert (shown["status"], shown["first_token_ns"], shown["last_token_ns"]) == (None, came, None)
    ((_, left),) = RowFold(decode_fold(encode_fold(fold.state))).close_open()
    assert (left["status"], left["first_token_ns"]) == ("gateway_crashed", came)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_each_request_that_ended_has_exactly_one_row(seed: int) -> None:
    policy = policy_names()[seed % len(policy_names())]
    world = World(world_settings(policy), random.Random(seed).randrange)
    fold = fold_of(world.settings)
    for name in REPLICAS:
        world._up(name)
    for _ in range(400):
        world.act()
    world.settle()
    rows: list[Row] = []
    for number, (event, commands, changes) in enumerate(world.steps):
        if number % 97 == 0:
            fold = RowFold(decode_fold(encode_fold(fold.state)))
        for table, row in fold.step(event, commands, changes):
            check(TABLES[table], row)
            if table == "requests":
                rows.append(row)
    assert fold.state.open == {}
    assert all(view.in_flight == 0 for view in fold.state.replicas.values())
    assert Counter(row["id"] for row in rows) == Counter(list(world.ended))
    words = {"cancelled": "client_gone", "lost": "gateway_crashed"}
    for row in rows:
        ended = world.ended[str(row["id"])]
        if ended == "refused":
            assert row["http_status"] in (404, 429, 502, 503, 504)
        else:
            assert row["status"] == words.get(ended, ended)
        if row["load_end_ns"] is not None:
            assert int(str(row["load_start_ns"])) <= int(str(row["load_end_ns"]))
