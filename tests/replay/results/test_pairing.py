from __future__ import annotations

from pathlib import Path

import pytest

from loraledger.errors import InputFileError
from loraledger.record.tables import Row
from loraledger.replay.results.pairing import ClassPair, Pairing, pair
from replay.runs import outcome, request_row, write_run


def pair_of(folder: Path, ours: list[Row], theirs: list[Row]) -> Pairing:
    mine = write_run(folder / "ours", ours, outcome(len(ours), label="ours"))
    return pair(mine, write_run(folder / "theirs", theirs, outcome(len(theirs), label="theirs")))


def rows(*times: float | None, **columns: object) -> list[Row]:
    """Requests that arrive a second apart and wait so long for their first token; ``None``: it never comes."""
    return [request_row(n, n, None if wait is None else n + wait, **columns) for n, wait in enumerate(times, 1)]


def test_each_request_is_held_against_itself(tmp_path: Path) -> None:
    paired = pair_of(tmp_path, rows(1.0, 1.5, 3.0, 4.0005, 4.0), rows(2.0, 1.0, 1.0, 4.0, 4.0005))
    assert (paired.ours, paired.theirs, paired.requests) == ("ours", "theirs", 5)
    change = paired.ttft
    assert change is not None
    assert (change.n, change.better, change.worse) == (5, 0.2, 0.4)
    assert [change.mean, change.p50, change.p90] == pytest.approx([1.5 / 5, 0.0005, 0.5 + 0.6 * 1.5], abs=1e-9)
    assert (change.mean_low, change.mean_high) == (None, None)


def test_requests_are_paired_by_arrival_and_not_by_what_they_are_called(tmp_path: Path) -> None:
    ours = [request_row(n, 0, n, prompt_tokens=n) for n in (9, 10, 100)]
    theirs = [request_row(n, 0, n + 1, prompt_tokens=p) for n, p in ((98, 9), (99, 10), (1000, 100))]
    paired = pair_of(tmp_path, ours[::-1], theirs[::-1])
    assert paired.ttft is not None
    assert (paired.ttft.better, paired.ttft.p50) == (1.0, -90.0)


def test_a_first_token_that_came_in_one_run_only_is_counted_and_makes_no_difference(tmp_path: Path) -> None:
    paired = pair_of(tmp_path, rows(1.0, None, 1.0, None), rows(None, 2.0, 3.0, None))
    assert (paired.only_ours, paired.only_theirs, paired.neither) == (1, 1, 1)
    assert paired.ttft is not None
    assert (paired.ttft.n, paired.ttft.mean) == (1, -2.0)
    assert pair_of(tmp_path / "none", rows(None), rows(1.0)).ttft is None


def test_what_a_move_between_tiers_changed(tmp_path: Path) -> None:
    tiers = [("gpu", "gpu"), ("gpu", "disk"), ("gpu", "disk"), ("disk", "gpu"), ("unknown", "gpu"), ("gpu", None)]
    tiers += [("gpu", "gpu")] * 2
    ours = [{**row, "hit_class": tier} for row, (tier, _) in zip(rows(1, 1, 1, 3, 1, 1, 1, 1), tiers, strict=True)]
    theirs = [{**row, "hit_class": tier} for row, (_, tier) in zip(rows(1, 2, 3, 2, 1, 1, 1, 1), tiers, strict=True)]
    paired = pair_of(tmp_path, ours, theirs)
    assert paired.by_class == (
        ClassPair("gpu", "gpu", 3, 0.0),
        ClassPair("disk", "gpu", 2, -1.5),
        ClassPair("gpu", "disk", 1, 1.0),
        ClassPair("gpu", "unknown", 1, 0.0),
    )
    assert (paired.gpu_rate_ours, paired.gpu_rate_theirs) == (5 / 6, 4 / 6)


def test_a_hit_rate_of_nothing_known_is_unknown(tmp_path: Path) -> None:
    paired = pair_of(tmp_path, rows(1, hit_class="base"), rows(1, hit_class="base"))
    assert (paired.gpu_rate_ours, paired.gpu_rate_theirs) == (None, None)


def test_the_adapters_that_lost_and_gained_most_are_named(tmp_path: Path) -> None:
    names = [f"a{n % 8}" for n in range(40)] + ["few"] * 4
    change = {"a0": 0.5, "a1": 0.1, "a2": 0.0, "a3": -0.2, "a4": 0.3, "a5": 0.2, "a6": 0.4, "a7": 0.6, "few": 9.0}
    theirs = [request_row(n, n, n + 10, adapter=name) for n, name in enumerate(names)]
    ours = [request_row(n, n, n + 10 + change[name], adapter=name) for n, name in enumerate(names)]
    paired = pair_of(tmp_path, ours, theirs)
    assert [(lost.adapter, lost.n) for lost in paired.lost] == [(f"a{n}", 5) for n in (7, 0, 6, 4, 5)]
    assert [lost.mean for lost in paired.lost] == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2])
    assert [(gained.adapter, gained.n) for gained in paired.gained] == [("a3", 5)]
    assert paired.gained[0].mean == pytest.approx(-0.2)


def test_the_interval_of_the_mean_holds_it_and_is_the_same_each_time(tmp_path: Path) -> None:
    theirs = rows(*[1.0] * 400)
    ours = rows(*[1.0 + (0.2 if n % 3 else -0.1) for n in range(400)])
    change = pair_of(tmp_path, ours, theirs).ttft
    assert change is not None
    assert change.mean_low is not None
    assert change.mean_high is not None
    assert 0.09 < change.mean_low < change.mean < change.mean_high < 0.11
    assert pair(tmp_path / "ours", tmp_path / "theirs").ttft == change


def test_a_single_bad_stretch_makes_the_interval_wide(tmp_path: Path) -> None:
    theirs = rows(*[1.0] * 400)
    spread = pair_of(tmp_path / "1", rows(*[3.0 if n % 20 == 0 else 1.0 for n in range(400)]), theirs).ttft
    stretch = pair_of(tmp_path / "2", rows(*[3.0 if 100 <= n < 120 else 1.0 for n in range(400)]), theirs).ttft
    assert spread is not None
    assert stretch is not None
    assert spread.mean == stretch.mean == pytest.approx(0.1)
    assert spread.mean_low is not None
    assert stretch.mean_low is not None
    assert stretch.mean_low < 0.03 < 0.05 < spread.mean_low


# --- what cannot be paired ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (outcome(2, trace="sha256:other"), "different traces"),
        (outcome(2, trace=f"{outcome(2).trace} speed=2/1"), "played with speed=1 and with speed=2/1; replay"),
        (
            outcome(2, trace=f"{outcome(2).trace} without={'a,' * 999}"),
            r"with speed=1 and with speed=1 without=[a,]{64}\.\.\.; replay",
        ),
        (outcome(3), "one played 2 requests of the trace and the other 3"),
        (outcome(2, dropped={"a hole": 1}), "different rows of the trace were dropped"),
    ],
)
def test_runs_of_something_else_are_refused(tmp_path: Path, theirs: object, said: str) -> None:
    mine = write_run(tmp_path / "ours", rows(1, 1))
    other = write_run(tmp_path / "theirs", rows(1, 1), theirs)  # type: ignore[arg-type]
    with pytest.raises(InputFileError, match=said):
        pair(mine, other)


def test_a_record_that_lost_requests_is_refused(tmp_path: Path) -> None:
    mine = write_run(tmp_path / "ours", rows(1, 1), outcome(2))
    other = write_run(tmp_path / "theirs", rows(1), outcome(2))
    with pytest.raises(InputFileError, match="1 requests in common, the runs had 2 and 2"):
        pair(mine, other)


@pytest.mark.parametrize("column", [{"adapter": "b"}, {"tenant": "bolt"}, {"prompt_tokens": 7}])
def test_arrivals_that_are_not_the_same_request_are_refused(tmp_path: Path, column: dict[str, object]) -> None:
    ours = rows(1, 1, 1, adapter="a")
    with pytest.raises(InputFileError, match="arrival 2 is not the same request"):
        pair_of(tmp_path, ours, [ours[0], {**ours[1], **column}, ours[2]])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="not the folder of a run"):
        pair(write_run(tmp_path / "ours", rows(1)), tmp_path / "nothing")
