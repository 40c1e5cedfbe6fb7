"""The documentation says what the code does: generated parts are current, queries run, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from loraledger.gateway.ledger_view import ledger_series
from loraledger.gateway.metrics import GatewayMetrics
from loraledger.kernel.fresh import fresh_state
from loraledger.kernel.policies import make_policy, policy_names
from loraledger.kernel.settings import FleetSettings
from loraledger.record.reader import RecordReader

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_generated_references_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_queries_of_the_record_page_run(tmp_path: Path) -> None:
    queries = re.findall(r"```sql\n(.*?)```", (ROOT / "docs/record.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(queries) >= 3
    with RecordReader(tmp_path) as reader:
        for query in queries:
            reader.query(query)


def test_every_policy_is_documented_with_its_parameters() -> None:
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    for name in policy_names():
        assert f"`{name}`" in text
        for parameter, value in make_policy(FleetSettings((), policy=name)).defaults.items():
            assert f"`{parameter}` {value:g}" in text or f"`{parameter}` {value}" in text, parameter


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    shown = GatewayMetrics().text(fresh_state(FleetSettings(())), None, {}).decode()
    shown += "".join(f"# TYPE {family.name} gauge\n" for family in ledger_series(()))
    for name in re.findall(r"^# TYPE (\S+)", shown, re.MULTILINE):
        assert f"`{name}`" in text, f"docs/operations.md lacks {name}"


def test_the_readme_shows_the_demos_output() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.split("<!-- demo output -->")[1].split("<!-- /demo output -->")[0]
    assert "adapter hit rate" in shown
    assert "decision" in shown


def test_the_operations_page_shows_what_budget_prints() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    found = re.search(r"```text\n\$ (loraledger budget [^\n]*)\n(.*?)```", text, re.DOTALL)
    assert found is not None
    words = [sys.executable, "-m", "loraledger.cli.main", *found[1].split()[1:]]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert [line.rstrip() for line in done.stdout.strip("\n").splitlines()] == found[2].strip("\n").splitlines()
