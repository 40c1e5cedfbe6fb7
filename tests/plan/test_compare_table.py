"""One committed table of a comparison: the same on every machine."""

from __future__ import annotations

from pathlib import Path

from .expected import TABLE, printed


def test_the_committed_offers_on_the_azure_canary_give_the_committed_table(tmp_path: Path) -> None:
    assert printed(tmp_path) == TABLE.read_text(encoding="utf-8")
