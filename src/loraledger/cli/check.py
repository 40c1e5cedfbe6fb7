"""``loraledger check``: prove the settings, the adapters and the replicas before traffic does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from loraledger.cli.options import ConfigOption, JsonOption, load_settings
from loraledger.cli.output import print_json
from loraledger.errors import ObjectiveError, TargetError

if TYPE_CHECKING:
    from loraledger.config import Settings
    from loraledger.engines.inspect import ReplicaReport


def check(
    config: ConfigOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail the check too.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not contact the replicas.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check file, adapters and replicas. Exit code 3: the file; 4: a replica cannot be reached; 5: something is not right.

    A replica whose load route answers without a credential is a warning: who reaches its port can load weights into it.
    """
    from loraledger.adapters import build_catalog
    from loraledger.config import warnings
    from loraledger.gateway.assemble import fleet_settings
    from loraledger.kernel.policies import make_policy

    settings = load_settings(config).settings
    found: list[tuple[str, str, str]] = [("warning", "settings", text) for text in warnings(settings)]
    catalog = build_catalog(settings)
    make_policy(fleet_settings(settings, catalog))  # raises for a name or a parameter that does not exist
    found += [("problem", "adapter", str(problem)) for problem in catalog.problems]
    found += [("warning", "adapter", text) for text in catalog.warnings]
    found += _ranks(settings, {entry.name: entry.folder.rank for entry in catalog.entries})
    reports = [] if offline else _inspect(settings)
    for report in reports:
        found += [("problem", f"replica {report.name}", f.message) for f in report.problems]
        found += [("warning", f"replica {report.name}", f.message) for f in report.warnings]
    if as_json:
        print_json("check", [{"severity": s, "subject": w, "message": m} for s, w, m in found])
    else:
        for severity, what, message in found:
            print(f"{severity}: {what}: {message}")
        print(
            f"{len(catalog.entries)} adapters, {len(settings.tenants)} tenants, "
            + (
                f"{len(settings.replicas)} replicas not asked"
                if offline
                else f"{sum(report.reachable for report in reports)}/{len(settings.replicas)} replicas reached"
            )
        )
    _judge(found, reports, strict)


def _judge(found: list[tuple[str, str, str]], reports: list[ReplicaReport], strict: bool) -> None:
    unreached = [report.name for report in reports if not report.reachable]
    if unreached:
        raise TargetError(f"not reached: {', '.join(unreached)}")
    problems = sum(severity == "problem" for severity, _, _ in found)
    if problems or (strict and found):
        raise ObjectiveError(f"{problems} problems, {len(found) - problems} warnings" + (" (strict)" if strict else ""))


def _ranks(settings: Settings, ranks: dict[str, int]) -> list[tuple[str, str, str]]:
    largest = max(replica.max_rank for replica in settings.replicas)
    return [
        (
            "problem",
            f"adapter {name}",
            f"rank {rank} is above every replica's max_rank ({largest}): no replica can load it",
        )
        for name, rank in ranks.items()
        if rank > largest
    ]


def _inspect(settings: Settings) -> list[ReplicaReport]:
    import asyncio

    from loraledger.config import resolve_secrets
    from loraledger.engines.inspect import inspect_replica
    from loraledger.gateway.assemble import target_of

    secrets = resolve_secrets(settings, os.environ)

    async def look() -> list[ReplicaReport]:
        return await asyncio.gather(
            *(
                inspect_replica(
                    target_of(replica, settings, secrets),
                    expected_slots=replica.slots,
                    expected_base=settings.base.names[0],
                )
                for replica in settings.replicas
            )
        )

    return asyncio.run(look())
