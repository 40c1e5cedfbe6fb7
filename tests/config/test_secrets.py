"""Secrets: fetched from where they are, never shown."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from loraledger.config import SecretRef, hash_key, resolve_secret, resolve_secrets, settings_from
from loraledger.errors import ConfigError


def test_a_key_is_stored_as_its_sha256() -> None:
    assert hash_key("sk-é") == hashlib.sha256("sk-é".encode()).hexdigest()


def test_a_secret_comes_from_the_environment() -> None:
    assert resolve_secret(SecretRef(env="K"), field_name="control.key", env={"K": "s3cret"}) == "s3cret"


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_a_secret_comes_from_a_file_without_its_last_line_break(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"s3cret" + ending.encode())
    assert resolve_secret(SecretRef(file=path), field_name="control.key", env={}) == "s3cret"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"two\nlines\n", "must be one plain token"),
        (b"with blank", "must be one plain token"),
        (b"s3cret\r\nX-Evil: 1", "must be one plain token"),
        ("geheimnüs".encode(), "must be one plain token"),
        (b"\xff\xfe", "must be one plain token"),
        (b"x" * 70_000, "must hold one secret"),
    ],
)
def test_what_cannot_be_a_header_value_is_refused_and_not_repeated(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^control.key: .*{message}") as caught:
        resolve_secret(SecretRef(file=path), field_name="control.key", env={})
    assert "s3cret" not in caught.value.message


def test_a_missing_secret_names_field_and_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"control\.key: environment variable NOPE is not set: export it"):
        resolve_secret(SecretRef(env="NOPE"), field_name="control.key", env={})
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"control\.key: .* is not a file"):
            resolve_secret(SecretRef(file=path), field_name="control.key", env={})


def test_a_secret_that_cannot_be_read_names_field_and_file() -> None:
    with pytest.raises(ConfigError, match=r"^control\.key: cannot read /proc/self/mem: "):
        resolve_secret(SecretRef(file=Path("/proc/self/mem")), field_name="control.key", env={})


def test_all_secrets_of_a_gateway_are_fetched_at_once_and_never_printed(
    minimal: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "r0.key").write_text("replica-s3cret\n")
    minimal["control"] = {"key": {"env": "CONTROL"}}
    minimal["replicas"][0]["key"] = {"file": "r0.key"}
    minimal["replicas"].append({"name": "r1", "url": "http://h:1", "slots": 1})
    settings = settings_from(minimal, root=tmp_path)
    secrets = resolve_secrets(settings, {"CONTROL": "control-s3cret"})
    assert (secrets.control_key, dict(secrets.replica_keys)) == ("control-s3cret", {"r0": "replica-s3cret"})
    assert "s3cret" not in f"{secrets!r} {settings!r} {settings.model_dump()}"


def test_all_missing_secrets_are_listed(minimal: dict[str, Any], tmp_path: Path) -> None:
    minimal["control"] = {"key": {"env": "CONTROL"}}
    minimal["replicas"][0]["key"] = {"file": "none"}
    with pytest.raises(ConfigError) as caught:
        resolve_secrets(settings_from(minimal, root=tmp_path), {})
    assert [line.split(":")[0] for line in caught.value.message.splitlines()] == ["control.key", "replicas[0].key"]


def test_without_references_there_are_no_secrets(minimal: dict[str, Any]) -> None:
    secrets = resolve_secrets(settings_from(minimal), {})
    assert (secrets.control_key, dict(secrets.replica_keys)) == (None, {})
