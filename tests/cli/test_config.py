"""``loraledger config``: what is in force, where it comes from, and a schema that fits what the loader takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Cli, write

SAMPLE: dict[str, Any] = {
    "base": {"names": ["base", "alias"]},
    "listen": {"host": "0.0.0.0", "port": 8000},
    "control": {"port": 8001, "key": {"env": "CONTROL_KEY"}},
    "replicas": [
        {
            "name": "r1",
            "url": "http://10.0.0.1:8000",
            "slots": 4,
            "host_entries": 8,
            "key": {"file": "/run/secrets/r1"},
            "path_map": [{"from": "/srv", "to": "/mnt"}],
            "priors": {"load_bytes_per_s": "1GB/s", "itl": "7ms"},
        }
    ],
    "adapters": {"folder": "adapters", "list": [{"name": "a0", "path": "a0", "pin": True, "replicas": "all"}]},
    "tenants": [{"name": "acme", "key_hashes": ["0" * 64], "adapters": ["a*"], "limits": {"concurrency": 2}}],
    "policy": {"name": "bounded-affinity", "params": {"epsilon": 0.05}},
    "limits": {"body_bytes": 1048576, "drain": "5s"},
    "record": {"dir": "record", "segment_bytes": "16MiB", "keep": "30d"},
}


def test_show_prints_every_setting_with_its_value(cli: Cli, written: Path) -> None:
    done = cli("config", "show")
    assert done.code == 0
    shown = {line[0]: line[1] for line in done.table()[1:]}
    assert shown["replicas[0].url"] == "http://127.0.0.1:1"
    assert shown["limits.drain"] == "30s"
    assert shown["record.dir"] == str(written.parent / "record")


def test_show_origin_says_file_and_line_variable_or_default(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "loraledger.yaml"
    config.write_text(
        "base: {names: [base]}\n"
        "replicas:\n"
        "  - {name: r1, url: 'http://127.0.0.1:1', slots: 2}\n"
        "tenants: [{name: acme, adapters: ['*']}]\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("LORALEDGER_LISTEN__PORT", "8123")
    origins = {item["setting"]: item["origin"] for item in cli("config", "show", "--json").items("settings")}
    assert origins["replicas[0].slots"] == "loraledger.yaml:3"
    assert origins["listen.port"] == "env:LORALEDGER_LISTEN__PORT"
    assert origins["listen.host"] == "default"
    lines = {line[0]: line[1:] for line in cli("config", "show", "--origin").table()}
    assert lines["listen.port"] == ["8123", "env:LORALEDGER_LISTEN__PORT"]
    assert lines["replicas[0].slots"] == ["2", "loraledger.yaml:3"]


def test_show_never_shows_a_secret(
    cli: Cli, tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORALEDGER_CONTROL_KEY", "very-secret")
    write(tmp_path / "loraledger.yaml", {**settings, "control": {"key": {"env": "LORALEDGER_CONTROL_KEY"}}})
    done = cli("config", "show", "--json")
    assert done.code == 0
    assert "LORALEDGER_CONTROL_KEY" in done.out
    assert "very-secret" not in done.out


def test_values_that_look_like_markup_are_printed_as_they_are(
    cli: Cli, tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings["tenants"][0]["adapters"] = ["*", "[a]*", ":boom:*", "x" * 300 + "*"]
    write(tmp_path / "loraledger.yaml", settings)
    shown = {line[0]: line[1] for line in cli("config", "show").table()[1:]}
    assert [shown[f"tenants[0].adapters[{n}]"] for n in range(4)] == settings["tenants"][0]["adapters"]


def test_the_schema_accepts_a_full_sample_and_so_does_the_loader(cli: Cli, tmp_path: Path) -> None:
    schema = json.loads(cli("config", "schema").out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert list(faults(schema, schema, SAMPLE)) == []
    (tmp_path / "adapters").mkdir()
    assert cli("config", "show", "--config", write(tmp_path / "sample.yaml", SAMPLE)).code == 0


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("recrd",), {}),
        (("replicas", 0, "slot"), 3),
        (("replicas", 0, "slots"), 0),
        (("replicas", 0, "engine"), "tgi"),
        (("listen", "port"), 70000),
        (("limits", "drain"), "soon"),
        (("adapters", "list", 0, "pin"), "yes"),
        (("adapters", "list", 0, "replicas"), "some"),
        (("tenants", 0, "adapters"), "*"),
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_loader_refuses(
    cli: Cli, tmp_path: Path, where: tuple[str | int, ...], value: object
) -> None:
    broken = json.loads(json.dumps(SAMPLE))
    place = broken
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    schema = json.loads(cli("config", "schema").out)
    assert list(faults(schema, schema, broken)) != []
    assert cli("config", "show", "--config", write(tmp_path / "broken.yaml", broken)).code == 3


KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
KNOWN = {
    *("$ref", "$defs", "$schema", "title", "description", "default", "examples", "format"),
    *("type", "properties", "required", "additionalProperties", "items", "anyOf", "oneOf", "enum", "const"),
    *("minimum", "maximum", "exclusiveMinimum", "pattern", "minLength", "minProperties", "maxProperties"),
}


def faults(root: dict[str, Any], schema: dict[str, Any], value: Any, at: str = "") -> Any:
    """Where ``value`` breaks ``schema``: the part of JSON Schema 2020-12 that the settings use, and no other word of it."""
    import re

    assert set(schema) <= KNOWN, f"unknown words in the schema: {set(schema) - KNOWN}"
    if "$ref" in schema:
        yield from faults(root, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, at)
    for words in ("anyOf", "oneOf"):
        if words in schema and all(list(faults(root, option, value, at)) for option in schema[words]):
            yield f"{at}: none of {words}"
    if "type" in schema:
        fits = isinstance(value, KINDS[schema["type"]]) and (schema["type"] == "boolean" or not isinstance(value, bool))
        if not fits:
            yield f"{at}: not {schema['type']}"
            return
    if "const" in schema and value != schema["const"]:
        yield f"{at}: not {schema['const']}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: not of {schema['enum']}"
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{at}: out of bounds"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at}: not {schema['pattern']}"
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from faults(root, schema["items"], item, f"{at}[{index}]")
    if isinstance(value, dict):
        yield from (f"{at}.{name}: missing" for name in schema.get("required", ()) if name not in value)
        rest = schema.get("additionalProperties", True)
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, rest)
            if inner is False:
                yield f"{at}.{name}: unknown"
            elif isinstance(inner, dict):
                yield from faults(root, inner, item, f"{at}.{name}")
