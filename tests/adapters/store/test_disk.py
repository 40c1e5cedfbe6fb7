"""The store's folder: what the disk refuses, what a crash leaves, what others put there, who owns it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.store.test_store import WEIGHTS, admit, content, hidden, tenant
from loraledger.adapters.store.store import Store
from loraledger.errors import ConfigError, InputFileError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "new" / "store", None) as store:
        yield store


def refuse_clones(patch: pytest.MonkeyPatch) -> None:
    """For tests of copying: they may run where extents can be shared."""

    def refuses(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    patch.setattr(fcntl, "ioctl", refuses)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "store_full"),
        (errno.EDQUOT, "store_full"),
        (errno.EFBIG, "store_full"),
        (errno.EIO, "store_failed"),
        (errno.EROFS, "store_failed"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
def test_whatever_the_disk_refuses_leaves_nothing_behind(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: str
) -> None:
    folder = tenant(tmp_path / "a")

    def fails(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        refuse_clones(patch)
        patch.setattr(os, call, fails)
        with pytest.raises(InputFileError, match=os.strerror(number)) as caught:
            admit(store, folder)
    assert caught.value.code == code
    assert (hidden(store), dict(store.entries)) == (set(), {})
    assert admit(store, folder).new


def test_an_entry_whose_name_cannot_be_made_durable_is_taken_back(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    tenant(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr("loraledger.adapters.store.store.sync_folder", fails)
        with pytest.raises(InputFileError, match="Input/output error"):
            admit(store, tmp_path / "a")
    assert [child.name for child in store.root.iterdir()] == [".lock"]
    assert admit(store, tmp_path / "a").new


def test_a_clone_is_what_is_hashed(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands for a file system that shares extents; the clone differs from what a second look at the source would give.
    folder = tenant(tmp_path / "a", b"v" * 100)
    expected = admit(store, tenant(tmp_path / "b", b"w" * 100))
    store.collect()

    def clone(target: int, request: int, source: int) -> int:
        assert request == 0x40049409
        data = os.pread(source, 1000, 0)
        os.write(target, data.replace(b"v", b"w"))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    assert admit(store, folder) == expected
    assert content(expected.path)[WEIGHTS] == b"w" * 100


def test_leftovers_are_cleared_and_what_is_foreign_is_named_and_kept(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store.open(root, None) as store:
        good = admit(store, tenant(tmp_path / "a"))
    precious = tenant(tmp_path / "precious")
    tenant(root / ".incoming-x").chmod(0o555)
    tenant(root / f".dropping-{good.digest}-1")
    (root / ".incoming-file").write_bytes(b"")
    (root / ".incoming-link").symlink_to(precious)
    (root / "README").write_text("mine")
    tenant(root / ("A" * 64))
    (root / ("1" * 64)).symlink_to(good.path)
    tenant(root / ("2" * 64))
    (root / ("2" * 64) / "more").touch()
    tenant(root / ("3" * 64))
    (root / ("3" * 64) / WEIGHTS).unlink()
    (root / ("3" * 64) / WEIGHTS).symlink_to(precious / WEIGHTS)
    names = {"README", "A" * 64, "1" * 64, "2" * 64, "3" * 64}
    with Store.open(root, None) as store:
        assert set(store.foreign) == names
        assert store.foreign["1" * 64] == "not a folder"
        assert list(store.entries) == [good.digest]
        store.settle()
        assert store.collect() == (good.digest,)
        assert {child.name for child in root.iterdir()} == names | {".lock", ".known"}
    assert content(precious) == content(root / ("A" * 64))


def test_a_store_has_one_owner(store: Store) -> None:
    with pytest.raises(ConfigError, match=rf"{store.root} is in use by the process with pid {os.getpid()}: stop"):
        Store.open(store.root, None)
    store.close()
    store.close()
    Store.open(store.root, None).close()


def test_a_folder_that_cannot_be_a_store_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="choose a folder"):
            Store.open(root, None)
