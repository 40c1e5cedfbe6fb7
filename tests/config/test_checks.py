"""What several fields say together: contradictions stop, oddities warn."""

from __future__ import annotations

from typing import Any

import pytest

from loraledger.config import Settings, hash_key, settings_from, warnings
from loraledger.errors import ConfigError


def problems(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        settings_from(data)
    return caught.value.message


def test_the_minimal_settings_have_no_warnings(minimal: dict[str, Any]) -> None:
    assert warnings(settings_from(minimal)) == []


def test_without_tenants_nobody_could_call(minimal: dict[str, Any]) -> None:
    del minimal["tenants"]
    assert problems(minimal).startswith("tenants: is empty, so nobody could call: add {name, key_hashes: [SHA-256")


def test_without_replicas_nothing_could_answer(minimal: dict[str, Any]) -> None:
    minimal["replicas"] = []
    assert problems(minimal) == "replicas: is empty: add at least one {name, url, slots}"


def test_without_a_base_name_there_is_no_base(minimal: dict[str, Any]) -> None:
    minimal["base"]["names"] = []
    assert "base.names: is empty" in problems(minimal)


def test_duplicates_are_named_with_the_first_of_them(minimal: dict[str, Any]) -> None:
    minimal["base"]["names"] = ["base", "base"]
    minimal["replicas"] = [minimal["replicas"][0]] * 2
    minimal["tenants"] = [minimal["tenants"][0]] * 2
    lines = problems(minimal).splitlines()
    assert [line.strip() for line in lines[1:]] == [
        "base.names[1]: 'base' is a duplicate of entry 0: give each its own",
        "replicas[1].name: 'r0' is a duplicate of entry 0: give each its own",
        "replicas[1].url: 'http://127.0.0.1:8000' is a duplicate of entry 0: give each its own",
        "tenants[1].name: 'acme' is a duplicate of entry 0: give each its own",
    ]


def test_names_of_replicas_and_tenants_follow_the_alphabet_too(minimal: dict[str, Any]) -> None:
    minimal["replicas"][0]["name"] = "r 0"
    minimal["tenants"][0]["name"] = "a,b"
    text = problems(minimal)
    assert "replicas[0].name: 'r 0' contains ' '" in text
    assert "tenants[0].name: 'a,b' contains ','" in text


def test_one_key_cannot_name_two_tenants(minimal: dict[str, Any]) -> None:
    minimal["tenants"].append({"name": "beta", "key_hashes": [hash_key("sk-acme").upper()], "adapters": []})
    assert problems(minimal) == "tenants[1].key_hashes[0]: is a key of tenant 'acme' too: a key must name one tenant"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-1"])
def test_the_control_plane_needs_a_key_beyond_loopback(minimal: dict[str, Any], host: str) -> None:
    minimal["control"] = {"host": host}
    assert "control.host" in problems(minimal)
    assert "set control.key, or use 127.0.0.1" in problems(minimal)
    minimal["control"]["key"] = {"env": "KEY"}
    assert settings_from(minimal).control.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_the_control_plane_needs_no_key_on_loopback(minimal: dict[str, Any], host: str) -> None:
    minimal["control"] = {"host": host}
    assert settings_from(minimal).control.key is None


def test_both_planes_cannot_have_one_port(minimal: dict[str, Any]) -> None:
    minimal["listen"] = {"host": "0.0.0.0", "port": 9000}
    minimal["control"] = {"port": 9000}
    assert "control.port: 9000 is the port of the data plane too" in problems(minimal)
    minimal["listen"]["host"] = "10.0.0.1"
    assert settings_from(minimal).control.port == 9000
    minimal["listen"], minimal["control"] = {"port": 0}, {"port": 0}
    assert settings_from(minimal).listen.port == 0


def test_a_host_cache_below_the_slots_is_refused_and_a_small_one_warned_of(minimal: dict[str, Any]) -> None:
    minimal["replicas"][0]["host_entries"] = 3
    assert "replicas[0].host_entries: 3 is below slots (4)" in problems(minimal)
    minimal["replicas"][0]["host_entries"] = 7
    (warning,) = warnings(settings_from(minimal))
    assert warning.startswith("replicas[0].host_entries: 7 is below 2 x slots (8)")


def test_all_bodies_together_must_have_room_for_the_largest(minimal: dict[str, Any]) -> None:
    minimal["limits"] = {"body_bytes": "2MiB", "body_bytes_total": "1MiB"}
    assert "limits.body_bytes_total: 1048576 bytes do not hold one body of limits.body_bytes (2097152)" in problems(
        minimal
    )
    minimal["limits"]["body_bytes_total"] = "2MiB"
    assert settings_from(minimal).limits.body_bytes_total == 2**21


def test_grants_must_name_what_exists(minimal: dict[str, Any]) -> None:
    minimal["tenants"][0]["adapters"] = ["sqk", "nothing-like-it"]
    minimal["adapters"]["list"][0]["tenants"] = ["acne"]
    lines = [line.strip() for line in problems(minimal).splitlines()[1:]]
    assert lines == [
        "adapters.list[0].tenants[0]: 'acne' is no tenant; did you mean 'acme'?",
        "tenants[0].adapters[0]: 'sqk' is no adapter; did you mean 'sql'?",
        "tenants[0].adapters[1]: 'nothing-like-it' is no adapter; known: sql",
    ]


def test_with_a_folder_only_its_scan_can_tell_which_adapters_exist(minimal: dict[str, Any]) -> None:
    minimal["adapters"]["folder"] = "adapters"
    minimal["tenants"][0]["adapters"] = ["in-the-folder", "none-*"]
    assert warnings(settings_from(minimal)) == []


def test_a_pattern_without_a_match_only_warns(minimal: dict[str, Any]) -> None:
    minimal["tenants"][0]["adapters"] = ["s?l", "zz-*"]
    assert warnings(settings_from(minimal)) == ["tenants[0].adapters[1]: 'zz-*' matches no adapter"]


def test_tenants_that_cannot_call_are_warned_of(minimal: dict[str, Any]) -> None:
    minimal["tenants"] += [
        {"name": "idle", "key_hashes": [hash_key("i")], "adapters": [], "base": False},
        {"name": "keyless", "adapters": ["sql"]},
        {"name": "owner", "key_hashes": [hash_key("o")], "adapters": [], "base": False},
    ]
    minimal["adapters"]["list"].append({"name": "own", "path": "x", "tenants": ["owner"]})
    assert warnings(settings_from(minimal)) == [
        "tenants[1].adapters: 'idle' may call neither an adapter nor the base model",
        "tenants[2].key_hashes: 'keyless' has no key, so nobody can call as this tenant",
    ]


def test_wishes_beyond_the_fleet_are_warned_of(minimal: dict[str, Any]) -> None:
    minimal["adapters"]["list"] = [{"name": f"a{i}", "path": "x", "pin": True, "replicas": 1} for i in range(4)]
    minimal["adapters"]["list"][0]["replicas"] = 2
    first, second = warnings(settings_from(minimal))
    assert first.startswith("adapters.list[0].replicas: 2 replicas are wanted for 'a0' and there are 1")
    assert second.startswith("adapters.list: 4 adapters are pinned and the smallest replica has 4 slots")


def test_no_inconsistent_settings_exist_even_when_made_in_code(minimal: dict[str, Any]) -> None:
    minimal["tenants"] = []
    with pytest.raises(ValueError, match="nobody could call"):
        Settings.model_validate(minimal)
