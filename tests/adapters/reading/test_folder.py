"""One adapter folder: what is read from it, and what is refused with its reason."""

from __future__ import annotations

import gc
import json
import os
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import LFS_POINTER, TENSORS, MakeAdapter, safetensors
from loraledger.adapters import AdapterFolder, read_folder
from loraledger.adapters.reading.folder import MAX_REMEMBERED, FolderReader
from loraledger.adapters.reading.modules import Inventory, LoraModule, Part
from loraledger.errors import InputFileError


def refused(folder: Path, root: Path | None = None) -> str:
    with pytest.raises(InputFileError) as caught:
        read_folder("sql", folder, root=root)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_plain_adapter_is_read(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("sql")
    read = read_folder("sql", folder)
    q, v = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
    assert read == AdapterFolder(
        name="sql",
        path=folder,
        config=read.config,
        inventory=Inventory(
            modules={q: LoraModule(q, 4, 8, 8, 64, 128), v: LoraModule(v, 4, 8, 2, 40, 80)},
            whole=Part(), magnitude=Part(), other=Part(), halves=(), mismatched=(),
        ),
        rank=4,
        target_modules=("q_proj", "v_proj"),
        base_claim="acme/base-8b",
        bytes_disk=len(safetensors()),
        parameters=104,
        dtypes=("BF16",),
        files=(folder / "adapter_config.json", folder / "adapter_model.safetensors"),
        sharded=False,
        ignored=(),
        layout_id=read.layout_id,
        warnings=(),
    )  # fmt: skip
    assert (read.config.rank, read.config.alpha, read.config.peft_type) == (4, 32.0, "LORA")
    assert read.scalings == {q: 8.0, v: 8.0}


def test_the_rank_is_the_largest_of_any_module(make_adapter: MakeAdapter) -> None:
    assert read_folder("a", make_adapter("a", r=8, rank_pattern={"q_proj": 32, "down_proj": 4})).rank == 32
    assert read_folder("b", make_adapter("b", r=8, rank_pattern={"model.layers.3.q_proj": 2})).rank == 8
    assert read_folder("c", make_adapter("c", r=8, rank_pattern=None)).rank == 8
    wider = read_folder("d", make_adapter("d", r=2))
    assert (wider.rank, wider.config.rank) == (4, 2)
    assert "tensors of another rank than the configuration says: 'model.layers.0.self_attn.q_proj'" in wider.warnings[0]


@pytest.mark.parametrize("targets", ["all-linear", r"^(?!.*lm_head).*\.(q_proj|v_proj)$"])
def test_targets_in_one_string_stay_one_string(make_adapter: MakeAdapter, targets: str) -> None:
    assert read_folder("sql", make_adapter("sql", target_modules=targets)).target_modules == targets


def test_null_targets_are_taken_from_the_tensors(make_adapter: MakeAdapter) -> None:
    read = read_folder("sql", make_adapter("sql", target_modules=None))
    assert read.target_modules == ("q_proj", "v_proj")
    assert read.warnings == ("target_modules is null: the modules are taken from the tensors",)
    bare = make_adapter("bare", target_modules=None, weights=safetensors({"lm_head.weight": (2, 2)}))
    assert "neither target_modules nor any tensor name" in refused(bare)


def test_other_kinds_of_adapters_are_reported_as_they_are(make_adapter: MakeAdapter) -> None:
    config = read_folder(
        "x", make_adapter("x", use_dora=True, modules_to_save=["lm_head", "embed_tokens"], peft_type="loha")
    ).config
    assert (config.use_dora, config.modules_to_save, config.peft_type) == (True, ("embed_tokens", "lm_head"), "LOHA")
    folder = make_adapter("y")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "target_modules": ["k_proj"]}))
    assert "is an adapter of type 'IA3', not LoRA" in refused(folder)


def test_unknown_fields_are_a_warning(make_adapter: MakeAdapter) -> None:
    read = read_folder("new", make_adapter("new", enable_lora=None, some_field_from_2027={"x": 1}, lora_alpha=16.5))
    assert (read.config.alpha, read.config.unknown) == (16.5, ("some_field_from_2027",))
    assert read.warnings == ("unknown fields of the configuration, ignored: 'some_field_from_2027'",)


def test_the_layout_is_that_of_tensors_and_behaviour(make_adapter: MakeAdapter) -> None:
    def layout(name: str, weights: bytes | None = None, **changes: Any) -> str:
        return read_folder(name, make_adapter(name, weights=weights, **changes)).layout_id

    plain = layout("plain")
    assert len(plain) == 16
    assert layout("values", safetensors(fill=b"\1")) == plain
    assert layout("order", safetensors(dict(reversed(TENSORS.items())))) == plain
    assert layout("said", base_model_name_or_path="x", peft_version="1", task_type="X", new={"x": 1}) == plain
    shapes = {name: (*shape[:-1], shape[-1] * 2) if "A" in name else shape for name, shape in TENSORS.items()}
    others = [
        layout("alpha", lora_alpha=33), layout("rslora", use_rslora=True), layout("pattern", alpha_pattern={"q_proj": 1}),
        layout("shape", safetensors(shapes)), layout("name", safetensors({f"x.{k}": v for k, v in TENSORS.items()})),
        layout("type", safetensors().replace(b'"BF16"', b'"F16" ')),
    ]  # fmt: skip
    assert len({plain, *others}) == 1 + len(others)


def test_the_layout_knows_which_tensor_has_which_type(make_adapter: MakeAdapter) -> None:
    raw = safetensors()
    first = raw.replace(b'"BF16"', b'"F16" ', 1)
    last = b'"F16" '.join(raw.rsplit(b'"BF16"', 1))
    layouts = {
        read_folder(name, make_adapter(name, weights=weights)).layout_id
        for name, weights in (("a", first), ("b", last))
    }
    assert len(layouts) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"[" * 200_000, "is nested too deeply"),
        (b" " * 1_100_000, "adapter_config.json is over 1,048,576 bytes"),
        (LFS_POINTER, "adapter_config.json is a Git LFS pointer for a file of 83,945,072 bytes"),
    ],
)
def test_a_broken_configuration_is_refused(make_adapter: MakeAdapter, content: bytes, message: str) -> None:
    folder = make_adapter("sql")
    (folder / "adapter_config.json").write_bytes(content)
    assert message in refused(folder)


def test_a_hostile_value_does_not_fill_the_message(make_adapter: MakeAdapter) -> None:
    assert len(refused(make_adapter("a", base_model_name_or_path=["x" * 100_000]))) < 300
    assert len(refused(make_adapter("b", rank_pattern={"x" * 100_000: 0}))) < 300
    assert len(refused(make_adapter("c", peft_type="x" * 100_000, r=None))) < 300
    names: dict[str, Any] = {f"f{i}" + "x" * 1000: 1 for i in range(100)}
    (warning,) = read_folder("d", make_adapter("d", **names)).warnings
    assert len(warning) < 500


def test_missing_files_are_named(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none")
    folder = make_adapter("sql")
    assert "is not a folder" in refused(folder / "adapter_config.json")
    (folder / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refused(folder)
    (folder / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refused(folder)
    assert "cannot be read: " in refused(tmp_path / "a\0b")
    assert "cannot be read: " in refused(tmp_path / ("x" * 300))


def test_pickled_weights_are_refused_by_name_and_never_opened(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("sql")
    os.mkfifo(folder / "adapter_model.bin")  # opening it would block this test for ever
    read = read_folder("sql", folder)
    assert (read.rank, read.ignored) == (4, ("adapter_model.bin",))
    assert read.warnings == ("ignored beside adapter_model.safetensors: 'adapter_model.bin'",)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").unlink()
    (folder / "adapter_model.bin").write_bytes(b"CANARY" * 1000)
    message = refused(folder)
    assert "only pickled weights (adapter_model.bin of 6,000 bytes), which are never opened: convert them" in message
    assert "CANARY" not in message


def test_only_regular_files_are_opened(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("sql")
    weights = folder / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    assert "adapter_model.safetensors is not a regular file" in refused(folder)
    weights.unlink()
    weights.mkdir()
    assert "adapter_model.safetensors is not a regular file" in refused(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()
    assert "adapter_config.json is not a regular file" in refused(folder)


@pytest.mark.parametrize("denied", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_unreadable_file_is_a_problem_of_the_adapter(
    make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    folder = make_adapter("sql")
    really = os.open

    def deny(path: Path, flags: int) -> int:
        if path.name == denied:
            raise PermissionError(13, "Permission denied")
        return really(path, flags)

    monkeypatch.setattr(os, "open", deny)
    assert refused(folder) == "cannot be read: Permission denied"


def test_files_may_be_links_inside_the_root_and_not_out_of_it(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    root = tmp_path / "root"
    inside = make_adapter("inside", parent=root)
    outside = make_adapter("outside")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        for target, reason in (
            (inside, None),
            (outside, f"{file} is a link that leads out of"),
            (tmp_path / "none", f"{file} is a link to nothing"),
        ):
            folder = make_adapter(f"{file}-linked-to-{target.name}", parent=root)
            (folder / file).unlink()
            (folder / file).symlink_to(target / file)
            if reason is None:
                assert read_folder("a", folder, root=root).rank == 4
            else:
                assert reason in refused(folder, root)
    assert read_folder("a", root / "adapter_config.json-linked-to-outside").rank == 4


def test_a_reader_of_many_folders_gives_what_single_readings_give(make_adapter: MakeAdapter) -> None:
    folders = [
        make_adapter("a"), make_adapter("b"), make_adapter("c", lora_alpha=7), make_adapter("d", r=2),
        make_adapter("e", weights=safetensors(dict(list(TENSORS.items())[:2]))), make_adapter("f", target_modules=None),
    ]  # fmt: skip
    (folders[1] / "adapter_model.bin").write_bytes(b"")
    for keep in (0, 1, 64):
        reader = FolderReader(keep)
        for folder in folders * 2:
            assert reader.read(folder.name, folder) == read_folder(folder.name, folder)


def test_a_reader_shares_what_folders_have_in_common_and_forgets_the_oldest(make_adapter: MakeAdapter) -> None:
    a, b, c = (make_adapter(name, lora_alpha=alpha) for name, alpha in (("a", 1), ("b", 1), ("c", 2)))
    reader = FolderReader(keep=1)
    first, second = reader.read("a", a), reader.read("b", b)
    assert first.inventory is second.inventory
    assert replace(first, name="b", path=b, files=second.files) == second
    forgotten = weakref.ref(first.reading)
    del first, second
    gc.collect()
    assert forgotten() is not None
    reader.read("c", c)
    gc.collect()
    assert forgotten() is None


def test_a_reader_forgets_what_was_used_longest_ago(make_adapter: MakeAdapter) -> None:
    a, b, c = (make_adapter(str(alpha), lora_alpha=alpha) for alpha in (1, 2, 3))
    reader = FolderReader(keep=2)
    first, second = (weakref.ref(reader.read("x", folder).reading) for folder in (a, b))
    for folder in (a, c):
        reader.read("x", folder)
    gc.collect()
    assert first() is reader.read("a", a).reading is not None
    assert second() is None


def test_a_reader_does_not_take_other_lengths_or_headers_for_known_ones(make_adapter: MakeAdapter) -> None:
    reader = FolderReader()
    folder = make_adapter("a")
    reader.read("a", folder)
    (folder / "adapter_model.safetensors").write_bytes(safetensors()[:-1])
    with pytest.raises(InputFileError, match="fetch it again"):
        reader.read("a", folder)


def test_a_reader_keeps_a_large_header_only_while_somebody_holds_it(make_adapter: MakeAdapter) -> None:
    many = {f"{i}{'x' * 100}.{side}.weight": (4, 4) for i in range(4000) for side in ("lora_A", "lora_B")}
    assert len(safetensors(many)) > MAX_REMEMBERED
    reader, folder, copy = FolderReader(), *(make_adapter(name, weights=safetensors(many)) for name in "ab")
    held = reader.read("a", folder)
    assert reader.read("b", copy).inventory is held.inventory
    inventory = weakref.ref(held.reading)
    del held
    gc.collect()
    assert inventory() is None


def test_many_links_to_one_fat_folder_cost_the_memory_of_one(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    many = {f"m.layers.{i}.q.{side}.weight": (1, 1) for i in range(10_000) for side in ("lora_A", "lora_B")}
    folder, reader = make_adapter("fat", weights=safetensors(many), r=1), FolderReader()
    for i in range(20):
        (tmp_path / f"link{i}").symlink_to(folder)
    tracemalloc.start()
    try:
        read = [reader.read("fat", folder)]
        one, _ = tracemalloc.get_traced_memory()
        read += [reader.read(f"link{i}", tmp_path / f"link{i}") for i in range(20)]
        all_of_them, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all_of_them < 1.2 * one
    assert len({id(item.inventory) for item in read}) == 1


def test_patterns_that_would_hold_an_engine_are_refused_with_the_folder(make_adapter: MakeAdapter) -> None:
    many = {f"m.layers.{i}.q.{side}.weight": (1, 1) for i in range(600) for side in ("lora_A", "lora_B")}
    keys = {f"m.layers.{i}.q": 1 for i in range(600)}
    assert "600 keys for 600 modules" in refused(make_adapter("a", weights=safetensors(many), r=1, rank_pattern=keys))
    assert "600 keys for 600 modules" in refused(make_adapter("b", weights=safetensors(many), r=1, alpha_pattern=keys))
    assert read_folder("c", make_adapter("c", weights=safetensors(many), r=1, rank_pattern={"q": 1})).rank == 1
