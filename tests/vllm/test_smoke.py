"""``adapters smoke`` against a real engine: an adapter that changes something, and one whose weights are zero."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from .engine import Engine, Model


def zeroed(adapter: Path, folder: Path) -> Path:
    """A copy of an adapter whose B matrices are all zero: nothing in its header shows it."""
    copy = shutil.copytree(adapter, folder)
    weights = copy / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if "lora_B" in name:
            start, end = entry["data_offsets"]
            raw[8 + length + start : 8 + length + end] = bytes(end - start)
    weights.write_bytes(raw)
    return copy


@pytest.mark.parametrize(("name", "code"), [("real", 0), ("zero", 5)])
def test_smoke_tells_weights_that_do_nothing(
    engine: Engine, model: Model, tmp_path: Path, name: str, code: int
) -> None:
    path = model.adapters["a04"] if name == "real" else zeroed(model.adapters["a04"], tmp_path / "zero")
    body = {"lora_name": name, "lora_path": str(path)}
    httpx2.post(f"{engine.url}/v1/load_lora_adapter", json=body, timeout=60.0, trust_env=False).raise_for_status()
    command = [sys.executable, "-m", "loraledger.cli.main", "adapters", "smoke", name]
    done = subprocess.run(
        [*command, "--url", engine.url, "--base", "base", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)["items"]["changes_something"] == (code == 0)
