"""One adapter folder: what is read from it, and what is refused with its reason."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraledger.adapters import AdapterFolder, read_folder
from loraledger.adapters.weights import MAX_HEADER
from loraledger.errors import InputFileError

from .conftest import CONFIG, LFS_POINTER, TENSORS, MakeAdapter, safetensors


def refused(folder: Path, root: Path | None = None) -> str:
    with pytest.raises(InputFileError) as caught:
        read_folder("sql", folder, root=root)
    return caught.value.message


def with_header(header: object, data: int = 0) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + b"\0" * data


def test_a_plain_adapter_is_read(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("sql")
    read = read_folder("sql", folder)
    assert read == AdapterFolder(
        name="sql",
        path=folder,
        rank=4,
        target_modules=("q_proj", "v_proj"),
        base_claim="acme/base-8b",
        bytes_disk=len(safetensors()),
        digest=read.digest,
        dora=False,
        modules_to_save=(),
        peft_type="LORA",
    )
    assert len(read.digest) == 64


def test_the_rank_is_the_largest_of_any_module(make_adapter: MakeAdapter) -> None:
    assert read_folder("a", make_adapter("a", r=8, rank_pattern={"q_proj": 32, "down_proj": 4})).rank == 32
    assert read_folder("b", make_adapter("b", r=8, rank_pattern={"model.layers.3.q_proj": 2})).rank == 8
    assert read_folder("c", make_adapter("c", r=8, rank_pattern=None)).rank == 8


@pytest.mark.parametrize("targets", ["all-linear", r"^(?!.*lm_head).*\.(q_proj|v_proj)$"])
def test_targets_in_one_string_stay_one_string(make_adapter: MakeAdapter, targets: str) -> None:
    assert read_folder("sql", make_adapter("sql", target_modules=targets)).target_modules == targets


def test_null_targets_are_taken_from_the_tensors(make_adapter: MakeAdapter) -> None:
    assert read_folder("sql", make_adapter("sql", target_modules=None)).target_modules == ("q_proj", "v_proj")
    bare = make_adapter("bare", target_modules=None, weights=safetensors({"lm_head.weight": (2, 2)}))
    assert "neither target_modules nor any tensor name" in refused(bare)


def test_other_kinds_of_adapters_are_reported_as_they_are(make_adapter: MakeAdapter) -> None:
    read = read_folder(
        "x", make_adapter("x", use_dora=True, modules_to_save=["lm_head", "embed_tokens"], peft_type="loha")
    )
    assert (read.dora, read.modules_to_save, read.peft_type) == (True, ("embed_tokens", "lm_head"), "LOHA")


def test_old_and_future_fields_do_not_matter(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("old", enable_lora=None, merge_weights=False, some_field_from_2027={"x": 1}, lora_alpha=16.5)
    config = json.loads((folder / "adapter_config.json").read_text())
    for key in ("base_model_name_or_path", "peft_type", "use_dora", "rank_pattern", "modules_to_save"):
        del config[key]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    read = read_folder("old", folder)
    assert (read.rank, read.base_claim, read.peft_type, read.dora, read.modules_to_save) == (4, None, None, False, ())


def test_missing_keys_are_all_named(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("sql")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 16}))
    assert "lacks r, target_modules:" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r is 0 and must be a whole number of 1 or more"),
        ({"r": True}, "r is True"),
        ({"r": 8.0}, "r is 8.0"),
        ({"r": "8"}, "r is '8'"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] is 0"),
        ({"rank_pattern": [8]}, "rank_pattern must map"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ""}, "target_modules must be a list"),
        ({"target_modules": [1]}, "target_modules must be a list"),
        ({"target_modules": {"q_proj": 1}}, "target_modules must be a list"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path is 5"),
        ({"peft_type": ["LORA"]}, "peft_type is ['LORA']"),
    ],
)
def test_a_wrong_field_is_named(make_adapter: MakeAdapter, changes: dict[str, Any], message: str) -> None:
    assert message in refused(make_adapter("sql", **changes))


def test_a_hostile_value_does_not_fill_the_message(make_adapter: MakeAdapter) -> None:
    assert len(refused(make_adapter("a", base_model_name_or_path=["x" * 100_000]))) < 300
    assert len(refused(make_adapter("b", rank_pattern={"x" * 100_000: 0}))) < 300
    assert len(refused(make_adapter("c", weights=with_header({"x" * 100_000: 1})))) < 300


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"[" * 200_000, "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b" " * 1_100_000, "is over 1,048,576 bytes"),
        (LFS_POINTER, "adapter_config.json is a Git LFS pointer for a file of 83,945,072 bytes"),
    ],
)
def test_a_broken_configuration_is_refused(make_adapter: MakeAdapter, content: bytes, message: str) -> None:
    folder = make_adapter("sql")
    (folder / "adapter_config.json").write_bytes(content)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, less than the 8"),
        (b"1234567", "has 7 bytes"),
        (LFS_POINTER, "is a Git LFS pointer for a file of 83,945,072 bytes that was not fetched: run `git lfs pull`"),
        (struct.pack("<Q", 2**63) + b"{}", "claims a header of 9,223,372,036,854,775,808 bytes in 10"),
        (struct.pack("<Q", MAX_HEADER + 1), "claims a header"),
        (struct.pack("<Q", 3) + b"{}", "claims a header of 3 bytes in 10"),
        (struct.pack("<Q", 2) + b"{]", "header that is not JSON"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "header that is not JSON"),
        (with_header([1]), "not a JSON object"),
        (with_header({}), "holds no tensors"),
        (with_header({"__metadata__": {}}), "holds no tensors"),
        (with_header({"a": {"shape": [1]}}), "tensor 'a' has no valid shape and data_offsets"),
        (with_header({"a": {"shape": [-1], "data_offsets": [0, 2]}}, 2), "tensor 'a'"),
        (with_header({"a": {"shape": [True], "data_offsets": [0, 2]}}, 2), "tensor 'a'"),
        (with_header({"a": {"shape": [1], "data_offsets": [2, 0]}}, 2), "tensor 'a'"),
        (with_header({"a": {"shape": [1], "data_offsets": [0, 1, 2]}}, 2), "tensor 'a'"),
        (with_header({"a": 5}), "tensor 'a'"),
        (safetensors()[:-1], "should hold 208 bytes of data and holds 207: fetch it again"),
        (safetensors() + b"x", "should hold 208 bytes of data and holds 209"),
    ],
)
def test_broken_weights_are_refused(make_adapter: MakeAdapter, content: bytes, message: str) -> None:
    assert message in refused(make_adapter("sql", weights=content))


def test_missing_files_are_named(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none")
    folder = make_adapter("sql")
    assert "is not a folder" in refused(folder / "adapter_config.json")
    (folder / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refused(folder)
    (folder / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refused(folder)


def test_pickled_weights_are_refused_by_name_and_never_opened(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("sql")
    os.mkfifo(folder / "adapter_model.bin")  # opening it would block this test for ever
    assert read_folder("sql", folder).rank == 4
    (folder / "adapter_model.safetensors").unlink()
    assert "only pickled weights (adapter_model.bin), which are never opened" in refused(folder)


def test_only_regular_files_are_opened(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("sql")
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    assert "adapter_model.safetensors is not a regular file" in refused(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()
    assert "adapter_config.json is not a regular file" in refused(folder)


def test_an_unreadable_file_is_a_problem_of_the_adapter(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("sql")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/proc/self/mem")  # regular by its mode, and cannot be read
    assert refused(folder).startswith("cannot be read: ")


def test_files_may_be_links_inside_the_root_and_not_out_of_it(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    root = tmp_path / "root"
    inside = make_adapter("inside", parent=root)
    outside = make_adapter("outside")
    for target, reason in (
        (inside, None),
        (outside, "is a link that leads out of"),
        (tmp_path / "none", "link to nothing"),
    ):
        folder = make_adapter(f"linked-to-{target.name}", parent=root)
        weights = folder / "adapter_model.safetensors"
        weights.unlink()
        weights.symlink_to(target / weights.name)
        if reason is None:
            assert read_folder("a", folder, root=root).rank == 4
        else:
            assert reason in refused(folder, root)
    assert read_folder("a", root / "linked-to-outside").rank == 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    config=st.dictionaries(
        st.sampled_from([*CONFIG, "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
            max_leaves=4,
        ),
    ),
    cut=st.integers(min_value=0, max_value=len(safetensors(TENSORS))),
    at=st.integers(min_value=0, max_value=len(safetensors(TENSORS)) - 1),
    byte=st.integers(min_value=0, max_value=255),
)
def test_no_folder_brings_anything_but_an_adapter_or_an_input_error(
    make_adapter: MakeAdapter, tmp_path: Path, config: dict[str, object], cut: int, at: int, byte: int
) -> None:
    folder = tmp_path / "fuzzed"
    if not folder.exists():
        make_adapter("fuzzed")
    content = bytearray(safetensors(TENSORS))
    content[at] = byte
    (folder / "adapter_model.safetensors").write_bytes(content[:cut] if cut % 2 else content)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    with contextlib.suppress(InputFileError):
        assert read_folder("fuzzed", folder).rank >= 1
