"""The change desk over a real kernel and a real journal; rows and time are the test's."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loraledger.adapters import Catalog
from loraledger.conductor.conductor import Conductor
from loraledger.conductor.fold import Emitted
from loraledger.config import Settings, settings_from
from loraledger.errors import BadRequestError, ConfigError, ConflictError, InputFileError, UnavailableError
from loraledger.events import Event, FloorObserved, ReplicaUp, RolloutEnded, RolloutSet
from loraledger.gateway import assemble, changes, changes_before, changes_watch
from loraledger.gateway.changes import ChangeDesk
from loraledger.gateway.changes_before import Asked
from loraledger.gateway.changes_case import Proposal
from loraledger.gateway.changes_force import Engine
from loraledger.gateway.changes_watch import LAG
from loraledger.gateway.control import control_app
from loraledger.gateway.control_changes import change_routes
from loraledger.gateway.exposition import exposition
from loraledger.kernel.affinity import BoundedAffinity
from loraledger.kernel.rollout_state import Rollout
from loraledger.operate.blocks import Block
from loraledger.operate.change import Guardrail, State, Target
from loraledger.operate.journal import FILE, read_entries
from loraledger.operate.population import treated
from loraledger.record.parquet import write_parquet
from loraledger.record.tables import Row
from operate.changes import evidence

from .fleets import NOW, DrivenGateway

SECOND = 10**9
BLOCK = 10 * SECOND
WINDOW = 200 * SECOND
TENANTS = ("t1", "t2", "t3", "t4")
PARAM, DEFAULT = next(iter(BoundedAffinity.defaults.items()))
DOCS = Path(__file__).parents[2] / "docs/operations.md"


def replicas(*names: str, **more: Any) -> list[dict[str, Any]]:
    flags = {"slots": 4, "host_entries": 8, **more}
    return [{"name": name, "url": f"http://127.0.0.1:{8000 + n}", **flags} for n, name in enumerate(names)]


def settings(names: tuple[str, ...] = TENANTS, **sections: Any) -> Settings:
    """Two replicas with probes and a policy of ``least-loaded``, unless ``sections`` say otherwise."""
    data = {
        "base": {"names": ["base"]},
        "replicas": replicas("r1", "r2", probe={"env": "K"}),
        "tenants": [{"name": name, "adapters": ["*"]} for name in names],
        "policy": {"name": "least-loaded"},
    }
    return settings_from({**data, **sections}, Path("/"))


class Office(DrivenGateway):
    """A gateway with a desk, and nothing else. A later one on the same folder is the next process."""

    def __init__(self, record: Path, said: Settings, before: Office | None = None) -> None:
        super().__init__(assemble.fleet_settings(said, Catalog((), (), ())))
        self.settings = said
        self.record = record
        self.at = NOW if before is None else before.at
        self.desk = ChangeDesk(self)
        self.written_before_told = True
        for name in self.state.replicas:
            self.feed(ReplicaUp(self.at, name, 1, (), "0.32.0"))
        self.events.clear()

    @property
    def conductor(self) -> Conductor:
        return self._conductor

    def start(self) -> Office:
        self.desk.open(self.record)
        self.desk.resume()
        return self

    def feed(self, event: Event) -> None:
        if isinstance(event, RolloutSet | RolloutEnded) and not self._is_written(event):
            self.written_before_told = False
        super().feed(event)

    def _is_written(self, event: RolloutSet | RolloutEnded) -> bool:
        states = {entry.change.id: entry.change.state for entry in read_entries(self.record / "changes")}
        wanted: set[State]
        if isinstance(event, RolloutEnded):
            wanted = {"rolled_back", "accepted"}
        else:
            wanted = {"accepted"} if event.members is None else {"rolling_out"}
        return states.get(event.change) in wanted

    def _take(self, rows: Emitted) -> None:
        """As in DrivenGateway, which has the desk only later."""

    @property
    def rollouts(self) -> dict[str, Rollout]:
        return self.state.rollouts

    def told(self) -> list[tuple[str, str, tuple[str, ...] | None]]:
        """(what, change, members) of each word to the kernel since the last look."""
        found = [
            ("set", event.change, event.members) if isinstance(event, RolloutSet) else ("ended", event.change, None)
            for event in self.events
            if isinstance(event, RolloutSet | RolloutEnded)
        ]
        self.events.clear()
        return found

    def lived(self, seconds: int = WINDOW // SECOND, apart: float = 0.0) -> None:
        """What the record has of the time before now. Members of the next change hit more by ``apart`` than the others."""
        chance = random.Random(self.at)
        mine = treated(TENANTS, 0.5, f"c{len(self.desk.cases)}")
        rows = [
            row(
                name,
                self.at - second * SECOND - chance.randrange(1, SECOND),
                hit=chance.random() < 0.5 + apart * (name in mine),
                preemptions=int(chance.random() < 0.1),
                number=number,
            )
            for second in range(seconds)
            for name in TENANTS
            for number in range(3)
        ]
        write_parquet({"requests": rows}, self.record, f"usual-{self.at}")

    async def spend(self, seconds: int, effect: float = 0.0, harm: float = 0.0, seed: int = 1) -> list[Row]:
        """Traffic of all tenants; those that are tried on hit more by ``effect``, and are preempted more by ``harm``."""
        chance = random.Random(seed)
        rows = []
        members = {name for case in self.desk.cases.values() for name in case.members or ()}
        for _ in range(seconds):
            self.at += SECOND
            for name in TENANTS:
                for number in range(3):
                    mine = name in members
                    rows.append(
                        row(
                            name,
                            self.at - chance.randrange(SECOND),
                            hit=chance.random() < 0.5 + effect * mine,
                            preemptions=int(chance.random() < 0.1 + harm * mine),
                            number=number,
                        )
                    )
                    self.desk.observe([("requests", rows[-1]), ("decisions", {})])
            await self.desk.look()
        return rows


def row(tenant: str, ended: int, *, hit: bool, preemptions: int, number: int = 0) -> Row:
    return {
        "id": f"{tenant}-{ended}-{number}", "tenant": tenant, "replica": "r1", "adapter": "a", "status": "ok", "stream": True,
        "hit_class": "gpu" if hit else "disk", "preemptions": preemptions, "arrived_ns": ended - SECOND,
        "first_token_ns": ended - SECOND // 2, "finished_ns": ended, "generated_tokens": 10, "itl_mean_ns": 10_000_000,
    }  # fmt: skip


def proposal(**fields: Any) -> Proposal:
    plain: dict[str, Any] = {
        "who": "eve",
        "why": "more hits",
        "variable": "policy",
        "after": "strict-affinity",
        "target": Target("hit_rate", 0.02),
        "guardrails": (Guardrail("preemptions", 150.0),),
        "window_ns": WINDOW,
        "block_ns": BLOCK,
        "share": 0.5,
    }
    return Proposal(**(plain | fields))


async def replayed(office: Office, **fields: Any) -> str:
    case = await office.desk.propose(proposal(**fields))
    name = case.change.id
    await office.desk.replay(name, "eve", "played", evidence())
    return name


async def trying(office: Office, **fields: Any) -> str:
    name = await replayed(office, **fields)
    office.lived()
    await office.desk.roll_out(name, "eve", "go", None)
    return name


def state_of(office: Office, name: str) -> State:
    return office.desk.cases[name].change.state


@pytest.fixture(autouse=True)
def _read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before is read in a thread: a process takes a second to start."""

    async def here(asked: Asked) -> list[Block]:
        return await asyncio.to_thread(changes_before.read, asked)

    monkeypatch.setattr(changes_watch, "read_apart", here)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path, settings()).start()
    yield office
    assert office.written_before_told, "the kernel was told what the journal did not have"


async def next_process(office: Office, said: Settings | None = None, *, kernel: bool = True) -> Office:
    """The one before is gone without a word; its kernel's state is carried over, unless it was lost."""
    await office.desk.close()
    later = Office(office.record, said or office.settings, office)
    if kernel:
        later.state.rollouts.update(office.rollouts)
    return later.start()


# --- proposals --------------------------------------------------------------------------------------------------------


async def test_a_proposal_is_on_the_disk_before_it_is_answered_and_begins_from_what_is_in_force(office: Office) -> None:
    case = await office.desk.propose(proposal())
    (entry,) = read_entries(office.record / "changes")
    assert (entry.kind, entry.who, entry.why, entry.at_ns) == ("propose", "eve", "more hits", NOW)
    assert entry.change == case.change
    assert (case.change.id, case.change.before, case.change.state) == ("c1", "least-loaded", "proposed")
    assert (case.change.population.unit, case.change.population.salt) == ("tenant", "c1")


async def test_what_is_not_in_force_cannot_be_changed(office: Office) -> None:
    with pytest.raises(ConflictError, match=r'before is "round-robin", but policy is "least-loaded" now') as refused:
        await office.desk.propose(proposal(before="round-robin"))
    assert (refused.value.status, refused.value.code) == (409, "change_conflict")
    assert read_entries(office.record / "changes") == []


async def test_one_variable_and_one_population_at_a_time(office: Office) -> None:
    await office.desk.propose(proposal())
    with pytest.raises(ConflictError, match="by c1"):
        await office.desk.propose(proposal(after="round-robin"))
    with pytest.raises(ConflictError, match="two changes at once"):
        await office.desk.propose(proposal(variable="tenant.concurrency", after=8))
    assert (await office.desk.propose(proposal(variable="slots", after=2))).change.id == "c2"


@pytest.mark.parametrize(
    ("variable", "before", "after"),
    [
        ("policy", "bounded-affinity", "least-loaded"),
        (f"policy.{PARAM}", DEFAULT, DEFAULT * 1.5),
        ("tenant.concurrency", 64, 8),
        ("slots", 4, 8),
        ("host_entries", 8, 16),
        ("replicas", 2, 3),
    ],
)
async def test_what_is_in_force_is_what_the_settings_say(
    tmp_path: Path, variable: str, before: object, after: object
) -> None:
    office = Office(tmp_path, settings(policy={"name": "bounded-affinity"})).start()
    assert (await office.desk.propose(proposal(variable=variable, after=after))).change.before == before


async def test_what_differs_between_tenants_is_no_one_value(tmp_path: Path) -> None:
    limits = [{"name": f"t{n}", "adapters": ["*"], "limits": {"concurrency": n}} for n in (1, 2)]
    office = Office(tmp_path, settings(tenants=limits)).start()
    with pytest.raises(BadRequestError, match=r"not one value for all \(t1 1, t2 2\)"):
        await office.desk.propose(proposal(variable="tenant.concurrency", after=8))


async def test_what_is_in_force_may_be_something_else_when_the_rollout_begins(office: Office) -> None:
    name = await replayed(office)
    later = await next_process(office, settings(policy={"name": "round-robin"}))
    with pytest.raises(ConflictError, match='policy is "round-robin" now'):
        await later.desk.roll_out(name, "eve", "go", None)
    assert state_of(later, name) == "replayed"


# --- over the control plane -------------------------------------------------------------------------------------------

BODY: dict[str, Any] = {
    "who": "eve",
    "why": "hits",
    "variable": "policy",
    "after": "strict-affinity",
    "target": {"metric": "hit_rate", "least": 0.02},
    "guardrails": [{"metric": "preemptions", "worse_by": 50}],
}
WHO = {"who": "eve", "why": "as agreed"}
PLAYED = evidence(warnings=["an old trace"])


@asynccontextmanager
async def asking(office: Office) -> AsyncIterator[httpx2.AsyncClient]:
    app = control_app(office, change_routes(office.desk))
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"target": {"metric": "speed"}}, "target.metric"),
        ({"guardrails": [{"metric": "preemptions", "worse_by": "much"}]}, "guardrails[0].worse_by"),
        ({"guardrails": [{"metric": "preemptions", "worse_by": -1}]}, "guardrails"),
        ({"guardrails": [{"metric": "hit_rate"}]}, "target"),
        ({"target": {"least": 0.1}}, "target.metric"),
        ({"target": []}, "target"),
        ({"variable": "colour"}, "variable"),
        ({"variable": "policy.colour"}, "variable"),
        ({"after": "no-policy"}, "after"),
        ({"after": "least-loaded"}, "after"),
        ({"variable": "slots", "after": 0}, "after"),
        ({"variable": "slots", "after": 9}, "after"),
        ({"variable": "replicas", "after": 1}, "after"),
        ({"why": " "}, "why"),
        ({"who": ""}, "who"),
        ({"share": 1.0}, "share"),
        ({"block_ns": 10**15}, "block_ns"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_a_proposal_that_cannot_be_is_a_400_that_names_the_field(
    office: Office, fields: dict[str, Any], param: str
) -> None:
    async with asking(office) as ask:
        answer = await ask.post("/api/changes", json=BODY | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        missing = await ask.post("/api/changes", json={key: value for key, value in BODY.items() if key != "after"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "after")
    assert office.desk.cases == {}


async def test_the_steps_of_a_change_over_http(office: Office) -> None:
    who = WHO
    async with asking(office) as ask:
        made = await ask.post("/api/changes", json=BODY)
        assert (made.status_code, made.json()["change"]["id"]) == (201, "c1")
        early = await ask.post("/api/changes/c1/rollout", json=who)
        assert (early.status_code, early.json()["error"]["code"]) == (409, "change_conflict")
        stale = await ask.post("/api/changes/c1/replay", json=who | {"evidence": evidence(stale=True)})
        assert (stale.status_code, stale.json()["error"]["code"]) == (409, "profile_stale")
        played = await ask.post("/api/changes/c1/replay", json=who | {"evidence": PLAYED})
        assert (played.status_code, played.json()["change"]["state"]) == (200, "replayed")
        begun = (await ask.post("/api/changes/c1/rollout", json=who | {"share": 0.25})).json()
        assert begun["change"]["state"] == "rolling_out"
        assert begun["members"] == list(treated(TENANTS, 0.25, "c1"))
        assert begun["left_ns"] == 3600 * SECOND
        assert begun["verdict"] is None
        back = (await ask.post("/api/changes/c1/rollback", json=who)).json()
        assert (back["change"]["state"], back["change"]["reason"]) == ("rolled_back", "as agreed")
        assert [entry["kind"] for entry in back["entries"]] == ["propose", "replay", "roll_out", "roll_back"]
        assert back["entries"][1]["evidence"] == PLAYED
        assert back == (await ask.get("/api/changes/c1")).json()
        await ask.post("/api/changes", json=BODY)
        assert (await ask.post("/api/changes/c2/withdraw", json=who)).json()["change"]["state"] == "withdrawn"
        assert [entry["id"] for entry in (await ask.get("/api/changes")).json()["changes"]] == ["c1", "c2"]
        assert (await ask.get("/api/changes/c3")).json()["error"]["code"] == "change_not_found"
        assert (await ask.delete("/api/changes")).status_code == 405
    assert office.told() == [("set", "c1", treated(TENANTS, 0.25, "c1")), ("ended", "c1", None)]
    assert office.rollouts == {}


@pytest.mark.parametrize(
    ("asked", "without"),
    [
        *(({key: value for key, value in PLAYED.items() if key != name}, f"evidence.{name}") for name in evidence()),
        ({}, "evidence.trace"),
        (PLAYED | {"guardrails": [{"metric": "hit_rate"}]}, "evidence.guardrails[0].role"),
        (PLAYED | {"figures": {"before": {}}}, "evidence.figures.after"),
        (PLAYED | {"profile": {}}, "evidence.profile.name"),
        (PLAYED | {"requests": "many"}, "evidence.requests"),
        (PLAYED | {"ok": None}, "evidence.ok"),
        ([], "evidence"),
    ],
)
async def test_evidence_that_a_replay_would_not_attach_is_a_400_that_names_the_field(
    office: Office, asked: Any, without: str
) -> None:
    async with asking(office) as ask:
        await ask.post("/api/changes", json=BODY)
        answer = await ask.post("/api/changes/c1/replay", json=WHO | {"evidence": asked})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, without), answer.text
    assert state_of(office, "c1") == "proposed"


async def test_a_replay_that_speaks_against_it_asks_for_a_reason(office: Office) -> None:
    against = evidence(ok=False, reasons=["guardrail refused is worse by more than 0.01"])
    async with asking(office) as ask:
        await ask.post("/api/changes", json=BODY)
        await ask.post("/api/changes/c1/replay", json=WHO | {"evidence": evidence()})
        await ask.post("/api/changes/c1/replay", json=WHO | {"evidence": against})  # the last one is what counts
        for more in ({}, {"although": False}):
            refused = await ask.post("/api/changes/c1/rollout", json=WHO | more)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "replay_against"), refused.text
        said = refused.json()["error"]["message"]
        assert "the replay of c1 speaks against it: guardrail refused is worse by more than 0.01" in said
        assert '"although": true' in said
        assert (office.told(), state_of(office, "c1")) == ([], "replayed")
        empty = await ask.post("/api/changes/c1/rollout", json={"who": "eve", "why": " ", "although": True})
        assert (empty.status_code, empty.json()["error"]["param"]) == (400, "why")
        later = await next_process(office)
    async with asking(later) as ask:
        assert (await ask.post("/api/changes/c1/rollout", json=WHO)).status_code == 409
        begun = await ask.post("/api/changes/c1/rollout", json=WHO | {"although": True})
        assert (begun.status_code, begun.json()["change"]["state"]) == (200, "rolling_out"), begun.text
        assert begun.json()["entries"][-1]["why"] == "as agreed"


async def test_an_old_replay_that_does_not_say_whether_it_is_for_it_asks_for_a_reason(office: Office) -> None:
    name = await replayed(office)
    await office.desk.replay(name, "eve", "played", {"stale": False})
    with pytest.raises(ConflictError, match="the replay of c1 does not say that it is for it"):
        await office.desk.roll_out(name, "eve", "go", None)
    assert (await office.desk.roll_out(name, "eve", "go", None, although=True)).change.state == "rolling_out"


@pytest.mark.parametrize(
    ("fields", "few"),
    [
        ({}, "tenants"),
        ({"variable": "tenant.concurrency", "after": 8}, "tenants"),
        ({"variable": "pins", "after": [["r1", "a"]]}, "replicas"),
        ({"variable": "slots", "after": 8}, "replicas"),
        ({"variable": "host_entries", "after": 16}, "replicas"),
    ],
)
async def test_where_nobody_would_be_left_to_compare_with_nothing_is_proposed(
    tmp_path: Path, fields: dict[str, Any], few: str
) -> None:
    one = settings(("t1",)) if few == "tenants" else settings(replicas=replicas("r1", probe={"env": "K"}))
    office = Office(tmp_path, one).start()
    with pytest.raises(ConflictError, match=f"fewer than two {few}: nobody would be left to compare with"):
        await office.desk.propose(proposal(**fields))
    assert read_entries(office.record / "changes") == []


async def test_another_replica_is_compared_with_the_one_that_there_is(tmp_path: Path) -> None:
    office = Office(tmp_path, settings(replicas=replicas("r1", probe={"env": "K"}))).start()
    assert (await office.desk.propose(proposal(variable="replicas", after=2))).change.state == "proposed"


async def test_the_others_may_be_gone_when_the_rollout_begins(office: Office) -> None:
    name = await replayed(office)
    later = await next_process(office, settings(("t1",)))
    with pytest.raises(ConflictError, match="fewer than two tenants"):
        await later.desk.roll_out(name, "eve", "go", None)
    assert state_of(later, name) == "replayed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guardrails": (Guardrail("refused", 0.01), Guardrail("preemptions", 10.0))}, "guardrails"),
        ({"target": Target("preemptions", 1.0), "guardrails": ()}, "target"),
    ],
)
async def test_preemptions_that_nobody_would_tell_of_are_not_measured_by(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    half = replicas("r1", probe={"env": "K"}) + replicas("r0", "r2")[1:]
    office = Office(tmp_path, settings(replicas=half)).start()
    with pytest.raises(BadRequestError, match=r"preemptions .* probe.* none in r2: .*docs/probe\.md") as refused:
        await office.desk.propose(proposal(**fields))
    assert refused.value.param == param
    assert "r1" not in refused.value.message
    assert (await office.desk.propose(proposal(guardrails=(Guardrail("refused", 0.01),)))).change.id == "c1"


async def test_changes_are_counted_by_state_and_the_series_is_documented(office: Office) -> None:
    await trying(office)
    text = exposition(office.desk.series()).decode()
    assert 'loraledger_changes{state="rolling_out"} 1' in text
    assert 'loraledger_changes{state="accepted"} 0' in text
    assert "`loraledger_changes`" in DOCS.read_text(encoding="utf-8")


# --- watching ---------------------------------------------------------------------------------------------------------


async def test_better_and_harmless_is_accepted_for_everybody(office: Office) -> None:
    name = await trying(office)
    await office.spend(190, effect=0.4)
    case = office.desk.cases[name]
    assert case.change.state == "accepted", case.change.reason
    assert case.change.ended_ns is not None
    assert case.change.ended_ns < NOW + WINDOW
    assert office.told() == [("set", name, treated(TENANTS, 0.5, "c1")), ("set", name, None)]
    assert (office.rollouts[name].value, office.rollouts[name].members) == ('"strict-affinity"', None)
    last = read_entries(office.record / "changes")[-1]
    assert (last.kind, last.who) == ("accept", "gateway")
    view = office.desk.view(name)
    assert view["held"] is True
    assert view["verdict"] == last.evidence["verdict"]
    target = last.evidence["verdict"]["readings"][0]  # type: ignore[index]
    assert (target["metric"], target["called"]) == ("hit_rate", "above")
    assert 0.02 < target["bounds"]["low"] < 0.4 < target["bounds"]["high"]
    assert not office.desk.watching


async def test_better_but_over_a_guardrail_is_taken_back_before_its_time_is_over(office: Office) -> None:
    name = await trying(office)
    await office.spend(190, effect=0.4, harm=0.3)
    change = office.desk.cases[name].change
    assert change.state == "rolled_back"
    assert change.ended_ns is not None
    assert change.ended_ns < NOW + WINDOW
    assert change.reason.startswith("guardrail preemptions is worse by")
    assert office.told()[-1] == ("ended", name, None)
    assert office.rollouts == {}


async def test_a_part_that_was_better_before_is_not_made_better_by_the_change(office: Office) -> None:
    name = await replayed(office)
    office.lived(apart=0.4)
    await office.desk.roll_out(name, "eve", "go", None)
    await office.spend((WINDOW + LAG) // SECOND, effect=0.4)
    change = office.desk.cases[name].change
    assert change.state == "rolled_back"
    assert change.reason.startswith("by the stated time target hit_rate is not")


async def test_a_part_of_which_nothing_is_known_from_before_is_never_called_better(office: Office) -> None:
    name = await replayed(office)
    await office.desk.roll_out(name, "eve", "go", None)
    await office.spend(190, effect=0.4, harm=0.3)
    assert state_of(office, name) == "rolling_out"
    await office.spend(20, effect=0.4)
    change = office.desk.cases[name].change
    assert (change.state, change.reason) == ("rolled_back", "by the stated time target hit_rate could not be measured")


async def test_the_time_before_begins_when_another_change_ended(office: Office) -> None:
    first = await accepted(office)
    ended = office.desk.cases[first].change.ended_ns
    assert ended is not None
    name = await replayed(office, after="round-robin")
    await office.desk.roll_out(name, "eve", "go", None)
    (found,) = office.desk._watched.values()
    assert found._usual == (ended, office.at)


async def test_no_effect_is_taken_back_at_the_stated_time(office: Office) -> None:
    name = await trying(office)
    await office.spend((WINDOW + LAG) // SECOND - 1)
    assert state_of(office, name) == "rolling_out"
    view = office.desk.view(name)
    assert view["verdict"].blocks == 19  # type: ignore[attr-defined]
    assert view["left_ns"] == 0
    await office.spend(1)
    change = office.desk.cases[name].change
    assert (change.state, change.ended_ns) == ("rolled_back", NOW + WINDOW + LAG)
    assert change.reason.startswith("by the stated time target hit_rate is not")


async def test_a_window_without_traffic_is_judged_too(office: Office) -> None:
    name = await trying(office)
    office.at += WINDOW + LAG
    await office.desk.look()
    assert state_of(office, name) == "rolled_back"
    assert office.desk.cases[name].change.reason == "by the stated time target hit_rate could not be measured"


async def test_rows_that_come_late_count_in_the_block_in_which_they_ended(office: Office) -> None:
    name = await trying(office)
    office.at += BLOCK
    for tenant in TENANTS:
        for number in range(5):
            late = row(tenant, office.at - SECOND, hit=True, preemptions=0, number=number)
            office.desk.observe(
                [("requests", row(tenant, office.at + 2 * SECOND, hit=False, preemptions=0)), ("requests", late)]
            )
    office.at += LAG
    await office.desk.look()
    verdict = office.desk.view(name)["verdict"]
    assert (verdict.blocks, verdict.readings[0].treated) == (1, 1.0)  # type: ignore[attr-defined]


async def test_watch_wakes_up_for_a_rollout_and_decides_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_watch, "LAG", 0)
    office = Office(tmp_path, settings()).start()
    watching = asyncio.create_task(office.desk.watch())
    await asyncio.sleep(0)
    name = await trying(office, window_ns=SECOND // 10, block_ns=SECOND // 10)
    office.at += SECOND // 10
    async with asyncio.timeout(20):
        while state_of(office, name) == "rolling_out":
            await asyncio.sleep(0.01)
    watching.cancel()
    assert state_of(office, name) == "rolled_back"


@contextmanager
def full_disk() -> Iterator[None]:
    """Nothing can be written down for good."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", full)
        yield


async def test_what_harms_ends_though_the_disk_refuses_and_the_entry_is_tried_again(office: Office) -> None:
    name = await trying(office)
    office.told()
    with full_disk():
        with pytest.raises(UnavailableError, match=r"c1 .* as before.*No space left.*tried again"):
            await office.spend(190, effect=0.4, harm=0.3)
        ended = office.at
        assert (state_of(office, name), office.rollouts) == ("rolling_out", {})
        assert office.told() == [("ended", name, None)]
        await office.spend(5)  # and is not judged, and nobody is told of it again and again
        assert not office.desk.watching
        view = office.desk.view(name)
        assert (view["members"], view["left_ns"]) == ((), None)
        assert "guardrail preemptions is worse by" in str(view["note"])
        assert "the journal could not be written yet" in str(view["note"])
        assert view["verdict"].action == "roll_back"  # type: ignore[attr-defined]
    office.written_before_told = True  # that was it
    await office.spend(1)
    last = read_entries(office.record / "changes")[-1]
    assert (state_of(office, name), last.kind, last.who) == ("rolled_back", "roll_back", "gateway")
    assert last.why.startswith("guardrail preemptions is worse by")
    assert last.evidence["verdict"]["action"] == "roll_back"  # type: ignore[index]
    assert (last.change.ended_ns, last.at_ns) == (ended, office.at)
    view = office.desk.view(name)
    assert (view["note"], view["members"]) == (None, treated(TENANTS, 0.5, "c1"))


async def test_who_takes_it_back_by_hand_has_it_written_once_the_disk_takes_it(office: Office) -> None:
    name = await trying(office)
    await office.spend(30, effect=0.4)
    office.told()
    async with asking(office) as ask:
        with full_disk():
            refused = await ask.post(f"/api/changes/{name}/rollback", json={"who": "ada", "why": "enough"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "change_journal_unwritable")
            said = refused.json()["error"]["message"]
            assert said.startswith("c1 is ended, and the fleet is as before")
            assert "tried again" in said
            assert office.rollouts == {}
            again = await ask.post(f"/api/changes/{name}/rollback", json={"who": "bob", "why": "me too"})
            assert again.status_code == 503
            shown = (await ask.get(f"/api/changes/{name}")).json()
            assert (shown["change"]["state"], shown["members"]) == ("rolling_out", [])
            assert shown["note"].startswith("taken back by ada (enough): ")
            blocked = await ask.post("/api/changes", json=BODY)
            assert blocked.status_code == 409
            await office.spend(160, effect=0.4)  # would be accepted, if it were judged
            assert state_of(office, name) == "rolling_out"
        office.written_before_told = True
        await office.desk.look()
        back = (await ask.get(f"/api/changes/{name}")).json()
    assert (back["change"]["state"], back["change"]["reason"]) == ("rolled_back", "enough")
    assert [(entry["kind"], entry["who"]) for entry in back["entries"]][2:] == [
        ("roll_out", "eve"),
        ("roll_back", "ada"),
    ]
    assert office.told() == [("ended", name, None)]
    later = await next_process(office)
    assert (state_of(later, name), later.rollouts) == ("rolled_back", {})


async def test_asking_again_writes_it_too(office: Office) -> None:
    name = await trying(office)
    with full_disk(), pytest.raises(UnavailableError):
        await office.desk.roll_back(name, "ada", "enough")
    office.written_before_told = True
    case = await office.desk.roll_back(name, "bob", "me too")
    assert (case.change.state, case.change.reason) == ("rolled_back", "enough")
    with pytest.raises(ConflictError, match="is rolled_back"):
        await office.desk.roll_back(name, "bob", "me too")


async def test_watch_tries_again_each_second_without_any_news(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(changes, "AGAIN_S", 0.01)
    watching = asyncio.create_task(office.desk.watch())
    await asyncio.sleep(0)
    name = await trying(office)
    with full_disk():
        with pytest.raises(UnavailableError):
            await office.desk.roll_back(name, "ada", "enough")
        await asyncio.sleep(0.2)
        assert not watching.done()
    office.written_before_told = True
    async with asyncio.timeout(20):
        while state_of(office, name) == "rolling_out":
            await asyncio.sleep(0.01)
    watching.cancel()
    assert caplog.text.count("No space left") <= 1


async def test_engines_that_come_back_begin_nothing_that_was_taken_back(tmp_path: Path) -> None:
    office = Office(tmp_path, settings(replicas=replicas("r1", "r2"))).start()
    name = await trying(office, variable="slots", after=8, guardrails=())
    with full_disk(), pytest.raises(UnavailableError, match=r"c1 is ended; "):
        await office.desk.roll_back(name, "ada", "enough")
    (member,) = office.desk.cases[name].members or ()
    office.feed(ReplicaUp(office.at, member, 2, (), "0.32.0"))
    office.settings = settings(replicas=replicas("r1", "r2", slots=8))
    await office.desk.look()
    assert state_of(office, name) == "rolled_back"


async def test_an_acceptance_that_the_disk_refuses_is_none_yet(office: Office) -> None:
    name = await trying(office)
    office.told()
    with full_disk(), pytest.raises(UnavailableError, match="No space left"):
        await office.spend(190, effect=0.4)
    assert (state_of(office, name), office.told(), office.desk.watching) == ("rolling_out", [], True)
    await office.spend(20, effect=0.4)
    assert state_of(office, name) == "accepted"


# --- restarts ---------------------------------------------------------------------------------------------------------


async def test_a_trial_goes_on_after_a_restart_where_it_stood(tmp_path: Path) -> None:
    whole, broken = Office(tmp_path / "whole", settings()).start(), Office(tmp_path / "broken", settings()).start()
    for office in (whole, broken):
        name = await trying(office)
    rows = await broken.spend(63, effect=0.1, seed=1)
    write_parquet({"requests": rows}, broken.record, "journal-00000001")
    broken = await next_process(broken)
    assert broken.told() == [("set", name, treated(TENANTS, 0.5, "c1"))]
    broken.desk.observe([("requests", row) for row in rows[-9:]])  # that waited for a probe: the record has them too
    await whole.spend(63, effect=0.1, seed=1)
    for office in (whole, broken):
        await office.spend(40, effect=0.1, seed=2)
        assert office.desk.view(name)["verdict"].blocks == 9  # type: ignore[attr-defined]
    assert broken.desk.view(name)["verdict"] == whole.desk.view(name)["verdict"]
    assert broken.desk.cases[name].change.began_ns == NOW


async def test_a_time_before_that_cannot_be_read_is_tried_again_and_then_never_called(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    async def damaged(asked: Asked) -> list[Block]:
        nonlocal tries
        tries += 1
        raise InputFileError("a.parquet is damaged")

    monkeypatch.setattr(changes_watch, "read_apart", damaged)
    name = await trying(office)
    await office.spend(190, effect=0.4)
    assert (state_of(office, name), tries) == ("rolling_out", changes_watch.TRIES)
    assert "a.parquet is damaged" in caplog.text


async def test_a_record_that_cannot_be_read_costs_the_blocks_before_the_restart_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(changes_watch, "TRIES", 1)
    office = Office(tmp_path, settings()).start()
    name = await trying(office)
    await office.spend(15)

    def damaged(*_: object, **__: object) -> None:
        raise InputFileError("a.parquet is damaged")

    monkeypatch.setattr(changes_watch, "open_record", damaged)
    later = await next_process(office)
    await later.spend(30)
    assert later.desk.view(name)["verdict"].blocks == 2  # type: ignore[attr-defined]
    assert "its blocks before the restart are left out" in caplog.text


async def test_what_the_journal_has_and_the_kernel_not_is_told_again(office: Office) -> None:
    name = await trying(office)
    members = treated(TENANTS, 0.5, "c1")
    later = await next_process(office, kernel=False)
    assert (later.told(), later.rollouts[name].members) == ([("set", name, members)], members)


async def test_members_are_those_of_the_rollout_and_not_of_later_settings(office: Office) -> None:
    name = await trying(office)
    later = await next_process(office, settings((*TENANTS, *(f"new{n}" for n in range(8)))))
    assert later.told() == [("set", name, treated(TENANTS, 0.5, "c1"))]


async def test_what_the_kernel_has_and_the_journal_ended_is_ended(office: Office) -> None:
    name = await trying(office)
    kept = dict(office.rollouts)
    await office.desk.roll_back(name, "eve", "enough")
    kept["c9"] = kept[name]
    await office.desk.close()
    later = Office(office.record, settings(), office)
    later.state.rollouts.update(kept)
    later.start()
    assert sorted(later.told()) == [("ended", name, None), ("ended", "c9", None)]
    assert later.rollouts == {}


async def accepted(office: Office, **fields: Any) -> str:
    name = await trying(office, **fields)
    await office.spend(190, effect=0.4)
    assert state_of(office, name) == "accepted"
    office.told()
    return name


async def test_what_was_accepted_is_held_as_long_as_the_settings_say_what_was_before(office: Office) -> None:
    name = await accepted(office)
    later = await next_process(office, kernel=False)
    assert later.told() == [("set", name, None)]
    with pytest.raises(ConflictError, match='policy is "strict-affinity" now'):
        await later.desk.propose(proposal(before="least-loaded", after="round-robin"))


async def test_settings_that_caught_up_need_nobody_to_hold_it_and_are_believed_from_then_on(office: Office) -> None:
    name = await accepted(office)
    later = await next_process(office, settings(policy={"name": "strict-affinity"}))
    assert (later.told(), later.rollouts) == ([("ended", name, None)], {})
    assert later.desk.view(name)["note"] == 'the settings say "strict-affinity" too'
    back = await next_process(later)
    back = await next_process(back, settings())
    assert (back.told(), back.desk.view(name)["held"]) == ([], False)


async def test_settings_that_say_something_else_count_and_the_change_says_so(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    name = await accepted(office)
    later = await next_process(office, settings(policy={"name": "round-robin"}))
    assert (later.told(), later.rollouts) == ([("ended", name, None)], {})
    note = 'the settings say "round-robin", not "strict-affinity": they count'
    assert later.desk.view(name)["note"] == note
    assert note in caplog.text


async def test_of_two_that_followed_each_other_the_last_one_is_held(office: Office) -> None:
    first = await accepted(office)
    office.at += WINDOW
    second = await accepted(office, after="round-robin")
    assert list(office.rollouts) == [second]
    assert office.desk.cases[second].change.before == "strict-affinity"
    later = await next_process(office, kernel=False)
    assert later.told() == [("set", second, None)]
    half = await next_process(later, settings(policy={"name": "strict-affinity"}), kernel=False)
    assert half.told() == [("set", second, None)]
    assert half.desk.view(first)["note"] == 'the settings say "strict-affinity" too'


async def test_a_trial_whose_rest_has_something_else_now_is_taken_back_at_the_start(office: Office) -> None:
    name = await trying(office)
    later = await next_process(office, settings(policy={"name": "round-robin"}))
    assert (later.told(), later.rollouts) == ([("ended", name, None)], {})
    assert later.desk.cases[name].change.state == "rolled_back"
    assert 'the settings say "round-robin" for policy now' in later.desk.cases[name].change.reason


async def test_a_start_that_cannot_write_down_what_it_takes_back_tries_again(office: Office) -> None:
    name = await trying(office)
    with full_disk():
        later = await next_process(office, settings(policy={"name": "round-robin"}))
        assert (later.told(), later.rollouts) == ([("ended", name, None)], {})
        await later.desk.look()
        assert 'taken back by gateway (the settings say "round-robin"' in str(later.desk.view(name)["note"])
    await later.desk.look()
    assert read_entries(later.record / "changes")[-1].change.reason.startswith('the settings say "round-robin"')
    assert (state_of(later, name), later.told()) == ("rolled_back", [])


async def test_a_trial_without_a_rest_is_taken_back_at_the_start(office: Office) -> None:
    name = await trying(office)
    later = await next_process(office, settings(treated(TENANTS, 0.5, "c1")))
    assert (later.rollouts, state_of(later, name)) == ({}, "rolled_back")


async def test_a_damaged_journal_stops_the_start(office: Office) -> None:
    await trying(office)
    await office.desk.close()
    path = office.record / "changes" / FILE
    path.write_bytes(path.read_bytes().replace(b"eve", b"eva"))
    with pytest.raises(InputFileError, match="damaged"):
        Office(office.record, settings(), office).start()


async def test_a_record_that_cannot_be_written_is_the_operators_to_mend(tmp_path: Path) -> None:
    (tmp_path / "changes").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be used"):
        Office(tmp_path, settings()).start()


# --- what engines read when they start --------------------------------------------------------------------------------


def floor(office: Office, name: str, **fields: int) -> None:
    office.feed(FloorObserved(office.at, name, **fields))


async def test_flags_are_given_and_the_trial_begins_when_the_probe_shows_them(tmp_path: Path) -> None:
    probed = settings(replicas=replicas("r1", "r2", probe={"env": "K"}))
    office = Office(tmp_path, probed).start()
    for replica_name in ("r1", "r2"):
        floor(office, replica_name, slots=8)  # long ago
    office.at += SECOND
    name = await trying(office, variable="slots", after=8)
    (member,) = office.desk.cases[name].members or ()
    other = "r2" if member == "r1" else "r1"
    view = office.desk.view(name)
    assert view["restart"] == [{"replica": member, "flags": ["--max-loras", "8", "--max-cpu-loras", "8"]}]
    await office.desk.look()
    assert state_of(office, name) == "waiting_restart"
    office.at += SECOND
    office.feed(ReplicaUp(office.at, member, office.at, (), "0.32.0"))
    await office.desk.look()
    assert office.desk.view(name)["engines"] == {member: Engine(restarted=True, shows=None)}
    office.at += SECOND
    floor(office, member, slots=6)
    await office.desk.look()
    engines = office.desk.view(name)["engines"]
    assert engines == {member: Engine(restarted=True, shows=6)}
    assert state_of(office, name) == "waiting_restart"
    later = await next_process(office)  # the wait outlives the gateway
    later.feed(ReplicaUp(later.at, member, later.at, (), "0.32.0"))
    later.at += SECOND
    floor(later, member, slots=8)
    await later.desk.look()
    case = later.desk.cases[name]
    assert (case.change.state, case.members, case.change.began_ns) == ("rolling_out", (member,), later.at)
    assert later.told() == []
    await later.desk.roll_back(name, "eve", "enough")
    back = [{"replica": member, "flags": ["--max-loras", "4", "--max-cpu-loras", "8"]}]
    assert later.desk.view(name)["restart"] == back
    assert other not in str(back)


async def test_without_a_probe_the_settings_tell_once_the_engine_is_another_process(tmp_path: Path) -> None:
    office = Office(tmp_path, settings(replicas=replicas("r1", "r2"))).start()
    name = await trying(office, variable="host_entries", after=16, guardrails=())
    (member,) = office.desk.cases[name].members or ()
    changed = [entry | ({"host_entries": 16} if entry["name"] == member else {}) for entry in replicas("r1", "r2")]
    later = await next_process(office, settings(replicas=changed))
    await later.desk.look()
    assert state_of(later, name) == "waiting_restart"
    later.feed(ReplicaUp(later.at, member, 2, (), "0.32.0"))
    await later.desk.look()
    assert state_of(later, name) == "rolling_out"


async def test_more_replicas_are_tried_once_the_settings_have_them(tmp_path: Path) -> None:
    office = Office(tmp_path, settings()).start()
    name = await trying(office, variable="replicas", after=3)
    assert office.desk.view(name)["restart"] is None
    later = await next_process(office, settings(replicas=replicas("r1", "r2", "r3")))
    await later.desk.look()
    case = later.desk.cases[name]
    assert (case.change.state, case.members) == ("rolling_out", ("r3",))
    again = await next_process(later)
    assert again.desk.watching
