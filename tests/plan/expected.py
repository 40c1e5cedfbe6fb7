"""The comparison whose table is committed: eight dated offers, half a minute of Azure's trace at four times its pace.

``python -m plan.expected`` (in ``tests/``) writes the table anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from plan.small import BASE, ROOT, azure

TABLE = Path(__file__).parent / "expected_compare.txt"
IMPORT = (
    "trace import vidur slice.csv --adapters 24 --popularity zipf:1.0 --tenants 3 --base-share 0.08 "
    "--ranks 8,16 --bytes-per-rank 2.5MiB --seed 2023 --out canary.jsonl"
)
COMPARE = (
    f"compare {ROOT / 'tests/plan/offers.csv'} --trace canary.jsonl --base {BASE} --profile llama-3.1-8b-h100 "
    "--speed 4 --slots 8,16 --replicas-max 2 --jobs 1"
)


def printed(folder: Path, *more: str) -> str:
    """What the comparison prints, in a process of its own with another hash seed each time."""
    azure(folder / "slice.csv", 30)
    out = ""
    for words in (IMPORT.split(), [*COMPARE.split(), *more]):
        out = subprocess.run(
            [sys.executable, "-X", "utf8", "-m", "loraledger.cli.main", *words],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": "random"},
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stdout
    return "".join(f"{line.rstrip()}\n" for line in out.splitlines())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        TABLE.write_text(printed(Path(place)), encoding="utf-8")
