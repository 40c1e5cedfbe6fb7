"""``loraledger hardware``: the catalogue as a table, one GPU with its sources, and what an unknown one is told."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Cli


def test_the_catalogue_is_a_table_of_one_line_a_gpu(cli: Cli) -> None:
    done = cli("hardware")
    assert (done.code, done.err) == (0, "")
    rows = {row[0]: row[1:] for row in done.table() if row}
    assert rows["h100-sxm"] == ["79.6", "GiB", "3,350", "989", "64"]
    assert rows["b200"][-1] == "*", "a figure of it is not yet checked"
    assert "bf16 dense, the link one way" in done.out


def test_one_gpu_is_shown_with_sources_dates_and_the_way_up(cli: Cli) -> None:
    done = cli("hardware", "NVIDIA H100 80GB HBM3")
    assert done.code == 0
    whole = " ".join(done.out.split())
    assert whole.startswith("h100-sxm, also called H100, ")
    assert "memory 79.6 GiB 85,520,809,984 2026-11-30" in whole
    assert "- memory: total memory as the vendor's tool (nvidia-smi, rocm-smi) prints it in public logs" in whole
    assert "disk host 0.76 GB/s 6 ms 28.1 ms" in whole
    assert "- remote: Amazon S3" in whole


def test_what_is_not_yet_checked_says_so(cli: Cli) -> None:
    assert "(not yet checked against this source)" in " ".join(cli("hardware", "b200").out.split())
    assert "not yet checked" not in cli("hardware", "h200").out


def test_both_as_data(cli: Cli) -> None:
    listed = cli("hardware", "--json").items("hardware")
    assert len(listed) >= 12
    one = cli("hardware", "l4", "--json").items("gpu")
    assert {key: one[key] for key in listed[0]} == next(gpu for gpu in listed if gpu["name"] == "l4")
    assert one["memory"] == {
        "value": 23034 * 2**20,
        "source": "total memory as the vendor's tool (nvidia-smi, rocm-smi) prints it in public logs",
        "as_of": "2026-11-30",
        "recalled": False,
    }
    assert [rung["name"] for rung in one["ladder"]] == ["device", "host", "disk", "remote"]


def test_an_unknown_gpu_is_exit_code_3_with_the_nearest_names(cli: Cli) -> None:
    done = cli("hardware", "A100")
    assert (done.code, done.out) == (3, "")
    assert done.err == "loraledger: 'A100' is no GPU that is known; that could be a100-40 or a100-80\n"


def test_a_file_of_ones_own_is_read_too(cli: Cli, tmp_path: Path) -> None:
    value = {"value": "10GiB", "source": "mine"}
    rate = {"value": "100GB/s", "source": "mine"}
    own = {
        "sources": {"mine": {"title": "my sheet", "as_of": "2026-11-01"}},
        "gpus": [
            {
                "name": "x1",
                "memory": value,
                "memory_bandwidth": rate,
                "bf16": {"value": "1TFLOP/s", "source": "mine"},
                "host_link": rate,
            }
        ],
    }
    (tmp_path / "own.yaml").write_text(json.dumps(own))
    done = cli("hardware", "X1", "--file", tmp_path / "own.yaml", "--json")
    # JSON is YAML, but for a quoted day, which is text there.
    assert done.code == 0, done.err
    assert done.items("gpu")["memory"]["value"] == 10 * 2**30
    assert cli("hardware", "--file", tmp_path / "none.yaml").code == 3
