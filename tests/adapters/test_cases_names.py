"""Names and paths that escape: the case ``path-names``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adapters.build_weights import CASES, expected
from loraledger.adapters.reading.files import contained
from loraledger.config.names import bad_name, clash_with_base, refused_adapters
from loraledger.engines.scrape import parse_metrics
from loraledger.errors import InputFileError
from loraledger.events import engine_name, parse_engine_name
from loraledger.gateway.exposition import Family, exposition

BASE = "acme/base-8b-instruct"
NAMES: list[str] = [entry["name"] for entry in json.loads((CASES / "path-names/names.json").read_text())]
PATHS: list[dict[str, str]] = json.loads((CASES / "path-names/paths.json").read_text())
GOOD_NAMES: list[str] = expected("path-names")["names_ok"]
GOOD_PATHS: list[str] = expected("path-names")["paths_ok"]


def test_only_the_harmless_names_are_taken() -> None:
    refused = refused_adapters(NAMES, [BASE])
    assert [name for index, name in enumerate(NAMES) if index not in refused] == GOOD_NAMES


def test_the_name_of_the_base_is_refused_for_being_that_and_all_others_for_what_is_in_them() -> None:
    bad = [name for name in NAMES if name not in GOOD_NAMES]
    assert [name for name in bad if bad_name(name) is None] == [BASE]
    assert "would capture base traffic" in (clash_with_base(BASE, [BASE]) or "")
    assert "','" in (bad_name("a,b") or "")


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_names_survive_both_metric_pages_and_the_way_to_the_engine_and_back(name: str) -> None:
    engine_side = engine_name(name, "0123456789abcdef")
    parsed = parse_engine_name(engine_side)
    assert parsed is not None
    assert parsed[0] == name
    both = f"other,{engine_side}"
    sample = parse_metrics(
        f'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{both}",waiting_lora_adapters=""}} 1.0\n'
    )
    assert set(sample.active_adapters or ()) == {"other", engine_side}
    page = Family("gauge", "seen", "One adapter.", ["adapter"])
    page.set((name,), 1)
    [family] = text_string_to_metric_families(exposition([page]).decode())
    assert [found.labels for found in family.samples] == [{"adapter": name}]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root that the case speaks of, beside a folder of somebody else's; ``link-in`` leads to its own ``sql``."""
    root = tmp_path / PATHS[0]["root"]
    for folder in (root / "sql/v1", tmp_path / "other/x", tmp_path / "other/sql"):
        folder.mkdir(parents=True)
    (root / "link-out").symlink_to("../other")
    (root / "link-in").symlink_to("sql")
    return root


@pytest.mark.parametrize("path", [entry["path"] for entry in PATHS])
def test_only_paths_inside_the_root_are_taken(root: Path, path: str) -> None:
    if path in GOOD_PATHS:
        assert contained(root, path) == root.resolve() / "sql/v1"
    else:
        reason = "is a URL" if "://" in path else "is absolute" if path.startswith("/") else "leads out|cannot be found"
        with pytest.raises(InputFileError, match=reason):
            contained(root, path)


def test_a_link_that_stays_inside_is_fine_and_a_hub_name_is_a_path_like_any_other(root: Path) -> None:
    assert contained(root, "link-in/v1") == root.resolve() / "sql/v1"
    with pytest.raises(InputFileError, match="cannot be found"):
        contained(root, "some-org/some-adapter")


def test_an_absolute_path_is_refused_even_when_it_lies_inside(root: Path) -> None:
    with pytest.raises(InputFileError, match="is absolute"):
        contained(root, str(root / "sql/v1"))
