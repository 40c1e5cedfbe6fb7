"""Settings, all from the environment, and the folder that an engine's processes share.

The first process of an engine to come here is its API server: it makes up the boot name, makes a private folder, and
leaves both in its environment, which vLLM's other processes inherit. So no process needs an argument, and a restarted
engine can never be taken for the one before it.

A folder is held by a lock for as long as its API server lives. An API server that is killed leaves its folder behind;
the next one that starts in the same place finds it unlocked and removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NAME = "loraledger"
"""The name of each entry point, thus what VLLM_PLUGINS must list."""

_SPOOL = "LORALEDGER_PROBE_SPOOL"  # set by the API server for its children, not by people
_PREFIX = "boot-"


@dataclass(frozen=True)
class Settings:
    """What one process needs to know. ``key`` is None when the operator gave none."""

    spool: Path
    boot: str
    key: str | None
    key_problem: str
    ring_events: int
    ring_bytes: int


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it and says what to set."""


def enabled(environment: Mapping[str, str]) -> bool:
    """Whether the probe is switched on and named in VLLM_PLUGINS (without which its endpoints would not load)."""
    return environment.get("LORALEDGER_PROBE") == "1" and not plugins_problem(environment)


def plugins_problem(environment: Mapping[str, str]) -> str:
    """Return why VLLM_PLUGINS keeps the endpoints from loading, with the remedy; empty when all is well."""
    named = environment.get("VLLM_PLUGINS")
    if named is not None and NAME in named.split(","):
        return ""
    wanted = f"{named},{NAME}" if named else NAME
    return f"the loraledger probe stays off: vLLM loads endpoints only of named plugins; set VLLM_PLUGINS={wanted}"


def load(environment: MutableMapping[str, str]) -> Settings:
    """Read the settings and make the shared folder, unless a parent process made it. Raises SettingsError or OSError."""
    spool = Path(environment.get(_SPOOL) or _make_spool(environment))
    key, problem = _key(environment)
    return Settings(
        spool=spool,
        boot=spool.name.removeprefix(_PREFIX),
        key=key,
        key_problem=problem,
        ring_events=_number(environment, "LORALEDGER_PROBE_EVENTS", 100_000, 1_000, 10_000_000),
        ring_bytes=_number(environment, "LORALEDGER_PROBE_EVENT_BYTES", 64 << 20, 1 << 20, 4 << 30),
    )


def _key(environment: Mapping[str, str]) -> tuple[str | None, str]:
    key = environment.get("LORALEDGER_PROBE_KEY", "")
    file = environment.get("LORALEDGER_PROBE_KEY_FILE", "")
    if not key and not file:
        return None, "no key is set: start vLLM with LORALEDGER_PROBE_KEY or LORALEDGER_PROBE_KEY_FILE"
    if not key:
        try:
            with Path(file).open(encoding="utf-8") as opened:
                key = opened.read(4096).strip()
        except (OSError, UnicodeDecodeError) as error:
            return None, f"LORALEDGER_PROBE_KEY_FILE cannot be read: {error}"
    if len(key) < 8:
        return None, "the key has fewer than 8 characters: set a longer one"
    return key, ""


def _number(environment: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise SettingsError(f"{name}={text!r} is not a number from {low} to {high}")
    return int(text)


def _make_spool(environment: MutableMapping[str, str]) -> str:
    given = environment.get("LORALEDGER_PROBE_DIR")
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"loraledger-probe-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise SettingsError(f"{folder} must be a folder of this user alone: chmod 700, or set LORALEDGER_PROBE_DIR")
    for left in folder.glob(f"{_PREFIX}*"):
        _remove_if_dead(left)
    made = folder / f"{_PREFIX}{secrets.token_hex(8)}"
    made.mkdir(mode=0o700)
    _hold(made)
    environment[_SPOOL] = str(made)
    return str(made)


def _hold(folder: Path) -> None:
    """Lock the folder for the life of this process, and remove it when the process ends in order."""
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child runs this too if it ends by sys.exit
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def _remove_if_dead(folder: Path) -> None:
    """Remove a folder that no process holds. One being made right now has no lock file yet and is left alone."""
    with suppress(OSError):
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
