"""The catalog: who is in it, who may call whom, and what could not be taken in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.conftest import LFS_POINTER, MakeAdapter
from loraledger.adapters import Catalog, build_catalog
from loraledger.config import hash_key, settings_from
from loraledger.config.names import bad_name
from loraledger.errors import ConfigError
from loraledger.events import engine_name, parse_engine_name


def catalog_of(tmp_path: Path, adapters: dict[str, Any], tenants: dict[str, list[str]] | None = None) -> Catalog:
    tenants = {"acme": ["*"]} if tenants is None else tenants
    data = {
        "base": {"names": ["acme/base-8b", "base"]},
        "replicas": [{"name": "r0", "url": "http://127.0.0.1:8000", "slots": 4}],
        "adapters": adapters,
        "tenants": [{"name": n, "key_hashes": [hash_key(n)], "adapters": a} for n, a in tenants.items()],
    }
    return build_catalog(settings_from(data, root=tmp_path))


def test_listed_adapters_come_first_then_those_of_the_folder_by_name(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_adapter(name, parent=tmp_path / "scan")
    make_adapter("elsewhere")
    spec = {"name": "org/sql@main", "path": "elsewhere", "pin": True, "replicas": "all"}
    catalog = catalog_of(tmp_path, {"folder": "scan", "list": [spec]})
    assert [entry.name for entry in catalog.entries] == ["org/sql@main", "a", "b"]
    first, second, _ = catalog.entries
    assert (first.folder.path, first.pin, first.replicas) == (tmp_path / "elsewhere", True, "all")
    assert (second.folder.path, second.pin, second.replicas) == (tmp_path / "scan" / "a", False, None)
    assert (catalog.problems, catalog.warnings) == ((), ())


def test_an_adapter_that_lists_tenants_is_theirs_alone(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    make_adapter("x")
    specs = [
        {"name": "private", "path": "x", "tenants": ["beta"]},
        {"name": "shared-a", "path": "x"},
        {"name": "other", "path": "x"},
    ]
    tenants = {"acme": ["*"], "beta": [], "gamma": ["shared-?", "nothing-*"]}
    catalog = catalog_of(tmp_path, {"list": specs}, tenants)
    assert {entry.name: entry.tenants for entry in catalog.entries} == {
        "private": ("beta",),
        "shared-a": ("acme", "gamma"),
        "other": ("acme",),
    }


def test_patterns_tell_case_apart(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    make_adapter("SQL", parent=tmp_path / "scan")
    catalog = catalog_of(tmp_path, {"folder": "scan"}, {"acme": ["sql*"]})
    assert catalog.entries[0].tenants == ()
    assert catalog.warnings == (
        "adapter 'SQL' is granted to no tenant: list tenants on it, or match it in a tenant's adapters",
        "tenant 'acme': the pattern 'sql*' matches no adapter",
    )


def test_a_bad_adapter_never_stops_the_rest(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    scan = tmp_path / "scan"
    make_adapter("good", parent=scan)
    make_adapter("rank0", parent=scan, r=0)
    make_adapter("pointer", parent=scan, weights=LFS_POINTER)
    make_adapter("a,b", parent=scan)
    make_adapter("base", parent=scan)
    make_adapter("BASE", parent=scan)
    (scan / "dangling").mkdir()
    (scan / "dangling" / "adapter_config.json").symlink_to("nowhere")
    catalog = catalog_of(tmp_path, {"folder": "scan", "list": [{"name": "gone", "path": "gone"}]})
    assert [entry.name for entry in catalog.entries] == ["good"]
    reasons = {problem.name: problem.reason for problem in catalog.problems}
    assert set(reasons) == {"gone", "rank0", "pointer", "a,b", "base", "BASE", "dangling"}
    assert "does not exist" in reasons["gone"]
    assert "r is 0" in reasons["rank0"]
    assert "Git LFS pointer" in reasons["pointer"]
    assert reasons["a,b"].startswith("the name contains ','")
    assert "equals a base alias" in reasons["base"]
    assert "differs by case only" in reasons["BASE"]
    assert "link to nothing" in reasons["dangling"]
    assert str(catalog.problems[0]) == f"gone ({tmp_path / 'gone'}): does not exist: correct the path"


def test_only_visible_sub_folders_with_a_configuration_are_adapters(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    make_adapter("a", parent=tmp_path / "scan")
    make_adapter(".cache", parent=tmp_path / "scan")
    make_adapter("nested", parent=tmp_path / "scan" / "deep")
    (tmp_path / "scan" / "notes.txt").write_text("x")
    catalog = catalog_of(tmp_path, {"folder": "scan"})
    assert ([entry.name for entry in catalog.entries], catalog.problems) == (["a"], ())


def test_links_out_of_the_folder_are_refused_and_links_inside_are_not(
    make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    scan = tmp_path / "scan"
    make_adapter("v1", parent=scan)
    make_adapter("outside")
    (scan / "current").symlink_to("v1")
    (scan / "escape").symlink_to(tmp_path / "outside")
    half = make_adapter("half", parent=scan)
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(tmp_path / "outside" / "adapter_model.safetensors")
    catalog = catalog_of(tmp_path, {"folder": "scan"})
    assert [entry.name for entry in catalog.entries] == ["current", "v1"]
    assert catalog.entries[0].digest == catalog.entries[1].digest
    assert {problem.name for problem in catalog.problems} == {"escape", "half"}
    assert all("leads out of" in problem.reason for problem in catalog.problems)


def test_an_entry_refines_the_sub_folder_that_it_names(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    make_adapter("sql", parent=tmp_path / "scan")
    make_adapter("ocr", parent=tmp_path / "scan")
    specs = [{"name": "org/sql", "path": "scan/sql", "pin": True}]
    catalog = catalog_of(tmp_path, {"folder": "scan", "list": specs})
    assert [(entry.name, entry.pin) for entry in catalog.entries] == [("org/sql", True), ("ocr", False)]
    assert catalog.problems == ()


def test_a_sub_folder_with_the_name_of_an_entry_elsewhere_is_a_duplicate(
    make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    make_adapter("sql", parent=tmp_path / "scan")
    make_adapter("other")
    catalog = catalog_of(tmp_path, {"folder": "scan", "list": [{"name": "sql", "path": "other"}]})
    assert [entry.folder.path for entry in catalog.entries] == [tmp_path / "other"]
    (problem,) = catalog.problems
    assert (problem.name, problem.path) == ("sql", tmp_path / "scan" / "sql")
    assert "is a duplicate" in problem.reason


def test_a_grant_to_what_the_folder_does_not_have_is_a_problem(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    make_adapter("sql", parent=tmp_path / "scan")
    make_adapter("bad", parent=tmp_path / "scan", r=0)
    catalog = catalog_of(tmp_path, {"folder": "scan"}, {"acme": ["sql", "sqk", "bad"]})
    assert [(problem.name, "granted to tenant 'acme'" in problem.reason) for problem in catalog.problems] == [
        ("bad", False),
        ("sqk", True),
    ]


def test_a_missing_folder_is_an_error_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapters\.folder: .* cannot be listed: No such file or directory"):
        catalog_of(tmp_path, {"folder": "scan"})


def test_loops_of_links_and_names_that_are_no_text_are_problems(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    scan = tmp_path / "scan"
    folder = make_adapter("x", parent=scan)
    folder.rename(scan / os.fsdecode(b"\xff\xfe"))
    (tmp_path / "loop").symlink_to("loop")
    catalog = catalog_of(tmp_path, {"folder": "scan", "list": [{"name": "loop", "path": "loop"}]})
    assert catalog.entries == ()
    shown = [str(problem) for problem in catalog.problems]
    assert len(shown) == 2
    assert shown[0].startswith("loop ")
    assert "contains" in shown[1]
    assert shown[1].isprintable()


def test_an_engine_name_carries_version_and_generation() -> None:
    digest = "0123456789ab" + "c" * 52
    assert engine_name("sql", digest) == "sql@0123456789ab"
    assert engine_name("org/a@main", digest, 2) == "org/a@main@0123456789ab~2"
    assert parse_engine_name("org/a@main@0123456789ab~2") == ("org/a@main", "0123456789ab", 2)
    assert parse_engine_name("a@0123456789ab@ba9876543210") == ("a@0123456789ab", "ba9876543210", 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sql",
        "sql@main",
        "@0123456789ab",
        "sql@0123456789a",
        "sql@0123456789AB",
        "sql@0123456789ab\n",
        "sql@0123456789ab~",
        "sql@0123456789ab~0",
        "sql@0123456789ab~1",
        "sql@0123456789ab~02",
        "sql@0123456789ab~2~3",
    ],
)
def test_other_names_are_no_engine_names(text: str) -> None:
    assert parse_engine_name(text) is None


NAMES = st.text("aA0._-+:@/~", min_size=1, max_size=30).filter(lambda name: bad_name(name) is None)


@settings(deadline=None)
@given(NAMES, st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(min_value=1, max_value=999_999_999))
def test_every_engine_name_leads_back(name: str, digest: str, generation: int) -> None:
    assert parse_engine_name(engine_name(name, digest, generation)) == (name, digest[:12], generation)
