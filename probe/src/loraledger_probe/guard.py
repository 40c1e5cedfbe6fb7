"""Puts hooks around methods of vLLM, such that nothing of the probe can ever raise into vLLM.

A `Hook` names one method by module, class and attribute, with the parameters that it must have. If any of that differs
in the running version, the hook is not set, only the events that it ``gives`` are missing, and the ``hooks`` event says
so. A hook that is set calls ``before`` and ``after`` around the original; each fault of theirs is caught in the one place
below, counted and reported, and after `FAULT_LIMIT` of them the hook does nothing any more and says that as well.

The guard also knows when the outermost hooked call ends: then the events of this step, or of this call, are written. It
adds up the nanoseconds spent in the probe's own code, the originals not counted.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loraledger_probe.spool import Spool

FAULT_LIMIT = 20
TESTED = (0, 32)
"""The version of vLLM, major and minor, on which the hooks are tested."""

_FAULT = object()
_MARK = "__loraledger_hook__"
_clock = time.perf_counter_ns


@dataclass(frozen=True)
class Hook:
    """One method of vLLM. ``before`` is called with its arguments, ``after`` with ``(this, token, result, error)``.

    ``token`` is what ``before`` returned. ``parameters`` are the first ones that the method must have, ``self`` left out.
    """

    role: str
    module: str
    owner: str
    method: str
    parameters: tuple[str, ...]
    gives: str
    before: Callable[..., Any] | None = None
    after: Callable[[Any, Any, Any, BaseException | None], None] | None = None

    @property
    def name(self) -> str:
        """Class and method, as people look for it."""
        return f"{self.owner}.{self.method}"


class Guard:
    """The hooks of this process. ``spent_ns`` grows with each hooked call."""

    def __init__(self, spool: Spool, version: str) -> None:
        self.spool = spool
        self.version = version
        self.spent_ns = 0
        self.faults: dict[str, int] = {}
        self._depth = 0
        self._status: list[dict[str, Any]] = []

    @property
    def tested(self) -> bool:
        """Whether the hooks are tested with the running version."""
        parts = self.version.split(".")[:2]
        return tuple(int(part) for part in parts if part.isdigit()) == TESTED

    def install(self, hooks: list[Hook]) -> None:
        """Set each hook that fits; never raises."""
        for hook in hooks:
            try:
                why = self._set(hook)
            except Exception as error:  # noqa: BLE001  (an import of vLLM may fail in any way; then this hook is missing)
                why = f"{type(error).__name__}: {error}"
            self._status.append({"hook": hook.name, "role": hook.role, "missing": why[:500], "gives": hook.gives})

    def works(self, name: str) -> bool:
        """Whether this hook is set and not disabled by faults."""
        found = any(status["hook"] == name and not status["missing"] for status in self._status)
        return found and self.faults.get(name, 0) < FAULT_LIMIT

    def note(self, role: str, name: str, missing: str, gives: str) -> None:
        """Add something that is not a method to the list of hooks. ``missing`` says why, empty when it is there."""
        self._status.append({"hook": name, "role": role, "missing": missing[:500], "gives": gives})

    def announce(self, role: str) -> None:
        """Emit the list of hooks once per role and process, before its first other event."""
        if role in self.spool.announced:
            return
        self.spool.announced.add(role)
        mine = [status for status in self._status if status["role"] == role]
        self.spool.emit(
            role,
            "hooks",
            vllm=self.version,
            tested=self.tested,
            installed=[status["hook"] for status in mine if not status["missing"]],
            missing=[
                {"hook": status["hook"], "why": status["missing"], "loses": status["gives"]}
                for status in mine
                if status["missing"]
            ],
        )

    def run(self, role: str, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call code of the probe from outside a hook: same protection, written at its end. None after a fault."""
        began = _clock()
        self._depth += 1
        result = self._safely(role, name, call, *args, **kwargs)
        self._leave(role)
        self.spent_ns += _clock() - began
        return None if result is _FAULT else result

    def _set(self, hook: Hook) -> str:
        owner = getattr(importlib.import_module(hook.module), hook.owner, None)
        if owner is None:
            return f"{hook.module} has no {hook.owner}"
        original = getattr(owner, hook.method, None)
        if original is None:
            return f"{hook.owner} has no {hook.method}"
        if hasattr(original, _MARK) and hook.method in vars(owner):
            return ""
        found = tuple(inspect.signature(original).parameters)[1:]
        if found[: len(hook.parameters)] != hook.parameters:
            return f"parameters are {found}, expected {hook.parameters}"
        setattr(owner, hook.method, self._wrap(hook, original))
        return ""

    def _wrap(self, hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
        # Bound here, not looked up in each call: a step passes a dozen of these.
        role, name, before, safely, leave = hook.role, hook.name, hook.before, self._safely, self._leave_hook

        @functools.wraps(original)
        def wrapper(this: Any, *args: Any, **kwargs: Any) -> Any:
            began = _clock()
            self._depth += 1
            token = safely(role, name, before, this, *args, **kwargs) if before else None
            if role not in self.spool.announced:
                safely(role, name, self.announce, role)
            self.spent_ns += _clock() - began
            try:
                result = original(this, *args, **kwargs)
            except BaseException as error:
                leave(role, name, hook.after, this, token, None, error)
                raise
            leave(role, name, hook.after, this, token, result, None)
            return result

        setattr(wrapper, _MARK, True)
        return wrapper

    def _leave_hook(
        self,
        role: str,
        name: str,
        after: Callable[..., None] | None,
        this: Any,
        token: Any,
        result: Any,
        error: BaseException | None,
    ) -> None:
        began = _clock()
        if after is not None and token is not _FAULT:
            self._safely(role, name, after, this, token, result, error)
        self._leave(role)
        self.spent_ns += _clock() - began

    def _leave(self, role: str) -> None:
        self._depth -= 1
        if self._depth == 0 and self.spool.holds:
            self._safely(role, "spool", self.spool.flush)

    def _safely(self, role: str, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The one place that keeps faults of the probe away from vLLM."""
        if self.faults.get(name, 0) >= FAULT_LIMIT:
            return _FAULT
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is ours and must not reach vLLM)
            count = self.faults[name] = self.faults.get(name, 0) + 1
            if name != "spool":  # an event about a spool that cannot be written would only fail again
                text = f"{type(error).__name__}: {error}"[:500]
                self.spool.emit(role, "hook_fault", hook=name, error=text, count=count, disabled=count >= FAULT_LIMIT)
            return _FAULT
