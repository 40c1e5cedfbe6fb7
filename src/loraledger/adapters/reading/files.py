"""How the files of an adapter folder are opened: contained, regular, and what they claim to be.

Adapter folders come from tenants, so each is read as if it were hostile. A path is resolved first and compared then:
joining alone lets an absolute name discard the root, and a link may lead anywhere. A link that stays inside the root is
fine, people do that. Only regular files are opened (a named pipe would block the start for ever). Pickled weights are
recognised by their file names and never opened, since to load one is to run it. A Git LFS pointer, the small text file
that a clone without LFS leaves in place of the weights, is recognised before it is mistaken for a broken file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from loraledger.errors import InputFileError

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Opening a pipe that took a file's place after it was looked at must not block."""

INDEX_NAME: Final = "adapter_model.safetensors.index.json"
PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_LFS_MAGIC: Final = b"version https://git-lfs.github.com/spec/"
_LFS_LIMIT: Final = 1024
"""Bytes; the LFS specification keeps pointer files below this."""


def contained(root: Path, path: str | Path) -> Path:
    """``path`` below ``root``, resolved. Raises :class:`InputFileError` when it is absolute, a URL, missing, or leads out."""
    text = str(path)
    if "://" in text or re.match(r"\w+:/", text):
        raise InputFileError(f"{text!r} is a URL: fetch it first and name the local path")
    if Path(text).is_absolute():
        raise InputFileError(f"{text!r} is absolute: name a path below {root}")
    try:
        resolved = (root / text).resolve(strict=True)
        inside = resolved.is_relative_to(root.resolve(strict=True))
    except (OSError, ValueError, RuntimeError) as error:
        raise InputFileError(f"{text!r} cannot be found below {root}: {_reason(error)}") from error
    if not inside:
        raise InputFileError(f"{text!r} leads out of {root}: put the adapter itself there, not a link")
    return resolved


def config_file(folder: Path, root: Path | None) -> Path:
    """``adapter_config.json`` of ``folder``, to be opened. Raises :class:`InputFileError` when it must not or cannot be."""
    return regular_file(folder, CONFIG_NAME, root, missing=partial(_no_config, folder))


def weights_file(folder: Path, root: Path | None) -> Path:
    """What an engine opens first for the weights of ``folder``: the safetensors file, or the index of its shards.

    Raises :class:`InputFileError` when there is none, or none that may be opened.
    """
    if not _there(folder, WEIGHTS_NAME) and _there(folder, INDEX_NAME):
        return regular_file(folder, INDEX_NAME, root)
    return regular_file(folder, WEIGHTS_NAME, root, missing=partial(_no_weights, folder))


def ignored_weights(folder: Path, used: str) -> tuple[str, ...]:
    """Names of weights files in ``folder`` that stay unread beside the one called ``used``."""
    return tuple([name for name in (*PICKLES, INDEX_NAME) if name != used and _there(folder, name)])


def read_small(path: Path, limit: int) -> bytes:
    """All of the file at ``path``. Raises :class:`InputFileError` above ``limit`` bytes, and for a Git LFS pointer."""
    descriptor = os.open(path, OPEN_FLAGS)
    try:
        length = os.fstat(descriptor).st_size
        raw = os.read(descriptor, min(length, limit) + 1)
    finally:
        os.close(descriptor)
    refuse_lfs_pointer(path.name, raw)
    if length > limit or len(raw) > length:
        raise InputFileError(f"{path.name} is over {limit:,} bytes: that is none of an adapter")
    return raw


def refuse_lfs_pointer(name: str, start: bytes) -> None:
    """Raises :class:`InputFileError` when ``start``, the first bytes of file ``name``, is a Git LFS pointer."""
    if start.startswith(_LFS_MAGIC):
        size = re.search(rb"^size (\d{1,18})$", start[:_LFS_LIMIT], re.MULTILINE)
        real = f" for a file of {int(size[1]):,} bytes" if size else ""
        raise InputFileError(f"{name} is a Git LFS pointer{real} that was not fetched: run `git lfs pull`")


def regular_file(folder: Path, name: str, root: Path | None, missing: Callable[[], str] | None = None) -> Path:
    """``folder / name``, to be opened: a regular file that lies in ``root`` after links are followed.

    Raises :class:`InputFileError` otherwise; ``missing`` words the message for a file that is not there.
    """
    path = folder / name
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise InputFileError(f"{name} is a link to nothing") from None
        raise InputFileError(missing() if missing else f"has no {name}: fetch the adapter again") from None
    if not stat.S_ISREG(mode):
        raise InputFileError(f"{name} is not a regular file")
    if root is not None and not path.resolve(strict=True).is_relative_to(root.resolve(strict=True)):
        raise InputFileError(f"{name} is a link that leads out of {root}: put the file itself there")
    return path


def _no_config(folder: Path) -> str:
    if not folder.exists():
        return "does not exist: correct the path"
    return f"has no {CONFIG_NAME}: it is not an adapter folder" if folder.is_dir() else "is not a folder"


def _no_weights(folder: Path) -> str:
    pickles = [(name, os.lstat(folder / name).st_size) for name in PICKLES if _there(folder, name)]
    if not pickles:
        return f"has no {WEIGHTS_NAME}: save the adapter in safetensors format"
    listed = ", ".join(f"{name} of {size:,} bytes" for name, size in pickles)
    return f"has only pickled weights ({listed}), which are never opened: convert them to {WEIGHTS_NAME}"


def _there(folder: Path, name: str) -> bool:
    return os.path.lexists(f"{folder}/{name}")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
