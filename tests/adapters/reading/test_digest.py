"""The digest: what changes it and what does not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.conftest import MakeAdapter, safetensors
from loraledger.adapters import content_digest, read_folder


def test_the_digest_is_sha256_of_lengths_and_bytes(tmp_path: Path) -> None:
    config, weights = tmp_path / "c", tmp_path / "w"
    config.write_bytes(b"{}")
    weights.write_bytes(b"\1" * 3_000_000)  # more than one chunk
    expected = b"\2" + b"\0" * 7 + b"{}" + (3_000_000).to_bytes(8, "little") + b"\1" * 3_000_000
    assert content_digest([config, weights]) == hashlib.sha256(expected).hexdigest()


def test_only_the_files_that_engines_read_count(make_adapter: MakeAdapter) -> None:
    def digest(folder: Path) -> str:
        return content_digest(read_folder("x", folder).files)

    folder = make_adapter("a")
    before = digest(folder)
    (folder / "README.md").write_text("changed")
    os.utime(folder / "adapter_model.safetensors", (0, 0))
    assert digest(folder) == before
    assert digest(make_adapter("c", lora_alpha=33)) != before
    assert digest(make_adapter("d", weights=safetensors(fill=b"\1"))) != before


def test_each_shard_counts(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("c", "i", "s1", "s2")]
    for file in files:
        file.write_bytes(b"same")
    before = content_digest(files)
    files[3].write_bytes(b"sane")
    assert len({before, content_digest(files), content_digest(files[:3])}) == 3


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        content_digest([tmp_path / "none"])


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=30, deadline=None
)
@given(st.binary(max_size=20), st.integers(min_value=0, max_value=20), st.integers(min_value=0, max_value=20))
def test_where_one_file_ends_and_the_other_begins_counts(tmp_path: Path, content: bytes, one: int, two: int) -> None:
    digests = []
    for cut in (min(one, len(content)), min(two, len(content))):
        (tmp_path / "c").write_bytes(content[:cut])
        (tmp_path / "w").write_bytes(content[cut:])
        digests.append(content_digest([tmp_path / "c", tmp_path / "w"]))
    assert (digests[0] == digests[1]) == (min(one, len(content)) == min(two, len(content)))
