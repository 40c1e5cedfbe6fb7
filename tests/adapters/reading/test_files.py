"""Containment: what a path below a root may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraledger.adapters.reading.files import contained, read_small
from loraledger.errors import InputFileError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """``adapters`` beside ``other``, with a link that stays inside and links that leave."""
    root = tmp_path / "adapters"
    for folder in (root / "sql/v1", tmp_path / "other/x", tmp_path / "adapters-of-others"):
        folder.mkdir(parents=True)
    (root / "link-in").symlink_to("sql")
    (root / "link-out").symlink_to("../other")
    (root / "link-near").symlink_to("../adapters-of-others")
    (root / "loop").symlink_to("loop")
    return root


@pytest.mark.parametrize("path", ["sql/v1", "./sql/v1", "sql/../sql/v1", "link-in/v1"])
def test_paths_that_stay_inside_are_resolved(root: Path, path: str) -> None:
    assert contained(root, path) == (root / "sql/v1").resolve()


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(root)
    assert contained(tmp_path / "current", "sql/v1") == (root / "sql/v1").resolve()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../other", "leads out of"),
        ("sql/../../other", "leads out of"),
        ("link-out/x", "leads out of"),
        ("link-near", "leads out of"),
        ("..", "leads out of"),
        ("/srv/other/x", "is absolute"),
        ("s3://bucket/x", "is a URL"),
        ("https://evil.example/x", "is a URL"),
        ("file:///etc", "is a URL"),
        ("file:/etc", "is a URL"),
        ("some-org/some-adapter", "cannot be found"),
        ("loop", "cannot be found"),
        ("a\0b", "cannot be found"),
        ("x" * 300, "cannot be found"),
    ],
)
def test_paths_that_leave_are_refused(root: Path, path: str, reason: str) -> None:
    with pytest.raises(InputFileError, match=reason):
        contained(root, path)


def test_a_small_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"12345")
    assert read_small(path, 5) == b"12345"
    with pytest.raises(InputFileError, match=r"x\.json is over 4 bytes"):
        read_small(path, 4)


def test_a_pointer_without_a_size_is_still_a_pointer(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(InputFileError, match=r"x\.json is a Git LFS pointer that was not fetched"):
        read_small(path, 100)
