"""Bounds that are known at the start: open files, and one process."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from loraledger.cli.main import app
from loraledger.config import Settings, hash_key, settings_from
from loraledger.errors import ConfigError
from loraledger.gateway.descriptors import allow_files, files_needed

Limit = tuple[int, int]


def settings(connections: int, max_in_flight: int = 512) -> Settings:
    replicas = [
        {"name": f"r{n}", "url": f"http://127.0.0.1:{8000 + n}", "slots": 2, "max_in_flight": max_in_flight}
        for n in range(2)
    ]
    return settings_from(
        {
            "base": {"names": ["base"]},
            "replicas": replicas,
            "tenants": [{"name": "acme", "key_hashes": [hash_key("k")], "adapters": ["*"]}],
            "limits": {"connections": connections},
        }
    )


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[Limit]]:
    """Give the process other limits; what is then set is in the list."""

    def give(soft: int, hard: int) -> list[Limit]:
        taken: list[Limit] = []
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda which, limits: taken.append(limits))
        return taken

    return give


def test_each_client_and_each_request_at_a_replica_takes_a_file() -> None:
    assert files_needed(settings(10_000)) - files_needed(settings(9_000)) == 1_000
    assert files_needed(settings(10_000, 600)) - files_needed(settings(10_000, 500)) == 2 * 100
    assert files_needed(settings(100, 600)) == files_needed(settings(100, 500))  # no more requests than connections


def test_the_soft_limit_is_raised_to_the_hard_one(process: Any) -> None:
    taken = process(1024, 50_000)
    allow_files(settings(10_000))
    assert taken == [(50_000, 50_000)]
    taken = process(50_000, 50_000)
    allow_files(settings(10_000))
    assert taken == []


def test_without_a_hard_limit_as_many_as_are_needed_are_taken(process: Any) -> None:
    wanted = settings(10_000)
    taken = process(1024, resource.RLIM_INFINITY)
    allow_files(wanted)
    assert taken == [(files_needed(wanted), resource.RLIM_INFINITY)]
    taken = process(20_000, resource.RLIM_INFINITY)
    allow_files(wanted)
    assert taken == []


def test_connections_that_the_hard_limit_cannot_keep_are_refused_with_the_remedy(process: Any) -> None:
    wanted = settings(10_000)
    needed = files_needed(wanted)
    taken = process(1024, needed - 1)
    with pytest.raises(ConfigError, match=rf"limits\.connections: 10000 .* take {needed} .*ulimit -n {needed};"):
        allow_files(wanted)
    assert taken == []
    process(1024, needed)
    allow_files(wanted)


def test_more_than_one_worker_is_refused_with_what_to_do_instead() -> None:
    refused = CliRunner().invoke(app, ["serve", "--workers", "2"]).exception
    assert isinstance(refused, ConfigError)
    assert refused.exit_code == 3
    assert "a gateway is one process" in refused.message
    assert "More than one gateway" in refused.message
    assert CliRunner().invoke(app, ["serve", "--workers", "0"]).exit_code == 2
