"""``signals``: which window is meant, what is shown of it, and what is said to be missing."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from adapters.build_weights import BASE_8B, build, pairs
from loraledger.record.parquet import write_parquet
from signals.records import MINUTE, NOON, SECOND, request, sample

from .conftest import Cli, Done, on_a_terminal, write
from .judged import SETTINGS, WINDOW, write_record


@pytest.fixture
def record(tmp_path: Path) -> Path:
    write(tmp_path / "loraledger.yaml", SETTINGS)
    return write_record(tmp_path / "record")


def figures(done: Done) -> dict[str, list[str]]:
    """The summary: by name, what stands behind it."""
    assert done.code == 0, done.err
    lines = done.out.split("\n\n")[1].splitlines()[1:]
    return {name.strip(): cells.split() for name, cells in ((line[:42], line[42:]) for line in lines)}


def test_the_header_says_what_was_measured_and_beside_what(cli: Cli, record: Path) -> None:
    whole = " ".join(cli("signals", *WINDOW).out.split())
    assert whole.startswith(
        "2026-09-21 12:00:00 to 12:10:00 UTC: 90 requests; engine 0.11.0, base base-8b, settings cc, gateway 0.1.0 "
        "beside 2026-09-21 11:50:00 to 12:00:00 UTC: 40 requests ALL REPLICAS"
    )


def test_the_summary_holds_now_against_before(cli: Cli, record: Path) -> None:
    found = figures(cli("signals", *WINDOW))
    assert found["requests a minute"] == ["9", "4", "x", "2.2"]
    assert found["GPU hit rate, of requests with an adapter"] == ["75.0%", "100.0%", "-25.0", "pt"]
    assert found["distinct adapters"] == ["5", "1", "x", "5.0"]
    assert found["time to first token p50, s"] == ["0.200", "0.200", "-"]
    assert found["p99 of misses"] == ["2.000", "-", "-"]
    assert found["loads a minute"] == ["2", "0", "from", "0"]


def test_no_baseline_is_no_column(cli: Cli, record: Path) -> None:
    done = cli("signals", *WINDOW, "--baseline", "none")
    assert "BEFORE" not in done.out
    assert "beside" not in done.out
    assert figures(done)["requests a minute"] == ["9"]


def test_a_named_baseline_is_measured_and_an_empty_one_is_said(cli: Cli, record: Path) -> None:
    done = cli("signals", *WINDOW, "--baseline", "2026-09-21T11:50:00Z/2026-09-21T12:00:00Z")
    assert figures(done)["requests a minute"][:2] == ["9", "4"]
    done = cli("signals", *WINDOW, "--baseline", "2026-09-20T11:50:00Z/2026-09-20T12:00:00Z")
    assert "No request arrived in the baseline" in done.out


def test_the_document_has_every_figure_with_its_rates(cli: Cli, record: Path) -> None:
    items = cli("signals", *WINDOW, "--json").items("signals")
    now = items["now"]
    assert now["window"]["minutes"] == 10
    assert now["total"]["hits"] == {
        "gpu": 60, "host": 0, "disk": 20, "remote": 0, "base": 10, "unknown": 0, "undecided": 0,
        "adapter_bearing": 80, "misses": 20, "gpu_rate": 0.75, "host_rate": 0.0,
    }  # fmt: skip
    assert set(now["replicas"]) == {"r1", "r2"}
    assert now["replicas"]["r1"]["working_set"]["slots"] == 2
    assert now["total"]["split"]["preparation_share"] is not None
    assert items["baseline"]["total"]["hits"]["gpu_rate"] == 1.0
    assert items["facts"]["source"] == "looked up in loraledger.yaml"
    assert "NaN" not in cli("signals", *WINDOW, "--json").out


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("replica", ["r1", "r2"]),
        ("tenant", ["acme", "birch"]),
        ("adapter", ["a0", "a1", "a2", "a3", "a4"]),
        ("class", ["base", "disk", "gpu"]),
    ],
)
def test_groups_are_rows(cli: Cli, record: Path, by: str, names: list[str]) -> None:
    out = cli("signals", *WINDOW, "--by", by).out
    lines = out[out.index(f"\n{by.upper()} ") :].splitlines()[2:]
    shown = [line.split()[0] for line in lines[: len(names)]]
    assert sorted(shown) == names


def test_many_rows_are_cut_and_that_is_said(cli: Cli, record: Path) -> None:
    out = cli("signals", *WINDOW, "--by", "adapter", "--limit", "2").out
    assert "and 3 more: --limit shows more, --json has all" in out
    assert (
        len(cli("signals", *WINDOW, "--by", "adapter", "--limit", "2", "--json").items("signals")["now"]["adapters"])
        == 5
    )


def test_a_record_that_ended_long_ago_counts_back_from_its_newest_row(cli: Cli, record: Path) -> None:
    done = cli("signals", "--last", "5m")
    assert "the newest row is of 2026-09-21 12:04:50 UTC: --last 5m counts back from there, not from now" in done.err
    assert done.out.startswith("2026-09-21 11:59:50 to 12:04:50 UTC: 90 requests")


def test_the_same_holds_where_the_newest_row_lies_in_an_hour_that_is_open(
    cli: Cli, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraledger.cli.signals.options.time.time_ns", lambda: NOON + 40 * MINUTE)
    assert "the newest row is of 2026-09-21 12:04:50 UTC" in cli("signals", "--last", "5m").err
    assert cli("signals", "--last", "38m").err == ""


def test_a_live_record_counts_back_from_now_whether_requests_arrived_or_not(cli: Cli, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    at = int(now.timestamp()) * SECOND
    folder = tmp_path / "live"
    write_parquet({"requests": [request(arrived_ns=at - 2 * MINUTE)]}, folder, "made")
    done = cli("signals", "--record", folder)
    assert done.err == ""
    assert "UTC: 1 requests" in done.out
    shutil.rmtree(folder)
    old = [request(arrived_ns=at - 50 * MINUTE)]
    write_parquet({"requests": old, "samples": [sample(at_ns=at - MINUTE)]}, folder, "made")
    done = cli("signals", "--record", folder)
    assert done.err == ""
    assert "UTC: no request" in done.out
    since = (now - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%S")
    assert "UTC: 1 requests" in cli("signals", "--record", folder, "--from", since).out


def test_an_empty_record_is_told_and_is_no_error(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = cli("signals", "--record", "empty")
    assert done.code == 0
    assert "UTC: no request" in done.out
    assert "No request arrived in the window" in done.out
    assert cli("signals", "--record", "empty", "--json").items("signals")["now"]["total"] is None


def test_without_settings_slots_are_unknown_unless_the_options_say_them(cli: Cli, record: Path, tmp_path: Path) -> None:
    (tmp_path / "loraledger.yaml").unlink()
    done = cli("signals", *WINDOW, "--record", record)
    assert "no settings were found: --config names them" in " ".join(done.out.split())
    items = cli("signals", *WINDOW, "--record", record, "--json").items("signals")
    assert items["now"]["replicas"]["r1"]["working_set"]["slots"] is None
    told = cli("signals", *WINDOW, "--record", record, "--slots", "8", "--host-entries", "16", "--json").items(
        "signals"
    )
    assert told["now"]["replicas"]["r2"]["working_set"]["slots"] == 8
    assert told["now"]["replicas"]["r2"]["working_set"]["host_entries"] == 16
    assert told["facts"]["source"] == "looked up in the options"
    done = cli("signals", *WINDOW)
    assert (done.code, "no settings found" in done.err) == (3, True)


def test_settings_come_before_the_options_and_a_bad_file_is_an_error(cli: Cli, record: Path, tmp_path: Path) -> None:
    items = cli("signals", *WINDOW, "--slots", "8", "--json").items("signals")
    assert items["now"]["replicas"]["r1"]["working_set"]["slots"] == 2
    (tmp_path / "loraledger.yaml").write_text("nope: 1", encoding="utf-8")
    assert cli("signals", *WINDOW, "--record", record).code == 3


def test_bytes_of_adapters_are_read_from_their_files(cli: Cli, record: Path, tmp_path: Path) -> None:
    modules = {name: BASE_8B.projections()[name] for name in ("self_attn.q_proj", "self_attn.v_proj")}
    spec = pairs(modules, 8, 1, stem="model.layers.{i}.", dtype="BF16")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    for name in ("a0", "a1"):
        build(tmp_path / "adapters" / name, {**config, "base_model_name_or_path": "base"}, spec)
    size = (tmp_path / "adapters/a0/adapter_model.safetensors").stat().st_size
    (tmp_path / "adapters/a2").mkdir()
    write(tmp_path / "loraledger.yaml", {**SETTINGS, "adapters": {"folder": "adapters"}})
    items = cli("signals", *WINDOW, "--json").items("signals")
    assert items["facts"]["adapter_bytes"] == {"a0": size, "a1": size}
    assert items["now"]["adapters"]["a0"]["bytes"] == size
    assert items["now"]["adapters"]["a2"]["bytes"] is None


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--by", "model"], "--by 'model' is not one of replica, tenant, adapter, class"),
        (["--last", "10m", "--from", "2026-09-21"], "give one of --last and --from"),
        (["--from", "yesterday"], "'yesterday' is not a moment"),
        (["--from", "2026-09-22", "--to", "2026-09-21"], "the window is empty"),
        (["--from", "-99999d"], "no record has such a time"),
        (["--to", "2400-01-01"], "no record has such a time"),
        (["--last", "99999d"], "a window before 1970 holds nothing"),
        (["--last", "15000d"], "a window before 1970 holds nothing"),
        (["--baseline", "after"], "--baseline 'after' is not before, none or FROM/TO"),
        (["--baseline", "2026-09-22/2026-09-21"], "the window is empty"),
        (["--last", "10"], "has no unit"),
        (["--slots", "0"], "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(cli: Cli, record: Path, words: list[str], complaint: str) -> None:
    done = cli("signals", *words)
    assert done.code == 2
    assert complaint in " ".join(done.err.replace("│", " ").split())


def test_a_folder_that_is_not_there_is_told(cli: Cli, record: Path, tmp_path: Path) -> None:
    done = cli("signals", "--record", tmp_path / "nowhere")
    assert done.code == 3
    assert "there is no record in" in done.err


def test_other_versions_are_not_pooled_unless_asked(cli: Cli, tmp_path: Path) -> None:
    rows = [request(arrived_ns=NOON + n * SECOND, engine_version="0.11.0" if n % 3 else "0.12.0") for n in range(9)]
    write_parquet({"requests": rows}, tmp_path / "two", "made")
    done = cli("signals", *WINDOW, "--record", "two")
    assert "6 requests; engine 0.11.0" in done.out
    assert "Measure again" in done.out
    pooled = cli("signals", *WINDOW, "--record", "two", "--pool-versions")
    assert "9 requests; all versions together" in pooled.out


def test_tables_fit_eighty_columns_of_a_terminal(record: Path, tmp_path: Path) -> None:
    out, _ = on_a_terminal(tmp_path, 80, "signals", *WINDOW)
    lines = out.decode().splitlines()
    tables = [line for line in lines if not line.startswith(("2026", "beside", "-", " "))]
    assert max(len(line) for line in tables if not line.startswith("by ")) <= 80


@pytest.mark.parametrize("verb", ["signals", "diagnose", "advise"])
def test_places_that_no_engine_has_are_refused(cli: Cli, record: Path, verb: str) -> None:
    done = cli(verb, "--record", record, "--slots", str(2**63))
    assert (done.code, "--slots" in done.err) == (2, True)
