"""What was being tried, in the rows of its requests; and a journal with rollouts, read back."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import pytest

from loraledger import events as ev
from loraledger.conductor.compact import compact
from loraledger.conductor.fold import decode_fold, encode_fold
from loraledger.conductor.reading import Segment, fold_segment, last_state, open_record, verify
from loraledger.kernel.settings import SECOND, TenantSpec
from loraledger.record.frames import segments
from loraledger.record.journal import Journal
from loraledger.record.tables import Row
from loraledger.replay.fleet.virtual import CALL, VirtualFleet
from replay.fleets import adapters, settings_for, virtual, zipf_trace

from .desk import T0, Desk, settings_of


def two_tenants(replicas: int = 2, policy: str = "bounded-affinity") -> Desk:
    tenants = tuple(TenantSpec(name, 8, 16, 20 * SECOND) for name in ("acme", "duff"))
    return Desk(msgspec.structs.replace(settings_of(replicas), tenants=tenants, policy=policy))


def rolled_out(
    at: int,
    change: str,
    variable: str,
    value: object,
    members: Iterable[str] | None,
    unit: Literal["tenant", "replica"],
) -> ev.RolloutSet:
    json = msgspec.json.encode(value).decode()
    return ev.RolloutSet(at, change, variable, json, unit, None if members is None else tuple(members))


def of_tenants(desk: Desk, members: Iterable[str] | None, change: str = "c1") -> None:
    desk.feed(rolled_out(desk.now, change, "policy", "round-robin", members, "tenant"))


def of_replicas(desk: Desk, members: Iterable[str] | None, change: str = "c2") -> None:
    desk.feed(rolled_out(desk.now, change, "pins", [], members, "replica"))


def whole(desk: Desk, request: str, tenant: str = "acme") -> str | None:
    """A request, begun and done: the change that its row names."""
    desk.arrive(request, tenant=tenant)
    desk.sent(request)
    desk.finish(request)
    return change_of(desk, request)


def change_of(desk: Desk, request: str) -> str | None:
    found = desk.row(request)["change_id"]
    assert found is None or isinstance(found, str)
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def test_requests_of_the_members_carry_the_change_while_it_is_tried() -> None:
    desk = two_tenants()
    assert whole(desk, "q1", "duff") is None
    of_tenants(desk, ["duff"])
    assert [whole(desk, "q2", "duff"), whole(desk, "q3", "acme")] == ["c1", None]
    assert [row["policy"] for row in desk.table("decisions")] == ["bounded-affinity", "round-robin", "bounded-affinity"]
    desk.feed(ev.RolloutEnded(desk.now, "c1"))
    assert whole(desk, "q4", "duff") is None


def test_what_was_accepted_is_not_tried_any_more() -> None:
    desk = two_tenants()
    of_tenants(desk, ["duff"])
    of_tenants(desk, None)
    assert [whole(desk, "q1", "duff"), whole(desk, "q2", "acme")] == [None, None]
    assert desk.row("q1")["policy"] == "round-robin"


def test_a_request_counts_for_what_was_tried_when_it_came() -> None:
    desk = two_tenants()
    desk.arrive("q1", tenant="duff")
    of_tenants(desk, ["duff"])
    desk.arrive("q2", tenant="duff")
    desk.feed(ev.RolloutEnded(desk.now, "c1"))
    for request in ("q1", "q2"):
        desk.sent(request)
        desk.finish(request)
    assert [change_of(desk, request) for request in ("q1", "q2")] == [None, "c1"]


def test_a_request_that_was_refused_carries_it_too() -> None:
    desk = two_tenants()
    of_tenants(desk, ["duff"])
    desk.feed(ev.AdapterRetired(desk.now, "a"))
    desk.arrive("q1", "a", tenant="duff")
    assert (desk.row("q1")["status"], change_of(desk, "q1")) == ("rejected", "c1")


def test_of_replicas_it_counts_which_one_answered() -> None:
    desk = two_tenants(1)
    assert whole(desk, "q1") is None
    of_replicas(desk, ["r1"])
    assert whole(desk, "q2") == "c2"
    of_replicas(desk, ["r2"])
    assert whole(desk, "q3") is None
    of_replicas(desk, ["acme"])  # a tenant has this name
    assert whole(desk, "q4") is None


@pytest.mark.parametrize(("member", "change"), [("r1", None), ("r2", "c2")])
def test_of_two_attempts_the_one_that_was_answered_counts(member: str, change: str | None) -> None:
    desk = two_tenants(2, "round-robin")
    of_replicas(desk, [member])
    desk.arrive("q1")
    assert desk.sent("q1").replica == "r1"
    desk.feed(ev.AttemptFailed(desk.now, "q1", 1, "upstream_failed", None, "connect_refused"))
    assert desk.sent("q1").replica == "r2"
    desk.finish("q1")
    assert change_of(desk, "q1") == change


def test_of_two_changes_that_of_the_tenant_is_named() -> None:
    desk = two_tenants(1)
    of_replicas(desk, ["r1"])
    of_tenants(desk, ["duff"])
    assert [whole(desk, "q1", "duff"), whole(desk, "q2", "acme")] == ["c1", "c2"]


def test_it_is_known_after_a_gateway_restart_and_from_a_snapshot() -> None:
    desk = two_tenants(1)
    of_tenants(desk, ["duff"])
    desk.feed(ev.GatewayStarted(desk.now, "10", "cfg"))
    desk.feed(ev.ReplicaUp(desk.now, "r1", 7, ()))
    assert whole(desk, "q1", "duff") == "c1"
    state = desk.conductor.fold.state
    assert decode_fold(encode_fold(state)) == state
    assert (
        decode_fold(msgspec.msgpack.encode({"base": "b", "config_digest": "c", "gateway_version": "1"})).rollouts == {}
    )


# --- the journal ------------------------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """A run with rollouts whose journal is kept."""

    directory: Path
    fleet: VirtualFleet


def happenings() -> list[tuple[float, ev.Event]]:
    """Seconds after the start, and what is set or ends then."""
    ranking = [["r1", "a3"], ["r1", "a4"], ["r2", "a5"]]
    return [
        (0.3, rolled_out(0, "c1", "policy", "dynamo-lora", ["duff"], "tenant")),
        (0.6, rolled_out(0, "c2", "pins", ranking, ["r1"], "replica")),
        (0.9, rolled_out(0, "c3", "tenant.concurrency", 2, ["even"], "tenant")),
        (1.5, rolled_out(0, "c1", "policy", "dynamo-lora", None, "tenant")),
        (1.8, rolled_out(0, "c4", "policy.tick_s", 0.5, ["acme", "even"], "tenant")),
        (2.4, ev.RolloutEnded(0, "c3")),
        (2.7, ev.RolloutEnded(0, "c1")),
        (3.0, rolled_out(0, "c5", "policy", "round-robin", ["duff", "even"], "tenant")),
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    directory = tmp_path_factory.mktemp("journal")
    settings = settings_for(3, adapters(16))
    tenants = tuple(TenantSpec(name, 20, 10_000) for name in ("acme", "duff", "even"))
    fleet = virtual(msgspec.structs.replace(settings, tenants=tenants), start=T0)
    rng = random.Random(3)
    trace = [
        msgspec.structs.replace(request, tenant=rng.choice(tenants).name)
        for request in zipf_trace(500, 16, 120, seed=2, base_share=0.1)
    ]
    for after, event in happenings():
        at = T0 + round(after * SECOND)
        fleet._push(at, CALL, partial(fleet.conductor.feed, msgspec.structs.replace(event, at=at)))
    with Journal.open(directory, 80 * 1024, fleet.conductor.head) as journal:
        fleet.conductor.journal = journal
        fleet.run(trace, until=T0 + 4 * SECOND)
    assert len(segments(directory)) >= 4
    return Recorded(directory, fleet)


def test_the_run_had_them_all(recorded: Recorded) -> None:
    rows = recorded.fleet.rows
    assert recorded.fleet.conductor.fleet.state.rollouts.keys() == {"c2", "c4", "c5"}
    changes = Counter(row["change_id"] for row in rows["requests"])
    assert changes.keys() == {None, "c1", "c2", "c3", "c4", "c5"}
    assert {row["policy"] for row in rows["decisions"]} == {"bounded-affinity", "dynamo-lora", "round-robin"}


def test_another_process_with_another_hash_seed_answers_alike(recorded: Recorded) -> None:
    here = verify(recorded.directory)
    assert (here.difference, here.unanswered) == (None, 0)
    program = (
        "import sys; from pathlib import Path; from loraledger.conductor.reading import verify\n"
        "seen = verify(Path(sys.argv[1])); print(seen.steps, seen.commands, seen.difference)"
    )
    for hash_seed in ("0", "4242"):
        there = subprocess.run(
            [sys.executable, "-c", program, str(recorded.directory)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.split() == [str(here.steps), str(here.commands), "None"]


def test_each_segment_alone_gives_the_rows_that_were_written_live(recorded: Recorded) -> None:
    found: list[Row] = []
    for path in segments(recorded.directory):
        rows, fold = fold_segment(Segment(path))
        found += [row for table, row in rows if table == "requests"]
    live = recorded.fleet.rows["requests"]
    assert found == live[len(live) - len(found) :]
    assert len({row["change_id"] for row in found}) == 6
    assert encode_fold(fold.state) == encode_fold(recorded.fleet.conductor.fold.state)


def test_the_last_state_is_that_of_the_process(recorded: Recorded) -> None:
    restored = last_state(recorded.directory)
    assert restored is not None
    fleet, fold = restored
    live = recorded.fleet.conductor
    assert fleet.snapshot() == live.fleet.snapshot()
    assert fold.rollouts == live.fold.state.rollouts
    assert {tenant: arm.policy.name for tenant, arm in fleet.arms.items()} == {
        tenant: arm.policy.name for tenant, arm in live.fleet.arms.items()
    }


def test_the_change_is_in_the_compacted_record(recorded: Recorded, tmp_path: Path) -> None:
    for path in segments(recorded.directory):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    compact(tmp_path)
    with open_record(tmp_path) as reader:
        rows = reader.query("SELECT change_id, COUNT(*) AS n FROM requests WHERE status = 'ok' GROUP BY 1")
    live = Counter(row["change_id"] for row in recorded.fleet.rows["requests"] if row["status"] == "ok")
    assert {row["change_id"]: row["n"] for row in rows} == live
