"""File, environment and flags: which is found, which wins, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from loraledger.config import Loaded, load, settings_from
from loraledger.config.loader import PREFIX
from loraledger.errors import ConfigError

from .conftest import MINIMAL, YAML, WriteYaml


def origins(loaded: Loaded) -> dict[str, str]:
    return {path: str(origin) for path, _, origin in loaded.shown()}


def refused(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**arguments)
    return caught.value.message


def test_a_flag_wins_over_the_environment_and_that_over_the_file(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml("listen: {host: 10.0.0.1, port: 1}\nlimits:\n  drain: 1s\n")
    env = {"LORALEDGER_LISTEN__PORT": "2", "LORALEDGER_LIMITS__DRAIN": "2s", "HOME": "/root"}
    loaded = load(env=env, flags={"listen.port": 3}, cwd=tmp_path)
    assert (loaded.settings.listen.host, loaded.settings.listen.port) == ("10.0.0.1", 3)
    assert loaded.settings.limits.drain == 2 * 10**9
    assert loaded.source == tmp_path / "loraledger.yaml"
    shown = origins(loaded)
    assert shown["listen.host"] == "loraledger.yaml:15"
    assert shown["listen.port"] == "flag:listen.port"
    assert shown["limits.drain"] == "env:LORALEDGER_LIMITS__DRAIN"
    assert shown["limits.pipelined"] == "default"
    assert shown["replicas[0].slots"] == "loraledger.yaml:6"
    assert shown["replicas[0].max_seqs"] == "default"
    assert shown["tenants[0].adapters[0]"] == "loraledger.yaml:14"


def test_the_file_is_found_by_flag_then_variable_then_working_directory(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml("policy: {name: cwd}\n")
    write_yaml("policy: {name: env}\n", name="env.yaml")
    flag = write_yaml("policy: {name: flag}\n", name="flag.yaml")
    env = {"LORALEDGER_CONFIG": "env.yaml"}
    assert load(env={}, cwd=tmp_path).settings.policy.name == "cwd"
    assert load(env=env, cwd=tmp_path).settings.policy.name == "env"
    assert load(flag, env=env, cwd=tmp_path).settings.policy.name == "flag"
    assert load(Path("flag.yaml"), env=env, cwd=tmp_path).settings.policy.name == "flag"


def test_the_working_directory_is_that_of_the_process(
    write_yaml: WriteYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_yaml()
    monkeypatch.chdir(tmp_path)
    assert load(env={}).settings.base.names == ("acme/base-8b", "base")


def test_without_any_settings_all_places_are_named(tmp_path: Path) -> None:
    message = refused(env={}, cwd=tmp_path)
    assert "--config" in message
    assert "LORALEDGER_CONFIG" in message
    assert "loraledger.yaml" in message


def test_a_named_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert "does not exist: correct --config" in refused(config=Path("x.yaml"), env={}, cwd=tmp_path)
    assert "does not exist" in refused(env={"LORALEDGER_CONFIG": "x.yaml"}, cwd=tmp_path)
    assert "is empty: unset it" in refused(env={"LORALEDGER_CONFIG": ""}, cwd=tmp_path)
    assert "cannot be read: Is a directory" in refused(config=tmp_path, env={}, cwd=tmp_path)
    with (tmp_path / "huge.yaml").open("wb") as huge:
        huge.truncate(100 * 2**20)
    assert "keep adapters in a folder" in refused(config=Path("huge.yaml"), env={}, cwd=tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"base: {names: [\xe9]}\n")
    assert "is not UTF-8 text (byte 15)" in refused(config=Path("latin.yaml"), env={}, cwd=tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml(text="\ufeff" + YAML)
    assert load(env={}, cwd=tmp_path).settings.base.names[0] == "acme/base-8b"


def test_the_environment_alone_is_enough(tmp_path: Path) -> None:
    env = {f"LORALEDGER_{section.upper()}": json.dumps(value) for section, value in MINIMAL.items()}
    loaded = load(env=env, cwd=tmp_path)
    assert loaded.source is None
    assert loaded.settings == settings_from(MINIMAL, root=tmp_path)
    assert origins(loaded)["replicas[0].url"] == "env:LORALEDGER_REPLICAS"


def test_list_entries_are_set_by_index_over_or_after_what_is_there(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml()
    env = {
        "LORALEDGER_REPLICAS__0__SLOTS": "8",
        "LORALEDGER_REPLICAS__1__NAME": "r1",
        "LORALEDGER_REPLICAS__1__URL": "http://127.0.0.1:8001",
        "LORALEDGER_REPLICAS__1__SLOTS": "2",
        "LORALEDGER_BASE__NAMES__1": "8",
        "LORALEDGER_POLICY__PARAMS__EPSILON": "0.5",
    }
    loaded = load(env=env, cwd=tmp_path)
    assert [(r.name, r.slots) for r in loaded.settings.replicas] == [("r0", 8), ("r1", 2)]
    assert loaded.settings.base.names == ("acme/base-8b", "8")
    assert loaded.settings.policy.params == {"epsilon": 0.5}
    assert origins(loaded)["replicas[0].slots"] == "env:LORALEDGER_REPLICAS__0__SLOTS"
    assert origins(loaded)["replicas[0].url"] == "loraledger.yaml:5"


def test_a_gap_in_a_list_is_refused(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml()
    message = refused(env={"LORALEDGER_REPLICAS__3__NAME": "x"}, cwd=tmp_path)
    assert message == "env:LORALEDGER_REPLICAS__3__NAME: replicas[3]: the list has 1 entries: the next one is [1]"


def test_a_variable_cannot_go_into_what_is_no_section(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml("listen: 5\n")
    assert "neither a section nor a list" in refused(env={"LORALEDGER_LISTEN__PORT": "1"}, cwd=tmp_path)
    write_yaml("listen:\n")
    assert load(env={"LORALEDGER_LISTEN__PORT": "1"}, cwd=tmp_path).settings.listen.port == 1


def test_what_takes_text_is_taken_letter_by_letter(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml()
    env = {
        "LORALEDGER_TENANTS__0__NAME": "007",
        "LORALEDGER_ADAPTERS__FOLDER": "null",
        "LORALEDGER_LISTEN__HOST": "::1",
    }
    settings = load(env=env, cwd=tmp_path).settings
    assert (settings.tenants[0].name, settings.adapters.folder, settings.listen.host) == ("007", None, "::1")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LORALEDGER_LISTEN_PORT", "LORALEDGER_LISTEN__PORT"),
        ("LORALEDGER_LIMITS__BODY_BYTE", "LORALEDGER_LIMITS__BODY_BYTES"),
        ("LORALEDGER_REPLICAS__7__URLL", "LORALEDGER_REPLICAS__7__URL"),
        ("LORALEDGER_REPLICA__0__URL", "LORALEDGER_REPLICAS__0__URL"),
        ("LORALEDGER_listen__port", "LORALEDGER_LISTEN__PORT"),
        ("LORALEDGER_LISTEN__PORT__X", "LORALEDGER_LISTEN__PORT"),
    ],
)
def test_an_unknown_variable_is_an_error_with_the_nearest_name(
    write_yaml: WriteYaml, tmp_path: Path, name: str, meant: str
) -> None:
    write_yaml()
    assert refused(env={name: "1"}, cwd=tmp_path) == f"env:{name}: no such setting; did you mean {meant}?"


def test_an_unknown_variable_without_a_near_name_is_an_error_too(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml()
    assert "config schema" in refused(env={"LORALEDGER_QQQ": "1"}, cwd=tmp_path)


def test_a_variable_that_a_secret_refers_to_is_known(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml("control: {key: {env: LORALEDGER_CONTROL_KEY}}\n")
    loaded = load(env={"LORALEDGER_CONTROL_KEY": "s3cret"}, cwd=tmp_path)
    assert "s3cret" not in repr(loaded)


def test_an_unknown_flag_is_an_error_with_the_nearest_name(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml()
    assert refused(env={}, flags={"listen.prt": 1}, cwd=tmp_path) == (
        "flag:listen.prt: no such setting; did you mean listen.port?"
    )
    message = refused(env={}, flags={"replicas.0.slot": 1}, cwd=tmp_path)
    assert message.endswith("did you mean replicas.0.slots?")


def test_a_value_that_cannot_be_read_is_an_error_of_its_variable(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml()
    message = refused(env={"LORALEDGER_BASE__NAMES": "[a"}, cwd=tmp_path)
    assert message.startswith("env:LORALEDGER_BASE__NAMES: base.names: value:2: is not valid YAML")
    message = refused(env={"LORALEDGER_LIMITS__DRAIN": "30"}, cwd=tmp_path)
    assert message.startswith("env:LORALEDGER_LIMITS__DRAIN: limits.drain: 30 is not a duration")


def test_all_problems_are_listed_with_file_and_line(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml("listen:\n  prot: 1\n  port: x\nlimits: {drain: 1s, drain: 2s}\n")
    lines = refused(env={"LORALEDGER_X": ""}, flags={"y": 1}, cwd=tmp_path).splitlines()
    assert lines[0] == "5 problems in the settings:"
    assert [line.strip().split(": ")[:2] for line in lines[1:]] == [
        ["loraledger.yaml:18", "limits.drain"],
        ["env:LORALEDGER_X", "no such setting"],
        ["flag:y", "no such setting"],
        ["loraledger.yaml:17", "listen.port"],
        ["loraledger.yaml:16", "listen.prot"],
    ]


def test_a_missing_field_points_at_its_section(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml(text=YAML.replace("    slots: 4\n", ""))
    assert refused(env={}, cwd=tmp_path).startswith("loraledger.yaml:4: replicas[0].slots: is missing: add it.")


def test_very_many_problems_are_counted(minimal: dict[str, Any]) -> None:
    minimal["limits"] = {f"x{i}": 1 for i in range(80)}
    with pytest.raises(ConfigError) as caught:
        settings_from(minimal)
    lines = caught.value.message.splitlines()
    assert (lines[0], lines[-1].strip(), len(lines)) == ("80 problems in the settings:", "and 30 more", 52)


def test_relative_paths_count_from_where_they_are_written(write_yaml: WriteYaml, tmp_path: Path) -> None:
    config = write_yaml("control: {key: {file: key}}\n", name="etc/c.yaml")
    settings = load(config, env={}, cwd=tmp_path).settings
    etc = tmp_path / "etc"
    assert settings.record.dir == etc / "record"
    assert settings.adapters.list[0].path == etc / "adapters/sql"
    assert settings.control.key is not None
    assert settings.control.key.file == etc / "key"
    flagged = load(
        config, env={"LORALEDGER_ADAPTERS__FOLDER": "/abs"}, flags={"record.dir": "rec"}, cwd=tmp_path
    ).settings
    assert (flagged.record.dir, flagged.adapters.folder) == (tmp_path / "rec", Path("/abs"))


def test_a_url_in_the_environment_is_refused_as_a_path(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml()
    assert "is a URL" in refused(env={"LORALEDGER_RECORD__DIR": "s3://b/x"}, cwd=tmp_path)
    assert "write the path out" in refused(env={"LORALEDGER_RECORD__DIR": "~/x"}, cwd=tmp_path)


def test_what_is_shown_loads_back_to_the_same_settings(write_yaml: WriteYaml, tmp_path: Path) -> None:
    write_yaml("limits: {drain: 1500ms, body_bytes: 42MB}\npolicy: {params: {a: 1}}\n")
    loaded = load(env={}, cwd=tmp_path)
    flags = {path.replace("[", ".").replace("]", ""): value for path, value, _ in loaded.shown()}
    assert load(env={}, flags=flags, cwd=tmp_path / "none").settings == loaded.settings


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    st.dictionaries(
        st.text("ABLISTENPORX_0123", max_size=20).map(lambda rest: PREFIX + rest), st.text(max_size=20), max_size=3
    )
)
def test_no_environment_brings_anything_but_settings_or_a_config_error(
    write_yaml: WriteYaml, tmp_path: Path, env: dict[str, str]
) -> None:
    write_yaml()
    with contextlib.suppress(ConfigError):
        load(env=env, cwd=tmp_path)
