"""Weights in several files: the index and the files agree, or the adapter is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from adapters.conftest import LFS_POINTER, TENSORS, MakeAdapter, safetensors
from loraledger.adapters import read_folder
from loraledger.adapters.reading.folder import FolderReader
from loraledger.adapters.reading.shards import MAX_SHARDS
from loraledger.errors import InputFileError

INDEX = "adapter_model.safetensors.index.json"
ONE, TWO = "adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"
A, B = dict(list(TENSORS.items())[:2]), dict(list(TENSORS.items())[2:])
MAP = {**dict.fromkeys(A, ONE), **dict.fromkeys(B, TWO)}


@pytest.fixture
def folder(make_adapter: MakeAdapter) -> Path:
    """The plain adapter of the other tests, in two files."""
    folder = make_adapter("sharded")
    (folder / "adapter_model.safetensors").unlink()
    (folder / ONE).write_bytes(safetensors(A))
    (folder / TWO).write_bytes(safetensors(B))
    write_index(folder, MAP)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def refused(folder: Path, root: Path | None = None) -> str:
    with pytest.raises(InputFileError) as caught:
        read_folder("x", folder, root=root)
    assert len(caught.value.message) < 300
    return caught.value.message


def test_shards_are_read_as_one(folder: Path, make_adapter: MakeAdapter) -> None:
    sharded, plain = read_folder("a", folder), read_folder("a", make_adapter("plain"))
    assert sharded.sharded
    assert not plain.sharded
    assert (sharded.inventory.modules, sharded.parameters) == (plain.inventory.modules, plain.parameters)
    assert sharded.layout_id == plain.layout_id
    assert sharded.bytes_disk == len(safetensors(A)) + len(safetensors(B))
    assert [file.name for file in sharded.files] == ["adapter_config.json", INDEX, ONE, TWO]
    assert sharded.warnings == ("weights in 2 files: engines read one file",)


def test_one_file_wins_over_an_index(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(safetensors())
    read = read_folder("a", folder)
    assert (read.sharded, read.ignored) == (False, (INDEX,))


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 5, "a\n.safetensors", None]
)
def test_shards_are_plain_names_beside_the_index(folder: Path, shard: object) -> None:
    write_index(folder, {**MAP, next(iter(A)): shard})
    assert "shards are safetensors files beside it" in refused(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map_is_refused(folder: Path, weight_map: object) -> None:
    write_index(folder, weight_map)
    assert "has no weight_map" in refused(folder)


def test_the_map_and_the_files_agree(folder: Path) -> None:
    name = next(iter(A))
    write_index(folder, {**MAP, name: TWO})
    assert f"{ONE} holds" in refused(folder)
    write_index(folder, {key: shard for key, shard in MAP.items() if key != name})
    assert f"{ONE} holds" in refused(folder)
    write_index(folder, {**MAP, "lost": ONE})
    assert f"{ONE} lacks 'lost', which {INDEX} places there" in refused(folder)
    write_index(folder, MAP)
    (folder / TWO).write_bytes(safetensors(A))
    assert f"{TWO} holds" in refused(folder)


def test_every_shard_is_held_to_the_format(folder: Path) -> None:
    (folder / TWO).write_bytes(safetensors(B)[:-1])
    assert "fetch it again" in refused(folder)
    (folder / TWO).write_bytes(LFS_POINTER)
    assert f"{TWO} is a Git LFS pointer for a file of 83,945,072 bytes" in refused(folder)
    (folder / TWO).unlink()
    assert f"has no {TWO}: fetch the adapter again" in refused(folder)
    os.mkfifo(folder / TWO)
    assert f"{TWO} is not a regular file" in refused(folder)


def test_shards_may_not_lie_outside_the_root(folder: Path, tmp_path: Path, make_adapter: MakeAdapter) -> None:
    (tmp_path / "elsewhere").write_bytes((folder / TWO).read_bytes())
    (folder / TWO).unlink()
    (folder / TWO).symlink_to(tmp_path / "elsewhere")
    assert read_folder("x", folder).sharded
    assert f"{TWO} is a link that leads out of" in refused(folder, root=folder)


def test_a_broken_index_is_refused(folder: Path) -> None:
    for content, message in ((b"{", "is not JSON"), (LFS_POINTER, "is a Git LFS pointer"), (b"", "is not JSON")):
        (folder / INDEX).write_bytes(content)
        assert f"{INDEX} {message}" in refused(folder)


def test_an_index_of_too_many_files_is_refused(folder: Path) -> None:
    many: Mapping[str, str] = {f"t{i}": f"{i}.safetensors" for i in range(MAX_SHARDS + 1)}
    write_index(folder, many)
    assert f"lists over {MAX_SHARDS:,} files" in refused(folder)


def test_a_reader_of_many_folders_sees_data_that_moved_between_shards(
    tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    folder = make_adapter("moved")
    (folder / "adapter_model.safetensors").unlink()
    shapes = {ONE: {"a.lora_A.weight": (111,)}, TWO: {"b.lora_A.weight": (1,)}}
    write_index(folder, {name: shard for shard, tensors in shapes.items() for name in tensors})
    for shard, tensors in shapes.items():
        (folder / shard).write_bytes(safetensors(tensors))
    reader = FolderReader()
    reader.read("x", folder)
    with (folder / ONE).open("r+b") as one, (folder / TWO).open("r+b") as two:
        one.truncate(len(safetensors(shapes[ONE])) - 200)
        two.truncate(len(safetensors(shapes[TWO])) + 20)  # 222 and 2 bytes of data are now 22 and 22
    with pytest.raises(InputFileError, match="fetch it again"):
        reader.read("x", folder)
