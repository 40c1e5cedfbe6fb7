"""Who takes part in a replay: the trace's tenants and adapters as the kernel is to be told of them.

Theory of operation. One pass over the trace (``survey``) finds who is named and the largest request, and has the file checked to
its end before anything is played. Only adapters that requests name take part, and those that the settings pin. Of each the
replay must know rank and bytes: from the trace's header, else from the adapter's own files where the settings say they lie, else
from the caller. A guess is never made.

Tenants have the limits that the settings give a tenant of that name. Others exist in the trace alone: they get the default
limits, and their number is said, since limits shape what waits.

Who may call what is not played: a gateway answers such a request at its edge, and a recorded trace holds only those that were let
in. Requests that these settings would not let in are counted and said, since a trace and settings that do not belong together are
a likely mistake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

from loraledger.adapters.catalog import granted
from loraledger.adapters.reading.folder import FolderReader
from loraledger.config.schema import AdapterSpec as ConfiguredAdapter
from loraledger.config.schema import Settings
from loraledger.errors import InputFileError
from loraledger.events import AdapterSpec
from loraledger.kernel.settings import TenantSpec
from loraledger.replay.traces.trace import Adapter, Request, Trace, no_request

MAX_TENANTS: Final = 100_000
May: TypeAlias = Callable[[str, str | None], bool]
"""Whether a tenant may call an adapter (``None``: the base)."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over a trace found. ``adapters`` and ``tenants`` in order of their first request."""

    requests: int
    digest: str
    adapters: tuple[str, ...]
    tenants: tuple[str, ...]
    most_tokens: int
    """Prompt and output of the largest request."""
    refused: int = 0
    """Requests that the settings would not let in, as ``survey`` was told."""


def survey(trace: Trace, requests: Iterable[Request] | None = None, may: May | None = None) -> Survey:
    """Read ``trace`` to its end, through ``requests`` if given. Raises ``InputFileError``, also for one without requests."""
    adapters: dict[str | None, None] = {}
    tenants: dict[str, None] = {}
    count = most = refused = 0
    for request in trace if requests is None else requests:
        count += 1
        adapters[request.adapter] = None
        tenants[request.tenant] = None
        if len(tenants) > MAX_TENANTS:
            raise InputFileError(f"{trace.path}: over {MAX_TENANTS:,} tenants: their limits would be too many to keep")
        if (tokens := request.prompt_tokens + request.output_tokens) > most:
            most = tokens
        if may is not None and not may(request.tenant, request.adapter):
            refused += 1
    if not count or trace.digest is None:
        raise no_request(trace.path, trace.dropped)
    return Survey(
        requests=count,
        digest=trace.digest,
        adapters=tuple(name for name in adapters if name is not None),
        tenants=tuple(tenants),
        most_tokens=most,
        refused=refused,
    )


def may_call(settings: Settings) -> May:
    """Whether the settings let a tenant call an adapter (``None``: the base). A tenant that they do not have may call all."""
    tenants = {tenant.name: tenant for tenant in settings.tenants}
    listed = {spec.name: spec for spec in settings.adapters.list}

    @lru_cache(maxsize=1 << 16)  # a look through a tenant's patterns takes microseconds, and requests of a pair repeat
    def may(tenant: str, adapter: str | None) -> bool:
        known = tenants.get(tenant)
        if known is None:
            return True
        if adapter is None:
            return known.base
        spec = listed.get(adapter) or ConfiguredAdapter.model_construct(name=adapter)
        return bool(granted(spec, (known,)))

    return may


def tenants_of(seen: Survey, configured: Sequence[TenantSpec]) -> tuple[tuple[TenantSpec, ...], list[str]]:
    """The tenants of the settings and of the trace, and what is to be said of the latter."""
    known = {spec.name for spec in configured}
    others = [TenantSpec(name) for name in seen.tenants if name not in known]
    warnings: list[str] = []
    if seen.refused:
        warnings.append(
            f"{seen.refused:,} of {seen.requests:,} requests are for what the settings do not let their tenant call; they are "
            "played all the same, a gateway would answer 404"
        )
    if not others:
        return tuple(configured), warnings
    some, one = _some([spec.name for spec in others]), others[0]
    return (*configured, *others), [
        *warnings,
        f"{len(others)} of {len(seen.tenants)} tenants of the trace are not in the settings ({some}) and get the default limits: "
        f"{one.concurrency} in flight, {one.queue} waiting (--set tenants.concurrency=N changes them)",
    ]


def adapters_of(
    trace: Trace, seen: Survey, settings: Settings, *, rank: int | None = None, size: int | None = None
) -> tuple[tuple[AdapterSpec, ...], list[str]]:
    """Every adapter that requests name or that the settings pin, and what is to be said of them.

    ``rank`` and ``size`` (bytes) stand in for what neither the header nor the files say. Raises ``InputFileError`` naming the
    first adapter of which something is still unknown.
    """
    listed = {spec.name: spec for spec in settings.adapters.list}
    pinned = [spec.name for spec in settings.adapters.list if _held(spec)]
    used = frozenset(seen.adapters)
    header = {adapter.name: adapter for adapter in trace.header.adapters if adapter.name in used}
    files = _Files(settings)
    specs: list[AdapterSpec] = []
    filled: list[str] = []
    warnings: list[str] = []
    for name in dict.fromkeys((*header, *pinned)):
        adapter = files.completed(header.get(name, Adapter(name)))
        if adapter.rank is None or adapter.bytes is None:
            if name not in used:
                warnings.append(f"pinned adapter {name!r} takes no place: its files cannot be read here")
                continue
            adapter = Adapter(name, adapter.rank or rank, adapter.bytes or size)
            filled.append(name)
        if adapter.rank is None or adapter.bytes is None:
            raise _unknown(trace.path, adapter)
        held = _held(listed[name]) if name in listed else 0
        specs.append(AdapterSpec(name, _digest(adapter), adapter.rank, adapter.bytes, (), held))
    if filled:
        warnings.append(f"rank or bytes of {len(filled)} adapters are those of the options ({_some(filled)})")
    return tuple(specs), warnings


class _Files:
    """Rank and bytes of configured adapters, read from their files one by one as they are asked for."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.adapters.folder
        self._paths = {spec.name: spec.path for spec in settings.adapters.list}
        self._reader = FolderReader()

    def completed(self, adapter: Adapter) -> Adapter:
        """``adapter``, with what it lacks if its files are there and can be read."""
        if adapter.rank is not None and adapter.bytes is not None:
            return adapter
        path, root = self._paths.get(adapter.name), None
        if path is None and self._folder is not None and "/" not in adapter.name and not adapter.name.startswith("."):
            path, root = self._folder / adapter.name, self._folder
        if path is None:
            return adapter
        try:
            read = self._reader.read(adapter.name, path, root=root)
        except InputFileError:
            return adapter  # said below by the name of the adapter, with what can be done
        return Adapter(adapter.name, adapter.rank or read.rank, adapter.bytes or read.bytes_disk)


def _unknown(trace: Path, adapter: Adapter) -> InputFileError:
    lacking = [
        option
        for option, value in (("--adapter-rank", adapter.rank), ("--adapter-bytes", adapter.bytes))
        if value is None
    ]
    return InputFileError(
        f"{trace}: row 1: {'rank and bytes' if len(lacking) == 2 else lacking[0].removeprefix('--adapter-')} of adapter "
        f"{adapter.name!r} are neither in the header nor in its files (adapters of the settings): give {' and '.join(lacking)}"
    )


def _held(spec: ConfiguredAdapter) -> int:
    """On how many replicas a configured adapter is held, in the kernel's words: -1 all, 0 on demand."""
    if spec.replicas == "all" or (spec.replicas is None and spec.pin):
        return -1
    return spec.replicas if isinstance(spec.replicas, int) else 0


def _digest(adapter: Adapter) -> str:
    """Stands in for the digest of the content: one adapter of a trace has one version."""
    return hashlib.sha256(f"{adapter.name}\0{adapter.rank}\0{adapter.bytes}".encode()).hexdigest()


def _some(names: Sequence[str], shown: int = 3) -> str:
    text = ", ".join(repr(name) for name in names[:shown])
    return text if len(names) <= shown else f"{text}, ..."
