"""What settings may say, field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from loraledger.config import Settings, json_schema, settings_from, shape
from loraledger.config.schema import Limits, Priors, TenantLimits
from loraledger.errors import ConfigError

SECOND = 10**9


def test_defaults_are_those_that_are_documented(minimal: dict[str, Any]) -> None:
    settings = settings_from(minimal)
    assert (settings.listen.host, settings.listen.port) == ("127.0.0.1", 8080)
    assert (settings.control.host, settings.control.port, settings.control.key) == ("127.0.0.1", 8081, None)
    assert settings.policy.name == "bounded-affinity"
    assert settings.policy.params == {}
    assert settings.limits == Limits()
    assert (settings.limits.header_bytes, settings.limits.body_bytes) == (65536, 8 * 2**20)
    assert (settings.limits.header_timeout, settings.limits.idle_timeout) == (10 * SECOND, 75 * SECOND)
    assert settings.limits.upstream_first_byte_timeout == 300 * SECOND
    assert settings.record.dir == Path("record")
    assert (settings.record.compact, settings.record.keep) == (3600 * SECOND, None)
    tenant = settings.tenants[0]
    assert tenant.base
    assert tenant.limits == TenantLimits(concurrency=64, queue=256, queue_deadline="30s")  # type: ignore[arg-type]


def test_replica_defaults_follow_from_what_was_given(minimal: dict[str, Any]) -> None:
    minimal["replicas"] = [{"name": "r0", "url": "http://h:1", "slots": 3, "max_seqs": 10}]
    replica = settings_from(minimal).replicas[0]
    assert (replica.host_entries, replica.max_in_flight, replica.max_rank, replica.kv_tokens) == (3, 20, 64, None)
    assert replica.engine == "vllm"
    assert replica.priors == Priors()
    assert replica.priors.load_bytes_per_s == 200_000_000
    assert (replica.priors.load_overhead, replica.priors.activation, replica.priors.itl) == (
        30_000_000,
        10**7,
        3 * 10**7,
    )


def test_settings_cannot_be_changed(minimal: dict[str, Any]) -> None:
    settings = settings_from(minimal)
    with pytest.raises(ValidationError, match="frozen"):
        settings.listen.port = 1


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1", 8000),
        ("http://gpu-1.internal:80/", "gpu-1.internal", 80),
        ("http://[::1]:8000", "::1", 8000),
    ],
)
def test_replica_urls_give_host_and_port(minimal: dict[str, Any], url: str, host: str, port: int) -> None:
    minimal["replicas"][0]["url"] = url
    replica = settings_from(minimal).replicas[0]
    assert (replica.url, replica.host, replica.port) == (url.rstrip("/"), host, port)


@pytest.mark.parametrize(
    "url",
    [
        "https://h:1",
        "http://h",
        "h:1",
        "http://h:1/v1",
        "http://h:1?x=1",
        "http://h:1#x",
        "http://user:hunter2@h:1",
        "http://h:0",
        "http://h:99999",
        "http://h:x",
        "http://:80",
        "http://[::1:80",
        "http://a b:1",
        "http://h:1\n",
    ],
)
def test_other_urls_are_refused_without_repeating_them(minimal: dict[str, Any], url: str) -> None:
    minimal["replicas"][0]["url"] = url
    with pytest.raises(ConfigError, match=r"replicas\[0\]\.url: .*http://HOST:PORT") as caught:
        settings_from(minimal)
    assert "hunter2" not in caught.value.message


def test_paths_are_rewritten_into_the_replicas_view_at_whole_folders(minimal: dict[str, Any]) -> None:
    minimal["replicas"][0]["path_map"] = [{"from": "/srv/a/", "to": "/mnt/x"}, {"from": "/srv", "to": "/data/"}]
    replica = settings_from(minimal).replicas[0]
    assert replica.seen_path("/srv/a/sql") == "/mnt/x/sql"
    assert replica.seen_path("/srv/a") == "/mnt/x"
    assert replica.seen_path("/srv/ab") == "/data/ab"
    assert replica.seen_path("/srvx/a") == "/srvx/a"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"listen": {"port": 70000}}, r"listen\.port: should be less than or equal to 65535, not 70000"),
        ({"listen": {"port": True}}, r"listen\.port: should be a valid integer, not True"),
        ({"listen": {"port": "8080"}}, r"listen\.port: should be a valid integer, not '8080'"),
        ({"listen": {"host": 10}}, r"listen\.host: .* not 10: put it in quotes"),
        ({"limits": {"body_bytes": 0}}, r"limits\.body_bytes: should be greater than or equal to 1, not 0"),
        ({"limits": {"idle_timeout": 75}}, r"limits\.idle_timeout: 75 is not a duration: write .* unit"),
        ({"limits": {"retry_ratio": float("nan")}}, r"limits\.retry_ratio: should be a finite number"),
        ({"limits": {"retry_ratio": 2}}, r"limits\.retry_ratio: should be less than or equal to 1"),
        ({"limits": {"body_byte": 1}}, r"limits\.body_byte: unknown field; did you mean 'body_bytes'\?"),
        ({"limits": None}, r"limits: should be a section of fields \(field: value\), not null"),
        ({"record": {"dir": "s3://bucket/x"}}, r"record\.dir: 's3://bucket/x' is a URL: fetch it first"),
        ({"record": {"dir": ""}}, r"record\.dir: is empty: name a path"),
        ({"record": {"dir": "~/x"}}, r"record\.dir: .*write the path out"),
        ({"record": {"dir": "a\0b"}}, r"record\.dir: contains a control character"),
        ({"policy": {"params": {"epsilon": "1"}}}, r"policy\.params\.epsilon: should be a valid number"),
        ({"base": {"names": "base"}}, r"base\.names: should be a list .*, not 'base'"),
        ({"control": {"key": "hunter2"}}, r"control\.key: a secret is never written here: use \{env: NAME\}"),
        ({"control": {"key": {}}}, r"control\.key: give exactly one of env and file"),
        ({"control": {"key": {"env": "A", "file": "b"}}}, r"control\.key: give exactly one"),
        ({"control": {"key": {"env": "A=B"}}}, r"control\.key: env must be the name"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(minimal: dict[str, Any], section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings_from({**minimal, **section})
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, r"replicas\[0\]\.slots: should be greater than or equal to 1"),
        ({"max_rank": 48}, r"replicas\[0\]\.max_rank: 48 is no max_lora_rank of the engine: use 64 "),
        ({"max_rank": 513}, r"replicas\[0\]\.max_rank: 513 .* use 512 "),
        ({"engine": "sglang"}, r"replicas\[0\]\.engine: should be 'vllm' or 'emulator', not 'sglang'"),
        ({"kv_tokens": 0}, r"replicas\[0\]\.kv_tokens"),
        ({"path_map": [{"from": "/a"}]}, r"replicas\[0\]\.path_map\[0\]\.to: is missing: add it\. What the replica"),
        ({"priors": {"itl": "30"}}, r"replicas\[0\]\.priors\.itl: '30' has no unit"),
    ],
)
def test_a_wrong_replica_is_named_with_its_path(minimal: dict[str, Any], change: dict[str, Any], message: str) -> None:
    minimal["replicas"][0].update(change)
    with pytest.raises(ConfigError, match=message):
        settings_from(minimal)


@pytest.mark.parametrize("replicas", [1, "all", None])
def test_an_adapter_may_ask_for_replicas(minimal: dict[str, Any], replicas: object) -> None:
    minimal["adapters"]["list"][0]["replicas"] = replicas
    assert settings_from(minimal).adapters.list[0].replicas == replicas


@pytest.mark.parametrize("replicas", [0, -1, True, "some", 1.5])
def test_an_adapter_may_not_ask_for_other_replicas(minimal: dict[str, Any], replicas: object) -> None:
    minimal["adapters"]["list"][0]["replicas"] = replicas
    with pytest.raises(ConfigError, match=r"adapters\.list\[0\]\.replicas: .* 'all', or null"):
        settings_from(minimal)


def test_a_plain_key_in_place_of_its_hash_is_refused_and_not_repeated(minimal: dict[str, Any]) -> None:
    for given in ("sk-very-secret", 12345678, ["sk-very-secret"], {"sk-very-secret": 1}):
        minimal["tenants"][0]["key_hashes"] = [given]
        with pytest.raises(ConfigError, match=r"tenants\[0\]\.key_hashes\[0\]") as caught:
            settings_from(minimal)
        assert "secret" not in caught.value.message.replace("a secret is", "")
        assert "12345678" not in caught.value.message


def test_a_missing_slots_is_reported_once(minimal: dict[str, Any]) -> None:
    minimal["replicas"] = [{"name": "r0", "url": "http://h:1"}]
    with pytest.raises(ConfigError) as caught:
        settings_from(minimal)
    expected = "replicas[0].slots: is missing: add it. GPU places for adapters: the engine's max_loras."
    assert caught.value.message == expected


def test_dumped_settings_are_settings_again(minimal: dict[str, Any]) -> None:
    minimal["control"] = {"key": {"env": "CONTROL"}}
    minimal["replicas"][0]["path_map"] = [{"from": "/a", "to": "/b"}]
    settings = settings_from(minimal)
    dumped = settings.model_dump(mode="json", by_alias=True)
    assert dumped["limits"]["body_bytes"] == "8MiB"
    assert settings_from(dumped) == settings


def test_each_field_is_described_and_each_limit_has_a_default() -> None:
    sections: list[type[BaseModel]] = [Settings]
    for section in sections:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            steps = [field.alias or name]
            places = [shape.locate(section, steps), shape.locate(section, [*steps, "0"])]
            inner = [place.takes for place in places if place is not None and isinstance(place.takes, type)]
            sections += [takes for takes in inner if issubclass(takes, BaseModel) and takes not in sections]
    assert len(sections) == 15
    assert not [name for name, field in Limits.model_fields.items() if field.is_required()]


def test_the_json_schema_gives_defaults_as_a_file_would_spell_them() -> None:
    schema = json_schema()
    limits = schema["$defs"]["Limits"]["properties"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["base", "replicas"]
    assert limits["body_bytes"]["default"] == "8MiB"
    assert limits["body_bytes"]["anyOf"][0] == {"type": "integer", "minimum": 0}
    assert limits["drain"]["type"] == "string"
    assert limits["drain"]["description"]
    assert "from" in schema["$defs"]["PathMap"]["properties"]
