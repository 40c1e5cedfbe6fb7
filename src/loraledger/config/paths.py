"""Paths in settings: local, and relative to the file that they are written in.

A settings file is moved and mounted together with what it refers to, so its relative paths count from its own folder
and not from wherever the process happens to be started. The loader passes that folder as the validation context
``root``; without one (settings made in code) a path stays as given. A URL in a path's place is refused:
``Path("s3://b/x")`` would silently become the relative path ``s3:/b/x``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ValidationInfo


def _local(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value:
        raise ValueError("is empty: name a path")
    if "://" in value:
        raise ValueError(f"{value!r} is a URL: fetch it first and name the local path")
    if value.startswith("~"):
        raise ValueError(f"{value!r} starts with '~', which is not expanded: write the path out")
    if not value.isprintable():
        raise ValueError("contains a control character")
    return value


def _anchored(path: Path, info: ValidationInfo) -> Path:
    root = info.context.get("root") if isinstance(info.context, dict) else None
    return root / path if isinstance(root, Path) else path


LocalPath = Annotated[Path, BeforeValidator(_local), AfterValidator(_anchored)]
