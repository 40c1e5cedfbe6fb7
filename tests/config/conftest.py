"""A small valid configuration, to be changed in one place a test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraledger.config import hash_key

MINIMAL: dict[str, Any] = {
    "base": {"names": ["acme/base-8b", "base"]},
    "replicas": [{"name": "r0", "url": "http://127.0.0.1:8000", "slots": 4, "host_entries": 8}],
    "adapters": {"list": [{"name": "sql", "path": "adapters/sql"}]},
    "tenants": [{"name": "acme", "key_hashes": [hash_key("sk-acme")], "adapters": ["*"]}],
}

YAML = f"""\
base:
  names: [acme/base-8b, base]
replicas:
  - name: r0
    url: http://127.0.0.1:8000
    slots: 4
    host_entries: 8
adapters:
  list:
    - {{name: sql, path: adapters/sql}}
tenants:
  - name: acme
    key_hashes: [{hash_key("sk-acme")}]
    adapters: ["*"]
"""


@pytest.fixture
def minimal() -> dict[str, Any]:
    """The plain data of a valid configuration without warnings; the caller's own copy."""
    return copy.deepcopy(MINIMAL)


WriteYaml = Callable[..., Path]


@pytest.fixture
def write_yaml(tmp_path: Path) -> WriteYaml:
    """Writes ``loraledger.yaml`` (the minimal one and ``more`` after it) into the test's folder, and returns its path."""

    def write(more: str = "", *, text: str = YAML, name: str = "loraledger.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + more, encoding="utf-8")
        return path

    return write
