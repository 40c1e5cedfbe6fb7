"""A short run of ``benchmarks/chaos``, emulated replicas only: faults of all kinds, one a second, and every promise held."""

from __future__ import annotations

from pathlib import Path

from benchmarks.chaos.__main__ import Plan, play


async def test_whatever_breaks_no_answer_is_anothers_no_row_is_lost_and_all_is_well_again(tmp_path: Path) -> None:
    verdict, _, shown = await play(tmp_path, Plan(14.0, seed=6, pace=1.2, scale=0.1, limit_s=8.0))
    print(shown)
    assert verdict.broken == [], shown
    assert verdict.compared > 100, shown
