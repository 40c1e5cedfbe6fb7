"""A short run of ``benchmarks/chaos`` with a real vLLM server beside the emulated ones: whatever breaks, every promise holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.chaos.__main__ import play


def test_whatever_breaks_beside_a_real_engine_every_promise_holds(tmp_path: Path) -> None:
    verdict, shown = asyncio.run(play(tmp_path, seconds=90.0, seed=3, real=True, pace=6.0, scale=0.4, limit_s=30.0))
    print(shown)
    assert verdict.broken == [], shown
    assert verdict.compared > 500, shown
