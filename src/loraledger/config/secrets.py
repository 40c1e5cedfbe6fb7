"""Secrets are referenced, never written: ``{env: NAME}`` or ``{file: PATH}``.

Settings are printed (``config show``), logged, digested into the journal and pasted into bug reports, so a value that
must stay secret does not enter them at all. It is fetched once, at start, into a :class:`Secrets` whose ``repr`` shows
nothing. Tenant keys need no fetching: only their SHA-256 is kept. A plain hash (no salt, no stretching) is right for
what these keys are, long random tokens; it would not be for passwords that people choose.

A secret goes into an ``Authorization`` header, so blanks, line breaks and anything beyond printable ASCII are refused
here rather than becoming a header injection later. The one line break that editors leave at the end of a file is
dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loraledger.config.paths import LocalPath
from loraledger.errors import ConfigError

if TYPE_CHECKING:
    from loraledger.config.schema import Settings

_MAX_SECRET: Final = 64 * 1024


class SecretRef(BaseModel):
    """Where a secret is found: exactly one of an environment variable or a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | None = Field(default=None, description="Name of the environment variable that holds the secret.")
    file: LocalPath | None = Field(default=None, description="File that holds the secret and nothing else.")

    @model_validator(mode="before")
    @classmethod
    def _never_plain(cls, value: object) -> object:
        if isinstance(value, str | int | float):
            raise ValueError("a secret is never written here: use {env: NAME} or {file: PATH}")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError("give exactly one of env and file")
        if self.env is not None and (not self.env or "=" in self.env or "\0" in self.env):
            raise ValueError("env must be the name of an environment variable")
        return self


@dataclass(frozen=True, slots=True)
class Secrets:
    """The resolved secrets of one gateway; shows nothing when printed."""

    control_key: str | None = field(repr=False)
    replica_keys: Mapping[str, str] = field(repr=False)
    """By replica name; replicas without a key are absent."""
    probe_keys: Mapping[str, str] = field(repr=False)
    """Of the probes inside the engines, by replica name."""


def hash_key(key: str) -> str:
    """SHA-256 of a tenant's key, 64 lower-case hex digits: what ``key_hashes`` holds."""
    return hashlib.sha256(key.encode()).hexdigest()


def resolve_secret(ref: SecretRef, *, field_name: str, env: Mapping[str, str]) -> str:
    """The secret behind ``ref``. Raises :class:`ConfigError` naming ``field_name`` and the remedy."""
    if ref.env is not None:
        value, place = env.get(ref.env), f"environment variable {ref.env}"
        if value is None:
            raise ConfigError(f"{field_name}: {place} is not set: export it, or refer to a file", param=field_name)
    else:
        assert ref.file is not None
        value, place = _read(ref.file, field_name), f"file {ref.file}"
    if not value:
        raise ConfigError(f"{field_name}: {place} is empty: put the secret there", param=field_name)
    if not value.isascii() or not value.isprintable() or " " in value:
        message = (
            f"{field_name}: {place} holds blanks, line breaks or characters beyond ASCII: it must be one plain token"
        )
        raise ConfigError(message, param=field_name)
    return value


def resolve_secrets(settings: Settings, env: Mapping[str, str]) -> Secrets:
    """All secrets that ``settings`` refer to. Raises one :class:`ConfigError` that lists all that are missing."""
    problems: list[str] = []

    def fetch(ref: SecretRef | None, field_name: str) -> str | None:
        if ref is None:
            return None
        try:
            return resolve_secret(ref, field_name=field_name, env=env)
        except ConfigError as error:
            problems.append(error.message)
            return None

    control_key = fetch(settings.control.key, "control.key")
    replicas = [(replica.name, fetch(replica.key, f"replicas[{i}].key")) for i, replica in enumerate(settings.replicas)]
    probes = [
        (replica.name, fetch(replica.probe, f"replicas[{i}].probe")) for i, replica in enumerate(settings.replicas)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return Secrets(
        control_key=control_key,
        replica_keys={name: key for name, key in replicas if key is not None},
        probe_keys={name: key for name, key in probes if key is not None},
    )


def _read(path: Path, field_name: str) -> str:
    try:
        if not path.is_file():
            raise ConfigError(f"{field_name}: {path} is not a file: create it or correct the path", param=field_name)
        with path.open("rb") as stream:
            raw = stream.read(_MAX_SECRET + 1)
    except OSError as error:
        raise ConfigError(f"{field_name}: cannot read {path}: {error.strerror}", param=field_name) from error
    if len(raw) > _MAX_SECRET:
        raise ConfigError(
            f"{field_name}: {path} is over {_MAX_SECRET} bytes: it must hold one secret", param=field_name
        )
    # Undecodable bytes become characters that the caller's check refuses, with the same remedy.
    text = raw.decode("utf-8", errors="replace")
    return text.removesuffix("\n").removesuffix("\r")
