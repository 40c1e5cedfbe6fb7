"""How fast adapter folders are read, against the safetensors library on the same headers. Run: python -m benchmarks.adapters.

1,000 folders of an adapter on an 8B base (32 layers, seven modules, rank 16: 448 tensors, 84 MB, sparse), warm. Ours is
``read_folder``: configuration, header, every check, modules by base-layer name. The library's is ``safe_open`` and the shape and
type of each tensor, nothing else. Rounds of 50 folders alternate between the two, so that a noisy neighbour meets both. A child
process that reads all folders once, and keeps what it read of one at a time, tells the peak of memory.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import safe_open

from loraledger.adapters import read_folder

FOLDERS = 1_000
ROUND = 50
PASSES = 5
LAYERS = 32
RANK = 16
LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
"""Module to (in, out)."""


def header() -> tuple[bytes, int]:
    """The header of one weights file, and the bytes of data behind it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for layer in range(LAYERS):
        for module, (inputs, outputs) in LAYER.items():
            for half, shape in (("A", [RANK, inputs]), ("B", [outputs, RANK])):
                size = 2 * shape[0] * shape[1]
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"
                entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
                end += size
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw, end


def write_folders(root: Path) -> list[Path]:
    """All folders; each file is its own, its data a hole."""
    start, data = header()
    config = json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]})
    folders = [root / f"a{number:04}" for number in range(FOLDERS)]
    for folder in folders:
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
        with (folder / "adapter_model.safetensors").open("wb") as stream:
            stream.write(start)
            stream.truncate(len(start) + data)
    return folders


def ours(folder: Path) -> int:
    return len(read_folder(folder.name, folder).inventory.modules)


def library(folder: Path) -> int:
    count = 0
    with safe_open(folder / "adapter_model.safetensors", framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            piece = file.get_slice(name)
            count += bool(piece.get_shape() and piece.get_dtype())
    return count


def seconds(read: Callable[[Path], int], folders: Sequence[Path]) -> float:
    start = time.perf_counter()
    for folder in folders:
        read(folder)
    return time.perf_counter() - start


def peak_mib(root: Path) -> float:
    """Peak resident memory of a process that reads every folder."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.adapters", "--peak", str(root)], check=True, capture_output=True, text=True
    )
    return int(done.stdout) / 1024


def read_all(root: Path) -> None:
    for folder in sorted(root.iterdir()):
        ours(folder)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--peak":
        read_all(Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        folders = write_folders(root)
        assert (ours(folders[0]), library(folders[0])) == (224, 448)
        ratios, mine, theirs = [], [], []
        for number in range(PASSES):
            for first in range(0, FOLDERS, ROUND):
                some = folders[first : first + ROUND]
                order = (ours, library) if number % 2 else (library, ours)
                took = {read: seconds(read, some) for read in order}
                mine.append(len(some) / took[ours])
                theirs.append(len(some) / took[library])
                ratios.append(took[library] / took[ours])
        for name, values, unit in (
            ("read_folder", mine, "folders/s"),
            ("safetensors", theirs, "folders/s"),
            ("ratio", ratios, "x"),
        ):
            low, middle, high = (statistics.quantiles(values, n=10)[i] for i in (0, 4, 8))
            print(f"{name:<12} median {middle:,.2f} {unit}   p10 {low:,.2f}   p90 {high:,.2f}   n {len(values)}")
        print(f"peak memory  {peak_mib(root):.0f} MiB over {FOLDERS:,} folders   ({os.cpu_count()} cores)")


if __name__ == "__main__":
    main()
