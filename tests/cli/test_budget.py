"""``loraledger budget``: what people and programs are told before an engine is started, and the exit code."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.build_weights import BASE_8B, Dims, build, pairs, spec_of
from adapters.conftest import CONFIG

from .conftest import Cli, Done

GIB = 2**30
SLOT = 335_544_320
"""Bytes of one slot of rank 64 of an 8B base with 1,024-wide KV."""

EXAMPLE = ("--device-memory", "80GiB", "--floor", "48GiB", "--safety", "4GiB", "--kv", "20GiB", "--adapter", "240MiB")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    BASE_8B.write(tmp_path / "base", "MistralForCausalLM")
    return tmp_path / "base"


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    for rank in (8, 16):
        build(
            tmp_path / "many" / f"r{rank}", {**CONFIG, "r": rank}, spec_of("slots-reserved-60", f"tensors_r{rank}.json")
        )
    return tmp_path / "many"


def document(done: Done) -> Any:
    return done.items("budget")


def row(done: Done, part: str) -> list[str]:
    (found,) = [line.split() for line in done.out.splitlines() if line.startswith(part)]
    return found


def test_the_worked_example_leaves_8_gib_for_34_adapters(cli: Cli) -> None:
    done = cli("budget", *EXAMPLE)
    assert (done.code, done.err) == (0, "")
    assert row(done, "left")[:5] == ["left", "8", "GiB", "8,589,934,592", "10.0%"]
    assert "8 GiB left for adapters: 34 of 240 MiB, and 32 MiB over" in done.out


def test_the_worked_example_as_data(cli: Cli) -> None:
    found = document(cli("budget", *EXAMPLE, "--json"))
    assert found == {
        "exact": False,
        "device_bytes": 80 * GIB,
        "floor_bytes": 48 * GIB,
        "safety_bytes": 4 * GIB,
        "kv_bytes": 20 * GIB,
        "adapter_bytes": 240 * 2**20,
        "left_bytes": 8 * GIB,
        "adapters": 34,
        "spare_bytes": 32 * 2**20,
        "fits": True,
    }


def test_an_estimate_that_does_not_fit_is_exit_code_5_and_is_shown_all_the_same(cli: Cli) -> None:
    words = ("budget", "--device-memory", "40GiB", "--floor", "48GiB", "--kv", "1GiB", "--adapter", "1GiB")
    done = cli(*words)
    assert done.code == 5
    assert "9 GiB more than the device" in done.err
    assert row(done, "left")[1:3] == ["-9", "GiB"]
    found = cli(*words, "--json")
    assert found.code == 5
    assert (document(found)["left_bytes"], document(found)["adapters"]) == (-9 * GIB, 0)


def test_an_estimate_that_fits_to_the_byte_fits(cli: Cli) -> None:
    words = ("budget", "--device-memory", "50GiB", "--floor", "48GiB", "--kv", "2GiB", "--adapter", "1B")
    done = cli(*words)
    assert done.code == 0
    assert "0 B left for adapters: 0 of 1 B" in done.out
    assert document(cli(*words, "--json"))["fits"]


def test_bars_are_as_long_as_the_shares(cli: Cli) -> None:
    done = cli("budget", *EXAMPLE)
    lengths = {
        part: sum(cell.count("█") for cell in row(done, part)) for part in ("floor", "safety", "kv", "left", "device")
    }
    assert lengths == {"floor": 7, "safety": 1, "kv": 3, "left": 1, "device": 12}


def test_the_exact_budget_of_a_base_and_a_folder(cli: Cli, base: Path, adapters: Path) -> None:
    words: list[str | Path] = [
        "--base",
        base,
        "--adapters",
        adapters,
        "--max-loras",
        "60",
        "--max-lora-rank",
        "64",
        "--overhead",
        "1.25GiB",
    ]
    done = cli("budget", "--device-memory", "80GiB", *words)
    assert (done.code, done.err) == (0, "")
    assert row(done, "slots   ")[:4] == ["slots", "18.8", "GiB", "20,132,659,200"]
    assert "60 x 320 MiB" in done.out
    assert "slots take 153,600 KV tokens away, one slot 2,560" in done.out
    assert "max_lora_rank 16 is enough for them and gives back 14.1 GiB or 115,200 KV tokens" in done.out
    assert "overhead is not known" not in done.out
    assert "take turns" not in done.out


def test_the_exact_budget_as_data_sums_to_the_device(cli: Cli, base: Path, adapters: Path) -> None:
    words: list[str | Path] = [
        "--base",
        base,
        "--adapters",
        adapters,
        "--max-loras",
        "60",
        "--max-lora-rank",
        "64",
        "--overhead",
        "1.25GiB",
    ]
    found = document(cli("budget", "--device-memory", "80GiB", *words, "--gpu-memory-utilization", "0.9", "--json"))
    assert found["slot_bytes"] == SLOT
    assert found["all_slots_bytes"] == 60 * SLOT
    assert found["kept_free_bytes"] == 8 * GIB
    parts = ("weight_bytes", "overhead_bytes", "all_slots_bytes", "kv_bytes", "kept_free_bytes", "left_bytes")
    assert sum(found[part] for part in parts) == found["device_bytes"] == 80 * GIB
    assert found["kv_tokens"] * found["kv_bytes_per_token"] == found["kv_bytes"]
    assert found["adapters"] == {
        "accepted": 2,
        "smallest_max_lora_rank": 16,
        "all_slots_bytes_at_smallest": 15 * SLOT,
        "freed_bytes_at_smallest": 45 * SLOT,
        "too_big": [],
        "host_bytes_at_most": 41_943_040 + 83_886_080,
        "take_turns": False,
    }


def test_an_overhead_that_is_not_given_is_unknown_and_never_zero(cli: Cli, base: Path) -> None:
    words = ("budget", "--device-memory", "80GiB", "--base", base)
    found = document(cli(*words, "--json"))
    assert found["overhead_bytes"] is found["kv_bytes"] is found["kv_tokens"] is None
    assert found["kv_bytes_at_most"] > 0
    assert found["adapters"] is None
    assert "overhead is not known and lies in the KV figure" in cli(*words).out
    assert "up to " in " ".join(row(cli(*words), "kv"))
    wanted = document(cli(*words, "--kv", "20GiB", "--json"))
    assert wanted["left_bytes"] is None
    assert "goes to KV too" in cli(*words, "--kv", "20GiB").out
    assert (wanted["kv_bytes"], wanted["kv_tokens"]) == (20 * GIB, 163_840)
    assert "must fit into what is left" in cli(*words, "--kv", "20GiB").out


def test_a_plan_that_fits_to_the_byte_fits(cli: Cli, base: Path) -> None:
    words = ("budget", "--device-memory", "80GiB", "--base", base, "--json")
    found = document(cli(*words))
    all_of_it = found["kv_bytes_at_most"] + found["left_bytes"]
    assert cli(*words, "--kv", str(all_of_it)).code == 0
    assert cli(*words, "--kv", str(all_of_it + 1)).code == 5


def test_figures_of_several_devices_are_said_to_be_of_one(cli: Cli, base: Path) -> None:
    words = ("budget", "--device-memory", "80GiB", "--base", base)
    assert "figures of one of 4 devices" in cli(*words, "--tp", "4").out
    assert "figures of one" not in cli(*words).out


def test_kv_can_be_wanted_in_tokens(cli: Cli, base: Path) -> None:
    found = document(cli("budget", "--device-memory", "80GiB", "--base", base, "--kv-tokens", "1001", "--json"))
    assert (found["kv_tokens"], found["kv_bytes"]) == (1008, 1008 * 131_072)


def test_slots_that_do_not_fit_are_exit_code_5_with_what_would(cli: Cli, base: Path, adapters: Path) -> None:
    words: list[str | Path] = ["--base", base, "--adapters", adapters, "--max-loras", "60", "--max-lora-rank", "64"]
    done = cli("budget", "--device-memory", "24GiB", *words)
    assert done.code == 5
    assert "11.6 GiB too much for the device: 22 slots fit, max_lora_rank 16 takes all adapters and fits" in done.err
    assert "does not fit" in done.out
    fitting = cli("budget", "--device-memory", "24GiB", *words[:4], "--max-loras", "22", "--max-lora-rank", "64")
    assert fitting.code == 0
    over = cli("budget", "--device-memory", "24GiB", *words[:4], "--max-loras", "23", "--max-lora-rank", "64")
    assert over.code == 5


def test_weights_that_do_not_fit_are_exit_code_5(cli: Cli, base: Path) -> None:
    done = cli("budget", "--device-memory", "12GiB", "--base", base)
    assert done.code == 5
    assert "no slot of this rank fits; else quantize the base, shard it (--tp)" in done.err
    assert cli("budget", "--device-memory", "12GiB", "--base", base, "--tp", "2").code == 0


def test_more_adapters_than_slots_take_turns(cli: Cli, base: Path, adapters: Path) -> None:
    done = cli("budget", "--device-memory", "80GiB", "--base", base, "--adapters", adapters)
    assert "max_loras 1, max_lora_rank 16, max_cpu_loras 1" in done.out
    assert "2 adapters on 1 slots take turns: one step runs at most 1 of them" in done.out
    assert "one slot 640" in done.out


def test_a_rank_that_is_too_low_is_said_with_what_the_right_one_costs(cli: Cli, base: Path, adapters: Path) -> None:
    done = cli("budget", "--device-memory", "80GiB", "--base", base, "--adapters", adapters, "--max-lora-rank", "8")
    assert "max_lora_rank 16 is enough for them and takes another 40 MiB or 320 KV tokens" in done.out


def test_an_adapter_that_cannot_be_read_is_exit_code_3_after_the_rest(cli: Cli, base: Path, adapters: Path) -> None:
    (adapters / "r8" / "adapter_config.json").write_text("{")
    done = cli("budget", "--device-memory", "1GiB", "--base", base, "--adapters", adapters)
    assert done.code == 3
    assert "1 could not be read" in done.err
    assert "adapters that the engine can take: 1" in done.out


def test_a_base_that_cannot_be_read_is_exit_code_3(cli: Cli, tmp_path: Path) -> None:
    done = cli("budget", "--device-memory", "80GiB", "--base", tmp_path / "none")
    assert done.code == 3
    assert "--base: " in done.err
    assert done.out == ""


def test_ranks_that_the_base_cannot_be_cut_over_are_exit_code_3(cli: Cli, base: Path) -> None:
    done = cli("budget", "--device-memory", "80GiB", "--base", base, "--tp", "3")
    assert done.code == 3
    assert "choose another --tp" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device-memory", "80"], "--floor, --kv and --adapter"),
        (["--device-memory", "80G"], "is no unit"),
        (["--device-memory", "80GiB", "--floor", "-1GiB", "--kv", "1GiB", "--adapter", "1MiB"], "is not a size"),
        (["--device-memory", "80GiB", "--floor", "1GiB", "--kv", "1GiB", "--adapter", "0"], "at least one byte"),
        (["--device-memory", "80GiB", "--base", "b", "--floor", "1GiB"], "works out --floor"),
        (
            ["--device-memory", "80GiB", "--base", "b", "--kv", "1GiB", "--kv-tokens", "5"],
            "one of --kv and --kv-tokens",
        ),
        (["--device-memory", "80GiB", "--base", "b", "--max-lora-rank", "10"], "1, 8, 16"),
        (["--device-memory", "80GiB", "--base", "b", "--max-loras", "4", "--max-cpu-loras", "2"], "at least its slots"),
        (["--device-memory", "80GiB", "--base", "b", "--gpu-memory-utilization", "1.2"], "less than or equal to 1"),
        ([*EXAMPLE, "--kv-tokens", "5"], "or --base for exact"),
    ],
)
def test_words_that_do_not_go_together_are_exit_code_2(cli: Cli, words: list[str], said: str) -> None:
    done = cli("budget", *words)
    assert done.code == 2
    assert said in " ".join(done.err.replace("│", " ").split())
    assert done.out == ""


def test_other_cuts_and_types_are_followed(cli: Cli, base: Path) -> None:
    def slot(*words: str) -> int:
        found = document(cli("budget", "--device-memory", "80GiB", "--base", base, *words, "--json"))
        size: int = found["slot_bytes"]
        return size

    assert slot("--max-lora-rank", "64", "--tp", "2") == 226_492_416
    assert slot("--max-lora-rank", "64", "--tp", "2", "--fully-sharded-loras") == SLOT // 2
    assert slot("--max-lora-rank", "64", "--lora-target-modules", "down_proj") == 32 * 64 * (14_336 + 4_096) * 2
    assert document(cli("budget", "--device-memory", "80GiB", "--base", base, "--kv-cache-dtype", "fp8", "--json"))[
        "kv_bytes_per_token"
    ] == (65_536)


def test_on_a_terminal_of_80_columns_nothing_is_cut(base: Path, adapters: Path, tmp_path: Path) -> None:
    words = ["--device-memory", "80GiB", "--base", str(base), "--adapters", str(adapters), "--max-loras", "60"]
    host, guest = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.run(
        [sys.executable, "-m", "loraledger.cli.main", "budget", *words],
        stdout=guest,
        env=environment,
        cwd=tmp_path,
        timeout=60,
        check=True,
    )
    os.close(guest)
    assert process.returncode == 0
    shown = os.read(host, 65_536).decode()
    os.close(host)
    table = shown.partition("PART")[2].partition("\n\n")[0].replace("\r", "").partition("\n\n")[0]
    assert "…" not in table
    assert "tokens" in table
    assert all(len(line.rstrip()) <= 80 for line in table.splitlines())


def test_bars_are_plain_where_blocks_cannot_be_written(base: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "loraledger.cli.main", "budget", *EXAMPLE],
        capture_output=True,
        env=environment,
        text=True,
        timeout=60,
        check=True,
    )
    assert "#######" in done.stdout


def test_a_base_of_another_shape_gives_other_figures(cli: Cli, tmp_path: Path) -> None:
    dims = Dims(hidden=64, ff=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=1000)
    dims.write(tmp_path / "tiny")
    build(tmp_path / "a", {**CONFIG, "r": 8}, pairs(dims.projections(), 8, 2))
    words: list[str | Path] = ["--base", tmp_path / "tiny", "--adapters", tmp_path / "a", "--max-lora-rank", "8"]
    found = document(cli("budget", "--device-memory", "16MiB", *words, "--json"))
    per_layer = sum(into + out for into, out in dims.projections().values())
    assert found["slot_projection_bytes"] == 2 * 8 * 2 * per_layer
    assert found["slot_embedding_bytes"] == 2 * 2 * 8 * (1000 + 64)
