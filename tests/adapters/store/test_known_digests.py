"""Known digests: what they recognise, what they must not, and what damage costs (time, never a wrong digest)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.adapters.store import known_digests
from loraledger.adapters.store.known_digests import SETTLED_NS, KnownDigests, PairKey, StatKey, stat_key

OLD = 1_000_000_000
LATER = OLD + SETTLED_NS
DIGEST = "a" * 64


def key(number: int = 0, **times: int) -> PairKey:
    file: StatKey = (1, number, 10, times.get("mtime", OLD), times.get("ctime", OLD))
    return (file, (1, 99, 10, OLD, OLD))


def test_files_that_have_settled_are_known() -> None:
    known = KnownDigests()
    known.put(key(), DIGEST, LATER)
    assert known.get(key()) == DIGEST
    assert known.get(key(1)) is None


@pytest.mark.parametrize("times", [{"mtime": OLD + 1}, {"ctime": OLD + 1}, {"ctime": LATER * 2}, {"mtime": LATER * 2}])
def test_files_that_are_young_or_from_the_future_are_not_known(times: dict[str, int]) -> None:
    known = KnownDigests()
    known.put(key(**times), DIGEST, LATER)
    swapped = (key(**times)[1], key(**times)[0])
    known.put(swapped, DIGEST, LATER)
    assert len(known) == 0


def test_each_part_of_the_stat_counts_but_the_time_of_access(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    seen = {stat_key(file.stat())}
    os.utime(file, ns=(5, file.stat().st_mtime_ns))
    changed = file.stat()
    seen.add(stat_key(changed))
    assert changed.st_atime_ns == 5
    file.write_bytes(b"four")
    os.utime(file, ns=(5, 7))
    seen.add(stat_key(file.stat()))
    # Times set back by hand: the change time tells.
    file.write_bytes(b"five")
    os.utime(file, ns=(5, 7))
    seen.add(stat_key(file.stat()))
    assert len(seen) == 4


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    known = KnownDigests()
    for number in (0, 2**64 - 1):
        known.put(key(number), f"{number:064x}"[-64:], LATER)
    assert known.save(tmp_path / "k", tmp_path / "scratch")
    loaded = KnownDigests.load(tmp_path / "k")
    assert len(loaded) == 2
    assert loaded.get(key(2**64 - 1)) == f"{2**64 - 1:064x}"
    assert [child.name for child in tmp_path.iterdir()] == ["k"]


@given(data=st.data())
def test_a_damaged_file_is_an_empty_one(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("known")
    known = KnownDigests()
    known.put(key(), DIGEST, LATER)
    known.save(folder / "k", folder / "scratch")
    raw = bytearray((folder / "k").read_bytes())
    where = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[where] ^= data.draw(st.integers(1, 255))
    else:
        del raw[where:]
    (folder / "k").write_bytes(raw)
    assert len(KnownDigests.load(folder / "k")) == 0


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"null", b"[[1,2,3]]", b"[" * 10_000, b'[[[1,2,3,4,"5"],[],"d"]]'])
def test_a_file_that_says_something_else_is_an_empty_one(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "k").write_bytes(known_digests._checksum(body) + b"\n" + body)
    assert len(KnownDigests.load(tmp_path / "k")) == 0
    (tmp_path / "k").unlink()
    assert len(KnownDigests.load(tmp_path / "k")) == 0
    (tmp_path / "k").mkdir()
    assert len(KnownDigests.load(tmp_path / "k")) == 0


def test_a_file_over_the_limit_is_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownDigests()
    known.put(key(), DIGEST, LATER)
    known.save(tmp_path / "k", tmp_path / "scratch")
    monkeypatch.setattr(known_digests, "_FILE_LIMIT", (tmp_path / "k").stat().st_size - 1)
    assert len(KnownDigests.load(tmp_path / "k")) == 0
    monkeypatch.setattr(known_digests, "_FILE_LIMIT", (tmp_path / "k").stat().st_size)
    assert len(KnownDigests.load(tmp_path / "k")) == 1


def test_a_disk_that_refuses_keeps_the_old_file(tmp_path: Path) -> None:
    known = KnownDigests()
    known.put(key(), DIGEST, LATER)
    assert known.save(tmp_path / "k", tmp_path / "scratch")
    known.put(key(1), DIGEST, LATER)
    assert not known.save(tmp_path / "k", tmp_path / "missing" / "scratch")
    assert len(KnownDigests.load(tmp_path / "k")) == 1


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_digests, "ENTRIES", 2)
    known = KnownDigests()
    known.put(key(0), DIGEST, LATER)
    known.put(key(1), DIGEST, LATER)
    known.get(key(0))
    known.put(key(2), DIGEST, LATER)
    assert (known.get(key(0)), known.get(key(1)), known.get(key(2))) == (DIGEST, None, DIGEST)
