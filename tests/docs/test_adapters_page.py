"""The output on docs/adapters.md is what the command prints for the adapters that the page describes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from adapters.build_weights import BASE_8B, build, pairs

PAGE = Path(__file__).parents[2] / "docs/adapters.md"


SOURCES = Path(__file__).parents[2] / "src/loraledger/adapters"


def test_every_rule_of_the_verdicts_is_named() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (SOURCES / "verdict").glob("*.py"))
    rules = set(re.findall(r'Finding\(\s*"([a-z_]+)"', code)) | set(
        re.findall(r'^        \("([a-z_]+)", config\.', code, re.MULTILINE)
    )
    assert len(rules) > 35
    text = PAGE.read_text(encoding="utf-8")
    assert [rule for rule in sorted(rules) if f"`{rule}`" not in text] == []


def write_example(folder: Path) -> None:
    """An 8B base and five adapters, of true size and without data."""
    BASE_8B.write(folder / "base-8b")
    every = BASE_8B.projections()
    attention = {name: every[name] for name in ("self_attn.q_proj", "self_attn.v_proj")}
    config = {"peft_type": "LORA", "lora_alpha": 32, "base_model_name_or_path": "base-8b"}

    def adapter(name: str, rank: int, modules: dict[str, tuple[int, int]], stem: str = "model", **more: object) -> None:
        names = sorted(module.rpartition(".")[2] for module in modules)
        spec = pairs(modules, rank, BASE_8B.layers, stem=f"{stem}.layers.{{i}}.", dtype=str(more.pop("dtype", "BF16")))
        build(folder / "adapters" / name, {**config, "r": rank, "target_modules": names, **more}, spec)

    adapter("extract", 8, attention)
    adapter("legal", 64, every, use_rslora=True)
    adapter("sql", 16, every)
    adapter("support", 16, every, dtype="F32")
    adapter("tone", 16, every, use_dora=True)
    adapter("vision", 16, every, stem="language_model.model")


def test_the_page_shows_what_inspect_prints(tmp_path: Path) -> None:
    write_example(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"```text\n\$ (loraledger adapters inspect [^\n]*)\n(.*?)```", text, re.DOTALL)
    assert found is not None
    words = found[1].split()[1:]
    done = subprocess.run(
        [sys.executable, "-m", "loraledger.cli.main", *words],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    assert shown == found[2].strip("\n")
    assert done.returncode == 5
