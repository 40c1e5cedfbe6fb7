"""What vLLM loads, in each of its processes.

Loading imports nothing but the standard library until the probe is found to be switched on. vLLM calls `register` in the
API server, the engine core and each worker, and expects an object for its HTTP routes from `endpoints`.

There is one guard per process, as there is one vLLM per process: hooks are set on vLLM's classes, so a second one would
set them twice.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from loraledger_probe import settings

if TYPE_CHECKING:
    from loraledger_probe.guard import Guard
    from loraledger_probe.settings import Settings

_log = logging.getLogger(__name__)


def register() -> None:
    """Entry point ``vllm.general_plugins``: set the hooks, if the probe is on."""
    process_guard()


def endpoints() -> Any:
    """Entry point ``vllm.endpoint_plugins``: the routes, or an object that adds none."""
    guard, found = process_guard(), process_settings()
    if guard is None or found is None:
        return Off()
    from loraledger_probe.endpoints import Endpoints

    return Endpoints(found, guard)


class Off:
    """The endpoint plugin of a probe that is switched off."""

    name = settings.NAME
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add nothing."""

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep nothing."""


@functools.cache
def process_settings() -> Settings | None:
    """Return this process's settings, None when the probe is off or cannot run, which is then logged once."""
    if os.environ.get("LORALEDGER_PROBE") != "1":
        return None
    if not settings.enabled(os.environ):
        _log.warning("%s", settings.plugins_problem(os.environ))
        return None
    try:
        return settings.load(os.environ)
    except (settings.SettingsError, OSError) as error:
        _log.error("the loraledger probe stays off: %s", error)
        return None


@functools.cache
def process_guard() -> Guard | None:
    """Return this process's guard, its hooks set; None when the probe is off."""
    found = process_settings()
    if found is None:
        return None
    try:
        return _make_guard(found)
    except Exception as error:  # noqa: BLE001  (an import of vLLM may fail in any way; vLLM must start all the same)
        _log.error("the loraledger probe stays off: %s: %s", type(error).__name__, error)
        return None


def _make_guard(found: Settings) -> Guard:
    from vllm.v1.worker.worker_base import WorkerBase
    from vllm.version import __version__

    from loraledger_probe import rpc
    from loraledger_probe.guard import Guard
    from loraledger_probe.scheduler import SchedulerProbe
    from loraledger_probe.spool import Spool
    from loraledger_probe.worker import WorkerProbe

    guard = Guard(Spool(found.spool), __version__)
    if not guard.tested:
        _log.warning("the loraledger probe is not tested with vLLM %s: see its hooks event", guard.version)
    worker = WorkerProbe(guard)
    guard.install(worker.hooks())
    guard.install(SchedulerProbe(guard).hooks())
    rpc.install(WorkerBase, guard, worker)
    return guard
