"""Offers compared on small replays: by memory after the floor, by policy, at their worst, and again without playing again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraledger.errors import InputFileError
from loraledger.plan import runs as runs_module
from loraledger.plan.canary import read_canary, scenario
from loraledger.plan.candidates import candidates
from loraledger.plan.compare import COST, WAIT, default_ladder, micro, steps_of
from loraledger.plan.doubt import at_worst, is_estimated
from loraledger.plan.recommend import order_holds, reasons, uncertainty
from loraledger.plan.runs import Wanted
from loraledger.plan.trials import Objective, Trial, measured
from loraledger.replay.traces.trace import Request
from loraledger.units import NS_PER_S

from .small import asked, canary, compared, offer, playing, setup, twins, written

GiB = 2**30


def test_same_headline_and_price_are_ranked_by_what_the_floors_leave(tmp_path: Path) -> None:
    halves = offer("a-two-halves", "l40s", count=2, memory_bytes=24 * GiB)
    whole = offer("b-one-whole", "l40s", memory_bytes=48 * GiB)
    found, judged = compared(tmp_path / "out", canary(tmp_path), [halves, whole])
    assert halves.headline_bytes == whole.headline_bytes
    assert [one.offer.name for one in judged] == ["b-one-whole", "a-two-halves"]
    assert judged[0].usable_bytes > judged[1].usable_bytes > 0
    assert all(cell.trial.meets and cell.trial.units == 1 for cell in found.cells)
    assert [cell.offer for cell in found.cells] == ["b-one-whole"] * 2 + ["a-two-halves"] * 2
    assert found.recommended is not None
    assert found.recommended.usable_bytes == judged[0].usable_bytes
    said = list(reasons(found, {one.offer.name: one for one in judged}, asked()))
    assert any("costs the same and leaves" in line for line in said)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(("bounded-affinity", "least-loaded", "round-robin")), st.integers(0, 3))
def test_policies_that_have_nothing_to_choose_do_not_reorder_hardware(
    tmp_path_factory: pytest.TempPathFactory, policies: list[str], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("one")
    offers = [offer("slow", "a10g", price_per_hour=0.9), offer("quick", "h100", price_per_hour=1.1)]
    found, _ = compared(
        folder / "out",
        canary(folder, requests=30, seed=seed),
        offers,
        policies=tuple(policies),
        replicas_max=1,
        ladder=(4,),
    )
    orders = {policy: [cell.offer for cell in found.cells if cell.policy == policy] for policy in policies}
    assert len({tuple(order) for order in orders.values()}) == 1
    figures = {(cell.offer, msgspec.json.encode(cell.trial)) for cell in found.cells}
    assert len(figures) == 2
    for grid in found.grids:
        assert grid.policy_effects is None or set(grid.policy_effects) == {0.0}
    assert found.cells[0].policy == policies[0]


def test_an_offer_of_more_replicas_than_are_allowed_is_not_tried(tmp_path: Path) -> None:
    offers = [offer("two", "l40s", count=2), offer("one", "l40s")]
    found, judged = compared(tmp_path / "out", canary(tmp_path, requests=20), offers, replicas_max=1, ladder=(4,))
    assert [one.replicas for one in judged] == [2, 1]
    assert {cell.offer for cell in found.cells} == {"one"}
    with pytest.raises(InputFileError, match="of more replicas than 1: raise --replicas-max"):
        compared(tmp_path / "other", canary(tmp_path, requests=20), offers[:1], replicas_max=1)


def test_what_was_played_is_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = canary(tmp_path)
    offers = [offer("l40s", "l40s")]
    first, _ = compared(tmp_path / "out", trace, offers)
    kept = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len([name for name in kept if name.endswith(".json")]) > 3
    assert not any(path.is_dir() for path in (tmp_path / "out").iterdir())

    def never(*_: object) -> None:
        raise AssertionError("a run is played again")

    monkeypatch.setattr(runs_module, "sweep", never)
    assert compared(tmp_path / "out", trace, offers)[0] == first
    with pytest.raises(AssertionError, match="played again"):
        compared(tmp_path / "out", trace, offers, objective=Objective(ttft_ns=2 * NS_PER_S))


def test_a_comparison_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = canary(tmp_path)
    offers = [offer("l40s", "l40s"), offer("h100", "h100", price_per_hour=3.0)]
    whole, _ = compared(tmp_path / "whole", trace, offers)
    real, left = measured, 3

    def stopping(*words: object, **more: object) -> Trial:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(*words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(runs_module, "measured", stopping)
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path / "out", trace, offers)
    monkeypatch.setattr(runs_module, "measured", real)
    assert len(list((tmp_path / "out").glob("[0-9a-f]*.json"))) == 3
    assert compared(tmp_path / "out", trace, offers)[0] == whole


def test_figures_that_are_none_are_said_and_not_used(tmp_path: Path) -> None:
    trace = canary(tmp_path, requests=30)
    compared(tmp_path / "out", trace, [offer("l40s", "l40s")], ladder=(4,), policies=("round-robin",))
    for kept in (tmp_path / "out").glob("[0-9a-f]*.json"):
        kept.write_text("{}", encoding="utf-8")
    with pytest.raises(InputFileError, match=r"no figures of a trial.*remove it"):
        compared(tmp_path / "out", trace, [offer("l40s", "l40s")], ladder=(4,), policies=("round-robin",))


def test_more_units_are_taken_where_one_does_not_keep_the_objectives(tmp_path: Path) -> None:
    trace = canary(tmp_path, rate=40.0, requests=240)
    found, judged = compared(
        tmp_path / "out", trace, [offer("a10g", "a10g")], policies=("least-loaded",), replicas_max=8
    )
    (cell,) = found.cells
    assert cell.trial.meets
    assert cell.trial.units > 1
    assert cell.cost_micro == cell.trial.units * 1_000_000
    assert cell.trial.replicas == cell.trial.units
    fewer, _ = compared(
        tmp_path / "fewer",
        trace,
        [offer("a10g", "a10g")],
        policies=("least-loaded",),
        replicas_max=cell.trial.units - 1,
    )
    assert not fewer.cells[0].trial.meets
    assert fewer.recommended is None
    said = list(reasons(fewer, {one.offer.name: one for one in judged}, asked(replicas_max=cell.trial.units - 1)))
    assert said[0].startswith("none: nothing keeps the objectives")
    assert (fewer.first, fewer.second) == (None, None)


def test_both_leaders_are_tried_at_their_worst_and_the_measured_gpu_has_no_doubt(tmp_path: Path) -> None:
    trace = canary(tmp_path)
    offers = [offer("l40s", "l40s"), offer("h100", "h100 sxm", price_per_hour=3.0)]
    found, judged = compared(tmp_path / "out", trace, offers)
    assert found.first is not None
    assert found.second is not None
    assert (found.first.estimated, found.second.estimated) == (True, False)
    assert found.second.cell == found.runner_up
    assert found.first.cell.trial.ttft_p50 is not None
    assert found.cells[0].trial.ttft_p50 is not None
    assert found.first.cell.trial.ttft_p50 > found.cells[0].trial.ttft_p50
    assert order_holds(found, asked()) == (True, True)
    by_name = {one.offer.name: one for one in judged}
    said = " ".join(uncertainty(found, by_name, asked(), "h100-sxm"))
    assert "the order holds" in said
    assert "of the GPU that was measured" in said
    assert "--overhead" in said


def test_an_order_that_does_not_stand_its_test_is_said_to_change(tmp_path: Path) -> None:
    offers = [offer("l40s", "l40s"), offer("h100", "h100 sxm", price_per_hour=1.5)]
    found, judged = compared(tmp_path / "out", canary(tmp_path), offers)
    assert found.first is not None
    worse = msgspec.structs.replace(found.first.cell, cost_micro=2_000_000)
    changed = msgspec.structs.replace(found, first=msgspec.structs.replace(found.first, cell=worse))
    assert order_holds(changed, asked()) == (False, False)
    said = " ".join(uncertainty(changed, {one.offer.name: one for one in judged}, asked(), "h100-sxm"))
    assert "the order CHANGES with both at their worst and with the first alone" in said


def test_at_worst_makes_every_estimated_term_slower_and_nothing_else() -> None:
    (one,) = candidates([offer("l40s", "l40s")], setup())
    twin, notes = twins().of(one, 4)
    worst = at_worst(twin, notes)
    high = {note.term: note.high / note.factor for note in notes}
    assert is_estimated(notes)
    assert worst.step_base_ps == round(twin.step_base_ps * high["decode"]) > twin.step_base_ps
    assert worst.prefill_per_token_ps == round(twin.prefill_per_token_ps * high["prefill"]) > twin.prefill_per_token_ps
    assert worst.step_base_ps + worst.prefill_offset_ps == twin.step_base_ps + twin.prefill_offset_ps
    same = ("slots", "kv_blocks", "load_bytes_per_s", "load_overhead_ps", "host_entries", "max_rank")
    assert all(getattr(worst, name) == getattr(twin, name) for name in same)
    (measured,) = candidates([offer("h100", "h100 sxm")], setup())
    twin, notes = twins().of(measured, 4)
    assert at_worst(twin, notes) == twin
    assert not is_estimated(notes)


def test_slots_are_paid_in_kv_and_the_twin_has_what_the_ledger_leaves() -> None:
    (one,) = candidates([offer("l40s", "l40s")], setup())
    few, many = (twins().of(one, slots)[0] for slots in (4, 8))
    budget = one.at_slots(8)
    assert budget is not None
    assert many.kv_tokens == budget.kv_tokens
    assert few.kv_tokens - many.kv_tokens == pytest.approx(
        budget.slots.one.total * 4 / budget.kv_bytes_per_token, abs=16
    )
    assert (few.slots, many.slots, many.host_entries) == (4, 8, 16)
    (large,) = candidates([offer("l40s", "l40s")], setup(least_kv_tokens=few.kv_tokens))
    assert steps_of(large, (4, 8)) == (4,)


def test_every_replica_is_named_alike_and_told_what_it_has(tmp_path: Path) -> None:
    (one,) = candidates([offer("two", "l40s", count=2)], setup())
    made = scenario(canary(tmp_path), twins(), one, "least-loaded", 2, 8)
    assert [spec.name for spec in made.settings.replicas] == ["r1", "r2", "r3", "r4"]
    assert {spec.kv_tokens for spec in made.settings.replicas} == {one.kv_blocks(8) * 16}
    assert made.settings.policy == "least-loaded"
    assert {tenant.concurrency for tenant in made.settings.tenants} == {1_000_000}


def test_a_request_is_met_when_both_waits_are_kept(tmp_path: Path) -> None:
    trace = canary(tmp_path, requests=30)
    (one,) = candidates([offer("a10g", "a10g")], setup())
    wanted = [Wanted(scenario(trace, twins(), one, "round-robin", 1, 4), 1, 4)]

    def met(objective: Objective) -> Trial:
        with playing(tmp_path / "out", trace, objective) as played:
            return played.trials(wanted)[0]

    loose = met(Objective(ttft_ns=60 * NS_PER_S))
    assert loose.met == 1.0
    assert loose.meets
    assert loose.itl is not None
    strict = met(Objective(ttft_ns=60 * NS_PER_S, itl_ns=int(loose.itl * 0.5e9)))
    assert strict.met == 0.0
    assert not strict.meets
    half = met(Objective(ttft_ns=60 * NS_PER_S, itl_ns=int(loose.itl * 1e9)))
    assert half.met is not None
    assert 0 < half.met < 1
    never = met(Objective(ttft_ns=1))
    assert never.met == 0.0
    assert never.ttft_p50 == loose.ttft_p50


def test_preemptions_over_the_guardrail_are_not_met(tmp_path: Path) -> None:
    long = [Request(number * NS_PER_S // 5, "t0", None, 200, 300) for number in range(40)]
    trace = written(tmp_path / "long.jsonl", long, 1, 7)
    (one,) = candidates([offer("tight", "a10g", memory_bytes=18_000_000_000)], setup(slots=1))
    wanted = [Wanted(scenario(trace, twins(), one, "round-robin", 1, 1), 1, 1)]
    with playing(tmp_path / "out", trace, Objective(share=0.001, preemptions_per_1000=0.0)) as played:
        (found,) = played.trials(wanted)
    assert found.preemptions_per_1000
    assert found.failed
    assert "0.0 are allowed" in found.failed[0]
    assert not found.meets


def test_offers_that_hold_no_base_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no offer fits: small does not fit"):
        compared(tmp_path / "out", canary(tmp_path), [offer("small", "a10g", memory_bytes=8 * GiB)])


def test_the_folder_of_another_trace_is_refused(tmp_path: Path) -> None:
    compared(tmp_path / "out", canary(tmp_path, requests=30), [offer("l40s", "l40s")], ladder=(4,))
    with pytest.raises(InputFileError, match="another trace"):
        compared(tmp_path / "out", canary(tmp_path, requests=31), [offer("l40s", "l40s")], ladder=(4,))


def test_the_ladder_ends_where_all_adapters_have_a_slot() -> None:
    assert [default_ladder(count) for count in (0, 3, 9, 40, 900)] == [
        (4,),
        (4,),
        (4, 8, 16),
        (4, 8, 16, 32, 64),
        (4, 8, 16, 32, 64),
    ]


def test_money_is_what_was_written() -> None:
    assert 3 * micro(1.1) == micro(3.3) == 3_300_000


def test_grids_and_pareto_are_of_what_was_tried(tmp_path: Path) -> None:
    offers = [offer("l40s", "l40s"), offer("h100", "h100", price_per_hour=3.0)]
    found, _ = compared(tmp_path / "out", canary(tmp_path), offers)
    assert [grid.figure for grid in found.grids][:2] == [COST, WAIT]
    assert found.grids[0].policies == ("bounded-affinity", "least-loaded")
    assert set(found.grids[0].offers) == {"l40s", "h100"}
    assert found.pareto[0].cost_micro == min(cell.cost_micro for cell in found.cells)
    assert all((cell.trial.units, cell.trial.slots) in cell.tried for cell in found.cells)


def test_the_canary_says_which_it_is(tmp_path: Path) -> None:
    plain = canary(tmp_path)
    quick = read_canary(plain.path, speed=(3, 2))
    assert plain.identity.startswith("sha256:")
    assert plain.seed == 7
    assert plain.requests == 60
    assert quick.identity == f"{plain.identity} speed=3/2"
    assert plain.largest_rank == 16
