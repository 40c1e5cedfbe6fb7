"""The catalog: every adapter that may be served, who may call it, and what could not be taken in.

Adapters come from two places, entries of the settings and the sub-folders of one folder. An entry that names a
sub-folder's path refines it (pin, tenants, another public name); otherwise two adapters with one name are a problem of
the second. Names found in a folder pass the same rules as written ones. One bad adapter never stops the rest: it
becomes a :class:`CatalogProblem` and is not served.

**Taking in** an adapter reads its headers, judges it against each replica's settings (and the base model's shapes, when
``base.path`` says where they are), and copies its files into the store: engines are only ever given the copy. What no replica
would apply is not served, because a base answer under an adapter's name is a wrong answer. Rank alone is left to the kernel,
which knows each replica's limit and tells the caller.

**Who may call.** An adapter that lists tenants belongs to those and no others. One that lists none goes to each tenant
whose ``adapters`` patterns match its name. Nothing else widens or narrows that.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from loraledger.adapters.reading.digest import content_digest
from loraledger.adapters.reading.files import CONFIG_NAME, contained
from loraledger.adapters.reading.folder import AdapterFolder, FolderReader
from loraledger.adapters.sizing.base import read_base
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.store.store import Store
from loraledger.adapters.verdict.alone import Finding
from loraledger.adapters.verdict.judge import Verdict, judge
from loraledger.config.checks import is_pattern
from loraledger.config.names import refused_adapters
from loraledger.config.schema import AdapterSpec, Replica, Settings, Tenant
from loraledger.errors import ConfigError, InputFileError
from loraledger.events import short_digest

CATALOG: Final = "catalog"
"""Holder of every stored copy that an entry is served from."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """An adapter that may be served."""

    name: str
    folder: AdapterFolder
    """As the tenant wrote it."""
    digest: str
    """Identity of the content, 64 hex digits."""
    path: Path
    """What engines are given: the copy in the store, or the folder itself where nothing will be served."""
    tenants: tuple[str, ...]
    """Names of the tenants that may call it, in the order of the settings."""
    pin: bool
    replicas: int | Literal["all"] | None


@dataclass(frozen=True, slots=True)
class CatalogProblem:
    """An adapter, or a grant, that could not be taken in."""

    name: str
    path: Path
    reason: str
    is_there: bool = True
    """There is something at ``path`` that should be an adapter. Not so of a grant to nothing."""

    def __str__(self) -> str:
        """One line for people; what cannot be printed is escaped: names of folders may be a tenant's."""
        text = f"{self.name} ({self.path}): {self.reason}".encode(errors="backslashreplace").decode()
        return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All adapters, listed ones first, then those of the folder by name."""

    entries: tuple[CatalogEntry, ...]
    problems: tuple[CatalogProblem, ...]
    warnings: tuple[str, ...]


def build_catalog(settings: Settings, store: Store | None = None) -> Catalog:
    """Read all adapters of ``settings`` and copy what is new into ``store``. Blocks on the disk.

    Without a store nothing is copied: the answer is for looking at, not for serving. Raises :class:`ConfigError` when the adapter
    folder cannot be listed, :class:`InputFileError` when ``base.path`` holds no base model.
    """
    folder = settings.adapters.folder
    base = None if settings.base.path is None else read_base(settings.base.path)
    specs = [*settings.adapters.list]
    problems: list[CatalogProblem] = []
    if folder is not None:
        specs += _found(folder, specs, problems)
    refused = refused_adapters([spec.name for spec in specs], settings.base.names)
    entries: list[CatalogEntry] = []
    warnings: list[str] = []
    versions: dict[str, str] = {}
    reader = FolderReader()
    for index, spec in enumerate(specs):
        listed = index < len(settings.adapters.list)
        try:
            if index in refused:
                raise InputFileError(f"the name {refused[index]}")
            root = None if listed else folder
            read = reader.read(spec.name, spec.path, root=root)
            warnings += _judged(read, base, settings.replicas)
            entry = _entry(spec, reader, read, root, settings.tenants, store)
            if versions.setdefault(short_digest(entry.digest), entry.digest) != entry.digest:
                raise InputFileError(
                    "the name of its version on the engines is that of another adapter: change any file of it"
                )
            entries.append(entry)
        except InputFileError as error:
            problems.append(CatalogProblem(spec.name, spec.path, error.message))
    if folder is not None:
        problems += _grants_to_nothing(settings.tenants, {spec.name for spec in specs}, folder)
    warnings += _warnings(entries, settings, {spec.name for spec in specs})
    return Catalog(tuple(entries), tuple(problems), tuple(warnings))


def engine_settings(replica: Replica) -> EngineSettings:
    """How the engine of ``replica`` was started, in the words of this room."""
    return EngineSettings(
        max_loras=replica.slots,
        max_lora_rank=replica.max_rank,
        max_cpu_loras=replica.host_entries,
        tensor_parallel=replica.tensor_parallel,
        fully_sharded_loras=replica.fully_sharded_loras,
        lora_target_modules=replica.lora_target_modules,
        lora_dtype=replica.lora_dtype,
        dtype=replica.dtype,
    )


def _entry(
    spec: AdapterSpec,
    reader: FolderReader,
    read: AdapterFolder,
    root: Path | None,
    tenants: Iterable[Tenant],
    store: Store | None,
) -> CatalogEntry:
    if read.sharded:
        raise InputFileError("its weights are in several files, which engines do not read: save them as one")
    if store is None:
        digest, path = content_digest(read.files), read.path
    else:
        stored = store.admit(*read.files, root=root, holder=CATALOG)
        digest, path = stored.digest, stored.path
        if reader.read(spec.name, path).layout_id != read.layout_id:  # what was judged must be what is served
            raise InputFileError("changed while it was taken in: have the folders read again")
    return CatalogEntry(spec.name, read, digest, path, granted(spec, tenants), spec.pin, spec.replicas)


def _judged(read: AdapterFolder, base: BaseModel | None, replicas: Iterable[Replica]) -> Iterator[str]:
    """Warnings about the adapter. Raises :class:`InputFileError` when no replica would load and apply it."""
    engines = dict.fromkeys(engine_settings(replica) for replica in replicas)
    verdicts = [judge(read, base, engine) for engine in engines]
    useless = [reason for verdict in verdicts if (reason := _uselessness(verdict)) is not None]
    if len(useless) == len(verdicts):
        raise InputFileError(f"no replica would apply it: {useless[0].message}" + _remedy(useless[0]))
    best = next(verdict for verdict in verdicts if _uselessness(verdict) is None)
    for finding in best.findings:
        if finding.effect == "drop":
            yield f"adapter {read.name!r}: {finding.message}{_remedy(finding)}"


def _uselessness(verdict: Verdict) -> Finding | None:
    for finding in verdict.findings:
        if finding.effect == "refuse" and finding.rule != "rank_over_max":
            return finding
    if verdict.outcome == "changes_nothing":
        return next((f for f in verdict.findings if f.effect == "drop"), verdict.findings[0])
    return None


def _remedy(finding: Finding) -> str:
    return f": {finding.remedy}" if finding.remedy else ""


def granted(spec: AdapterSpec, tenants: Iterable[Tenant]) -> tuple[str, ...]:
    """Names of ``tenants`` that may call the adapter of ``spec``."""
    if spec.tenants:
        return tuple(tenant.name for tenant in tenants if tenant.name in spec.tenants)
    return tuple(
        tenant.name for tenant in tenants if any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in tenant.adapters)
    )


def _found(folder: Path, listed: Sequence[AdapterSpec], problems: list[CatalogProblem]) -> Iterator[AdapterSpec]:
    """Sub-folders of ``folder`` that are adapters and that no entry names by path, sorted by name."""
    try:
        children = sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    except OSError as error:
        message = f"adapters.folder: {folder} cannot be listed: {error.strerror}: create it or correct the path"
        raise ConfigError(message, param="adapters.folder") from error
    # realpath, unlike resolve, takes a loop of links without raising; reading the entry will name it.
    taken = {Path(os.path.realpath(spec.path)) for spec in listed}
    for child in children:
        try:
            config = child / CONFIG_NAME
            if not (config.exists() or config.is_symlink()):
                continue
            if contained(folder, child.name) not in taken:
                # Not validated: a name that is not even Unicode must become a problem of its own, not an exception.
                yield AdapterSpec.model_construct(name=child.name, path=child)
        except OSError as error:
            problems.append(CatalogProblem(child.name, child, f"cannot be read: {error.strerror}"))
        except InputFileError as error:
            problems.append(CatalogProblem(child.name, child, error.message))


def _grants_to_nothing(tenants: Iterable[Tenant], names: set[str], folder: Path) -> Iterator[CatalogProblem]:
    for tenant in tenants:
        for grant in tenant.adapters:
            if not is_pattern(grant) and grant not in names:
                reason = f"is granted to tenant {tenant.name!r}, and neither an entry nor a sub-folder has that name"
                yield CatalogProblem(grant, folder, reason, is_there=False)


def _warnings(entries: Sequence[CatalogEntry], settings: Settings, names: set[str]) -> Iterator[str]:
    for entry in entries:
        if not entry.tenants:
            yield f"adapter {entry.name!r} is granted to no tenant: list tenants on it, or match it in a tenant's adapters"
    if settings.adapters.folder is not None:
        for tenant in settings.tenants:
            for grant in tenant.adapters:
                if is_pattern(grant) and not any(fnmatch.fnmatchcase(name, grant) for name in names):
                    yield f"tenant {tenant.name!r}: the pattern {grant!r} matches no adapter"
