"""``loraledger trace``: what people and programs get, and how bad files and usage end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraledger.record.parquet import write_parquet
from loraledger.replay.traces.trace import Trace

from .conftest import Cli, Done, on_a_terminal

DATA = Path(__file__).parents[1] / "replay" / "data"


def document(done: Done) -> Any:
    assert (done.code, done.err) == (0, "")
    return done.items("trace")


def said(done: Done, name: str) -> str:
    (found,) = [line for line in done.out.splitlines() if line.startswith(f"{name} ")]
    return found.removeprefix(name).strip()


def test_generate_writes_a_trace_and_says_how_skewed_it_came_out(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "trace",
        "generate",
        "zipf:1",
        "--out",
        "z.jsonl.gz",
        "--adapters",
        "50",
        "--rate",
        "20",
        "--duration",
        "5m",
        "--tenants",
        "3",
    )
    assert (done.code, done.err) == (0, "")
    assert (
        said(done, "source")
        == "loraledger trace generate zipf:1 --seed 42 --rate 20.0 --duration 5m --adapters 50 --tenants 3"
    )
    assert said(done, "tenants") == "3"
    assert said(done, "adapters") == "50 used of 50; 0.0% of requests to the base"
    assert said(done, "popularity").startswith("top-1 2")
    assert "exp of entropy" in said(done, "effective")
    assert "distinct adapters a minute" in said(done, "working set")
    assert said(done, "arrivals").startswith("|")
    trace = Trace(tmp_path / "z.jsonl.gz")
    assert len(list(trace)) == trace.header.requests
    assert said(done, "digest") == trace.digest


def test_the_source_of_a_trace_is_the_whole_command_that_made_it(cli: Cli) -> None:
    words = ("trace", "generate", "uniform", "--requests", "5", "--ranks", "8,16", "--bytes-per-rank", "2MiB")
    found = document(cli(*words, "-o", "u.jsonl", "--json"))
    assert found["source"] == f"loraledger {' '.join(words[:3])} --seed 42 {' '.join(words[3:])}"
    again = document(cli(*found["source"].split()[1:], "-o", "v.jsonl", "--json"))
    assert again["digest"] == found["digest"]


def test_the_help_of_generate_says_what_it_does_unasked(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    told = " ".join(cli("trace", "generate", "--help").out.replace("│", " ").split())
    found = document(cli("trace", "generate", "uniform", "-o", "u.jsonl", "--json"))
    assert found["adapters_named"] == 100
    assert "How many adapters there are. Default: 100; slora 200." in told
    assert found["rate"] == pytest.approx(10, rel=0.1)
    assert "Requests/s. Default: 10; slora 2." in told
    assert found["duration_ns"] == pytest.approx(600 * 10**9, rel=0.01)
    assert "Default: 10m unless --requests; slora 300s." in told
    assert (found["prompt"]["max"], found["output"]["max"]) == (511, 511)
    assert told.count("Default: 8-511; ") == 2
    slora = document(cli("trace", "generate", "slora", "-o", "s.jsonl", "--json"))
    assert (slora["adapters_named"], slora["requests"]) == (200, 2 * 300)
    assert "Default: no limit; punica 1024." in told


def test_describe_says_the_same_as_generate_and_gives_it_as_data(cli: Cli) -> None:
    made = cli(
        "trace", "generate", "uniform", "--out", "u.jsonl", "--requests", "500", "--base-share", "0.5", "--seed", "3"
    )
    assert cli("trace", "describe", "u.jsonl").out == made.out
    found = document(cli("trace", "describe", "u.jsonl", "--json"))
    assert (found["requests"], found["seed"], found["adapters_named"]) == (500, 3, 100)
    assert found["base_share"] == pytest.approx(0.5, abs=0.1)
    assert found["digest"] == said(made, "digest")
    assert found["concentration"].keys() == {"top1", "top10", "entropy_number", "simpson_number"}
    assert found["prompt"].keys() == {"p50", "p90", "p99", "mean", "max"}
    assert len(found["top"]) == 10
    assert sum(found["bins"]) == 500


def test_slora_by_default_is_the_published_setting(cli: Cli) -> None:
    found = document(cli("trace", "generate", "slora", "-o", "s.jsonl", "--ranks", "64,32,16,8", "--json"))
    assert (found["requests"], found["adapters_used"], found["adapters_named"]) == (600, 187, 200)
    assert found["prompt"]["mean"] == pytest.approx(153_447 / 600)
    again = document(cli("trace", "generate", "slora", "-o", "t.jsonl", "--alpha", "0.3", "--json"))
    assert again["concentration"]["top1"] == pytest.approx(0.2, abs=0.05)


def test_punica_kinds_come_at_once_unless_a_rate_is_given(cli: Cli) -> None:
    found = document(cli("trace", "generate", "punica-skewed", "-o", "p.jsonl", "--json"))
    assert (found["requests"], found["adapters_used"], found["duration_ns"]) == (1024, 16, 0)
    assert found["concentration"]["top1"] == pytest.approx(291 / 1024)
    assert document(cli("trace", "generate", "punica-uniform", "-o", "p.jsonl", "--rate", "5", "--json"))[
        "rate"
    ] == pytest.approx(5, rel=0.2)


def test_servegen_clients_are_tenants(cli: Cli) -> None:
    done = cli(
        "trace",
        "generate",
        "servegen",
        "--data",
        DATA / "servegen",
        "-o",
        "c.jsonl",
        "--start",
        "1h",
        "--duration",
        "1h",
    )
    assert said(done, "tenants") == "2"
    assert said(done, "source").endswith("--duration 1h --start 1h (3 clients of servegen)")


def test_drift_and_churn_are_options_of_every_popularity(cli: Cli) -> None:
    words = ("trace", "generate", "zipf:1.5", "-o", "d.jsonl", "--active", "20", "--duration", "20m", "--json")
    still, moved = document(cli(*words)), document(cli(*words, "--drift", "1m:3", "--churn", "1m:2"))
    assert still["adapters_used"] == 20
    assert 40 < moved["adapters_used"] <= 20 + 19 * 2
    assert moved["concentration"]["top1"] < still["concentration"]["top1"] / 2
    assert moved["working_set"]["max"] <= 20


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("zipf:0",), "parameter"),
        (("pareto",), "not a popularity"),
        (("slora", "--tenants", "3"), "slora does not take --tenants"),
        (("zipf:1", "--alpha", "1"), "zipf:1 does not take --alpha"),
        (("punica-odd",), "one of distinct"),
        (("servegen",), "--data DIR"),
        (("zipf:1", "--arrivals", "at-once"), "give --requests"),
        (("zipf:1", "--prompt", "x"), "number of tokens"),
        (("zipf:1", "--churn", "1m"), "churn needs adapters that wait"),
        (("zipf:1", "--rate", "-1"), "a rate of -1"),
        (("zipf:1", "--duration", "10"), "no unit"),
        (("zipf:1", "--bytes-per-rank", "1MiB"), "needs --ranks"),
        (("zipf:1", "--ranks", "8,x"), "invalid literal"),
        (("slora", "--alpha", "0"), "above 0"),
    ],
)
def test_what_cannot_be_generated_is_a_usage_error_and_leaves_nothing(
    cli: Cli, tmp_path: Path, words: tuple[str, ...], complaint: str
) -> None:
    done = cli("trace", "generate", *words, "--out", "x.jsonl")
    assert done.code == 2
    assert complaint in " ".join(done.err.replace("│", " ").split())
    assert not list(tmp_path.glob("*x.jsonl*"))


def test_azure_is_imported_with_adapters_laid_over_it(cli: Cli) -> None:
    words = ("trace", "import", "azure", DATA / "azure_conv_50.csv", "-o", "a.jsonl")
    bare = document(cli(*words, "--json"))
    assert (bare["requests"], bare["base_share"], bare["concentration"]) == (50, 1.0, None)
    laid = document(cli(*words, "--adapters", "8", "--popularity", "zipf:1", "--tenants", "2", "--seed", "5", "--json"))
    assert (laid["requests"], laid["base_share"], laid["adapters_named"], laid["seed"]) == (50, 0.0, 8, 5)
    assert "8 adapters laid over it: zipf:1, seed 5, 2 tenants" in laid["source"]
    assert "CC-BY" in laid["licence"]
    assert (bare["prompt"], bare["duration_ns"]) == (laid["prompt"], laid["duration_ns"])
    again = document(
        cli(*words, "--adapters", "8", "--popularity", "zipf:1", "--tenants", "2", "--seed", "6", "--json")
    )
    assert again["digest"] != laid["digest"]


def test_mooncake_blocks_are_kept_salted_or_left_out(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("trace", "import", "mooncake", DATA / "mooncake_conversation_50.jsonl", "-o", "m.jsonl")
    kept = cli(*words)
    assert said(kept, "prefixes") == "100.0% of requests name blocks of 512 tokens"
    assert next(iter(Trace(tmp_path / "m.jsonl"))).blocks[:2] == (0, 1)
    (tmp_path / "salt").write_text("0123456789abcdef\n", encoding="utf-8")
    by_file = document(cli(*words, "--salt-file", "salt", "--json"))
    assert next(iter(Trace(tmp_path / "m.jsonl"))).blocks[0] > 10**6
    assert "0123456789abcdef" not in (tmp_path / "m.jsonl").read_text(encoding="utf-8")
    monkeypatch.setenv("PREFIX_SALT", "0123456789abcdef")
    assert document(cli(*words, "--salt-env", "PREFIX_SALT", "--json"))["digest"] == by_file["digest"]
    assert "prefix blocks salted" in by_file["source"]
    assert document(cli(*words, "--no-prefixes", "--json"))["prefix_share"] == 0


def test_a_trace_goes_out_as_tracev2_and_comes_back(cli: Cli, tmp_path: Path) -> None:
    made = document(
        cli("trace", "generate", "zipf:1", "-o", "z.jsonl", "--requests", "300", "--tenants", "4", "--json")
    )
    done = cli("trace", "export", "tracev2", "z.jsonl", "-o", "z.csv")
    assert done.out == f"z.csv and z.yaml: tracev2 of {made['digest']}\n"
    back = document(cli("trace", "import", "tracev2", "z.csv", "-o", "b.jsonl", "--json"))
    assert list(Trace(tmp_path / "b.jsonl")) == list(Trace(tmp_path / "z.jsonl"))
    assert back["top"] == made["top"]
    assert cli("trace", "export", "tracev2", "z.jsonl", "-o", "z.yaml").code == 2
    before = (tmp_path / "z.jsonl").read_bytes()
    itself = cli("trace", "export", "tracev2", "z.jsonl", "-o", "z.jsonl")
    assert (itself.code, (tmp_path / "z.jsonl").read_bytes()) == (2, before)
    assert "would write over the trace" in itself.err
    (tmp_path / "z.jsonl").rename(tmp_path / "t.yaml")
    assert cli("trace", "export", "tracev2", "t.yaml", "-o", "t.csv").code == 2
    assert (tmp_path / "t.yaml").read_bytes() == before


def test_an_edited_trace_is_refused_until_it_is_written_anew(cli: Cli, tmp_path: Path) -> None:
    cli("trace", "generate", "zipf:1", "-o", "z.jsonl", "--requests", "30")
    text = (tmp_path / "z.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "z.jsonl").write_text("\n".join([*text[:-1], "", '{"what": 1}']), encoding="utf-8")
    done = cli("trace", "describe", "z.jsonl")
    assert (done.code, done.out) == (3, "")
    assert done.err == "loraledger: z.jsonl: row 31: a hole (--skip-bad drops such rows and counts them)\n"
    done = cli("trace", "describe", "z.jsonl", "--skip-bad")
    assert (done.code, done.err) == (0, "loraledger: 2 bad rows dropped: 1 a hole, 1 not a request\n")
    done = cli("trace", "import", "trace", "z.jsonl", "-o", "new.jsonl", "--skip-bad")
    assert (done.code, done.err) == (0, "loraledger: 2 bad rows dropped: 1 a hole, 1 not a request\n")
    assert said(cli("trace", "describe", "new.jsonl"), "requests").startswith("29 in ")
    assert said(done, "source") == "loraledger trace generate zipf:1 --seed 42 --requests 30"


def test_a_request_above_the_limit_is_refused_with_its_row(cli: Cli) -> None:
    cli("trace", "generate", "zipf:1", "-o", "z.jsonl", "--requests", "30", "--prompt", "4000")
    done = cli("trace", "describe", "z.jsonl", "--max-tokens", "4096")
    assert done.code == 3
    assert "row 2: request too large: 4," in done.err


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (("azure", "missing.csv"), 3, "missing.csv: cannot be read"),
        (("azure", DATA / "mooncake_conversation_50.jsonl"), 3, "no column TIMESTAMP"),
        (("tracev2", DATA / "azure_conv_50.csv"), 3, "TraceV2 is a CSV and this header"),
        (("trace", DATA / "azure_conv_50.csv"), 3, "not the header of a trace"),
        (("record", "."), 3, "no request in it"),
        (("record", "missing"), 3, "there is no record in missing"),
        (("azure", DATA / "azure_conv_50.csv", "--adapters", "3"), 2, "go together"),
        (("azure", DATA / "azure_conv_50.csv", "--tenants", "3"), 2, "need --adapters"),
        (("azure", DATA / "azure_conv_50.csv", "--salt-env", "NO_SUCH"), 2, "has no prefix blocks"),
        (
            ("mooncake", DATA / "mooncake_conversation_50.jsonl", "--salt-env", "NO_SUCH"),
            2,
            "there is no variable NO_SUCH",
        ),
        (("mooncake", DATA / "mooncake_conversation_50.jsonl", "--salt-file", "NO_SUCH"), 3, "NO_SUCH: cannot be read"),
        (("record", ".", "--adapters", "3", "--popularity", "uniform"), 2, "names its own adapters"),
    ],
)
def test_what_cannot_be_imported_says_why(
    cli: Cli, tmp_path: Path, words: tuple[str | Path, ...], code: int, complaint: str
) -> None:
    done = cli("trace", "import", *words, "--out", "x.jsonl")
    assert done.code == code
    assert complaint in " ".join(done.err.replace("│", " ").split())
    assert not list(tmp_path.glob("*x.jsonl*"))


def test_a_record_becomes_a_trace_without_prompts(cli: Cli, tmp_path: Path) -> None:
    known = {"tenant": "acme", "adapter": "a0", "status": "ok", "prompt_tokens": 100, "generated_tokens": 7}
    rows: list[dict[str, object]] = [
        {**known, "id": f"q{n}", "arrived_ns": 1_789_992_000 * 10**9 + n * 10**9} for n in range(20)
    ]
    rows[5] |= {"status": "rejected", "prompt_tokens": None, "generated_tokens": None, "predicted_prompt_tokens": 90}
    write_parquet({"requests": rows}, tmp_path / "record", "s1")
    done = cli("trace", "import", "record", "record", "-o", "r.jsonl")
    assert (done.code, "request q5: no token counts" in done.err) == (3, True)
    done = cli("trace", "import", "record", "record", "-o", "r.jsonl", "--unknown", "estimate")
    assert done.code == 0
    assert done.err.splitlines() == [
        "loraledger: generated_tokens estimated for 1 requests",
        "loraledger: prompt_tokens estimated for 1 requests",
    ]
    assert said(done, "source") == "record record --unknown estimate"
    found = list(Trace(tmp_path / "r.jsonl"))
    assert [request.at for request in found] == [n * 10**9 for n in range(20)]
    assert (found[5].prompt_tokens, found[5].output_tokens) == (90, 7)


def test_a_folder_around_a_record_is_refused_with_the_one_to_give(cli: Cli, tmp_path: Path) -> None:
    known = {"tenant": "acme", "adapter": None, "status": "ok", "prompt_tokens": 9, "generated_tokens": 7}
    for run in (".old.partial", "b", "c"):
        row: dict[str, object] = {**known, "id": "q", "arrived_ns": 1_789_992_000 * 10**9}
        write_parquet({"requests": [row]}, tmp_path / "runs" / run / "record", "s1")
    done = cli("trace", "import", "record", "runs/b", "-o", "r.jsonl")
    assert (done.code, done.err.count("\n")) == (3, 1)
    assert "runs/b: not a record, but there is one in it: give runs/b/record" in done.err
    done = cli("trace", "import", "record", "runs", "-o", "r.jsonl")
    assert (done.code, done.err.count("\n")) == (3, 1)
    assert "there are 2 in it: give one of them, such as runs/b/record" in done.err
    assert cli("trace", "import", "record", "runs/c/record", "-o", "r.jsonl").code == 0


def test_describe_says_what_to_do_with_a_trace_without_requests(cli: Cli, tmp_path: Path) -> None:
    head = '{"loraledger_trace":1,"name":"n","source":"s","licence":"l"}\n'
    (tmp_path / "none").write_text(head, encoding="utf-8")
    (tmp_path / "bad").write_text(f"{head}\nno row\n", encoding="utf-8")
    done = cli("trace", "describe", "none")
    assert (done.code, "none: no request in it: give a file that holds at least one\n" in done.err) == (3, True)
    done = cli("trace", "describe", "bad", "--skip-bad")
    assert (done.code, "bad: no request in it, all were dropped (1 a hole, 1 not a request): mend" in done.err) == (
        3,
        True,
    )


def test_names_in_a_trace_do_not_reach_the_terminal_as_commands(cli: Cli, tmp_path: Path) -> None:
    head = (
        '{"loraledger_trace":1,"name":"\\u001b[2J[red]","source":"s","licence":"","adapters":[{"name":"\\u001b]0;x"}]}'
    )
    row = '{"at":0,"tenant":"t","adapter":"\\u001b]0;x","prompt_tokens":1,"output_tokens":1}'
    (tmp_path / "a").write_text(f"{head}\n{row}\n", encoding="utf-8")
    done = cli("trace", "describe", "a")
    assert done.code == 0
    assert "\x1b" not in done.out
    assert said(done, "trace") == "\\x1b[2J[red]"
    assert said(done, "licence") == "not said"


def test_a_terminal_shows_a_bar_for_many_rows_and_a_pipe_does_not(cli: Cli, tmp_path: Path) -> None:
    cli("trace", "generate", "uniform", "-o", "big.jsonl.gz", "--requests", "150000")
    out, shown = on_a_terminal(tmp_path, 100, "trace", "describe", "big.jsonl.gz")
    assert b"reading" in shown
    assert b"150000" in shown
    assert out.startswith(b"trace       uniform\n")
    assert cli("trace", "describe", "big.jsonl.gz").err == ""
