"""Changes while the disk refuses, and what is left when it does not any more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraledger.errors import UnavailableError
from loraledger.events import ReplicaUp
from loraledger.gateway import changes_before, changes_watch
from loraledger.gateway.changes_before import Asked
from loraledger.operate.blocks import Block
from loraledger.operate.change import Guardrail, Target
from loraledger.operate.journal import FILE, read_entries
from operate.changes import evidence

from .test_changes import (
    SECOND,
    WHO,
    Office,
    asking,
    floor,
    full_disk,
    next_process,
    replayed,
    settings,
    state_of,
    trying,
)


@pytest.fixture(autouse=True)
def _read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(asked: Asked) -> list[Block]:
        return changes_before.read(asked)

    monkeypatch.setattr(changes_watch, "read_apart", here)


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path, settings()).start()


async def test_harm_ends_although_another_change_cannot_begin(office: Office) -> None:
    harmful = await trying(office, guardrails=(Guardrail("hit_rate", 0.05),), target=Target("ttft_p99", 0.01))
    waiting = await replayed(office, variable="slots", after=8, guardrails=())
    await office.desk.roll_out(waiting, "eve", "go", None)
    (member,) = office.desk.cases[waiting].members or ()
    office.at += SECOND
    office.feed(ReplicaUp(office.at, member, office.at, (), "0.32.0"))
    office.at += SECOND
    floor(office, member, slots=8)
    refused = 0
    with full_disk():
        for seed in range(100):
            try:
                await office.spend(1, effect=-0.45, seed=seed)
            except UnavailableError:
                refused += 1
    assert refused > 90, "the change that waits is tried again at each look"
    assert office.rollouts == {}
    assert office.desk.cases[harmful].back is not None
    office.written_before_told = True
    await office.desk.look()
    assert (state_of(office, harmful), state_of(office, waiting)) == ("rolled_back", "rolling_out")


async def test_an_orderly_stop_writes_what_was_taken_back(office: Office) -> None:
    name = await trying(office)
    with full_disk(), pytest.raises(UnavailableError):
        await office.desk.roll_back(name, "ada", "it harms")
    later = await next_process(office)
    assert (state_of(later, name), later.rollouts) == ("rolled_back", {})
    assert [(entry.kind, entry.who) for entry in read_entries(office.record / "changes")][-1] == ("roll_back", "ada")


async def test_what_a_client_attaches_does_not_settle_what_is_accepted(office: Office) -> None:
    name = await replayed(office)
    async with asking(office) as ask:
        body = {**WHO, "evidence": {**evidence(), "settled": "yes"}}
        assert (await ask.post(f"/api/changes/{name}/replay", json=body)).status_code == 200
        office.lived()
        assert (await ask.post(f"/api/changes/{name}/rollout", json=WHO)).status_code == 200
    await office.spend(210, effect=0.4)
    assert state_of(office, name) == "accepted"
    later = await next_process(office)
    assert later.desk.view(name)["held"] is True
    assert set(later.rollouts) == {name}


async def test_a_start_goes_on_although_it_cannot_write_what_the_settings_ended(office: Office) -> None:
    name = await trying(office)
    await office.spend(210, effect=0.4)
    assert state_of(office, name) == "accepted"
    said = settings(policy={"name": "strict-affinity"})
    with full_disk():
        later = await next_process(office, said)
    assert later.rollouts == {}
    again = await next_process(later, said)
    assert again.rollouts == {}
    assert "settled" in read_entries(office.record / "changes")[-1].evidence


async def test_a_line_that_the_disk_would_not_give_back_is_cut_off_before_the_next(office: Office) -> None:
    name = await trying(office)

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    path = office.record / "changes" / FILE
    before = path.stat().st_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        patch.setattr(os, "ftruncate", broken)
        with pytest.raises(UnavailableError):
            await office.desk.roll_back(name, "ada", "it harms")
    assert path.stat().st_size > before
    await office.desk.look()
    later = await next_process(office)
    assert state_of(later, name) == "rolled_back"
    assert [entry.n for entry in read_entries(office.record / "changes")] == [1, 2, 3, 4]
