"""Which stored copies a gateway keeps, gives up, and what a reread of the folders changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.build_weights import SMALL, build, pairs
from e2e.fleet import write_adapter
from loraledger.adapters import Store
from loraledger.config import Settings, hash_key, settings_from
from loraledger.errors import ConfigError, InputFileError
from loraledger.events import AdapterDeclared, AdapterRetired, ReplicaSampled, ReplicaUp, engine_name
from loraledger.gateway.assemble import fleet_settings
from loraledger.gateway.shelf import Shelf, differences, names_of
from loraledger.kernel.fleet import Fleet


def settings(
    tmp_path: Path, grants: tuple[str, ...] = ("*",), base: Path | None = None, **adapters: object
) -> Settings:
    return settings_from(
        {
            "base": {"names": ["base"], "path": None if base is None else str(base)},
            "replicas": [
                {"name": n, "url": f"http://127.0.0.1:800{i}", "slots": 2} for i, n in enumerate(("r1", "r2"))
            ],
            "adapters": {"folder": "scan", **adapters},
            "tenants": [{"name": "acme", "key_hashes": [hash_key("k")], "adapters": list(grants)}],
        },
        root=tmp_path,
    )


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    folder = tmp_path / "scan"
    for name in ("a", "b"):
        write_adapter(folder, name)
    return folder


@pytest.fixture
def shelf(tmp_path: Path, scan: Path) -> Iterator[Shelf]:
    shelf = Shelf(settings(tmp_path))
    yield shelf
    shelf.close()


def listing(replica: str, *names: str) -> ReplicaSampled:
    return ReplicaSampled(1, replica, 1, 0, 0, 0.0, None, None, names)


def digest_of(shelf: Shelf, name: str) -> str:
    return next(entry.digest for entry in shelf.catalog.entries if entry.name == name)


def edit(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_engines_are_given_the_copy_and_never_the_folder(shelf: Shelf, scan: Path, tmp_path: Path) -> None:
    digest = digest_of(shelf, "a")
    path = Path(shelf.path_of(engine_name("a", digest, 3)))
    assert path == tmp_path / "store" / digest
    before = (path / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(scan / "a")
    assert (path / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["a@000000000000", "a", "sql@main"])
def test_a_version_that_the_store_does_not_have_is_refused(shelf: Shelf, name: str) -> None:
    with pytest.raises(InputFileError, match="the store has no files of"):
        shelf.path_of(name)


def test_the_store_belongs_to_one_gateway(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store"):
        Shelf(settings(tmp_path))


def test_a_reread_tells_what_is_new_changed_and_gone(shelf: Shelf, scan: Path, tmp_path: Path) -> None:
    state = Fleet(fleet_settings(settings(tmp_path), shelf.catalog)).state
    old = digest_of(shelf, "a")
    edit(scan / "a", revision="a2")
    shutil.rmtree(scan / "b")
    write_adapter(scan, "c")
    fresh = shelf.read()
    events = differences(state, fresh, 7)
    assert [type(event) for event in events] == [AdapterRetired, AdapterDeclared, AdapterDeclared]
    assert names_of(events, state) == {"added": ["c"], "changed": ["a"], "removed": ["b"]}
    shelf.swap(fresh)
    assert digest_of(shelf, "a") != old
    assert differences(state, shelf.catalog, 7) == events
    assert (tmp_path / "store" / old).is_dir(), "a replica may still read the old version"


def test_an_adapter_that_became_unreadable_keeps_its_last_good_version(
    shelf: Shelf, scan: Path, tmp_path: Path
) -> None:
    state = Fleet(fleet_settings(settings(tmp_path), shelf.catalog)).state
    digest = digest_of(shelf, "a")
    (scan / "a" / "adapter_model.safetensors").write_bytes(b"half an uplo")
    fresh = shelf.read()
    assert [problem.name for problem in fresh.problems] == ["a"]
    assert differences(state, fresh, 7) == []
    shelf.swap(fresh)
    assert digest_of(shelf, "a") == digest


def retire_a(shelf: Shelf, scan: Path) -> str:
    """Take ``a`` out of the catalog; returns the digest that it had."""
    digest = digest_of(shelf, "a")
    shutil.rmtree(scan / "a")
    shelf.swap(shelf.read())
    return digest


def test_a_copy_goes_when_every_replica_was_heard_and_none_lists_it(shelf: Shelf, scan: Path, tmp_path: Path) -> None:
    state = Fleet(fleet_settings(settings(tmp_path), shelf.catalog)).state
    digest = retire_a(shelf, scan)
    shelf.observe(ReplicaUp(1, "r1", 1, (engine_name("a", digest),)))
    shelf.sweep(state, ())
    assert shelf.collect() == (), "r2 was never heard"
    shelf.observe(listing("r2", "someone-elses"))
    shelf.sweep(state, ())
    assert shelf.collect() == (), "r1 lists it"
    shelf.observe(listing("r1"))
    shelf.sweep(state, [digest])
    assert shelf.collect() == (), "a request for it is open"
    shelf.sweep(state, ())
    assert shelf.collect() == (digest,)
    assert set(shelf.store.entries) == {digest_of(shelf, "b")}


def test_a_copy_whose_load_is_under_way_stays(shelf: Shelf, scan: Path, tmp_path: Path) -> None:
    fleet = Fleet(fleet_settings(settings(tmp_path), shelf.catalog))
    for replica in ("r1", "r2"):
        up = ReplicaUp(1, replica, 1, ())
        fleet.step(up)
        shelf.observe(up)
    digest = digest_of(shelf, "a")
    spec = fleet.state.adapters["a"].spec
    fleet.step(AdapterDeclared(2, type(spec)(spec.name, spec.digest, spec.rank, spec.bytes, spec.tenants, -1)))
    assert fleet.state.replicas["r1"].registrations["a"].state == "loading"
    retire_a(shelf, scan)
    shelf.sweep(fleet.state, ())
    assert shelf.collect() == ()
    assert digest in shelf.store.entries


def test_what_is_served_is_never_removed(shelf: Shelf, tmp_path: Path) -> None:
    state = Fleet(fleet_settings(settings(tmp_path), shelf.catalog)).state
    for replica in ("r1", "r2"):
        shelf.observe(listing(replica))
    shelf.sweep(state, ())
    assert shelf.collect() == ()
    assert len(shelf.store.entries) == 2


def test_copies_of_an_earlier_process_stay_until_the_replicas_were_heard(scan: Path, tmp_path: Path) -> None:
    first = Shelf(settings(tmp_path))
    digest = digest_of(first, "a")
    first.close()
    shutil.rmtree(scan / "a")
    second = Shelf(settings(tmp_path))
    try:
        state = Fleet(fleet_settings(settings(tmp_path), second.catalog)).state
        second.sweep(state, ())
        assert second.collect() == ()
        for replica in ("r1", "r2"):
            second.observe(listing(replica))
        second.sweep(state, ())
        assert second.collect() == (digest,)
    finally:
        second.close()


def test_an_adapter_that_does_not_fit_the_store_is_a_problem_and_the_rest_is_served(scan: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in (scan / "a").iterdir())
    shelf = Shelf(settings(tmp_path, store_bytes=size + 10))
    try:
        assert [entry.name for entry in shelf.catalog.entries] == ["a"]
        (problem,) = shelf.catalog.problems
        assert problem.name == "b"
        assert "store" in problem.reason
    finally:
        shelf.close()


def test_what_no_replica_would_apply_is_not_served(scan: Path, tmp_path: Path) -> None:
    edit(scan / "a", use_dora=True)
    shelf = Shelf(settings(tmp_path))
    try:
        (problem,) = shelf.catalog.problems
        assert (problem.name, "DoRA" in problem.reason) == ("a", True)
        assert len(shelf.store.entries) == 1
    finally:
        shelf.close()


def test_a_version_is_found_by_adapter_and_digits_together(shelf: Shelf) -> None:
    a, b = digest_of(shelf, "a"), digest_of(shelf, "b")
    assert shelf.path_of(engine_name("a", a)).endswith(a)
    with pytest.raises(InputFileError):
        shelf.path_of(engine_name("a", b))


def test_two_adapters_with_the_same_twelve_digits_are_not_both_served(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Making such a pair takes 2^48 hashes the plain way; here digests are cut to one digit that all share.
    monkeypatch.setattr("loraledger.adapters.catalog.short_digest", lambda digest: "0")
    shelf = Shelf(settings(tmp_path))
    try:
        assert [entry.name for entry in shelf.catalog.entries] == ["a"]
        assert [problem.name for problem in shelf.catalog.problems] == ["b"]
    finally:
        shelf.close()


def test_an_adapter_whose_folder_is_gone_is_retired_although_a_grant_names_it(scan: Path, tmp_path: Path) -> None:
    shelf = Shelf(settings(tmp_path, grants=("a", "b")))
    try:
        shutil.rmtree(scan / "a")
        fresh = shelf.read()
        assert [entry.name for entry in fresh.entries] == ["b"]
        assert [problem.name for problem in fresh.problems] == ["a"]
    finally:
        shelf.close()


def test_a_folder_without_its_configuration_is_an_upload_under_way(shelf: Shelf, scan: Path, tmp_path: Path) -> None:
    (scan / "a" / "adapter_config.json").unlink()
    fresh = shelf.read()
    assert {entry.name for entry in fresh.entries} == {"a", "b"}
    assert [problem.name for problem in fresh.problems] == ["a"]


def test_store_and_folder_may_not_lie_in_each_other_even_through_a_link(scan: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(scan)
    with pytest.raises(ConfigError, match="lie in each other"):
        Shelf(settings(tmp_path, store="elsewhere/inner"))


def test_a_copy_that_was_admitted_and_then_not_served_is_given_up(shelf: Shelf, tmp_path: Path) -> None:
    state = Fleet(fleet_settings(settings(tmp_path), shelf.catalog)).state
    other = write_adapter(tmp_path / "other", "x")
    stored = shelf.store.admit(other / "adapter_config.json", other / "adapter_model.safetensors", holder="catalog")
    for replica in ("r1", "r2"):
        shelf.observe(listing(replica))
    shelf.sweep(state, ())
    assert shelf.collect() == ()
    shelf.swap(shelf.read())
    shelf.sweep(state, ())
    assert shelf.collect() == (stored.digest,)


def test_a_problem_is_one_line_whatever_the_folder_is_called(scan: Path, tmp_path: Path) -> None:
    (scan / "evil\n2026 INFO all is well \x1b[31m").mkdir()
    (scan / "evil\n2026 INFO all is well \x1b[31m" / "adapter_config.json").write_text("{}")
    shelf = Shelf(settings(tmp_path))
    try:
        (problem,) = shelf.catalog.problems
        assert str(problem).isprintable()
        assert "evil\\n2026" in str(problem)
    finally:
        shelf.close()


def test_a_folder_that_changes_between_judging_and_copying_is_not_served(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = Store.admit

    def swapped(store: Store, config: Path, weights: Path, **more: Any) -> Any:
        if config.parent.name == "a":
            edit(config.parent, lora_alpha=99)
        return admit(store, config, weights, **more)

    monkeypatch.setattr(Store, "admit", swapped)
    shelf = Shelf(settings(tmp_path))
    try:
        (problem,) = shelf.catalog.problems
        assert (problem.name, "changed while it was taken in" in problem.reason) == ("a", True)
        assert [entry.name for entry in shelf.catalog.entries] == ["b"]
    finally:
        shelf.close()


def test_what_an_engine_drops_of_an_adapter_is_a_warning_and_the_rest_is_served(tmp_path: Path) -> None:
    SMALL.write(tmp_path / "base")
    every = SMALL.projections()
    config = {"r": 4, "lora_alpha": 8, "peft_type": "LORA", "target_modules": ["q_proj"]}
    build(
        tmp_path / "scan" / "deep", config, pairs({"self_attn.q_proj": every["self_attn.q_proj"]}, 4, SMALL.layers + 1)
    )
    shelf = Shelf(settings(tmp_path, base=tmp_path / "base"))
    try:
        assert [entry.name for entry in shelf.catalog.entries] == ["deep"]
        (warning,) = [text for text in shelf.catalog.warnings if "deep" in text]
        assert "not in the base" in warning
    finally:
        shelf.close()
