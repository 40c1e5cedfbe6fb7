"""A short run of ``benchmarks/chaos`` with a real vLLM server beside the emulated ones: whatever breaks, every promise holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.chaos.__main__ import Plan, play


def test_whatever_breaks_beside_a_real_engine_every_promise_holds(tmp_path: Path) -> None:
    plan = Plan(90.0, seed=3, engines=1, emulators=3, pace=6.0, scale=0.4)
    verdict, _, shown = asyncio.run(play(tmp_path, plan))
    print(shown)
    assert verdict.broken == [], shown
    assert verdict.compared > 500, shown
