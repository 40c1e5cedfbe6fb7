"""Where runs are kept, and what may be written or deleted there: one folder a sweep, one folder a run in it.

A sweep's folder carries a mark with the trace that its runs are of, so that several sweeps of one trace may share it and nothing
else is ever written into, or deleted. Whoever plays holds the mark locked: two sweeps that write into one folder at a time would
mix their rows.

A run is played into a hidden folder that takes its name when it is complete: an earlier run of that name stays until then, and what
was interrupted leaves nothing behind. What a killed process left is removed by whoever holds the lock next. Only what looks like a
run and nothing else is replaced or removed: a file of anybody else's in it keeps it.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from loraledger.errors import InputFileError
from loraledger.record.tables import TABLES
from loraledger.replay.fleet.outcome import RECORD_FOLDER, RUN_FILE
from loraledger.replay.fleet.rowsink import LABEL, SCRATCH
from loraledger.replay.fleet.run import MARK as RECORD_MARK

MARK: Final = "replay.json"
_MAX_NAME: Final = 120
_PARTS: Final = frozenset({RUN_FILE, f".{RUN_FILE}.new", RECORD_FOLDER})
_OF_RECORD: Final = re.compile(
    rf"{re.escape(RECORD_MARK)}|{re.escape(SCRATCH)}/.*|({'|'.join(TABLES)})/date=[^/]+/hour=[^/]+/{LABEL}-[0-9]+\.parquet"
)
"""Files of a record that a run wrote, and what it has in hand while it does."""


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    loraledger_replay: int = 1
    trace: str


def sweep_folder(out: Path | None, digest: str) -> Path:
    """``out``, or a folder named by the trace's ``digest``, made and marked.

    Raises ``InputFileError`` when it cannot be written, or has something else in it than runs of this trace.
    """
    folder = out if out is not None else Path(f"replay-{digest.removeprefix('sha256:')[:8]}")
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / MARK
        if mark.is_file():
            _check(folder, mark.read_bytes(), digest)
        elif any(folder.iterdir()):
            raise InputFileError(f"{folder} is not empty and no folder of a replay: give --out another one")
        else:
            mark.write_bytes(msgspec.json.encode(_Mark(trace=digest)) + b"\n")
    return folder


def runs_in(folder: Path) -> list[Path]:
    """The complete runs of a sweep's ``folder``, by name; none if it is no such folder or cannot be listed."""
    if not (folder / MARK).is_file():
        return []
    return sorted(path.parent for path in folder.glob(f"[!.]*/{RUN_FILE}"))


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else plays into a sweep's ``folder`` meanwhile, and what a killed sweep left half done there is gone.

    Raises ``InputFileError`` when somebody does.
    """
    with (folder / MARK).open("rb") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputFileError(
                f"another replay writes into {folder}: wait for its end, or give --out another folder"
            ) from error
        with _writing(folder):
            for path in folder.glob(".*.partial"):
                if path.is_dir() and not _foreign(path):
                    shutil.rmtree(path, ignore_errors=True)
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


@contextmanager
def whole(directory: Path) -> Iterator[Path]:
    """A hidden folder to play a run into; it takes the place of ``directory`` when the block ends well.

    Raises ``InputFileError`` when what is there is not a run and nothing else.
    """
    with _writing(directory):
        _check_replaceable(directory)
    remove_partial(directory)
    yield _partial(directory)
    with _writing(directory):
        replaced = directory.with_name(f".{directory.name}.replaced.partial")
        if directory.exists():  # aside first, since removing a large run takes long and may be cut short
            directory.rename(replaced)
        _partial(directory).rename(directory)
        shutil.rmtree(replaced, ignore_errors=True)


def remove_partial(directory: Path) -> None:
    """What an interrupted run of ``directory`` left, if there is any."""
    shutil.rmtree(_partial(directory), ignore_errors=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputFileError(
            f"{path}: cannot be written: {error.strerror or error}; give --out another folder"
        ) from error


def _partial(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.partial")


def _check_replaceable(directory: Path) -> None:
    """Raises ``InputFileError`` unless ``directory`` is free, or a run and nothing else."""
    if not directory.is_symlink() and not directory.exists():
        return
    if directory.is_symlink() or not (directory / RUN_FILE).is_file():
        raise InputFileError(f"{directory} is there and is no run: give --out another folder")
    if foreign := _foreign(directory):
        raise InputFileError(
            f"{directory / foreign[0]} is no part of a run and would be lost: move it, or give --out another folder"
        )


def _foreign(directory: Path) -> list[str]:
    """What is in ``directory`` that no run has, as paths relative to it, sorted."""
    found = [path.name for path in directory.iterdir() if path.name not in _PARTS]
    record = directory / RECORD_FOLDER
    if record.is_symlink() or record.is_file():
        return sorted([*found, RECORD_FOLDER])
    files = (path for path in record.rglob("*") if path.is_symlink() or not path.is_dir())
    found += [
        path.relative_to(directory).as_posix()
        for path in files
        if not _OF_RECORD.fullmatch(path.relative_to(record).as_posix())
    ]
    return sorted(found)


def _check(folder: Path, data: bytes, digest: str) -> None:
    try:
        mark = msgspec.json.decode(data, type=_Mark)
    except msgspec.MsgspecError as error:
        raise InputFileError(f"{folder / MARK}: {error}; give --out another folder") from error
    if mark.trace != digest:
        raise InputFileError(f"{folder} holds runs of another trace ({mark.trace[:19]}...): give --out another folder")
