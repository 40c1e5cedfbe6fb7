"""``record import``: a log of others becomes a record that the other verbs take."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Cli, Fleet

LOG = """request,when,model,user,gpu,ttft_ms,seconds,code
a,2026-09-21T12:00:00Z,acme/sql,acme,r1,200,1.5,200
b,2026-09-21T12:00:01Z,llama,birch,r1,50,0.5,200
c,2026-09-21T12:00:02Z,acme/tone,acme,r2,,0.1,429
"""
MAP = tuple(
    word
    for entry in (
        "id=request", "arrived=when", "dispatched=when", "adapter=model", "tenant=user", "replica=gpu",
        "ttft=ttft_ms:ms", "duration=seconds:s", "status=code",
    )
    for word in ("--map", entry)
)  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text(LOG, encoding="utf-8")
    return path


def test_what_was_imported_is_shown_and_read_by_the_other_verbs(cli: Cli, log: Path) -> None:
    done = cli("record", "import", log, *MAP, "--base", "llama", "--out", "record")
    assert done.code == 0, done.err
    assert done.out.startswith(
        "3 requests from 2026-09-21 12:00:00 to 2026-09-21 12:00:02 UTC: 2 tenants, 2 adapters, 2 replicas\n"
    )
    assert ["first_token_ns", "ttft_ms", "2", "66.7%"] in done.table()
    assert "hit_class (hit rates), prompt_tokens (load in tokens)" in done.out
    last = done.out.splitlines()[-1]
    assert last.startswith("now: loraledger signals --record record --from 2026-09-21T12:00:00 --to ")
    shown = cli(*last.removeprefix("now: loraledger ").split())
    assert shown.code == 0, shown.err
    assert "UTC: 3 requests" in shown.out
    assert "33.3%" in next(line for line in shown.out.splitlines() if "rejected" in line)
    rows = cli("get", "requests", "--json", "--record", "record").items("requests")
    assert [(row["id"], row["adapter"], row["status"]) for row in rows] == [
        ("c", "acme/tone", "rejected"),
        ("b", None, "ok"),
        ("a", "acme/sql", "ok"),
    ]
    assert rows[0]["prompt_tokens"] is None


def test_the_same_file_replaces_what_it_gave_and_another_one_is_added(cli: Cli, log: Path, tmp_path: Path) -> None:
    def count() -> int:
        return int(cli("query", "SELECT count(*) AS n FROM requests", "--record", "record", "--csv").out.split()[1])

    words = (*MAP, "--out", "record", "--json")
    assert cli("record", "import", log, *words).items("import")["requests"] == 3
    assert count() == 3
    log.write_text(LOG + "d,2026-09-21T13:00:03Z,acme/sql,acme,r1,1,1,200\n", encoding="utf-8")
    assert cli("record", "import", log, *words).items("import")["requests"] == 4
    assert count() == 4
    log.write_text(LOG, encoding="utf-8")
    cli("record", "import", log, *words)
    assert count() == 3
    other = tmp_path / "other.csv"
    other.write_text(LOG, encoding="utf-8")
    assert cli("record", "import", other, *words).items("import")["requests"] == 3
    assert count() == 6


def test_a_bad_row_is_told_with_its_line_and_leaves_what_was_there(cli: Cli, log: Path) -> None:
    cli("record", "import", log, *MAP, "--out", "record")
    log.write_text(LOG + "e,soon,acme/sql,acme,r1,1,1,200\nf,2026", encoding="utf-8")
    done = cli("record", "import", log, *MAP, "--out", "record")
    assert done.code == 3
    assert f"{log}: row 5: not a request: arrived (when): 'soon' is not a time" in done.err
    assert cli("get", "requests", "--record", "record").out.count("acme/sql") == 1
    done = cli("record", "import", log, *MAP, "--out", "record", "--skip-bad", "--json")
    assert (done.code, done.items("import")["requests"], done.items("import")["dropped"]) == (0, 3, 2)
    assert "1 rows dropped: a hole" in done.err
    assert "1 rows dropped: not a request" in done.err


def test_the_document_says_how_much_of_each_column_is_filled(cli: Cli, log: Path) -> None:
    items = cli("record", "import", log, *MAP, "--out", "record", "--json").items("import")
    assert items["filled"]["first_token_ns"] == 2
    assert (items["tenants"], items["adapters"], items["replicas"]) == (2, 3, 2)
    assert items["record"] == "record"


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["--map", "arrivd=when"], 2, "is arrived meant?"),
        (["--map", "id=request"], 2, "no entry says when a request arrived"),
        ([], 2, "Missing option '--map'"),
        (["--map", "arrived=time"], 3, "nothing in it is named 'time'"),
    ],
)
def test_a_map_that_does_not_fit_is_told(cli: Cli, log: Path, words: list[str], code: int, complaint: str) -> None:
    done = cli("record", "import", log, *words, "--out", "record")
    assert done.code == code
    assert complaint in done.err
    assert not Path("record/requests").exists()


def test_files_and_folders_that_cannot_be_used_are_told(cli: Cli, log: Path, tmp_path: Path) -> None:
    done = cli("record", "import", tmp_path / "nothing.csv", *MAP, "--out", "record")
    assert (done.code, "cannot be read" in done.err) == (3, True)
    done = cli("record", "import", log, *MAP, "--out", log)
    assert (done.code, "cannot be written" in done.err) == (3, True)


def test_the_record_of_a_gateway_is_left_alone(cli: Cli, log: Path, fleet: Fleet) -> None:
    done = cli("record", "import", log, *MAP, "--out", fleet.gateway.record)
    assert done.code == 3
    assert "is the record of a gateway" in done.err


@pytest.mark.parametrize("base", ["", " ", "\x1b[31m", "b\udcff", "x" * 2000])
def test_a_name_for_the_base_that_no_row_may_hold_is_refused(cli: Cli, log: Path, base: str) -> None:
    done = cli("record", "import", log, *MAP, "--base", base, "--out", "record")
    assert done.code == 2
    assert "\x1b" not in done.err
