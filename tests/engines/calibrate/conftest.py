"""What is measured here reads a virtual clock."""

from __future__ import annotations

import pytest

from .virtual_clock import Clock

READERS = ("calibrate.asking", "calibrate.measure", "calibrate.run", "emulator_engine")


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in READERS:
        monkeypatch.setattr(f"loraledger.engines.{module}.time", Clock())
