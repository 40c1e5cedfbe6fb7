"""What the rooms are told of the operator's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loraledger.adapters import Catalog
from loraledger.config import Settings, settings_from
from loraledger.gateway.assemble import config_digest, fleet_settings


def settings_of(root: Path, *ranked: str, **policy: Any) -> Settings:
    pins = [{"replica": "r1", "adapter": name} for name in ranked]
    (root / "pins.json").write_text(json.dumps({"schema_version": 1, "kind": "pins", "pins": pins}), encoding="utf-8")
    data = {
        "base": {"names": ["base"]},
        "replicas": [{"name": "r1", "url": "http://127.0.0.1:8000", "slots": 4}],
        "adapters": {"list": [{"name": name, "path": name} for name in ("sql", "chat")]},
        "tenants": [{"name": "acme", "adapters": ["*"]}],
        "policy": policy,
    }
    return settings_from(data, root)


def told(settings: Settings) -> tuple[str, tuple[tuple[str, str], ...]]:
    fleet = fleet_settings(settings, Catalog((), (), ()))
    return fleet.residency, fleet.pins


def test_the_kernel_is_told_the_ranking_only_where_it_counts(tmp_path: Path) -> None:
    ranked = settings_of(tmp_path, "sql", "chat", residency="ranked", pins="pins.json")
    assert told(ranked) == ("ranked", (("r1", "sql"), ("r1", "chat")))
    assert told(settings_of(tmp_path, "sql", pins="pins.json")) == ("lru", ())
    assert told(settings_of(tmp_path)) == ("lru", ())


def test_another_ranking_in_the_same_file_is_another_configuration(tmp_path: Path) -> None:
    asked = {"residency": "ranked", "pins": "pins.json"}
    one, other, again = (
        config_digest(settings_of(tmp_path, *names, **asked)) for names in (("sql",), ("chat",), ("sql",))
    )
    assert one == again != other
    unread = [config_digest(settings_of(tmp_path, name, pins="pins.json")) for name in ("sql", "chat")]
    assert unread[0] == unread[1]
