"""Where runs are kept: one folder a sweep, one folder a run in it, named by what tells the run apart.

A sweep's folder carries a mark with the trace that its runs are of, so that several sweeps of one trace may share it and nothing
else is ever written into, or deleted. A run replaces an earlier one of its name. Whoever plays holds the mark locked: two sweeps
that write into one folder at a time would mix their rows.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from loraledger.errors import InputFileError

MARK: Final = "replay.json"
_MAX_NAME: Final = 120


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    loraledger_replay: int = 1
    trace: str


def sweep_folder(out: Path | None, digest: str) -> Path:
    """``out``, or a folder named by the trace's ``digest``, made and marked.

    Raises ``InputFileError`` when it cannot be written, or has something else in it than runs of this trace.
    """
    folder = out if out is not None else Path(f"replay-{digest.removeprefix('sha256:')[:8]}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / MARK
        if mark.is_file():
            _check(folder, mark.read_bytes(), digest)
        elif any(folder.iterdir()):
            raise InputFileError(f"{folder} is not empty and no folder of a replay: give --out another one")
        else:
            mark.write_bytes(msgspec.json.encode(_Mark(trace=digest)) + b"\n")
    except OSError as error:
        raise InputFileError(
            f"{folder}: cannot be written: {error.strerror or error}; give --out another folder"
        ) from error
    return folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else plays into a sweep's ``folder`` meanwhile. Raises ``InputFileError`` when somebody does."""
    with (folder / MARK).open("rb") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputFileError(
                f"another replay writes into {folder}: wait for its end, or give --out another folder"
            ) from error
        yield


def run_folders(folder: Path, labels: Sequence[str], kept: Path | None) -> list[Path]:
    """A folder for each label. Raises ``InputFileError`` if one of them is ``kept``, the run that is compared with."""
    names: dict[str, None] = {}
    for label in labels:
        name = re.sub(r"[^A-Za-z0-9=.,_-]+", "_", label)[:_MAX_NAME].lstrip(".") or "run"
        while name in names:
            name += "+"
        names[name] = None
    found = [folder / name for name in names]
    if kept is not None and kept.resolve() in {path.resolve() for path in found}:
        raise InputFileError(f"{kept} would be replaced by a run of the same name: give --out another folder")
    return found


def _check(folder: Path, data: bytes, digest: str) -> None:
    try:
        mark = msgspec.json.decode(data, type=_Mark)
    except msgspec.MsgspecError as error:
        raise InputFileError(f"{folder / MARK}: {error}; give --out another folder") from error
    if mark.trace != digest:
        raise InputFileError(f"{folder} holds runs of another trace ({mark.trace[:19]}...): give --out another folder")
