"""What takes more than one field to judge: names that collide, grants to nobody, engines set up against themselves.

``problems`` stop the start; ``warnings`` are printed and do not. The line between them: a problem would answer some
request wrongly or never, on a fleet that works as configured; a warning is a choice that usually costs something.
"""

from __future__ import annotations

import difflib
import fnmatch
import ipaddress
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from loraledger.config.names import bad_name, refused_adapters
from loraledger.config.origin import Problem, Where

if TYPE_CHECKING:
    from loraledger.config.schema import Settings


class InconsistentError(ValueError):
    """Carries problems through pydantic, which keeps the exception of a failed validator."""

    def __init__(self, found: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in found))
        self.found = tuple(found)


def nearest(name: str, known: Collection[str]) -> str:
    """A hint to append to a message: what was probably meant, else what is known (when that is short)."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if 0 < len(known) <= 30 else ""


def is_pattern(grant: str) -> bool:
    """Whether a tenant's grant is a shell glob rather than a name."""
    return any(sign in grant for sign in "*?[")


def problems(settings: Settings) -> list[Problem]:
    """All contradictions in ``settings``, in the order of the file."""
    return [
        *_base(settings),
        *_addresses(settings),
        *_replicas(settings),
        *_adapters(settings),
        *_tenants(settings),
        *_limits(settings),
    ]


def warnings(settings: Settings) -> list[str]:
    """What works and is probably not meant, one sentence each."""
    return [*_fleet_warnings(settings), *_residency_warnings(settings), *_grant_warnings(settings)]


def _base(settings: Settings) -> Iterator[Problem]:
    names = settings.base.names
    if not names:
        yield Problem(("base", "names"), "is empty: list the names under which the engines serve the base model")
    yield from _names(("base", "names"), names)


def _addresses(settings: Settings) -> Iterator[Problem]:
    control, listen = settings.control, settings.listen
    if control.key is None and not _is_loopback(control.host):
        message = f"{control.host!r} is reachable from elsewhere: set control.key, or use 127.0.0.1"
        yield Problem(("control", "host"), message)
    wildcard = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not bound to
    same_host = listen.host == control.host or bool(wildcard & {listen.host, control.host})
    if same_host and listen.port == control.port != 0:
        yield Problem(("control", "port"), f"{control.port} is the port of the data plane too: choose another")


def _replicas(settings: Settings) -> Iterator[Problem]:
    replicas = settings.replicas
    if not replicas:
        yield Problem(("replicas",), "is empty: add at least one {name, url, slots}")
    yield from _names(("replicas",), [replica.name for replica in replicas], "name")
    yield from _duplicates(("replicas",), [replica.url for replica in replicas], "url")
    for index, replica in enumerate(replicas):
        if replica.host_entries < replica.slots:
            message = f"{replica.host_entries} is below slots ({replica.slots}): the engine refuses that; raise it"
            yield Problem(("replicas", index, "host_entries"), message)


def _adapters(settings: Settings) -> Iterator[Problem]:
    listed = settings.adapters.list
    tenants = {tenant.name for tenant in settings.tenants}
    refused = refused_adapters([adapter.name for adapter in listed], settings.base.names)
    for index, reason in refused.items():
        yield Problem(("adapters", "list", index, "name"), f"{listed[index].name!r} {reason}")
    for index, adapter in enumerate(listed):
        for position, name in enumerate(adapter.tenants):
            if name not in tenants:
                where: Where = ("adapters", "list", index, "tenants", position)
                yield Problem(where, f"{name!r} is no tenant{nearest(name, tenants)}")
    folder, store = settings.adapters.folder, settings.adapters.store
    if folder is not None and (store.is_relative_to(folder) or folder.is_relative_to(store)):
        # Whoever may write into the folder could write into the copies.
        yield Problem(
            ("adapters", "store"), f"{store} and adapters.folder must lie beside each other: choose another place"
        )


def _tenants(settings: Settings) -> Iterator[Problem]:
    tenants = settings.tenants
    if not tenants:
        message = "is empty, so nobody could call: add {name, key_hashes: [SHA-256 of a key], adapters: ['*']}"
        yield Problem(("tenants",), message)
    yield from _names(("tenants",), [tenant.name for tenant in tenants], "name")
    owners: dict[str, str] = {}
    for index, tenant in enumerate(tenants):
        for position, key_hash in enumerate(tenant.key_hashes):
            owner = owners.setdefault(key_hash, tenant.name)
            if owner != tenant.name:
                where: Where = ("tenants", index, "key_hashes", position)
                yield Problem(where, f"is a key of tenant {owner!r} too: a key must name one tenant")
    yield from _unknown_grants(settings)


def _limits(settings: Settings) -> Iterator[Problem]:
    limits = settings.limits
    if limits.body_bytes_total < limits.body_bytes:
        message = (
            f"{limits.body_bytes_total} bytes do not hold one body of limits.body_bytes ({limits.body_bytes}): raise it"
        )
        yield Problem(("limits", "body_bytes_total"), message)


def _unknown_grants(settings: Settings) -> Iterator[Problem]:
    """Names granted that no entry has. With a folder, only its scan can tell: the catalog reports those."""
    if settings.adapters.folder is not None:
        return
    known = {adapter.name for adapter in settings.adapters.list}
    for index, tenant in enumerate(settings.tenants):
        for position, grant in enumerate(tenant.adapters):
            if not is_pattern(grant) and grant not in known:
                yield Problem(
                    ("tenants", index, "adapters", position), f"{grant!r} is no adapter{nearest(grant, known)}"
                )


def _names(where: Where, names: Sequence[str], field: str | None = None) -> Iterator[Problem]:
    last: Where = () if field is None else (field,)
    for index, name in enumerate(names):
        reason = bad_name(name)
        if reason is not None:
            yield Problem((*where, index, *last), f"{name!r} {reason}")
    yield from _duplicates(where, names, field)


def _duplicates(where: Where, values: Sequence[str], field: str | None) -> Iterator[Problem]:
    last: Where = () if field is None else (field,)
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        if first.setdefault(value, index) != index:
            yield Problem(
                (*where, index, *last), f"{value!r} is a duplicate of entry {first[value]}: give each its own"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _fleet_warnings(settings: Settings) -> Iterator[str]:
    for index, replica in enumerate(settings.replicas):
        if replica.host_entries < 2 * replica.slots:
            yield (
                f"replicas[{index}].host_entries: {replica.host_entries} is below 2 x slots ({2 * replica.slots}): "
                "the engine may evict an adapter of the very batch that it runs, and reread it from disk in that step"
            )
    for index, adapter in enumerate(settings.adapters.list):
        if isinstance(adapter.replicas, int) and adapter.replicas > len(settings.replicas):
            yield (
                f"adapters.list[{index}].replicas: {adapter.replicas} replicas are wanted for "
                f"{adapter.name!r} and there are {len(settings.replicas)}: it is kept on those"
            )
    pinned = sum(adapter.pin for adapter in settings.adapters.list)
    fewest = min(replica.slots for replica in settings.replicas)
    if pinned >= fewest:
        yield (
            f"adapters.list: {pinned} adapters are pinned and the smallest replica has {fewest} slots: "
            "together they may leave none for the others"
        )


def _residency_warnings(settings: Settings) -> Iterator[str]:
    policy = settings.policy
    if policy.pins is not None and policy.residency != "ranked":
        yield "policy.pins: is not read, because policy.residency is lru: set it to ranked, or leave pins out"
    ranked = {replica for replica, _ in settings.ranking}
    for index, replica in enumerate(settings.replicas):
        at = f"replicas[{index}]"
        if replica.name in ranked and replica.probe is None:
            yield f"{at}.probe: is not set, so nothing is pinned on {replica.name!r} and its LRU stays"
        elif replica.name in ranked and replica.slots == 1:
            yield f"{at}.slots: the only slot serves all adapters, so nothing is pinned on {replica.name!r}"


def _grant_warnings(settings: Settings) -> Iterator[str]:
    listed = settings.adapters.list
    owned = {name for adapter in listed for name in adapter.tenants}
    for index, tenant in enumerate(settings.tenants):
        at = f"tenants[{index}]"
        if not tenant.key_hashes:
            yield f"{at}.key_hashes: {tenant.name!r} has no key, so nobody can call as this tenant"
        if not (tenant.adapters or tenant.base or tenant.name in owned):
            yield f"{at}.adapters: {tenant.name!r} may call neither an adapter nor the base model"
        if settings.adapters.folder is None:
            for position, grant in enumerate(tenant.adapters):
                if is_pattern(grant) and not any(fnmatch.fnmatchcase(adapter.name, grant) for adapter in listed):
                    yield f"{at}.adapters[{position}]: {grant!r} matches no adapter"
