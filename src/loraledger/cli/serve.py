"""``loraledger serve``: run the gateway, in one process."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Final, Literal

import typer

from loraledger.cli.options import ConfigOption, load_settings
from loraledger.errors import ConfigError

_ONE_PROCESS: Final = (
    "--workers {}: a gateway is one process. Workers in front of the same replicas would each count seats, KV, slots and tenants' "
    "requests for themselves: each limit would hold several times over, and belief of residency would be wrong. Run several "
    "gateways instead, each with its own tenants, record and store, behind a balancer that goes by key (docs/operations.md, "
    "More than one gateway)"
)


def serve(
    config: ConfigOption = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="How much is said on stderr.")
    ] = "info",
    workers: Annotated[int, typer.Option(min=1, help="Processes: 1. More are refused, with what to do instead.")] = 1,
) -> None:
    """Run the gateway until SIGTERM, then drain. Exit code 0 after a clean drain."""
    if workers > 1:
        raise ConfigError(_ONE_PROCESS.format(workers))

    import asyncio

    import uvloop

    from loraledger.config import warnings
    from loraledger.gateway.descriptors import allow_files
    from loraledger.gateway.serve import Gateway

    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    settings = load_settings(config).settings
    for warning in warnings(settings):
        logging.getLogger("loraledger").warning("%s", warning)
    allow_files(settings)
    gateway = Gateway(settings, os.environ)
    for problem in gateway.catalog.problems:
        logging.getLogger("loraledger").warning("adapter not served: %s", problem)

    def ready() -> None:
        assert gateway.plane is not None
        logging.getLogger("loraledger").info(
            "serving %d adapters from %d replicas on http://%s:%d (control http://%s:%d)",
            len(gateway.catalog.entries),
            len(settings.replicas),
            settings.listen.host,
            gateway.plane.port,
            settings.control.host,
            gateway.control_port,
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(gateway.run(ready))
