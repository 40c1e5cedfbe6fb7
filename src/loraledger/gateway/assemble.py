"""From the operator's settings to what each room is told: fleet settings, plane limits, grants, addresses, engine targets.

This is the one place that knows both the configuration's words and the rooms' words: a field added to either is joined here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from loraledger.adapters import Catalog
from loraledger.config import Replica, Secrets, Settings
from loraledger.engines.protocol import ReplicaTarget
from loraledger.events import AdapterSpec
from loraledger.gateway.auth import Access, Grant
from loraledger.gateway.settings import PlaneSettings, ReplicaAddress
from loraledger.kernel.settings import FleetSettings, Limits, ReplicaSpec, TenantSpec


def fleet_settings(settings: Settings, catalog: Catalog) -> FleetSettings:
    """What the kernel is told."""
    limits = settings.limits
    return FleetSettings(
        replicas=tuple(_replica_spec(replica) for replica in settings.replicas),
        adapters=adapter_specs(catalog),
        tenants=tuple(
            TenantSpec(t.name, t.limits.concurrency, t.limits.queue, t.limits.queue_deadline) for t in settings.tenants
        ),
        base=settings.base.names[0],
        policy=settings.policy.name,
        params=dict(settings.policy.params),
        limits=Limits(
            limits.queue_total,
            limits.retry_ratio,
            limits.retry_burst,
            limits.load_backoff,
            limits.load_backoff_max,
            limits.park,
            limits.loads_per_minute,
        ),
        residency=settings.policy.residency,
        pins=settings.ranking,
    )


def adapter_specs(catalog: Catalog) -> tuple[AdapterSpec, ...]:
    """The catalog in the kernel's words. A pinned adapter without a number of replicas is held on all."""
    return tuple(
        AdapterSpec(
            entry.name,
            entry.digest,
            entry.folder.rank,
            entry.folder.bytes_disk,
            entry.tenants,
            _held_on(entry.replicas, entry.pin),
        )
        for entry in catalog.entries
    )


def plane_settings(settings: Settings) -> PlaneSettings:
    """What the data plane is told."""
    limits = settings.limits
    return PlaneSettings(
        header_bytes=limits.header_bytes,
        body_bytes=limits.body_bytes,
        body_bytes_total=limits.body_bytes_total,
        header_timeout=limits.header_timeout,
        body_timeout=limits.body_timeout,
        idle_timeout=limits.idle_timeout,
        first_byte_timeout=limits.upstream_first_byte_timeout,
        stream_idle_timeout=limits.upstream_idle_timeout,
        answer_bytes=limits.answer_bytes,
        connect_timeout=limits.connect_timeout,
        connections=limits.connections,
        pipelined=limits.pipelined,
        drain=limits.drain,
    )


def access_of(settings: Settings, catalog: Catalog, created: int) -> Access:
    """Who may call what. ``created`` (seconds since the epoch) is what model lists show."""
    grants = [
        Grant(
            tenant=tenant.name,
            key_hashes=tuple(bytes.fromhex(digest) for digest in tenant.key_hashes),
            adapters=frozenset(entry.name for entry in catalog.entries if tenant.name in entry.tenants),
            base=tenant.base,
        )
        for tenant in settings.tenants
    ]
    return Access(grants, settings.base.names, created)


def addresses(settings: Settings, secrets: Secrets) -> Mapping[str, ReplicaAddress]:
    """Where the data plane finds each replica."""
    return {
        replica.name: ReplicaAddress(replica.name, replica.host, replica.port, secrets.replica_keys.get(replica.name))
        for replica in settings.replicas
    }


def target_of(replica: Replica, settings: Settings, secrets: Secrets) -> ReplicaTarget:
    """What one engine driver is told."""
    return ReplicaTarget(
        name=replica.name,
        url=replica.url,
        api_key=secrets.replica_keys.get(replica.name),
        tensor_parallel=replica.tensor_parallel,
        probe_key=secrets.probe_keys.get(replica.name),
        path_map=tuple((entry.from_, entry.to) for entry in replica.path_map),
        scrape_interval=settings.limits.scrape_interval,
    )


def config_digest(settings: Settings) -> str:
    """Twelve hex digits that change when any setting does, or the ranking that one of them names."""
    said = settings.model_dump_json(by_alias=True)
    if settings.ranking:
        said += json.dumps(settings.ranking)
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def _replica_spec(replica: Replica) -> ReplicaSpec:
    priors = replica.priors
    return ReplicaSpec(
        replica.name,
        replica.slots,
        replica.host_entries,
        replica.max_rank,
        replica.max_seqs,
        replica.max_in_flight,
        replica.kv_tokens,
        priors.load_bytes_per_s,
        priors.load_overhead,
        priors.activation,
        priors.prefill_tokens_per_s,
        priors.itl,
    )


def _held_on(replicas: int | str | None, pin: bool) -> int:
    if replicas == "all" or (replicas is None and pin):
        return -1
    return replicas if isinstance(replicas, int) else 0
