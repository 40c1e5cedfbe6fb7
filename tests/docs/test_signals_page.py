"""The example on docs/signals.md is what the commands print, and the page names every option, target, pool and step."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from loraledger.cli.signals import advise, diagnose, query, signals
from loraledger.record.importing import parse_map
from loraledger.signals.diagnosis import Diagnosis, Evidence, Pool, Verdict
from loraledger.signals.diagnosis.thresholds import MANY
from loraledger.signals.figures import DIMENSIONS
from loraledger.signals.rules.advice import Targets

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/signals.md").read_text(encoding="utf-8")
IMPORT = (
    (ROOT / "docs/record.md").read_text(encoding="utf-8").split("\n## Import a log of others\n")[1].split("\n## ")[0]
)
STEPS = ("demand", "misses", "waiting", "clustering", "pressure")


def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    (fleet,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (prompts,) = re.findall(r"`prompts\.json` is `([^`]*)`", PAGE)
    (tmp_path / "fleet.yaml").write_text(fleet, encoding="utf-8")
    (tmp_path / "prompts.json").write_text(prompts, encoding="utf-8")
    examples = re.findall(r"```text\n\$ (loraledger [^\n]*)\n(.*?)```", PAGE, re.DOTALL)
    verbs = [shlex.split(command)[1] for command, _ in examples]
    assert verbs == ["trace", "replay", "signals", "diagnose", "advise", "query"]
    for command, shown in examples:
        words = [sys.executable, "-X", "utf8", "-m", "loraledger.cli.main", *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, encoding="utf-8", check=True)
        if shown:
            assert [line.rstrip() for line in done.stdout.strip("\n").splitlines()] == shown.strip("\n").splitlines()


@pytest.mark.parametrize("verb", [signals, diagnose, advise, query], ids=lambda verb: verb.__name__)
def test_every_option_is_on_the_page(verb: Callable[..., None]) -> None:
    spelled = {"since": "from", "until": "to", "as_json": "json", "as_csv": "csv"}
    for name in set(inspect.signature(verb).parameters) - {"sql"}:
        assert f"--{spelled.get(name, name).replace('_', '-')}" in PAGE, name


def test_every_target_is_in_the_table_with_its_default() -> None:
    for name in Targets.__struct_fields__:
        default = getattr(Targets(), name)
        cell = "" if default is None else f"{default:g}"
        assert re.search(rf"^\| `{name}` \| {re.escape(cell)} *\| ", PAGE, re.MULTILINE), name


def test_pools_verdicts_dimensions_and_fields_are_named() -> None:
    for word in get_args(Pool):
        assert f"| `{word}` |" in PAGE, word
    for word in get_args(Verdict):
        assert f"`{word}`" in PAGE, word
    for name in (*Diagnosis.__struct_fields__, *Evidence.__struct_fields__):
        if name not in ("window", "baseline", "requests", "measure_again"):
            assert f"`{name}`" in PAGE, name
    assert f"--by {'|'.join(DIMENSIONS[1:])}" in PAGE


def test_the_questions_of_the_steps_are_those_that_are_asked() -> None:
    for number, step in enumerate(STEPS, 1):
        question = importlib.import_module(f"loraledger.signals.diagnosis.{step}").QUESTION
        assert f"| {number} | {question} |" in PAGE


def test_what_the_numbers_do_not_prove_has_a_place_of_its_own() -> None:
    said = PAGE.split("\n## What the numbers do not prove\n")[1]
    assert len(re.findall(r"^- \*\*", said, re.MULTILINE)) >= 7
    assert f"Below {MANY} requests" in said


def test_the_import_that_the_record_page_shows_has_a_map_that_can_be() -> None:
    (shown,) = re.findall(r"```sh\n(.*?)```", IMPORT, re.DOTALL)
    words = shlex.split(shown)
    mapped = parse_map([entry for option, entry in pairwise(words) if option == "--map"])
    assert len(mapped) == words.count("--map") == 11
    assert {"arrived_ns", "dispatched_ns", "first_token_ns", "finished_ns"} <= {one.column for one in mapped}


def test_every_reason_to_drop_a_row_is_on_the_record_page() -> None:
    room = ROOT / "src/loraledger/record"
    code = "".join((room / name).read_text(encoding="utf-8") for name in ("importing.py", "lines.py"))
    reasons = set(re.findall(r'bad\(\w+, "([^"]+)"', code)) | set(re.findall(r'else "([^"]+)", str', code))
    assert {"a hole", "not a request", "a heading", "not CSV in UTF-8"} <= reasons
    for reason in reasons:
        assert f"`{reason}`" in IMPORT, reason
