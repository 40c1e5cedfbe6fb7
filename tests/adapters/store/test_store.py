"""The store: what it keeps, what it lets go, and that nothing a tenant does changes it."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loraledger.adapters.store.admission import Source
from loraledger.adapters.store.known_digests import KnownDigests
from loraledger.adapters.store.store import EARLIER, Store, Stored
from loraledger.errors import InputFileError, InternalError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MIB = 1024 * 1024


def tenant(folder: Path, weights: bytes = b"w" * 100, config: bytes = b'{"r": 8}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_bytes(config)
    (folder / WEIGHTS).write_bytes(weights)
    return folder


def admit(store: Store, folder: Path, holder: str | None = None) -> Stored:
    return store.admit(folder / CONFIG, folder / WEIGHTS, holder=holder)


def content(path: Path) -> dict[str, bytes]:
    return {child.name: child.read_bytes() for child in path.iterdir()}


def hidden(store: Store) -> set[str]:
    return {child.name for child in store.root.iterdir() if child.name.startswith(".")} - {".lock", ".known"}


def no_reading(*_: object) -> int:
    raise AssertionError("a file was read")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "new" / "store", None) as store:
        yield store


def test_an_admitted_adapter_lies_under_its_digest_with_the_two_names(store: Store, tmp_path: Path) -> None:
    tenant(tmp_path / "a", b"\0\1" * MIB)
    (tmp_path / "a" / WEIGHTS).rename(tmp_path / "a" / "other.name")
    stored = store.admit(tmp_path / "a" / CONFIG, tmp_path / "a" / "other.name")
    assert stored == Stored(stored.digest, store.root / stored.digest, 2 * MIB + 8, new=True)
    assert content(stored.path) == {CONFIG: b'{"r": 8}', WEIGHTS: b"\0\1" * MIB}
    assert store.path_of(stored.digest) == stored.path
    assert list(store.entries) == [stored.digest]
    assert store.bytes == store.entries[stored.digest].bytes == stored.bytes
    assert abs(store.entries[stored.digest].admitted_at - time.time_ns()) < 60 * 10**9
    assert hidden(store) == set()


def test_an_entry_is_read_only_within_the_umask(store: Store, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = admit(store, tenant(tmp_path / "a")).path
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, path / CONFIG, path / WEIGHTS)]
    assert modes == [0o550, 0o440, 0o440]


def test_equal_content_is_kept_once(store: Store, tmp_path: Path) -> None:
    first = admit(store, tenant(tmp_path / "a"))
    again = admit(store, tenant(tmp_path / "b"))
    assert (first.new, again.new) == (True, False)
    assert (again.digest, again.path) == (first.digest, first.path)
    assert store.bytes == first.bytes
    assert hidden(store) == set()


def test_a_stored_file_shares_no_inode_with_the_tenants(store: Store, tmp_path: Path) -> None:
    folder = tenant(tmp_path / "a")
    stored = admit(store, folder)
    assert (stored.path / WEIGHTS).stat().st_ino != (folder / WEIGHTS).stat().st_ino
    assert (folder / WEIGHTS).stat().st_nlink == 1


@pytest.mark.parametrize("deed", ["edit", "truncate", "append", "replace", "delete", "chmod", "link elsewhere"])
def test_what_a_tenant_does_afterwards_changes_no_stored_byte(store: Store, tmp_path: Path, deed: str) -> None:
    folder = tenant(tmp_path / "a")
    stored = admit(store, folder)
    before, weights = content(stored.path), folder / WEIGHTS
    if deed == "edit":
        with weights.open("r+b") as stream:
            stream.write(b"other")
    elif deed == "truncate":
        os.truncate(weights, 3)
    elif deed == "append":
        with weights.open("ab") as stream:
            stream.write(b"more")
    elif deed == "replace":
        (folder / "new").write_bytes(b"v" * 100)
        (folder / "new").replace(weights)
    elif deed == "chmod":
        weights.chmod(0)
    else:
        shutil.rmtree(folder)
        if deed == "link elsewhere":
            folder.symlink_to(tenant(tmp_path / "b", b"b"))
    assert content(stored.path) == before
    assert store.verify(stored.digest)


def test_new_weights_of_equal_shape_under_the_same_name_are_another_entry(tmp_path: Path) -> None:
    # Written in place within the grain of the clock, times set back: the content alone tells them apart.
    folder = tenant(tmp_path / "a", b"v" * 100)
    with Store.open(tmp_path / "store", None) as store:
        old = admit(store, folder)
        with (folder / WEIGHTS).open("r+b") as stream:
            stream.write(b"w" * 100)
        os.utime(folder / WEIGHTS, (1, 1))
        new = admit(store, folder)
        assert (new.new, new.bytes) == (True, old.bytes)
        assert new.digest != old.digest
        assert content(old.path)[WEIGHTS] == b"v" * 100
        assert content(new.path)[WEIGHTS] == b"w" * 100


def test_a_file_known_unchanged_is_not_read_again_even_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tenant(tmp_path / "a")
    with Store.open(tmp_path / "store", None, now=lambda: time.time_ns() + 3 * 10**9) as store:
        first = admit(store, folder)
    monkeypatch.setattr(os, "preadv", no_reading)
    with Store.open(tmp_path / "store", None) as store:
        again = admit(store, folder, "catalog:a")
        assert again == Stored(first.digest, first.path, first.bytes, new=False)
        assert store.holders(first.digest) == {EARLIER, "catalog:a"}


def test_a_file_that_was_young_when_read_is_read_again(store: Store, tmp_path: Path) -> None:
    folder = tenant(tmp_path / "a")
    admit(store, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", no_reading)
        with pytest.raises(AssertionError, match="a file was read"):
            admit(store, folder)
    assert hidden(store) == set()


def test_a_known_file_whose_entry_was_collected_is_taken_in_again(tmp_path: Path) -> None:
    folder = tenant(tmp_path / "a")
    with Store.open(tmp_path / "store", None, now=lambda: time.time_ns() + 3 * 10**9) as store:
        first = admit(store, folder)
        assert store.collect() == (first.digest,)
        assert admit(store, folder) == first


def test_a_known_file_whose_entry_vanished_is_taken_in_again_and_stays_held(tmp_path: Path) -> None:
    folder = tenant(tmp_path / "a")
    with Store.open(tmp_path / "store", None, now=lambda: time.time_ns() + 3 * 10**9) as store:
        first = admit(store, folder, "r0")
        shutil.rmtree(first.path)
        assert admit(store, folder) == first
        assert store.holders(first.digest) == {"r0"}
        assert content(first.path)[WEIGHTS] == b"w" * 100


def test_an_entry_that_was_damaged_in_place_is_refused_and_not_touched(tmp_path: Path) -> None:
    folder = tenant(tmp_path / "a")
    with Store.open(tmp_path / "store", None) as store:
        stored = admit(store, folder)
        stored.path.chmod(0o755)
        (stored.path / WEIGHTS).unlink()
        with pytest.raises(InputFileError, match="is damaged") as caught:
            admit(store, folder)
        assert caught.value.code == "store_damaged"
        assert content(stored.path) == {CONFIG: b'{"r": 8}'}
        assert hidden(store) == set()


def away_and_back(store: Store, folder: Path) -> None:
    """The store's disk is gone during one admission of ``folder``."""
    away = store.root.with_name("away")
    store.root.rename(away)
    with pytest.raises(InputFileError) as caught:
        admit(store, folder)
    assert caught.value.code == "store_failed"
    away.rename(store.root)


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_copy_that_was_away_for_a_while_is_served_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewritten: bool
) -> None:
    folder = tenant(tmp_path / "a")
    with Store.open(tmp_path / "store", None, now=lambda: time.time_ns() + 3 * 10**9) as store:
        first = admit(store, folder, "catalog")
        away_and_back(store, folder)
        if rewritten:
            folder = tenant(tmp_path / "b")
        else:
            monkeypatch.setattr(Source, "copy_into", no_reading)
        assert admit(store, folder, "r0") == replace(first, new=False)
        assert list(store.entries) == [first.digest]
        assert (store.bytes, store.holders(first.digest)) == (first.bytes, frozenset({"catalog", "r0"}))
        assert hidden(store) == set()


def test_a_copy_that_came_back_changed_is_not_served(tmp_path: Path) -> None:
    folder = tenant(tmp_path / "a")
    with Store.open(tmp_path / "store", None, now=lambda: time.time_ns() + 3 * 10**9) as store:
        first = admit(store, folder)
        away_and_back(store, folder)
        (first.path / WEIGHTS).chmod(0o644)
        (first.path / WEIGHTS).write_bytes(b"v" * 100)
        with pytest.raises(InputFileError, match="is damaged") as caught:
            admit(store, folder)
        assert caught.value.code == "store_damaged"
        assert store.entries == {}


def test_an_adapter_over_the_limit_of_one_is_refused_unread_with_both_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = tenant(tmp_path / "small", b"w" * 100), tenant(tmp_path / "large")
    os.truncate(large / WEIGHTS, 2 * 10**9)
    with Store.open(tmp_path / "store", None, adapter_limit=108) as store:
        assert admit(store, small).bytes == 108
        monkeypatch.setattr(os, "preadv", no_reading)
        with pytest.raises(InputFileError, match=r"2,000,000,008 bytes and .* 108") as caught:
            admit(store, large)
        assert caught.value.code == "adapter_too_large"
        assert hidden(store) == set()


def test_verify_sees_bytes_that_were_changed_in_the_store(store: Store, tmp_path: Path) -> None:
    stored = admit(store, tenant(tmp_path / "a"))
    assert store.verify(stored.digest)
    (stored.path / WEIGHTS).chmod(0o644)
    with (stored.path / WEIGHTS).open("r+b") as stream:
        stream.write(b"x")
    assert not store.verify(stored.digest)
    stored.path.chmod(0o755)
    (stored.path / WEIGHTS).unlink()
    assert not store.verify(stored.digest)
    with pytest.raises(InternalError, match="no entry"):
        store.verify("0" * 64)


def test_a_held_entry_is_never_collected(store: Store, tmp_path: Path) -> None:
    one, two = (admit(store, tenant(tmp_path / name, name.encode())) for name in "ab")
    store.hold(one.digest, "r0")
    store.hold(one.digest, "r0")
    store.hold(one.digest, "catalog:a")
    assert store.collect() == (two.digest,)
    store.release(one.digest, "r0")
    store.release(one.digest, "nobody")
    assert store.holders(one.digest) == {"catalog:a"}
    assert store.collect() == ()
    assert one.path.is_dir()
    store.release(one.digest, "catalog:a")
    assert store.collect() == (one.digest,)
    assert (store.bytes, list(store.entries), hidden(store)) == (0, [], set())
    assert not one.path.exists()


def test_collection_goes_by_age_and_stops_when_enough_is_free(store: Store, tmp_path: Path) -> None:
    all_ = [admit(store, tenant(tmp_path / name, name.encode() * 92)) for name in "abcd"]
    store.hold(all_[0].digest, "r0")
    assert store.collect(101) == (all_[1].digest, all_[2].digest)
    assert store.collect(0) == ()
    assert list(store.entries) == [all_[0].digest, all_[3].digest]


def test_an_entry_that_vanished_is_collected_like_others(store: Store, tmp_path: Path) -> None:
    stored = admit(store, tenant(tmp_path / "a"))
    shutil.rmtree(stored.path)
    assert store.collect() == (stored.digest,)
    assert (store.bytes, store.collect(), hidden(store)) == (0, (), set())


def test_age_outlives_a_restart(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", None) as store:
        old = [admit(store, tenant(tmp_path / name, name.encode())) for name in "abcdef"]
    for number, stored in enumerate(old):
        os.utime(stored.path, (1, 100 - number))
    with Store.open(tmp_path / "store", None) as store:
        assert list(store.entries) == [stored.digest for stored in reversed(old)]
        assert store.entries[old[0].digest].admitted_at == 100 * 10**9


def test_paths_stay_true_when_the_working_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open(Path("store"), None) as store:
        assert admit(store, tenant(tmp_path / "a")).path.parent == tmp_path / "store"


def test_a_kill_costs_no_more_than_a_bound_of_reading_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraledger.adapters.store.store._SAVE_EVERY", 250)
    sizes = []
    with Store.open(tmp_path / "store", None, now=lambda: time.time_ns() + 3 * 10**9) as store:
        for name in "abc":
            admit(store, tenant(tmp_path / name, name.encode() * 92))
            sizes.append(len(KnownDigests.load(store.root / ".known")))
    assert sizes == [0, 0, 3]


def test_an_entry_that_is_gone_cannot_be_held(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="no entry"):
        store.hold("0" * 64, "r0")
    with pytest.raises(InternalError, match="no entry"):
        store.path_of("0" * 64)
    assert store.holders("0" * 64) == frozenset()


def test_entries_of_an_earlier_run_are_held_until_the_caller_has_settled(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", None) as store:
        old = [admit(store, tenant(tmp_path / name, name.encode())).digest for name in "cab"]
    with Store.open(tmp_path / "store", 10) as store:
        assert list(store.entries) == old
        assert store.holders(old[0]) == {EARLIER}
        with pytest.raises(InputFileError, match="has no room"):
            admit(store, tenant(tmp_path / "new", b"new"))
        store.hold(old[1], "r0")
        store.settle()
        assert store.collect() == (old[0], old[2])


def test_over_the_limit_the_oldest_without_a_holder_makes_room(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", 250) as store:
        a = admit(store, tenant(tmp_path / "a", b"a" * 92), "r0")
        b = admit(store, tenant(tmp_path / "b", b"b" * 92))
        c = admit(store, tenant(tmp_path / "c", b"c" * 92))
        assert list(store.entries) == [a.digest, c.digest]
        assert not b.path.exists()


def test_without_room_nothing_is_removed_and_the_message_has_the_numbers(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", 250) as store:
        admit(store, tenant(tmp_path / "a", b"a" * 92), "r0")
        b = admit(store, tenant(tmp_path / "b", b"b" * 92))
        with pytest.raises(InputFileError, match=r"needs 200 B, the limit is 250 B, 200 B are used") as caught:
            admit(store, tenant(tmp_path / "c", b"c" * 192))
        assert caught.value.code == "store_full"
        assert b.digest in store.entries
        assert hidden(store) == set()


def test_a_full_store_still_recognises_what_it_has(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", 210) as store:
        a = admit(store, tenant(tmp_path / "a", b"a" * 92))
        admit(store, tenant(tmp_path / "b", b"b" * 92))
        assert admit(store, tenant(tmp_path / "copy of a", b"a" * 92)) == Stored(a.digest, a.path, 100, new=False)
        assert len(store.entries) == 2


def test_a_file_of_holes_larger_than_the_disk_is_refused_unread(store: Store, tmp_path: Path) -> None:
    folder = tenant(tmp_path / "a")
    os.truncate(folder / WEIGHTS, 8 * 1024**4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", no_reading)
        with pytest.raises(InputFileError, match=r"needs 8 TiB, no limit set, 0 B are used, .* of the disk are free"):
            admit(store, folder)


def test_a_closed_store_admits_and_collects_nothing(store: Store, tmp_path: Path) -> None:
    store.close()
    with pytest.raises(InternalError, match="closed"):
        admit(store, tenant(tmp_path / "a"))
    with pytest.raises(InternalError, match="closed"):
        store.collect()
