"""All reproduction targets in one table: published, ours, error, tolerance, pass; misses stay in it with their reasons.

    python -m benchmarks.reproduce DATA [--only slora,grid] [--json FILE] [--markdown FILE] [--write-profiles DIR]

DATA holds ``slora-results`` and ``bsc-vllm-lora-grid`` (docs/accuracy.md: where from); a folder that is not there is said below
the table, what needs no data is always computed. What a run is, is told from folder, file name and content: more GPUs, settings
or files of the same form are simply more rows. Progress goes to stderr.

Exit codes: 0 the table was printed and at least 80 % of its lines pass, 3 a file in DATA is bad or DATA holds nothing, 5 fewer
pass. ``--markdown`` writes the table with passing single runs folded into one row a group, as docs/accuracy.md has it.
``--write-profiles`` writes the fits as profiles that ``loraledger replay`` reads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

from benchmarks.reproduce import slora, table
from benchmarks.reproduce.slora_profiles import write_profiles
from benchmarks.reproduce.table import Counted, LeftOut, Line
from loraledger.cli.output import print_table
from loraledger.errors import InputFileError, LedgerError

SLORA: Final = "slora"
OTHERS: Final = {
    # as --only has it: (module, the folder that it reads)
    "punica": ("punica", None),
    "grid": ("grid", "bsc-vllm-lora-grid"),
    "ledger": ("ledger_row", None),
    "bounds": ("bounds_row", None),
}


class _Part(Protocol):
    def lines(self, data: Path, say: Callable[[str], None]) -> list[Line]: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description="Published measurements of multi-LoRA serving, predicted.")
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", help=f"some of {', '.join((SLORA, *OTHERS))}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--write-profiles", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    known = SLORA, *OTHERS
    wanted = {*known} if args.only is None else {part.strip() for part in args.only.split(",")}
    if wanted - {*known}:
        parser.error(f"--only knows {', '.join(known)}")
    try:
        return _run(args, wanted)
    except LedgerError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace, wanted: set[str]) -> int:
    lines, counted, left_out = _collect(args.data, wanted, args.write_profiles)
    below = table.summary(lines, counted, left_out)
    print_table(table.COLUMNS, [table.cells(line) for line in lines], table.RIGHT)
    print()
    print("\n".join(below))
    if args.markdown is not None:
        args.markdown.write_text(table.markdown(lines, below), encoding="utf-8")
    passed, count = table.share(lines)
    if args.json is not None:
        document = {
            "passed": passed,
            "counted": count,
            "lines": table.as_data(lines),
            "constants": [asdict(one) for one in counted],
            "left_out": [asdict(one) for one in left_out],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if passed >= table.LEAST_SHARE * count else 5


def _collect(data: Path, wanted: set[str], profiles: Path | None) -> tuple[list[Line], list[Counted], list[LeftOut]]:
    """The lines of the parts ``wanted``. Raises ``InputFileError``."""
    folders = [slora.FOLDER, *(folder for _, folder in OTHERS.values() if folder is not None)]
    if not any((data / folder).is_dir() for folder in folders):
        raise InputFileError(
            f"{data}: no folder with {' or '.join(folders)} in it; docs/accuracy.md says where to get them"
        )
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    lines: list[Line] = []
    counted: list[Counted] = []
    left_out: list[LeftOut] = []
    if SLORA in wanted:
        if (data / slora.FOLDER).is_dir():
            study = slora.study(data, say)
            lines, counted, left_out = study.lines, study.counted(), study.left_out
            if profiles is not None:
                for path in write_profiles(study.fits, profiles):
                    say(f"wrote {path}")
        else:
            left_out.append(LeftOut("S-LoRA", f"{data} has no {slora.FOLDER}"))
    for name, (module, folder) in OTHERS.items():
        if name not in wanted:
            continue
        if folder is not None and not (data / folder).is_dir():
            left_out.append(LeftOut(name, f"{data} has no {folder}"))
            continue
        lines += cast(_Part, import_module(f"benchmarks.reproduce.{module}")).lines(data, say)
    return lines, counted, left_out


if __name__ == "__main__":
    sys.exit(main())
