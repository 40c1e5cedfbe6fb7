"""The catalog: every adapter that may be served, who may call it, and what could not be taken in.

Adapters come from two places, entries of the settings and the sub-folders of one folder. An entry that names a
sub-folder's path refines it (pin, tenants, another public name); otherwise two adapters with one name are a problem of
the second. Names found in a folder pass the same rules as written ones. One bad adapter never stops the rest: it
becomes a :class:`CatalogProblem` and is not served.

**Who may call.** An adapter that lists tenants belongs to those and no others. One that lists none goes to each tenant
whose ``adapters`` patterns match its name. Nothing else widens or narrows that.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loraledger.adapters.files import CONFIG_NAME, contained
from loraledger.adapters.folder import AdapterFolder, read_folder
from loraledger.config.checks import is_pattern
from loraledger.config.names import refused_adapters
from loraledger.config.schema import AdapterSpec, Settings, Tenant
from loraledger.errors import ConfigError, InputFileError


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """An adapter that may be served."""

    name: str
    folder: AdapterFolder
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

    def __str__(self) -> str:
        """One line for people; bytes of a file name that are not Unicode are escaped."""
        return f"{self.name} ({self.path}): {self.reason}".encode(errors="backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class Catalog:
    """All adapters, listed ones first, then those of the folder by name."""

    entries: tuple[CatalogEntry, ...]
    problems: tuple[CatalogProblem, ...]
    warnings: tuple[str, ...]


def build_catalog(settings: Settings) -> Catalog:
    """Read all adapters of ``settings``. Blocks on the disk: every weights file is read once for its digest.

    Raises :class:`ConfigError` when the adapter folder itself cannot be listed.
    """
    folder = settings.adapters.folder
    specs = [*settings.adapters.list]
    problems: list[CatalogProblem] = []
    if folder is not None:
        specs += _found(folder, specs, problems)
    refused = refused_adapters([spec.name for spec in specs], settings.base.names)
    entries: list[CatalogEntry] = []
    for index, spec in enumerate(specs):
        listed = index < len(settings.adapters.list)
        try:
            if index in refused:
                raise InputFileError(f"the name {refused[index]}")
            read = read_folder(spec.name, spec.path, root=None if listed else folder)
        except InputFileError as error:
            problems.append(CatalogProblem(spec.name, spec.path, error.message))
            continue
        entries.append(CatalogEntry(spec.name, read, granted(spec, settings.tenants), spec.pin, spec.replicas))
    if folder is not None:
        problems += _grants_to_nothing(settings.tenants, {spec.name for spec in specs}, folder)
    return Catalog(tuple(entries), tuple(problems), tuple(_warnings(entries, settings, {spec.name for spec in specs})))


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
                yield CatalogProblem(grant, folder, reason)


def _warnings(entries: Sequence[CatalogEntry], settings: Settings, names: set[str]) -> Iterator[str]:
    for entry in entries:
        if not entry.tenants:
            yield f"adapter {entry.name!r} is granted to no tenant: list tenants on it, or match it in a tenant's adapters"
    if settings.adapters.folder is not None:
        for tenant in settings.tenants:
            for grant in tenant.adapters:
                if is_pattern(grant) and not any(fnmatch.fnmatchcase(name, grant) for name in names):
                    yield f"tenant {tenant.name!r}: the pattern {grant!r} matches no adapter"
