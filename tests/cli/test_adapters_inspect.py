"""``loraledger adapters inspect``: what people and programs are told of adapters on disk, and the exit code."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.build_weights import Dims, build, pairs
from adapters.conftest import CONFIG

from .conftest import Cli, Done, write

BASE = Dims(hidden=64, ff=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=1000)
KV_TOKEN = 2 * 2 * 2 * 16 * 2
"""Bytes: K and V, layers, heads, width, bfloat16."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    BASE.write(tmp_path / "base")
    return tmp_path / "base"


def adapter(folder: Path, rank: int = 8, modules: str = "qv", out: int = 0, **changes: object) -> Path:
    """An adapter on ``q_proj`` and so on; ``out`` other than 0 is an output width that the base does not have."""
    widths = {name: shape for name, shape in BASE.projections().items() if name.split(".")[1][0] in modules}
    widths = {name: (into, out or outside) for name, (into, outside) in widths.items()}
    return build(folder, {**CONFIG, "r": rank, **changes}, pairs(widths, rank, BASE.layers))


def slot(rank: int) -> tuple[int, int]:
    """Bytes of one slot of the base: projections, token tables."""
    per_layer = sum(into + out for into, out in BASE.projections().values())
    return 2 * 2 * rank * per_layer, 2 * 2 * rank * (1000 + 64)


def document(done: Done) -> Any:
    return done.items("inspection")


def test_one_row_an_adapter_and_exit_code_0(cli: Cli, tmp_path: Path, base: Path) -> None:
    adapter(tmp_path / "many" / "all", 16, "qkvogud")
    adapter(tmp_path / "many" / "small", 4)
    done = cli("adapters", "inspect", tmp_path / "many", "--base", base, "--max-loras", "2")
    assert done.code == 0, done.err
    assert done.err == ""
    lines = done.out.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith("ADAPTER"))
    first, second = lines[table + 1].split(), lines[table + 2].split()
    assert first[:4] == ["all", "16", "14", "attn+mlp"]
    assert second[:4] == ["small", "4", "4", "q+v"]
    assert first[-1] == second[-1] == "loads"


def test_the_document_has_plain_numbers_with_their_unit(cli: Cli, tmp_path: Path, base: Path) -> None:
    folder = adapter(tmp_path / "a", 8)
    words = ["--max-loras", "3", "--max-lora-rank", "32", "--max-cpu-loras", "5", "--json"]
    found = document(cli("adapters", "inspect", folder, "--base", base, *words))
    (row,) = found["adapters"]
    pair_bytes = 2 * 2 * 8 * (64 + 64 + 64 + 32)
    assert row["name"] == "a"
    assert row["path"] == str(folder)
    assert row["verdict"] == "loads"
    assert (row["rank"], row["smallest_max_lora_rank"], row["parameters"]) == (8, 8, pair_bytes // 2)
    assert (row["modules"], row["modules_applied"], row["module_suffixes"]) == (4, 4, ["q_proj", "v_proj"])
    assert row["disk_bytes"] == (folder / "adapter_model.safetensors").stat().st_size
    assert row["host_bytes"] == row["device_bytes_per_rank_process"] == pair_bytes
    projections, tables = slot(32)
    totals = found["totals"]
    assert totals["slot_projection_bytes_per_rank_process"] == projections
    assert totals["slot_embedding_bytes_per_rank_process"] == tables
    assert totals["slot_bytes_per_rank_process"] == projections + tables
    assert totals["all_slots_bytes_per_rank_process"] == 3 * (projections + tables)
    assert totals["all_slots_kv_tokens"] == -(-3 * (projections + tables) // KV_TOKEN)
    assert totals["smallest_max_lora_rank"] == 8
    smaller = totals["at_smallest_max_lora_rank"]
    assert smaller["slot_bytes_per_rank_process"] == sum(slot(8))
    assert row["slot_share"] == pair_bytes / (projections + tables)
    assert (totals["disk_bytes"], totals["host_bytes"]) == (row["disk_bytes"], row["host_bytes"])
    assert found["base"]["kv_bytes_per_token_and_rank_process"] == KV_TOKEN
    assert (found["engine"]["max_loras"], found["engine"]["host_entries"]) == (3, 5)


def test_defaults_are_the_engines_and_spelled_out(cli: Cli, tmp_path: Path) -> None:
    done = cli("adapters", "inspect", adapter(tmp_path / "a"))
    assert "max_loras 1, max_lora_rank 16, max_cpu_loras 1, 1 rank process" in done.out


def test_several_adapters_on_one_slot_are_pointed_out_with_the_cost_of_another(
    cli: Cli, tmp_path: Path, base: Path
) -> None:
    for name in ("a", "b"):
        adapter(tmp_path / "many" / name)
    words = ("adapters", "inspect", tmp_path / "many", "--base", base)
    alone = cli(*words)
    assert "so 2 take turns; --max-loras 2 --max-cpu-loras 2 costs " in alone.out
    assert f"{-(-sum(slot(16)) // KV_TOKEN):,} KV tokens" in alone.out
    assert "take turns" not in cli(*words, "--max-loras", "2").out


def test_without_a_base_device_figures_are_unknown_and_never_zero(cli: Cli, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    done = cli("adapters", "inspect", folder)
    assert done.code == 0
    assert "--base DIR" in done.out
    found = document(cli("adapters", "inspect", folder, "--json"))
    assert found["base"] is None
    assert found["adapters"][0]["device_bytes_per_rank_process"] is None
    assert found["adapters"][0]["slot_share"] is None
    for figure in ("slot_bytes_per_rank_process", "all_slots_bytes_per_rank_process", "all_slots_kv_tokens"):
        assert found["totals"][figure] is None
    assert found["totals"]["host_bytes"] > 0


def test_fully_sharded_loras_cut_slots(cli: Cli, tmp_path: Path, base: Path) -> None:
    words = (adapter(tmp_path / "a"), "--base", base, "--tp", "2", "--json")
    plain, sharded = (
        document(cli("adapters", "inspect", *words, *more))["totals"]["slot_bytes_per_rank_process"]
        for more in ([], ["--fully-sharded-loras"])
    )
    assert sharded < plain


def test_host_bytes_count_a_copy_for_each_rank_process(cli: Cli, tmp_path: Path, base: Path) -> None:
    folder = adapter(tmp_path / "a")
    one = document(cli("adapters", "inspect", folder, "--base", base, "--json"))
    two = document(cli("adapters", "inspect", folder, "--base", base, "--tp", "2", "--json"))
    assert two["totals"]["host_bytes"] == 2 * one["totals"]["host_bytes"]
    assert two["adapters"][0]["host_bytes_per_rank_process"] == one["adapters"][0]["host_bytes"]
    assert two["totals"]["slot_bytes_per_rank_process"] < one["totals"]["slot_bytes_per_rank_process"]


def test_a_refused_adapter_is_exit_code_5_with_the_rank_that_takes_it(cli: Cli, tmp_path: Path, base: Path) -> None:
    adapter(tmp_path / "many" / "fine", 8)
    adapter(tmp_path / "many" / "wide", 24)
    done = cli("adapters", "inspect", tmp_path / "many", "--base", base, "--max-loras", "2")
    assert done.code == 5
    assert done.err == "loraledger: 1 of 2 adapters refused, 0 would change nothing\n"
    assert "refused: wide: " in done.out
    assert "[rank_over_max]" in done.out
    assert "smallest max_lora_rank that fits all: 32; it is 16" in done.out
    other = next(line for line in done.out.splitlines() if line.startswith("  or"))
    assert f"{2 * sum(slot(32)):,}" in other


def test_an_adapter_that_would_change_nothing_is_exit_code_5(cli: Cli, tmp_path: Path, base: Path) -> None:
    folder = adapter(tmp_path / "a", modules="o")
    done = cli("adapters", "inspect", folder, "--base", base, "--lora-target-modules", "gate_proj")
    assert done.code == 5
    assert "0 of 1 adapters refused, 1 would change nothing" in done.err
    assert "no effect" in done.out


def test_slots_without_a_byte_have_no_share(cli: Cli, tmp_path: Path, base: Path) -> None:
    words: list[str | Path] = [adapter(tmp_path / "a"), "--base", base, "--lora-target-modules", "nothing_proj"]
    done = cli("adapters", "inspect", *words)
    assert done.code == 5
    assert "Traceback" not in done.err
    found = document(cli("adapters", "inspect", *words, "--json"))
    assert (found["totals"]["all_slots_bytes_per_rank_process"], found["totals"]["all_slots_kv_tokens"]) == (0, 0)
    assert found["adapters"][0]["slot_share"] is None


def test_cache_types_are_known_without_a_base(cli: Cli, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    for dtype in ("auto", "fp8", "fp8_e4m3", "bfloat16"):
        assert cli("adapters", "inspect", folder, "--kv-cache-dtype", dtype).code == 0


def test_target_modules_are_listed_by_commas_or_repeated(cli: Cli, tmp_path: Path, base: Path) -> None:
    folder = adapter(tmp_path / "a", modules="qo")
    split = ["--lora-target-modules", "o_proj", "--lora-target-modules", "down_proj"]
    joined = ["--lora-target-modules", "o_proj, down_proj"]
    for words in (split, joined):
        found = document(cli("adapters", "inspect", folder, "--base", base, "--json", *words))
        assert found["engine"]["lora_target_modules"] == ["o_proj", "down_proj"]
        assert found["adapters"][0]["verdict"] == "partly_applied"
        assert (found["adapters"][0]["modules"], found["adapters"][0]["modules_applied"]) == (4, 2)


def test_what_cannot_be_read_is_named_and_the_others_are_still_reported(cli: Cli, tmp_path: Path) -> None:
    adapter(tmp_path / "many" / "a")
    (adapter(tmp_path / "many" / "b") / "adapter_model.safetensors").write_bytes(b"short")
    adapter(tmp_path / "many" / "c", 64)  # refused at rank 16: exit code 3 wins over 5
    done = cli("adapters", "inspect", tmp_path / "many", tmp_path / "gone")
    assert done.code == 3
    rows = {line.split()[0]: line.split()[-1] for line in done.out.splitlines() if line[:2] in ("a ", "b ", "c ")}
    assert rows == {"a": "loads", "b": "unreadable", "c": "refused"}
    assert "3 adapters: 1 load, 1 refused, 1 unreadable" in done.out
    gone, broken, last = done.err.splitlines()
    assert gone == f"loraledger: {tmp_path / 'gone'}: does not exist: correct the path"
    assert broken.startswith(f"loraledger: {tmp_path / 'many' / 'b'}: adapter_model.safetensors has 5 bytes")
    assert last == "loraledger: 2 could not be read"


def test_paths_without_any_adapter_print_no_table(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = cli("adapters", "inspect", tmp_path / "empty", tmp_path / "gone")
    assert (done.code, done.out) == (3, "")
    assert len(done.err.splitlines()) == 3
    found = document(cli("adapters", "inspect", tmp_path / "gone", "--json"))
    assert found["adapters"] == []
    assert [problem["path"] for problem in found["problems"]] == [str(tmp_path / "gone")]


def test_text_that_is_no_unicode_breaks_neither_form(cli: Cli, tmp_path: Path) -> None:
    good = adapter(tmp_path / "good")
    folder = build(tmp_path / "odd", {**CONFIG, "r": 8}, pairs({"x\ud800": (64, 64)}, 8))
    for form in ([], ["--json"]):
        done = cli("adapters", "inspect", good, folder, *form)
        assert done.code in (0, 3)
        assert "good" in done.out
        assert "odd" in done.out


def test_unreadable_rows_of_the_document_say_why(cli: Cli, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    (folder / "adapter_config.json").write_text("{")
    done = cli("adapters", "inspect", folder, "--json")
    assert done.code == 3
    (row,) = document(done)["adapters"]
    assert (row["name"], row["verdict"]) == ("a", "unreadable")
    assert "JSON" in row["reason"]


@pytest.mark.parametrize("name", ["[red]x", ",:smile:", "a\x1b[31mb", "two\nlines", os.fsdecode(b"n\xff")])
def test_names_are_data(cli: Cli, tmp_path: Path, name: str) -> None:
    folder = adapter(tmp_path / name)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    done = cli("adapters", "inspect", folder)
    assert done.code == 0
    assert any(line.startswith(shown) for line in done.out.splitlines())
    assert "\x1b" not in done.out
    assert "the gateway would not serve it under its folder's name" in done.out
    assert document(cli("adapters", "inspect", folder, "--json"))["adapters"][0]["verdict"] == "loads"
    (folder / "adapter_model.safetensors").unlink()
    done = cli("adapters", "inspect", folder)
    assert done.code == 3
    assert "\x1b" not in done.err
    assert len(done.err.splitlines()) == 2


def test_what_holds_for_many_is_said_once(cli: Cli, tmp_path: Path, base: Path) -> None:
    for number in range(6):
        adapter(tmp_path / "many" / f"w{number}", 64)
    adapter(tmp_path / "many" / "x")
    done = cli("adapters", "inspect", tmp_path / "many", "--base", base)
    refusals = [line for line in done.out.splitlines() if line.startswith("refused")]
    assert len(refusals) == 1
    assert refusals[0].startswith("refused: w0, w1, w2 and 3 more: ")


def test_a_rank_above_every_setting_is_said(cli: Cli, tmp_path: Path) -> None:
    adapter(tmp_path / "many" / "huge", 768)
    adapter(tmp_path / "many" / "wide", 20)
    done = cli("adapters", "inspect", tmp_path / "many")
    assert "no max_lora_rank fits huge; 32 fits the others" in done.out


def test_shapes_of_another_base_are_refused(cli: Cli, tmp_path: Path, base: Path) -> None:
    done = cli("adapters", "inspect", adapter(tmp_path / "a", out=96), "--base", base)
    assert done.code == 5
    assert "refused" in done.out


def test_a_file_of_module_names_serves_as_base(cli: Cli, tmp_path: Path) -> None:
    served = tmp_path / "served.txt"
    served.write_text("model.layers.0.mlp.down_proj\nmodel.layers.1.mlp.down_proj\n")
    done = cli("adapters", "inspect", adapter(tmp_path / "a"), "--base", served)
    assert done.code == 5
    assert "2 module names, without shapes" in done.out
    assert "[unknown_module]" in done.out


@pytest.mark.parametrize(
    ("engine", "what"), [("sglang", "of rank 16"), ("lorax", "lorax has no slots"), ("slora", "slora has no slots")]
)
def test_other_engines_are_costed_by_their_own_rules(
    cli: Cli, tmp_path: Path, base: Path, engine: str, what: str
) -> None:
    done = cli("adapters", "inspect", adapter(tmp_path / "a"), "--base", base, "--engine", engine, "--max-loras", "4")
    assert what in done.out
    assert ("max_lora_rank" in done.out) == (engine == "sglang")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--max-lora-rank", "17"], "1, 8, 16, 32, 64, 128, 256, 320, 512"),
        (["--max-loras", "4", "--max-cpu-loras", "2"], "at least its slots (4)"),
        (["--engine", "nope"], "nope"),
        (["--lora-target-modules", ",,"], "names no module"),
        (["--lora-target-modules", ""], "names no module"),
        (["--kv-cache-dtype", "bogus"], "auto, fp8, float32, bfloat16, float16"),
    ],
)
def test_flags_that_the_engine_would_not_start_with_are_wrong_usage(
    cli: Cli, tmp_path: Path, words: list[str], complaint: str
) -> None:
    done = cli("adapters", "inspect", adapter(tmp_path / "a"), *words)
    assert done.code == 2
    assert complaint in " ".join(done.err.split())


@pytest.mark.parametrize("content", [None, "{}", "[", '{"architectures": ["NoSuchModel"]}'])
def test_a_base_that_cannot_be_read_is_exit_code_3_and_named(cli: Cli, tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    done = cli("adapters", "inspect", adapter(tmp_path / "a"), "--base", folder)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith(f"loraledger: --base: {folder}: ")


def test_ranks_that_the_base_cannot_be_cut_over_are_exit_code_3(cli: Cli, tmp_path: Path, base: Path) -> None:
    done = cli("adapters", "inspect", adapter(tmp_path / "a"), "--base", base, "--tp", "3")
    assert (done.code, done.out) == (3, "")
    assert "3 ranks" in done.err


def test_settings_give_base_and_flags_and_options_win(
    cli: Cli, tmp_path: Path, base: Path, settings: dict[str, Any]
) -> None:
    settings["base"]["path"] = str(base)
    settings["replicas"][0] |= {"slots": 2, "host_entries": 6, "max_rank": 32, "tensor_parallel": 2}
    path = write(tmp_path / "loraledger.yaml", settings)
    folder = adapter(tmp_path / "a", 24)
    found = document(cli("adapters", "inspect", folder, "--config", path, "--max-cpu-loras", "9", "--json"))
    assert found["base"]["name"] == "base"
    engine = found["engine"]
    assert (engine["max_loras"], engine["max_lora_rank"], engine["tensor_parallel"]) == (2, 32, 2)
    assert engine["host_entries"] == 9


def on_a_terminal(columns: int, *words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the verb on terminals of their own."""
    shown = []
    pairs_of_ends = [pty.openpty() for _ in range(2)]
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, "-m", "loraledger.cli.main", "adapters", "inspect", *map(str, words)]
    process = subprocess.Popen(command, stdout=pairs_of_ends[0][1], stderr=pairs_of_ends[1][1], env=environment)
    for reader, writer in pairs_of_ends:
        os.close(writer)
        data = b""
        try:
            while piece := os.read(reader, 65536):
                data += piece
        except OSError:  # how a terminal says that its last writer left
            pass
        os.close(reader)
        shown.append(data.decode())
    return process.wait(timeout=60), shown[0], shown[1]


def test_on_a_narrow_terminal_nothing_is_cut_and_names_are_broken_last(tmp_path: Path, base: Path) -> None:
    adapter(tmp_path / "many" / "customer-support-fr-v2", 16, "qkvogud")
    adapter(tmp_path / "many" / "legal-de", 8)
    words = (tmp_path / "many", "--base", base, "--max-loras", "2")
    for columns, whole, spare in ((120, True, True), (80, True, False), (64, False, False)):
        code, out, _ = on_a_terminal(columns, *words)
        lines = out.splitlines()
        assert code == 0
        assert "…" not in out
        assert max(map(len, map(plain, lines))) <= columns
        assert any(line.startswith("customer-support-fr-v2 ") for line in lines) == whole
        assert any(" PARAMS " in plain(line) for line in lines) == spare


def plain(line: str) -> str:
    """``line`` without bold."""
    return re.sub(r"\x1b\[\d*m", "", line)


def test_progress_is_shown_on_a_terminal_past_fifty_folders(tmp_path: Path) -> None:
    for number in range(51):
        adapter(tmp_path / "many" / f"a{number:02}")
    code, out, err = on_a_terminal(80, tmp_path / "many")
    assert code == 0
    assert "reading" in err
    assert "reading" not in out
    _, _, err = on_a_terminal(80, *(tmp_path / "many" / f"a{number:02}" for number in range(50)))
    assert err == ""


def test_no_progress_where_no_terminal_is(cli: Cli, tmp_path: Path) -> None:
    for number in range(51):
        adapter(tmp_path / "many" / f"a{number:02}")
    assert cli("adapters", "inspect", tmp_path / "many").err == ""
