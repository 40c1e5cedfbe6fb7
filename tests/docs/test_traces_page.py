"""The outputs and figures on docs/traces.md are what the commands and formulas give."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from loraledger.replay.traces.trace import Header, Request
from loraledger.replay.workloads.popularity import concentration, punica_counts, shares

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/traces.md").read_text(encoding="utf-8")


def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/replay/data/azure_conv_50.csv", tmp_path)
    examples = re.findall(r"```text\n\$ (loraledger trace [^\n]*)\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 3
    for command, shown in examples:
        words = [sys.executable, "-X", "utf8", "-m", "loraledger.cli.main", *command.split()[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, encoding="utf-8", check=True)
        assert [line.rstrip() for line in done.stdout.strip("\n").splitlines()] == shown.strip("\n").splitlines()


def test_the_table_of_spreads_follows_the_formulas() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \| ([\d.,]+) \| ([\d.,]+) \|$", PAGE, re.MULTILINE
    )
    assert len(rows) == 14
    for spread, n, *figures in rows:
        weights = (
            punica_counts(spread.removeprefix("punica-"), 1024)
            if spread.startswith("punica-")
            else shares(spread, int(n))
        )
        found = concentration(weights)
        assert found is not None
        assert len(weights) == int(n)
        told = [
            f"{found.top1:.1%}",
            f"{found.top10:.1%}",
            f"{found.entropy_number:,.1f}",
            f"{found.simpson_number:,.1f}",
        ]
        assert [text.rstrip("%") for text in told] == figures


def test_every_field_and_every_reason_is_on_the_page() -> None:
    for name in (*Header.__struct_fields__, *Request.__struct_fields__):
        assert f"`{name}`" in PAGE, name
    sources = ROOT / "src/loraledger"
    code = "".join(
        (sources / name).read_text(encoding="utf-8")
        for name in ("record/lines.py", *(f"replay/traces/{name}.py" for name in ("trace", "importers", "tracev2")))
    )
    reasons = set(re.findall(r'bad\(\w+, "([a-z][^"]*)"', code)) | set(re.findall(r'return "([a-z][^"]*)", f?"', code))
    assert len(reasons) >= 7
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in PAGE] == []
