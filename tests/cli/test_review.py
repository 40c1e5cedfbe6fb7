"""``review``: where it writes, what it remembers, and when it has nothing to do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from loraledger.cli.change.options import read_limit, read_share, read_time, read_value
from loraledger.operate.change import Guardrail
from loraledger.operate.journal import ChangeJournal
from loraledger.record.parquet import write_parquet
from operate.changes import change
from operate.review.made import SCRIPT, week, write_weeks
from signals.records import MINUTE, NOON, request

from .conftest import Cli, write
from .judged import SETTINGS

FLEET = {
    **SETTINGS,
    "tenants": [
        {"name": name, "key_hashes": [key * 64], "adapters": ["*"]} for name, key in (("acme", "0"), ("birch", "1"))
    ],
}
LAST = "reviews/last.json"
DAYS = ("--from", "2026-09-14T12:00:00Z", "--to", "2026-09-21T12:00:00Z")


@pytest.fixture
def record(tmp_path: Path) -> Path:
    write(tmp_path / "loraledger.yaml", SETTINGS)
    return write_weeks(tmp_path / "record")


def test_without_a_file_the_markdown_goes_to_stdout(cli: Cli, record: Path) -> None:
    done = cli("review", *DAYS)
    assert done.code == 0, done.err
    assert done.out.startswith("# Weekly review\n\n2026-09-14 12:00 to 2026-09-21 12:00 UTC, beside the week before")
    assert "8 of 40 requests got no first token within 1 s" in done.out
    assert "looked up in loraledger.yaml" in done.out
    assert "<script" not in done.out


def test_a_page_and_markdown_are_written_and_stdout_stays_empty(cli: Cli, record: Path, tmp_path: Path) -> None:
    done = cli("review", *DAYS, "--out", "review.html", "--markdown", "review.md")
    assert (done.code, done.out) == (0, "")
    assert done.err == "loraledger: wrote review.html\nloraledger: wrote review.md\n"
    page = (tmp_path / "review.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    assert SCRIPT not in page
    assert (tmp_path / "review.md").read_text(encoding="utf-8") == cli("review", *DAYS).out


def test_a_record_that_ended_long_ago_is_reviewed_up_to_its_newest_row(cli: Cli, record: Path) -> None:
    done = cli("review", "--record", record)
    assert "the newest row is of 2026-09-19" in done.err
    assert done.out.startswith("# Weekly review\n\n2026-09-12")
    assert cli("review", "--last", "1d").out.startswith("# Review\n\n2026-09-18")


def test_the_document_has_the_figures_the_advice_and_the_commands(cli: Cli, record: Path) -> None:
    items = cli("review", *DAYS, "--json").items("review")
    signals = cli("signals", *DAYS, "--json").items("signals")
    assert items["now"] == signals["now"]
    assert items["before"] == signals["baseline"]
    assert items["advice"] == cli("advise", "--to", DAYS[3], "--json").items("advice")
    assert items["worst"]["late"] == 8
    assert items["worst"]["diagnosis"]["sentence"]
    assert all(proposal["command"].startswith("loraledger change propose ") for proposal in items["proposals"])
    assert items["missing"]


def test_the_command_for_the_worst_hour_gives_its_diagnosis(cli: Cli, record: Path) -> None:
    worst = cli("review", *DAYS, "--json").items("review")["worst"]
    words = shlex.split(worst["command"])
    assert words[0] == "loraledger"
    assert cli(*words[1:], "--json").items("diagnosis") == worst["diagnosis"]


def test_changes_are_read_from_the_journal(cli: Cli, record: Path) -> None:
    with ChangeJournal(record / "changes") as journal:
        opened = change(id="c7", proposed_ns=NOON - MINUTE, guardrails=(Guardrail("refused", 0.01),))
        journal.append(NOON - MINUTE, "propose", "an operator", "hits", opened)
    out = cli("review", *DAYS).out
    assert "| c7 | proposed | policy | least-loaded | bounded-affinity |" in out
    assert "Open: c7 (policy, proposed)." in out
    (record / "changes/changes.jsonl").write_text("nonsense\n", encoding="utf-8")
    assert cli("review", *DAYS).code == 3


def test_what_was_accepted_is_where_proposals_begin(cli: Cli, record: Path, tmp_path: Path) -> None:
    write(tmp_path / "loraledger.yaml", FLEET)
    accepted = change(state="accepted", before="bounded-affinity", after="round-robin", ended_ns=NOON - MINUTE)
    with ChangeJournal(record / "changes") as journal:
        journal.append(NOON - MINUTE, "accept", "gateway", "better", accepted)
    (command,) = [
        proposal["command"]
        for proposal in cli("review", *DAYS, "--json").items("review")["proposals"]
        if proposal["variable"] == "policy"
    ]
    assert "--from round-robin --to bounded-affinity" in command


def test_what_is_not_new_is_not_reviewed_again(cli: Cli, record: Path, tmp_path: Path) -> None:
    first = cli("review", *DAYS, "--if-changed", "--out", "review.html")
    assert "no review of this record before this one" in first.err
    (tmp_path / "review.html").unlink()
    noted = (record / LAST).read_bytes()
    until = ("--to", "2026-09-21T13:00:00Z")
    again = cli("review", *until, "--if-changed", "--out", "review.html")
    assert (again.code, again.out) == (0, "")
    assert "nothing new since the last review, which ended 2026-09-21 12:00:00 UTC" in again.err
    assert not (tmp_path / "review.html").exists()
    assert (record / LAST).read_bytes() == noted
    assert cli("review", *until, "--if-changed", "--json").items("review") is None


def test_a_new_engine_is_reviewed_and_named(cli: Cli, record: Path, tmp_path: Path) -> None:
    cli("review", *DAYS)
    write_parquet({"requests": [request(arrived_ns=NOON + MINUTE, engine_version="0.12.0")]}, record, "later")
    until = ("--to", "2026-09-21T13:00:00Z")
    done = cli("review", *until, "--if-changed", "--out", "review.html")
    assert "new since the last review: engine 0.12.0, at 2026-09-21 12:01:00 UTC" in done.err
    assert "engine 0.12.0, since 2026-09-21 12:01" in (tmp_path / "review.html").read_text(encoding="utf-8")
    assert json.loads((record / LAST).read_bytes())["until_ns"] == NOON + 60 * MINUTE
    assert "nothing new" in cli("review", *until, "--if-changed").err


def test_a_record_that_cannot_be_written_to_is_reviewed_all_the_same(cli: Cli, record: Path) -> None:
    (record / "reviews").write_text("in the way", encoding="utf-8")
    done = cli("review", *DAYS)
    assert done.code == 0
    assert "the review is not noted beside the record" in done.err


def test_an_empty_record_says_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = cli("review", "--record", "empty")
    assert done.code == 0
    assert "No request arrived in the window: " in done.out


def test_without_settings_places_are_unknown_and_said_to_be(cli: Cli, tmp_path: Path) -> None:
    write_parquet({"requests": week(NOON, 20, 5)}, tmp_path / "record", "made")
    out = cli("review", "--record", "record", *DAYS).out
    assert "no settings were found" in out
    residency = next(line for line in out.splitlines() if line.startswith("| r1 |"))
    assert "- (-)" in residency


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--last", "7d", "--from", "2026-09-14T12:00:00Z"), 2),
        (("--to", "yesterday"), 2),
        (("--record", "nowhere"), 3),
        (("--out", "no/such/folder/review.html"), 3),
    ],
)
def test_bad_words_are_refused(cli: Cli, record: Path, words: tuple[str, ...], code: int) -> None:
    done = cli("review", *words)
    assert (done.code, done.out) == (code, "")


def test_what_is_proposed_is_what_change_propose_reads(cli: Cli, record: Path, tmp_path: Path) -> None:
    write(tmp_path / "loraledger.yaml", {**FLEET, "policy": {"name": "round-robin"}})
    commands = [one["command"] for one in cli("review", *DAYS, "--json").items("review")["proposals"]]
    assert [shlex.split(command)[3] for command in commands][:1] == ["policy"]
    readers: dict[str, Callable[[str], object]] = {
        "--target": read_limit,
        "--guard": read_limit,
        "--share": read_share,
        "--within": read_time,
        "--why": str,
    }
    for command in commands:
        variable, *options = shlex.split(command)[3:]
        for name, value in zip(options[::2], options[1::2], strict=True):
            assert read_value(variable, value) is not None if name in ("--from", "--to") else readers[name](value)
