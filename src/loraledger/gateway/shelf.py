"""The adapters that are served now, and the stored copies that some replica may still read.

Theory of operation. Engines read weights again from the path under which they were registered: after a host eviction, in the
middle of a step, and long after the catalog has moved on. So a copy leaves the store only when it is in no catalog entry *and*
nobody can read it any more: no replica lists its name, no load of it is under way, no open request was sent to it. Listings are
seen as events pass by. Until each replica has listed its names once since the start, nothing is given up; a replica that is down
counts with what it listed last, because it may be alive behind a broken network.

A reread takes the folders in again. An adapter with new files is served from a new copy under a new engine-side name; one whose
folder became unreadable keeps its last good copy, because a tenant in the middle of an upload must not take itself down; one whose
folder is gone is no longer served.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from loraledger.adapters import CATALOG, Catalog, CatalogProblem, Store, build_catalog
from loraledger.config import Settings
from loraledger.errors import ConfigError, InputFileError
from loraledger.events import (
    AdapterDeclared,
    AdapterRetired,
    Event,
    ReplicaSampled,
    ReplicaUp,
    parse_engine_name,
    short_digest,
)
from loraledger.gateway.assemble import adapter_specs
from loraledger.kernel.state import FleetState

FLEET: Final = "fleet"
"""Holder of what some replica may read, beside the catalog."""


class Shelf:
    """Store and catalog of one gateway process. Opening it reads all adapters and blocks on the disk."""

    def __init__(self, settings: Settings) -> None:
        folder, store = settings.adapters.folder, settings.adapters.store
        if folder is not None and (_inside(store, folder) or _inside(folder, store)):
            raise ConfigError(f"adapters.store: {store} and {folder} lie in each other once links are followed")
        self._settings = settings
        self._listed: dict[str, tuple[str, ...]] = {}
        self._digests: dict[tuple[str, str], str] = {}
        """Adapter and first digits to the digest, of every version that this process ever served."""
        self.store = Store.open(
            settings.adapters.store, settings.adapters.store_bytes, adapter_limit=settings.adapters.adapter_bytes
        )
        self.catalog: Catalog = build_catalog(settings, self.store)
        self._learn(self.catalog)

    def close(self) -> None:
        """Let another process have the store."""
        self.store.close()

    def observe(self, event: Event) -> None:
        """Note which names a replica lists."""
        if isinstance(event, ReplicaUp | ReplicaSampled) and event.registered is not None:
            self._listed[event.replica] = event.registered

    def path_of(self, engine_name: str) -> str:
        """Where the files of this version of an adapter lie. Raises :class:`InputFileError` when the store has no such version."""
        parsed = parse_engine_name(engine_name)
        # By adapter first: twelve digits are few enough that somebody could make another adapter that has them too.
        digest = None if parsed is None else self._digests.get(parsed[:2])
        if digest is None or digest not in self.store.entries:
            raise InputFileError(f"the store has no files of {engine_name!r}", code="adapter_unknown")
        return str(self.store.path_of(digest).absolute())

    def read(self) -> Catalog:
        """The folders as they are now; what became a problem keeps its last good version. Blocks on the disk."""
        fresh = build_catalog(self._settings, self.store)
        names = {entry.name for entry in fresh.entries}
        troubled = {problem.name for problem in fresh.problems if problem.is_there}
        missing = [entry for entry in self.catalog.entries if entry.name not in names]
        halfway = [e for e in missing if e.name not in troubled and e.folder.path.is_dir()]
        kept = tuple(entry for entry in missing if entry.name in troubled or entry in halfway)
        problems = tuple(
            CatalogProblem(e.name, e.folder.path, "has no configuration any more: its last good version is served")
            for e in halfway
        )
        return Catalog(fresh.entries + kept, fresh.problems + problems, fresh.warnings)

    def swap(self, fresh: Catalog) -> None:
        """Serve ``fresh`` from now on; what it no longer has stays held until no replica can read it."""
        served = {entry.digest for entry in fresh.entries}
        for entry in self.catalog.entries:
            self.store.hold(entry.digest, FLEET)
        for digest in self.store.entries:  # also what was admitted and then not served after all
            if digest not in served:
                self.store.release(digest, CATALOG)
        self.catalog = fresh
        self._learn(fresh)

    def sweep(self, state: FleetState, open_digests: Iterable[str]) -> None:
        """Give up the hold on copies that nobody can read any more. What is removed when is the store's matter: :meth:`collect`."""
        if any(name not in self._listed for name in state.replicas):
            return
        readable = set(self._readable(state, open_digests))
        for digest in self.store.entries:
            if short_digest(digest) in readable:
                self.store.hold(digest, FLEET)
            else:
                self.store.release(digest, FLEET)
        self.store.settle()

    def collect(self) -> tuple[str, ...]:
        """Remove the copies that nobody holds; returns their digests. Blocks on the disk."""
        return self.store.collect()

    def _learn(self, catalog: Catalog) -> None:
        for entry in catalog.entries:
            self._digests[entry.name, short_digest(entry.digest)] = entry.digest

    def _readable(self, state: FleetState, open_digests: Iterable[str]) -> Iterator[str]:
        """First twelve digits of each digest that some replica may read."""
        yield from (short_digest(digest) for digest in open_digests)
        registrations = (r.engine_name for replica in state.replicas.values() for r in replica.registrations.values())
        for names in (*self._listed.values(), registrations):
            for name in names:
                parsed = parse_engine_name(name)
                if parsed is not None:
                    yield parsed[1]


def _inside(path: Path, other: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(other))


def differences(state: FleetState, catalog: Catalog, at: int) -> list[AdapterDeclared | AdapterRetired]:
    """What the kernel must be told so that it knows ``catalog``: who left first, then who is new or has another specification."""
    specs = {spec.name: spec for spec in adapter_specs(catalog)}
    retired: list[AdapterDeclared | AdapterRetired] = [
        AdapterRetired(at, name) for name in state.adapters if name not in specs
    ]
    changed = [
        AdapterDeclared(at, spec)
        for name, spec in specs.items()
        if name not in state.adapters or state.adapters[name].spec != spec
    ]
    return retired + changed


def names_of(events: Collection[AdapterDeclared | AdapterRetired], state: FleetState) -> dict[str, list[str]]:
    """For people: which adapters ``differences`` adds, changes and removes, as ``state`` is before it takes them in."""
    declared = [event.adapter.name for event in events if isinstance(event, AdapterDeclared)]
    return {
        "added": [name for name in declared if name not in state.adapters],
        "changed": [name for name in declared if name in state.adapters],
        "removed": [event.name for event in events if isinstance(event, AdapterRetired)],
    }
