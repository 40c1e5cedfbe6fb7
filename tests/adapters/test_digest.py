"""The digest: what changes it and what does not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraledger.adapters import content_digest, read_folder

from .conftest import MakeAdapter, safetensors


def test_the_digest_is_sha256_of_lengths_and_bytes(tmp_path: Path) -> None:
    config, weights = tmp_path / "c", tmp_path / "w"
    config.write_bytes(b"{}")
    weights.write_bytes(b"\1" * 3_000_000)  # more than one chunk
    expected = b"\2" + b"\0" * 7 + b"{}" + (3_000_000).to_bytes(8, "little") + b"\1" * 3_000_000
    assert content_digest(config, weights) == hashlib.sha256(expected).hexdigest()


def test_only_the_two_files_count(make_adapter: MakeAdapter) -> None:
    folder = make_adapter("a")
    digest = read_folder("a", folder).digest
    (folder / "README.md").write_text("changed")
    os.utime(folder / "adapter_model.safetensors", (0, 0))
    assert read_folder("b", folder).digest == digest
    assert read_folder("c", make_adapter("c", lora_alpha=33)).digest != digest
    assert read_folder("d", make_adapter("d", weights=safetensors(fill=b"\1"))).digest != digest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(st.binary(max_size=20), st.integers(min_value=0, max_value=20), st.integers(min_value=0, max_value=20))
def test_where_one_file_ends_and_the_other_begins_counts(tmp_path: Path, content: bytes, one: int, two: int) -> None:
    digests = []
    for cut in (min(one, len(content)), min(two, len(content))):
        (tmp_path / "c").write_bytes(content[:cut])
        (tmp_path / "w").write_bytes(content[cut:])
        digests.append(content_digest(tmp_path / "c", tmp_path / "w"))
    assert (digests[0] == digests[1]) == (min(one, len(content)) == min(two, len(content)))
