"""What it costs to take an adapter into the store, against copying its files. Run: python -m benchmarks.store [DIR].

One adapter of 84 MB (rank 16 on all modules of an 8B base) of random bytes, warm. ``admit`` hashes, copies and makes durable;
``copy`` is ``shutil.copyfile`` of the same files, ``copy + sync`` with ``fsync`` of each; ``known`` takes the same files in again.
Rounds alternate, each into a fresh store. On a file system with reflinks ``admit`` clones instead of copying.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from loraledger.adapters import Store

ROUNDS = 15
BYTES = 83_886_080


def copy(source: Path, target: Path, *, sync: bool) -> None:
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        if sync:
            with (target / path.name).open("rb") as stream:
                os.fsync(stream.fileno())


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    figures: dict[str, list[float]] = {"admit": [], "known": [], "copy": [], "copy + sync": []}
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        root, adapter = Path(place), Path(place) / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text("{}")
        (adapter / "adapter_model.safetensors").write_bytes(os.urandom(BYTES))
        files = (adapter / "adapter_config.json", adapter / "adapter_model.safetensors")
        time.sleep(2.1)  # files younger than two seconds are never remembered
        for number in range(ROUNDS):
            with Store.open(root / f"store{number}", None) as store:
                figures["admit"].append(milliseconds(lambda store=store: store.admit(*files, holder="x")))  # type: ignore[misc]
                figures["known"].append(milliseconds(lambda store=store: store.admit(*files, holder="x")))  # type: ignore[misc]
            for name, sync in (("copy", False), ("copy + sync", True)):
                target = root / f"{name}{number}"
                figures[name].append(milliseconds(lambda target=target, sync=sync: copy(adapter, target, sync=sync)))  # type: ignore[misc]
                shutil.rmtree(target)
            shutil.rmtree(root / f"store{number}")
    for name, values in figures.items():
        low, high = statistics.quantiles(values, n=10)[0], statistics.quantiles(values, n=10)[-1]
        print(
            f"{name:<12} median {statistics.median(values):8.2f} ms   p10 {low:8.2f}   p90 {high:8.2f}   n {len(values)}"
        )
    ratios = [a / b for a, b in zip(figures["admit"], figures["copy + sync"], strict=True)]
    print(f"admit / copy + sync: median {statistics.median(ratios):.2f} x   {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
