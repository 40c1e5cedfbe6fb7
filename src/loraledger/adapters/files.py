"""How the files of an adapter folder are opened: contained, regular, and what they claim to be.

Adapter folders come from tenants, so each is read as if it were hostile. A path is resolved first and compared then:
joining alone lets an absolute name discard the root, and a link may lead anywhere. A link that stays inside the root is
fine, people do that. Only regular files are opened (a named pipe would block the start for ever). Pickled weights are
recognised by their file names and never opened, since to load one is to run it. A Git LFS pointer, the small text file
that a clone without LFS leaves in place of the weights, is recognised before it is mistaken for a broken file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from loraledger.errors import InputFileError

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"

_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
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
    return _regular(folder, CONFIG_NAME, root, missing=f"has no {CONFIG_NAME}: it is not an adapter folder")


def weights_file(folder: Path, root: Path | None) -> Path:
    """``adapter_model.safetensors`` of ``folder``, to be opened. Raises :class:`InputFileError` when it must not be."""
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    missing = f"has no {WEIGHTS_NAME}: save the adapter in safetensors format"
    if pickles:
        missing = (
            f"has only pickled weights ({', '.join(pickles)}), which are never opened: convert them to {WEIGHTS_NAME}"
        )
    return _regular(folder, WEIGHTS_NAME, root, missing)


def refuse_lfs_pointer(name: str, start: bytes) -> None:
    """Raises :class:`InputFileError` when ``start``, the first bytes of file ``name``, is a Git LFS pointer."""
    if start.startswith(_LFS_MAGIC):
        size = re.search(rb"^size (\d{1,18})$", start[:_LFS_LIMIT], re.MULTILINE)
        real = f" for a file of {int(size[1]):,} bytes" if size else ""
        raise InputFileError(f"{name} is a Git LFS pointer{real} that was not fetched: run `git lfs pull`")


def _regular(folder: Path, name: str, root: Path | None, missing: str) -> Path:
    path = folder / name
    if not path.exists():
        raise InputFileError(f"{name} is a link to nothing" if path.is_symlink() else missing)
    if not path.is_file():
        raise InputFileError(f"{name} is not a regular file")
    if root is not None and not path.resolve(strict=True).is_relative_to(root.resolve(strict=True)):
        raise InputFileError(f"{name} is a link that leads out of {root}: put the file itself there")
    return path


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
