"""Admission against files that are not what they seem, or change while they are read."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.store.test_disk import refuse_clones
from adapters.store.test_store import CONFIG, WEIGHTS, admit, content, hidden, tenant
from loraledger.adapters.reading.digest import content_digest
from loraledger.adapters.reading.files import config_file, weights_file
from loraledger.adapters.store.admission import opened
from loraledger.adapters.store.store import Store
from loraledger.errors import InputFileError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", None) as store:
        yield store


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


STRANGE: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "loop": lambda path: path.symlink_to(path),
    "missing": lambda _: None,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("root", [None, Path("/")])
def test_only_regular_files_are_read(store: Store, tmp_path: Path, kind: str, name: str, root: Path | None) -> None:
    folder = tenant(tmp_path / "a")
    (folder / name).unlink()
    STRANGE[kind](folder / name)
    with pytest.raises(InputFileError, match=name) as caught:
        store.admit(folder / CONFIG, folder / WEIGHTS, root=root)
    assert "\n" not in caught.value.message
    assert (hidden(store), dict(store.entries)) == (set(), {})


def test_a_path_that_is_none_is_an_input_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="cannot be opened"):
        store.admit(tmp_path / "nul\0", tmp_path / "x")


def test_a_link_put_in_place_after_the_check_is_refused(store: Store, tmp_path: Path) -> None:
    tenants, secret = tmp_path / "tenants", tenant(tmp_path / "secret", b"secret")
    folder = tenant(tenants / "evil")
    config, weights = config_file(folder, tenants), weights_file(folder, tenants)
    weights.unlink()
    weights.symlink_to(secret / WEIGHTS)
    with pytest.raises(InputFileError, match="leads out of"):
        store.admit(config, weights, root=tenants)


def test_a_folder_swapped_after_the_check_is_refused(store: Store, tmp_path: Path) -> None:
    tenants, secret = tmp_path / "tenants", tenant(tmp_path / "secret", b"secret")
    folder = tenant(tenants / "evil")
    config, weights = config_file(folder, tenants), weights_file(folder, tenants)
    folder.rename(tenants / "gone")
    folder.symlink_to(secret)
    with pytest.raises(InputFileError, match="leads out of"):
        store.admit(config, weights, root=tenants)
    assert dict(store.entries) == {}


def test_links_that_stay_below_the_root_are_followed(store: Store, tmp_path: Path) -> None:
    # As a download cache lays files out: names are links to blobs.
    folder, blobs = tenant(tmp_path / "t" / "a"), tenant(tmp_path / "t" / "blobs", b"blob")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(blobs / WEIGHTS)
    (tmp_path / "way").symlink_to(tmp_path / "t")
    stored = store.admit(folder / CONFIG, folder / WEIGHTS, root=tmp_path / "way")
    assert content(stored.path)[WEIGHTS] == b"blob"
    assert not (stored.path / WEIGHTS).is_symlink()
    assert admit(store, folder).digest == stored.digest


SWAP = """
import os, sys
folder, spare, link = sys.argv[1:]
while True:
    for one, two in ((folder, spare), (link, folder), (folder, link), (spare, folder)):
        os.rename(one, two)
"""


def test_swaps_in_a_race_never_let_foreign_bytes_in(store: Store, tmp_path: Path) -> None:
    tenants, secret = tmp_path / "tenants", tenant(tmp_path / "secret", b"secret")
    folder, link = tenant(tenants / "evil"), tenants / "link"
    link.symlink_to(secret)
    reasons: set[str] = set()
    swapper = subprocess.Popen([sys.executable, "-c", SWAP, folder, tenants / "spare", link])
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (store.entries and any("leads out" in reason for reason in reasons)):
            try:
                store.admit(folder / CONFIG, folder / WEIGHTS, root=tenants)
            except InputFileError as error:
                reasons.add(error.message)
    finally:
        swapper.kill()
        swapper.wait()
    assert any("leads out" in reason for reason in reasons), "the race was never lost: the test shows nothing"
    assert [content(store.path_of(digest))[WEIGHTS] for digest in store.entries] == [b"w" * 100]


@pytest.mark.parametrize("deed", ["grow", "shrink", "edit", "touch"])
def test_a_file_that_changes_while_it_is_copied_is_given_up(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    folder = tenant(tmp_path / "a", b"w" * 3_000_000)
    os.utime(folder / WEIGHTS, (1, 1))
    real = os.write

    def write(target: int, data: bytes | memoryview) -> int:
        weights = folder / WEIGHTS
        if deed == "touch":
            os.utime(weights, (2, 2))
        elif deed == "edit":
            with weights.open("r+b") as stream:
                stream.write(b"x")
        else:
            os.truncate(weights, 4_000_000 if deed == "grow" else 1_000_000)
        return real(target, data)

    with monkeypatch.context() as patch:
        refuse_clones(patch)
        patch.setattr(os, "write", write)
        with pytest.raises(InputFileError, match=f"{WEIGHTS} changed while it was read"):
            admit(store, folder)
    assert (hidden(store), dict(store.entries)) == (set(), {})


def test_a_file_that_changes_while_only_its_digest_is_taken_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tenant(tmp_path / "a")
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.utime(folder / WEIGHTS, (2, 2))
        return real(fd, buffers, offset)

    with opened(folder / CONFIG, folder / WEIGHTS) as source:
        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(InputFileError, match="changed while it was read"):
            source.digest()


def test_a_clone_of_another_length_is_given_up(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", lambda target, *_: os.write(target, b"w" * 101))
    with pytest.raises(InputFileError, match="changed while it was read"):
        admit(store, tenant(tmp_path / "a"))


def test_short_writes_are_continued(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    refuse_clones(monkeypatch)
    monkeypatch.setattr(os, "write", lambda target, data: real(target, bytes(data[:7])))
    stored = admit(store, tenant(tmp_path / "a", bytes(range(256)) * 10))
    assert content(stored.path)[WEIGHTS] == bytes(range(256)) * 10


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60, deadline=None
)
@given(config=st.binary(max_size=30), weights=st.binary(max_size=30), pad=st.sampled_from([0, 2**20 - 1, 2**20, 2**21]))
def test_the_digest_is_sha256_of_lengths_and_bytes(tmp_path: Path, config: bytes, weights: bytes, pad: int) -> None:
    weights += b"\7" * pad
    folder = tenant(tmp_path / "a", weights, config)
    parts = (len(config).to_bytes(8, "little"), config, len(weights).to_bytes(8, "little"), weights)
    with opened(folder / CONFIG, folder / WEIGHTS) as source:
        assert (
            source.digest()
            == content_digest([folder / CONFIG, folder / WEIGHTS])
            == hashlib.sha256(b"".join(parts)).hexdigest()
        )
