"""docs/operate.md: what the example's commands print, but for what takes traffic, and every option, metric and variable."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from loraledger.cli.change import app
from loraledger.operate.change import BETTER, LIVE, RESTART
from support.gateway import GatewayProcess

from .pages import ROOT, example_of

PAGE, REVIEW = (ROOT / "docs/operate.md").read_text(encoding="utf-8").split("\n## The weekly review\n")
EXAMPLE = PAGE.split("<!-- a change -->")[1]
LIVE_TRAFFIC = ("watch",)
"""What these print depends on traffic and time: they are as they were printed once."""


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The folder that the first command of the example makes."""
    return example_of(EXAMPLE, tmp_path)


def test_the_page_shows_what_the_commands_print(example: Path) -> None:
    examples = re.findall(r"```text\n\$ (loraledger [^\n]*)\n(.*?)```", EXAMPLE, re.DOTALL)
    verbs = [shlex.split(command)[1:3] for command, _ in examples]
    assert [words[-1] for words in verbs] == ["propose", "generate", "replay", "rollout", "watch", "diff"]
    said = yaml.safe_load((example / "loraledger.yaml").read_bytes())
    settings = {name: part for name, part in said.items() if name not in ("listen", "control")}
    with GatewayProcess(example, settings) as gateway:
        gateway.start(replicas_up=0)
        gateway.wait(lambda: gateway.summary() != {}, "an answer")
        for command, shown in examples:
            words = shlex.split(command)[1:]
            if words[-2] in LIVE_TRAFFIC:
                continue
            printed = ran(words, example)
            if shown:
                assert [text.rstrip() for text in printed.strip("\n").splitlines()] == shown.strip("\n").splitlines()


def test_the_page_shows_what_the_review_of_its_example_says(tmp_path: Path) -> None:
    (settings,) = re.findall(r"```yaml\n(.*?)```", REVIEW, re.DOTALL)
    (tmp_path / "fleet.yaml").write_text(settings, encoding="utf-8")
    commands = re.findall(r"^\$ (loraledger [^\n]*)$", REVIEW, re.MULTILINE)[1:]
    assert [shlex.split(command)[1] for command in commands] == ["trace", "replay", "review"]
    for command in commands:
        written = ran(shlex.split(command)[1:], tmp_path)
    begins, figures = re.findall(r"`{3,4}markdown\n(.*?)\n`{3,4}\n\n", REVIEW, re.DOTALL)
    assert written.startswith(begins)
    assert figures in written


def ran(words: list[str], cwd: Path) -> str:
    """What the command printed."""
    line = [sys.executable, "-X", "utf8", "-m", "loraledger.cli.main", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, encoding="utf-8", check=True).stdout


@pytest.mark.parametrize(
    "verb", [command.callback for command in app.registered_commands], ids=lambda verb: verb.__name__
)
def test_every_option_is_on_the_page_or_shared(verb: object) -> None:
    assert callable(verb)
    spelled = {"before": "from", "after": "to", "as_json": "json"}
    shared = {
        "id_",
        "variable",
        "config",
        "out",
        "jobs",
        "adapter_rank",
        "adapter_bytes",
        "skip_unfit",
        "every",
        "open_",
    }
    for name in set(inspect.signature(verb).parameters) - shared:
        assert f"--{spelled.get(name, name).replace('_', '-')}" in PAGE, name


def test_every_verb_metric_and_variable_is_named() -> None:
    names = [command.name or "" for command in app.registered_commands]
    for name in (*names, *BETTER, *LIVE, *RESTART):
        assert re.search(rf"`(loraledger change )?{re.escape(name)}`", PAGE), name


def test_what_is_promised_of_the_test_is_what_it_does() -> None:
    watch = importlib.import_module("loraledger.operate.watch")
    sequential = importlib.import_module("loraledger.operate.sequential")
    blocks = importlib.import_module("loraledger.operate.blocks")
    assert (watch.ALPHA, sequential.FEWEST, blocks.FEWEST) == (0.05, 5, 5)
    assert "5 %" in PAGE
    assert "Five blocks are the least" in PAGE
    assert "both parts have five requests" in PAGE
