"""Rows of requests whose engine has a probe: what they wait for, how long, and what their parts add up to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger import events as ev
from loraledger.conductor.fold import ENGINE_WAIT, RowFold, decode_fold, encode_fold
from loraledger.kernel.settings import MS, SECOND
from loraledger.record.tables import Row

from .desk import DIGEST, Desk, settings_of

A = ev.engine_name("a", DIGEST, 1)


def probed(replicas: int = 1) -> Desk:
    """A desk whose replicas all have a probe that answers."""
    desk = Desk(settings_of(replicas))
    for spec in desk.settings.replicas:
        tell(desk, spec.name)
    return desk


def tell(desk: Desk, replica: str = "r1", active: tuple[str, ...] = ()) -> None:
    desk.feed(ev.TiersObserved(desk.now, replica, desk.now - MS, active, active))


def inside(desk: Desk, request: str, replica: str = "r1", **more: Any) -> None:
    """The probe tells how a request went; 4 ms queued, 30 of prefill with 12 of stall, if not said otherwise."""
    usual = {"queue": 4 * MS, "prefill": 30 * MS, "decode": 9 * MS, "access": "disk", "load": 9 * MS}
    usual |= {"activation": 2 * MS, "stall": 12 * MS, "cached_tokens": 3, "preemptions": 1}
    desk.feed(ev.EngineFinished(desk.now, replica, request, **{**usual, **more}))


def serve(desk: Desk, request: str, first_token: int | None = 50) -> str:
    """Send a request of the base model, its first token after so many ms; it has not ended. Returns its replica."""
    desk.arrive(request)
    replica = desk.sent(request).replica
    if first_token is not None:
        desk.tick(first_token)
        desk.first_token(request)
    return replica


def end(desk: Desk, request: str, status: ev.Status = "ok", first_token: int | None = None) -> None:
    desk.finish(request, status, ev.Measured(first_token=first_token))


def rows(desk: Desk) -> list[str]:
    return [str(row["id"]) for row in desk.table("requests")]


# --- what a row waits for ---------------------------------------------------------------------------------------------


def test_a_row_waits_for_what_the_probe_tells_of_it() -> None:
    desk = probed()
    serve(desk, "q1")
    end(desk, "q1")
    finished = desk.now
    assert rows(desk) == []
    desk.tick(80)
    inside(desk, "q1")
    row = desk.row("q1")
    assert (row["engine_access"], row["engine_queue_ns"], row["engine_decode_ns"]) == ("disk", 4 * MS, 9 * MS)
    assert (row["engine_load_ns"], row["engine_activation_ns"], row["engine_stall_ns"]) == (9 * MS, 2 * MS, 12 * MS)
    assert (row["preemptions"], row["cached_tokens"]) == (1, 3)
    assert (row["status"], row["finished_ns"]) == ("ok", finished), "when it ended, not when that was told"


def test_a_probe_that_is_quicker_than_the_answer_delays_nothing() -> None:
    desk = probed()
    serve(desk, "q1")
    inside(desk, "q1")
    assert rows(desk) == []
    end(desk, "q1")
    assert desk.row("q1")["engine_access"] == "disk"


def test_without_a_probe_nothing_is_waited_for() -> None:
    desk = Desk(settings_of(1))
    serve(desk, "q1")
    end(desk, "q1")
    row = desk.row("q1")
    assert row.get("engine_access") is row.get("engine_queue_ns") is row.get("unattributed_ns") is None


@pytest.mark.parametrize("status", ["upstream_reset", "client_gone", "client_error"])
def test_an_answer_that_broke_off_waits_for_no_word(status: ev.Status) -> None:
    desk = probed()
    serve(desk, "q1")
    end(desk, "q1", status)
    assert rows(desk) == ["q1"]
    inside(desk, "q1")
    assert rows(desk) == ["q1"]


def test_a_client_that_left_and_a_refused_request_wait_for_no_word() -> None:
    desk = probed()
    serve(desk, "q1")
    desk.feed(ev.RequestCancelled(desk.now, "q1", ev.Measured()))
    desk.arrive("q2", "a")
    desk.load_ends("broken")
    assert set(rows(desk)) == {"q1", "q2"}


def test_a_row_waits_three_seconds_at_most() -> None:
    desk = probed()
    serve(desk, "q1")
    end(desk, "q1")
    desk.tick(1_000)
    serve(desk, "q2", None)
    end(desk, "q2")
    desk.tick(ENGINE_WAIT / MS - 1_001)
    tell(desk)
    assert rows(desk) == []
    desk.tick(1)
    tell(desk)
    assert rows(desk) == ["q1"]
    desk.tick(1_000)
    tell(desk)
    assert rows(desk) == ["q1", "q2"]
    inside(desk, "q1")
    assert rows(desk) == ["q1", "q2"], "too late, and not twice"


@pytest.mark.parametrize("kind", ["lost", "down", "gateway"])
def test_who_waits_is_written_when_no_word_will_come(kind: str) -> None:
    desk = probed(2)
    mine = serve(desk, "q1")
    other = serve(desk, "q2")
    assert mine != other
    end(desk, "q1")
    end(desk, "q2")
    ends: dict[str, ev.Event] = {
        "lost": ev.ProbeLost(desk.now, mine, "timeout: x"),
        "down": ev.ReplicaDown(desk.now, mine, "connect_failed"),
        "gateway": ev.GatewayStarted(desk.now, "2", "c"),
    }
    desk.feed(ends[kind])
    assert rows(desk) == (["q1", "q2"] if kind == "gateway" else ["q1"])
    assert {row["status"] for row in desk.table("requests")} == {"ok"}, "it was answered, whatever came then"


def test_after_a_probe_is_lost_rows_wait_no_more_until_it_answers_again() -> None:
    desk = probed()
    desk.feed(ev.ProbeLost(desk.now, "r1", "timeout: x"))
    serve(desk, "q1")
    end(desk, "q1")
    assert rows(desk) == ["q1"]
    tell(desk)
    serve(desk, "q2")
    end(desk, "q2")
    assert rows(desk) == ["q1"]


def test_rows_that_wait_are_shown_as_ended_to_whoever_reads_meanwhile() -> None:
    desk = probed()
    serve(desk, "q1")
    end(desk, "q1")
    serve(desk, "q2")
    shown = {row["id"]: row["status"] for _, row in desk.conductor.fold.open_rows()}
    assert shown == {"q1": "ok", "q2": None}


def test_what_another_replica_tells_of_an_attempt_that_was_given_up_closes_nothing() -> None:
    desk = probed(2)
    desk.arrive("q1")
    first = desk.sent("q1")
    desk.feed(ev.AttemptFailed(desk.now, "q1", 1, "upstream_failed", None, "connect_refused"))
    second = desk.sent("q1")
    inside(desk, "q1", first.replica, queue=1)
    end(desk, "q1")
    inside(desk, "q1", first.replica, queue=1)
    assert rows(desk) == []
    inside(desk, "q1", second.replica, queue=2)
    assert desk.row("q1")["engine_queue_ns"] == 2


def test_what_was_told_of_a_first_attempt_is_not_taken_for_the_second() -> None:
    desk = probed(2)
    desk.arrive("q1")
    first = desk.sent("q1")
    inside(desk, "q1", first.replica, queue=1)
    desk.feed(ev.AttemptFailed(desk.now, "q1", 1, "upstream_failed", None, "reset"))
    desk.tick(1_000)
    for replica in ("r1", "r2"):
        desk.feed(ev.ScrapeStarted(desk.now, replica))
        desk.feed(ev.ReplicaSampled(desk.now, replica, desk.now, 0, 0, 0.0, None))
    second = desk.sent("q1")
    assert second.attempt == 2
    end(desk, "q1")
    assert rows(desk) == []
    inside(desk, "q1", second.replica, queue=2)
    assert desk.row("q1")["engine_queue_ns"] == 2


# --- what the parts add up to -----------------------------------------------------------------------------------------

durations = st.integers(0, 10 * SECOND)


def parts(row: Row) -> int:
    names = ("engine_queue_ns", "engine_stall_ns", "engine_prefill_ns", "unattributed_ns")
    return sum(int(str(row[name] or 0)) for name in names)


@given(queue=durations, prefill=durations, stall=st.none() | durations, wait=st.integers(0, 20_000))
def test_the_parts_are_the_time_to_first_token_exactly(queue: int, prefill: int, stall: int | None, wait: int) -> None:
    desk = probed()
    serve(desk, "q1", wait)
    sent = desk.now - wait * MS
    inside(desk, "q1", queue=queue, prefill=prefill, stall=stall)
    end(desk, "q1", first_token=desk.now)
    row = desk.row("q1")
    assert row["dispatched_ns"] == sent
    assert parts(row) == wait * MS
    assert int(str(row["engine_prefill_ns"])) == max(0, prefill - (stall or 0))


@pytest.mark.parametrize("missing", ["queue", "prefill", "first_token"])
def test_nothing_is_called_unattributed_while_a_part_is_unknown(missing: str) -> None:
    desk = probed()
    serve(desk, "q1")
    unknown: dict[str, Any] = {name: None for name in ("queue", "prefill") if name == missing}
    inside(desk, "q1", **unknown)
    end(desk, "q1", first_token=None if missing == "first_token" else desk.now)
    assert desk.row("q1")["unattributed_ns"] is None


def test_what_the_answer_itself_said_of_cached_tokens_wins() -> None:
    desk = probed()
    serve(desk, "q1")
    inside(desk, "q1", cached_tokens=3)
    desk.finish("q1", measured=ev.Measured(cached_tokens=16))
    assert desk.row("q1")["cached_tokens"] == 16


# --- samples ----------------------------------------------------------------------------------------------------------


def sample(desk: Desk) -> Row:
    desk.feed(ev.ScrapeStarted(desk.now, "r1"))
    desk.feed(ev.ReplicaSampled(desk.now, "r1", desk.now, 0, 0, 0.0, None))
    return desk.table("samples")[-1]


def test_a_sample_sums_the_steps_since_the_one_before() -> None:
    desk = probed()
    desk.feed(ev.StepsObserved(desk.now, "r1", 2, 30, 5, 1, 8, {"a": 2, "b": 1}, 1, 70))
    desk.feed(ev.StepsObserved(desk.now, "r1", 3, 10, 6, 0, 0, {"a": 1, "c": 4}, 2, 60))
    row = sample(desk)
    assert (row["steps"], row["step_tokens"], row["step_ns"], row["preempted"], row["recomputed_tokens"]) == (
        *(5, 40, 11, 1, 8),
    )
    assert (row["blocked"], row["distinct_adapters"], row["kv_blocks_free"]) == (2 + 1 + 4, 2, 60)
    assert sample(desk).get("steps") is None, "none since"
    desk.feed(ev.StepsObserved(desk.now, "r1", 2, 30, 5, 1, 8, {}, 1, 70))
    desk.feed(ev.ProbeLost(desk.now, "r1", "x"))
    assert sample(desk).get("steps") is None


def test_slots_of_a_sample_are_those_of_the_lists_and_of_the_moves_after_them() -> None:
    desk = probed()
    desk.tick(10)
    tell(desk, active=(A, "b@"))
    assert sample(desk)["slots_used_believed"] == 2
    desk.feed(ev.EvictionObserved(desk.now, "r1", A, "host", "remove"))
    assert sample(desk)["slots_used_believed"] == 1
    desk.feed(ev.ActivationObserved(desk.now, "r1", A, MS))
    assert sample(desk)["slots_used_believed"] == 2
    desk.feed(ev.EvictionObserved(desk.now, "r1", "b@", "gpu"))
    assert sample(desk)["slots_used_believed"] == 1


# --- any order --------------------------------------------------------------------------------------------------------

REQUESTS = ("q1", "q2", "q3")
words = st.sampled_from(
    [
        *((kind, request) for request in REQUESTS for kind in ("arrive", "send", "end", "break", "leave", "inside")),
        *((kind, replica) for replica in ("r1", "r2") for kind in ("tell", "lost", "down", "up")),
        *(("tick", n) for n in (1, 900, 3_100)),
        ("restart", ""),
    ]
)


def say(desk: Desk, kind: str, of: Any, arrived: dict[str, None]) -> None:
    """One thing happens, if it can."""
    state = desk.conductor.fleet.state
    sent = of in state.requests and state.requests[of].phase == "sent"
    match kind:
        case "arrive" if of not in arrived:
            arrived[of] = None
            desk.arrive(of)
        case "send" if sent:
            desk.feed(ev.RequestDispatched(desk.now, of, state.requests[of].attempt))
        case "end" if sent:
            end(desk, of)
        case "break" if sent:
            desk.feed(ev.AttemptFailed(desk.now, of, state.requests[of].attempt, "upstream_failed", None, "reset"))
        case "leave" if of in state.requests:
            desk.feed(ev.RequestCancelled(desk.now, of, ev.Measured()))
        case "inside":
            for replica in ("r1", "r2"):
                inside(desk, of, replica)
        case "tell":
            tell(desk, of)
        case "lost":
            desk.feed(ev.ProbeLost(desk.now, of, "x"))
        case "down":
            desk.feed(ev.ReplicaDown(desk.now, of, "x"))
        case "up":
            desk.feed(ev.ReplicaUp(desk.now, of, 7, ()))
        case "tick":
            desk.tick(of)
            desk.feed(ev.Wake(desk.now))
        case "restart":
            desk.feed(ev.GatewayStarted(desk.now, "1", "c"))
        case _:
            pass


@given(st.lists(words, max_size=40))
def test_each_request_has_one_row_in_any_order_of_events_and_none_is_lost(script: list[tuple[str, Any]]) -> None:
    desk = probed(2)
    arrived: dict[str, None] = {}
    for kind, of in script:
        say(desk, kind, of, arrived)
        written, waiting = rows(desk), desk.conductor.fold.state.closing
        assert len(written) == len(set(written)), "a row was written twice"
        opened = [str(row["id"]) for _, row in desk.conductor.fold.open_rows()]
        assert sorted(written + opened) == sorted(arrived), "a request was forgotten"
        assert all(desk.now - closed.finished < ENGINE_WAIT for closed in waiting.values()) or kind == "tick"
    desk.feed(ev.GatewayStarted(desk.now, "1", "c"))
    assert sorted(rows(desk)) == sorted(arrived)


@given(st.lists(words, max_size=30), st.integers(0, 60))
def test_a_fold_that_is_taken_up_from_its_state_writes_the_same_rows(script: list[tuple[str, Any]], cut: int) -> None:
    steps: list[Any] = []
    desk = probed(2)
    whole = desk.conductor.fold.step
    start = encode_fold(desk.conductor.fold.state)

    def noted(event: ev.Event, commands: list[ev.Command], changes: list[ev.ResidencyChange]) -> Any:
        steps.append((event, list(commands), list(changes)))
        return whole(event, commands, changes)

    desk.conductor.fold.step = noted  # type: ignore[method-assign]
    told = len(desk.rows)
    arrived: dict[str, None] = {}
    for kind, of in script:
        say(desk, kind, of, arrived)
    fold, again = RowFold(decode_fold(start)), []
    for number, step in enumerate(steps):
        if number == cut:
            fold = RowFold(decode_fold(encode_fold(fold.state)))
        again += fold.step(*step)
    assert again == desk.rows[told:]
    assert fold.state == desk.conductor.fold.state
