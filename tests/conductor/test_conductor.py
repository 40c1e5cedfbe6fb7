from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loraledger import events as ev
from loraledger.conductor.conductor import PER_REQUEST, RESERVE
from loraledger.conductor.reading import Segment, fold_segment, last_state, verify
from loraledger.kernel.settings import SECOND, TenantSpec
from loraledger.record.frames import Kind, read_segment, segments
from loraledger.record.journal import Journal

from .desk import T0, Desk, settings_of


def kinds(path: Path) -> list[int]:
    return [frame.kind for frame in read_segment(path)]


def test_what_is_fed_while_a_command_is_performed_waits_its_turn() -> None:
    desk = Desk(settings_of(1))
    order: list[str] = []
    perform = desk.perform

    def busy(command: ev.Command) -> None:
        perform(command)
        if isinstance(command, ev.Dispatch):
            order.append(f"begin {command.request}")
            desk.feed(ev.RequestDispatched(desk.now, command.request, command.attempt))
            if command.request == "q1":
                desk.arrive("q2")
            order.append(f"end {command.request}")

    desk.perform = busy  # type: ignore[method-assign]
    before = desk.conductor.steps
    desk.arrive("q1")
    assert order == ["begin q1", "end q1", "begin q2", "end q2"]
    assert desk.conductor.steps == before + 4


def test_the_alarm_is_armed_once_for_each_time_and_given_up_when_nothing_is_timed() -> None:
    desk = Desk(settings_of(1, 1))
    assert desk.alarms == []
    desk.arrive("q1")
    desk.arrive("q2")
    desk.tick(1)
    desk.arrive("q3")
    first = desk.now - 10**6 + 20 * SECOND
    assert desk.alarms == [first]
    desk.feed(ev.RequestCancelled(desk.now, "q2", ev.Measured()))
    assert desk.alarms == [first, first + 10**6]
    desk.feed(ev.RequestCancelled(desk.now, "q3", ev.Measured()))
    assert desk.alarms[-1] is None


def test_waking_steps_the_kernel_at_the_clocks_time_and_arms_again() -> None:
    desk = Desk(settings_of(1, 1))
    for request in ("q1", "q2"):
        desk.arrive(request)
    desk.tick(1)
    desk.arrive("q3")
    armed = desk.alarms[-1]
    assert armed is not None
    desk.now = armed
    desk.conductor.wake()
    assert desk.row("q2")["finished_ns"] == armed
    assert desk.alarms[-1] == armed + 10**6


@pytest.mark.parametrize("where", ["kernel", "performer", "sink"])
def test_an_exception_in_a_handler_does_not_wedge_the_inbox(where: str) -> None:
    desk = Desk(settings_of(1, 1))
    desk.arrive("q1")
    desk.arrive("q2")

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    alarms = len(desk.alarms)
    perform, sink = desk.perform, desk.conductor._sink
    if where == "kernel":
        unknown_tenant = ev.RequestArrived(desk.now, "q9", "nobody", None, 1, 1, False, "/v1")
        with pytest.raises(KeyError):
            desk.feed(unknown_tenant)
    else:
        if where == "performer":
            desk.perform = broken  # type: ignore[assignment,method-assign]
        else:
            desk.conductor._sink = broken
        with pytest.raises(RuntimeError):
            desk.feed(ev.RequestCancelled(desk.now, "q1", ev.Measured()))
        desk.perform, desk.conductor._sink = perform, sink  # type: ignore[method-assign]
    desk.arrive("q3")
    assert "q3" in desk.conductor.fleet.state.requests
    assert len(desk.alarms) >= alarms
    desk.finish("q2")
    assert "q2" not in desk.conductor.fleet.state.requests
    desk.tick(30_000)
    desk.conductor.wake()
    assert desk.conductor.fleet.state.queued == 0


def test_after_an_exception_the_next_wake_up_is_still_armed() -> None:
    desk = Desk(settings_of(1, 1))
    desk.arrive("q1")
    desk.arrive("q2")
    armed = desk.alarms[-1]
    assert armed is not None
    desk.conductor._armed = None  # as the alarm leaves it when it rings

    def broken(_: ev.Command) -> None:
        raise RuntimeError("broken")

    desk.perform = broken  # type: ignore[assignment,method-assign]
    with pytest.raises(RuntimeError):
        desk.arrive("q3")
    assert desk.alarms[-1] == armed
    assert len(desk.alarms) == 2


# --- the journal ------------------------------------------------------------------------------------------------------


def test_an_event_is_in_the_journal_before_its_commands_are_performed(tmp_path: Path) -> None:
    desk = Desk(settings_of(1))
    with Journal.open(tmp_path, 1 << 20, desk.conductor.head) as journal:
        desk.conductor.journal = journal
        seen: list[list[int]] = []
        desk.perform = lambda command: seen.append(kinds(segments(tmp_path)[-1]))  # type: ignore[method-assign]
        desk.arrive("q1")
    assert seen == [[Kind.SETTINGS, Kind.SNAPSHOT, Kind.EVENT, Kind.COMMANDS]]


def test_a_step_is_never_split_over_two_segments_however_many_requests_it_moves(tmp_path: Path) -> None:
    waiting = 2_400
    filler = ev.UnloadAsked(T0, 5_000 * "x", "r1")
    settings = settings_of(1)
    roomy = msgspec.structs.replace(settings.replicas[0], max_in_flight=waiting)
    desk = Desk(
        msgspec.structs.replace(settings, replicas=(roomy,), tenants=(TenantSpec("acme", waiting, 1, 20 * SECOND),))
    )
    with Journal.open(tmp_path, 2 * (RESERVE + PER_REQUEST * waiting), desk.conductor.head) as journal:
        desk.conductor.journal = journal
        for n in range(waiting):
            desk.arrive(f"q{n:04}", "a")
        while journal.room > RESERVE + 6_000 and len(segments(tmp_path)) == 1:
            desk.feed(filler)
        desk.load_ends()
        assert sum(isinstance(command, ev.Dispatch) for command in desk.done) == waiting
    frames = [frame for path in segments(tmp_path) for frame in read_segment(path)]
    assert max(len(frame.payload) for frame in frames if frame.kind == Kind.COMMANDS) > RESERVE + 6_000
    for path in segments(tmp_path):
        assert kinds(path)[:3] == [Kind.SETTINGS, Kind.SNAPSHOT, Kind.EVENT]
    verified = verify(tmp_path)
    assert (verified.difference, verified.unanswered) == (None, 0)


def test_what_was_not_journalled_is_not_answered_in_the_journal_either(tmp_path: Path) -> None:
    class Off(Journal):
        """A journal whose disk refuses one frame: the event's."""

        refuse = False

        def append(self, kind: int, payload: bytes) -> bool:
            if self.refuse and kind == Kind.EVENT:
                self.refuse = False
                self.dropped += 1
                return False
            return super().append(kind, payload)

    desk = Desk(settings_of(1))
    with Off.open(tmp_path, 1 << 20, desk.conductor.head) as journal:
        desk.conductor.journal = journal
        desk.arrive("q1")
        before = len(kinds(segments(tmp_path)[-1]))
        journal.refuse = True
        desk.arrive("q2")
        assert len(kinds(segments(tmp_path)[-1])) == before
        assert "q2" in desk.conductor.fleet.state.requests


def test_a_request_that_a_crashed_process_decided_to_refuse_but_did_not_answer_is_recorded_as_crashed(
    tmp_path: Path,
) -> None:
    desk = Desk(settings_of(1, 1))
    with Journal.open(tmp_path, 1 << 20, desk.conductor.head) as journal:
        desk.conductor.journal = journal
        desk.arrive("q1")
        desk.arrive("q2")
        journal.append(Kind.EVENT, ev.encode(ev.Wake(desk.now + 60 * SECOND)))  # and here it is killed
    restored = last_state(tmp_path)
    assert restored is not None
    fleet, fold = restored
    assert "q2" not in fleet.state.requests
    assert list(fold.open) == ["q1", "q2"]
    rows, _ = fold_segment(Segment(segments(tmp_path)[-1]))
    assert not [row for table, row in rows if table == "requests"]
