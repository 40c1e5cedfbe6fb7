"""The store against a model of it: any order of admissions, holds, releases, collections and restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adapters.store.test_store import admit, hidden, tenant
from loraledger.adapters.store.store import EARLIER, Store
from loraledger.errors import InputFileError

LIMIT = 400
CONTENTS = st.integers(0, 7)
HOLDERS = st.sampled_from(["r0", "r1", "catalog"])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.digests: dict[int, str] = {}
        self.present: list[str] = []
        """Oldest first."""
        self.size: dict[str, int] = {}
        self.held: dict[str, set[str]] = {}

    @initialize()
    def start(self) -> None:
        self.store = Store.open(self.folder / "store", LIMIT)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def loose(self) -> list[str]:
        return [digest for digest in self.present if not self.held.get(digest)]

    def forget(self, digests: list[str]) -> None:
        self.present = [digest for digest in self.present if digest not in digests]

    def oldest_for(self, need: int) -> list[str]:
        freed, chosen = 0, []
        for digest in self.loose():
            if freed >= need:
                break
            chosen.append(digest)
            freed += self.size[digest]
        return chosen

    @rule(number=CONTENTS, holder=st.none() | HOLDERS)
    def take_in(self, number: int, holder: str | None) -> None:
        folder = tenant(self.folder / "tenant", bytes([number]) * (60 + 20 * (number % 4)), b"")
        need = 60 + 20 * (number % 4)
        known = self.digests.get(number)
        if known in self.present:
            stored = admit(self.store, folder, holder)
            assert (stored.digest, stored.new) == (known, False)
        else:
            short = sum(self.size[digest] for digest in self.present) + need - LIMIT
            if short > sum(self.size[digest] for digest in self.loose()):
                with pytest.raises(InputFileError, match="has no room"):
                    admit(self.store, folder, holder)
                return
            stored = admit(self.store, folder, holder)
            assert stored.new
            self.forget(self.oldest_for(short) if short > 0 else [])
            self.present.append(stored.digest)
            self.digests[number] = stored.digest
            self.size[stored.digest] = need
        if holder is not None:
            self.held.setdefault(stored.digest, set()).add(holder)

    @precondition(lambda self: self.present)
    @rule(data=st.data(), holder=HOLDERS)
    def hold(self, data: st.DataObject, holder: str) -> None:
        digest = data.draw(st.sampled_from(self.present))
        self.store.hold(digest, holder)
        self.held.setdefault(digest, set()).add(holder)

    @precondition(lambda self: self.digests)
    @rule(data=st.data(), holder=HOLDERS)
    def release(self, data: st.DataObject, holder: str) -> None:
        digest = data.draw(st.sampled_from(sorted(self.digests.values())))
        self.store.release(digest, holder)
        self.held.get(digest, set()).discard(holder)

    @rule(need=st.none() | st.integers(0, LIMIT))
    def collect(self, need: int | None) -> None:
        expected = self.loose() if need is None else self.oldest_for(need)
        assert list(self.store.collect(need)) == expected
        self.forget(expected)

    @rule()
    def settle(self) -> None:
        self.store.settle()
        for holders in self.held.values():
            holders.discard(EARLIER)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = Store.open(self.folder / "store", LIMIT)
        # The file system's clock may give neighbours one time; the order among them is then the store's own.
        found = list(self.store.entries)
        assert sorted(found) == sorted(self.present)
        self.present = found
        self.held = {digest: {EARLIER} for digest in found}

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert list(self.store.entries) == self.present
        assert self.store.bytes == sum(self.size[digest] for digest in self.present) <= LIMIT
        assert hidden(self.store) == set()
        on_disk = {child.name for child in self.store.root.iterdir() if not child.name.startswith(".")}
        assert on_disk == set(self.present)
        for digest in self.present:
            assert self.store.holders(digest) == self.held.get(digest, set())


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
