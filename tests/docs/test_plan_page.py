"""The walk-through on docs/plan.md is what the commands print, and the page names every field, column and option."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loraledger.cli.compare import compare
from loraledger.cli.compare.show import COSTS, MEMORY, PARETO, WAITS
from loraledger.cli.hardware import hardware
from loraledger.cli.requirement import requirement
from loraledger.plan.compare import LADDER, REPLICAS_MAX
from loraledger.plan.offers import FIELDS

from .pages import ROOT, example_of

PAGE = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
AGE = re.compile(r"(observed|believed|configured) +[0-9.]+ (ns|us|ms|s|min|h|d)$")


def lines(text: str) -> list[str]:
    """Without what the day of the run decides: how old a figure is, and the blanks that line it up."""
    return [AGE.sub(r"\1 AGE", line.rstrip()) for line in text.strip("\n").splitlines()]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The folder that the command at the top of the page makes."""
    return example_of(PAGE, tmp_path)


def test_the_page_shows_what_the_commands_print(example: Path) -> None:
    examples = re.findall(r"```text\n\$ (loraledger [^\n]*)\n(.*?)```", PAGE, re.DOTALL)
    verbs = [shlex.split(command)[1] for command, _ in examples]
    assert verbs == ["hardware", "hardware", "trace", "replay", "requirement", "compare"]
    for command, shown in examples:
        words = [sys.executable, "-X", "utf8", "-m", "loraledger.cli.main", *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=example, capture_output=True, encoding="utf-8", check=True)
        assert "warning" not in done.stderr, command
        assert "SATURATED" not in done.stdout or "compare" in command, command
        if shown:
            assert lines(done.stdout) == lines(shown)


def test_the_offers_shown_are_the_offers_compared() -> None:
    (shown,) = re.findall(r"```csv\n(.*?)```", PAGE, re.DOTALL)
    assert shown == (ROOT / "tests/plan/offers.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", [hardware, requirement, compare], ids=lambda verb: verb.__name__)
def test_every_option_is_on_the_page(verb: Callable[..., None]) -> None:
    spelled = {"since": "from", "until": "to", "as_json": "json", "as_yaml": "yaml"}
    for name in set(inspect.signature(verb).parameters) - {"name", "offers"}:
        assert f"--{spelled.get(name, name).replace('_', '-')}" in PAGE, name


def test_every_field_column_and_default_is_on_the_page() -> None:
    for field in FIELDS:
        assert re.search(rf"^\| [^|]*`{field}`", PAGE, re.MULTILINE), field
    for column in {*MEMORY, *COSTS, *WAITS, *PARETO} - {"offer", "gpu", "policy"}:
        assert f"`{column}`" in PAGE, column
    assert f"default {', '.join(map(str, LADDER))} up to" in PAGE
    assert f"tried at most (default {REPLICAS_MAX})" in PAGE
