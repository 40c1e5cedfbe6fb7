"""How fast adapter folders are read, against the safetensors library on the same headers. Run: python -m benchmarks.adapters.

1,000 folders of an adapter on an 8B base (32 layers, seven modules, rank 16: 448 tensors, 84 MB, sparse), warm. Ours is
configuration, header, every check, modules by base-layer name, in two ways: ``FolderReader``, which a gateway uses and which
parses equal headers once (these 1,000 are equal, as those of one training pipeline are), and ``read_folder``, which parses each.
The library's is ``safe_open`` and the shape and type of each tensor, nothing else. Rounds of 50 folders alternate between the
three, so that a noisy neighbour meets all. A child process that reads all folders once tells the peak of memory.
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

from loraledger.adapters import FolderReader, read_folder

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


READER = FolderReader()


def shared(folder: Path) -> int:
    return len(READER.read(folder.name, folder).inventory.modules)


def each(folder: Path) -> int:
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
    kept = [READER.read(folder.name, folder) for folder in sorted(root.iterdir())]
    assert len(kept) == FOLDERS
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def show(name: str, values: Sequence[float], unit: str) -> None:
    low, middle, high = (statistics.quantiles(values, n=10)[i] for i in (0, 4, 8))
    print(f"{name:<34} median {middle:,.2f} {unit}   p10 {low:,.2f}   p90 {high:,.2f}   n {len(values)}")


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--peak":
        read_all(Path(sys.argv[2]))
        return
    ways = {"FolderReader": shared, "read_folder": each, "safetensors library": library}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        folders = write_folders(root)
        assert (shared(folders[0]), each(folders[0]), library(folders[0])) == (224, 224, 448)
        for number in range(PASSES):
            for first in range(0, FOLDERS, ROUND):
                some = folders[first : first + ROUND]
                for name in list(ways) if number % 2 else reversed(list(ways)):
                    rates[name].append(len(some) / seconds(ways[name], some))
        for name, values in rates.items():
            show(name, values, "folders/s")
        peers = rates["safetensors library"]
        for name in ("FolderReader", "read_folder"):
            show(f"{name} / library", [ours / theirs for ours, theirs in zip(rates[name], peers, strict=True)], "x")
        print(f"peak memory with all kept: {peak_mib(root):.0f} MiB   ({os.cpu_count()} cores)")


if __name__ == "__main__":
    main()
