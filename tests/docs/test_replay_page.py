"""The example on docs/replay.md is what the commands print, and the page names every key and option."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from loraledger.cli.replay.show import _BY_CLASS, _COSTS, _WAITING
from loraledger.cli.replay.verb import replay
from loraledger.replay.scenarios.axes import keys
from loraledger.replay.scenarios.profiles import DEFAULT

PAGE = (Path(__file__).parents[2] / "docs/replay.md").read_text(encoding="utf-8")


def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    (fleet,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (prompts,) = re.findall(r"`prompts\.json` is `([^`]*)`", PAGE)
    (tmp_path / "fleet.yaml").write_text(fleet, encoding="utf-8")
    (tmp_path / "prompts.json").write_text(prompts, encoding="utf-8")
    examples = re.findall(r"```text\n\$ (loraledger [^\n]*)\n(.*?)```", PAGE, re.DOTALL)
    assert [command.split()[1] for command, _ in examples] == ["trace", "replay"]
    for command, shown in examples:
        words = [sys.executable, "-X", "utf8", "-m", "loraledger.cli.main", *command.split()[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, encoding="utf-8", check=True)
        if shown:
            assert [line.rstrip() for line in done.stdout.strip("\n").splitlines()] == shown.strip("\n").splitlines()


def test_every_key_column_and_option_is_on_the_page() -> None:
    for key in keys():
        room, _, name = key.rpartition(".")
        assert f"`{name}`" in PAGE or (room == "policy" and "`policy.*`" in PAGE), key
    for column in (*_WAITING, *_COSTS, *_BY_CLASS):
        assert column in PAGE, column
    own = {"trace", "as_json", "fleet", "out", "jobs", "against", "profile", "policy", "set_"}
    for parameter in set(inspect.signature(replay).parameters) - own - {"max_tokens"}:
        assert f"--{parameter.replace('_', '-')}" in PAGE, parameter
    assert f"`{DEFAULT}`" in PAGE
