"""What a terminal of 100 columns shows: no cell is ever cut, the last column alone is folded."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest

from loraledger.cli.output import print_table
from loraledger.operate.change import Change
from loraledger.operate.journal import Entry
from loraledger.operate.watch import judge
from loraledger.units import NS_PER_S
from operate.changes import block, change
from operate.test_watch import blocks

from .conftest import Cli, Done
from .test_change import NOON, playing, view
from .test_compare import Compare, compare

__all__ = ["compare"]

COLUMNS = 100
WHY = (
    "target hit_rate is better by 0.09721 (0.04213 to 0.1522): 0.7618 with the change, 0.2618 without, 26 blocks; "
    "0.4401 and 0.4377 before; every guardrail is within its bound"
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Screen(Protocol):
    """Runs something that has to end well; the lines that it printed, without bold."""

    def __call__(self, run: Callable[..., Done | None], *words: str, **more: Any) -> list[str]: ...


@pytest.fixture
def screen(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal as stdout; after ``cli``, which sets the columns that others want."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERM", "xterm")

    def shown(run: Callable[..., Done | None], *words: str, **more: Any) -> list[str]:
        terminal = _Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            done = run(*words, **more)
        assert done is None or done.code == 0
        return re.sub(r"\x1b\[[0-9;]*[mK]", "", terminal.getvalue()).splitlines()

    return shown


def accepted(**fields: Any) -> Change:
    return msgspec.structs.replace(change(**fields), state="accepted", proposed_ns=NOON, began_ns=NOON, reason=WHY)


# --- any table --------------------------------------------------------------------------------------------------------


def wide(room: int, last: str, right: tuple[str, ...] = ()) -> None:
    """A table whose last column has ``room`` columns of the terminal left."""
    name = "x" * (COLUMNS - room - 7)
    print_table(("name", "n", "why"), [[name, 123, last], [name, None, "b"]], right=("n", *right))


def test_a_table_that_fits_is_as_it_is(screen: Screen) -> None:
    _, first, _ = screen(lambda: wide(9, "why it is"))
    assert re.match(r"x+  123  why it is$", first)


def test_columns_stand_closer_before_anything_is_folded(screen: Screen) -> None:
    _, first, _ = screen(lambda: wide(8, "why it is"))
    assert re.match(r"x+ 123 why it is *$", first)


def test_the_last_column_is_folded_at_blanks(screen: Screen) -> None:
    lines = screen(lambda: wide(30, WHY))
    assert max(map(len, lines)) <= COLUMNS
    assert re.match(r"x+  123  target hit_rate is ", lines[1])
    assert " ".join(line[COLUMNS - 30 :].strip() for line in lines[1:-1]) == WHY


@pytest.mark.parametrize(("room", "last"), [(4, WHY), (8, "a-name-without-blanks")])
def test_what_cannot_fit_is_left_to_the_terminal(screen: Screen, room: int, last: str) -> None:
    heading, first, second = screen(lambda: wide(room, last))
    assert re.match(r"x+  123  ", first)
    assert first.endswith(f"  {last}")
    assert len(first) > COLUMNS
    assert heading.endswith("WHY")
    assert second.endswith("-  b")


def test_a_table_without_columns_is_nothing(screen: Screen) -> None:
    assert not any(line.strip() for line in screen(lambda: print_table((), [])))


def test_numbers_are_not_folded(screen: Screen) -> None:
    lines = screen(lambda: wide(18, "12 345 678 901 234 567", right=("why",)))
    assert lines[1].endswith("  12 345 678 901 234 567")


# --- changes ----------------------------------------------------------------------------------------------------------


def listed(folder: Path, cli: Cli, screen: Screen) -> list[str]:
    changes = [accepted(), change(id="c2", variable="policy.growth_share", before=0.5, after=0.25)]
    with playing(folder, {"/api/changes": [(200, {"changes": msgspec.to_builtins(changes)})]}):
        return screen(cli, "change", "list")


def test_a_list_of_changes_cuts_nothing(cli: Cli, screen: Screen, tmp_path: Path) -> None:
    heading, first, second = listed(tmp_path, cli, screen)
    assert heading.split()[:3] == ["ID", "STATE", "VARIABLE"]
    assert first.split()[:5] == ["c1", "accepted", "policy", "least-loaded", "bounded-affinity"]
    assert first.endswith(f"2026-12-01 00:00:00  an operator  {WHY}")
    assert second.split()[:3] == ["c2", "proposed", "policy.growth_share"]


def test_a_list_of_changes_folds_why(cli: Cli, screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    heading, *lines = listed(tmp_path, cli, screen)
    assert max(map(len, lines)) <= 170
    assert lines[0].split()[:5] == ["c1", "accepted", "policy", "least-loaded", "bounded-affinity"]
    at = heading.index("WHY")
    assert " ".join(line[at:].strip() for line in lines[:-1]) == WHY


def test_a_rollout_that_ended_tells_all_of_it(cli: Cli, screen: Screen, tmp_path: Path) -> None:
    began = time.time_ns() - 60 * NS_PER_S
    going = msgspec.structs.replace(change(), state="rolling_out", began_ns=began, reason="go")
    before = [block(n, {"hit_rate": 0.5 + 0.01 * (n % 3)}, {"hit_rate": 0.6}) for n in range(12)]
    said = msgspec.to_builtins(judge(going, [*blocks(26, 0.1, 0), block(26, {}, {"hit_rate": 0.7})], began, before))
    views = [view(going, verdict=said), view(accepted(), verdict=said)]
    with playing(tmp_path, {"/api/changes/c1": [(200, one) for one in views]}):
        _, drawn, *lines = screen(cli, "change", "watch", "c1", "--every", "10ms")
    told = lines[: lines.index("")]
    assert len(drawn) < COLUMNS
    assert " left; 26 blocks, hit_rate 80.9% with it" in drawn
    assert max(map(len, lines)) <= COLUMNS
    assert " ".join(line.strip() for line in told) == f"c1 accepted: {WHY}"
    assert "…" not in "".join(lines)
    assert any(re.search(r"WITH IT +WITHOUT +APART +MOVED +LOW +HIGH +LIMIT +SO FAR +BLOCKS", line) for line in lines)
    assert any(re.match(r"target .* -9\.0 pt .* > \+2\.0 pt better +26", line) for line in lines)


def test_a_change_tells_which_blocks_count_and_folds_its_journal(cli: Cli, screen: Screen, tmp_path: Path) -> None:
    found = accepted()
    parts = [*blocks(26, 0.1, 0), block(26, {"hit_rate": None}, {"hit_rate": 0.7})]
    entries = [Entry(n=1, at_ns=NOON, kind="accept", who="gateway", why=WHY, change=found, evidence={})]
    answer = view(found, entries=msgspec.to_builtins(entries), verdict=msgspec.to_builtins(judge(found, parts, NOON)))
    with playing(tmp_path, {"/api/changes/c1": [(200, answer)]}):
        lines = screen(cli, "change", "show", "c1")
    assert max(map(len, lines)) <= COLUMNS
    assert "rollout, 27 blocks: with the change beside without it, in the blocks that measured both" in lines
    assert next(line for line in lines if line.startswith("target ")).split()[-1] == "26"
    heading, *journal = lines[lines.index("journal") + 1 :]
    assert journal[0].startswith("1  2026-12-01 00:00:00  accept  accepted  gateway  target hit_rate")
    assert " ".join(line[heading.index("WHY") :].strip() for line in journal) == WHY


# --- the others -------------------------------------------------------------------------------------------------------


def test_a_comparison_cuts_nothing(compare: Compare, screen: Screen) -> None:
    offers = [
        f"{name},m,{gpu},1,,,{price}.00,USD,spot,,2026-11-30\n"
        for name, gpu, price in (("l40s-in-amsterdam", "L40S", 10), ("a100-40-in-virginia", "A100 40GB", 20))
    ]
    lines = screen(compare, "--policy", "bounded-affinity", "--replicas-max", "4", rows=tuple(offers))
    assert "…" not in "".join(lines)
    for heading in ("REPLICAS", "HEADLINE/1", "UNITS", "KV TOKENS", "TRIED", "ELSE HOST"):
        assert any(re.search(rf"\b{heading}( |$)", line) for line in lines), heading
    assert sum(line.startswith("a100-40-in-virginia ") for line in lines) == 3


def test_the_kv_of_a_replica_is_a_share(cli: Cli, tmp_path: Path) -> None:
    def replica(name: str, kv: float | None) -> dict[str, Any]:
        figures = {"in_flight": 0, "running": 1, "waiting": 0, "kv_usage": kv, "slots_used": 1, "slots": 2}
        told = {figure: {"value": value, "source": "observed", "age_s": 0.1} for figure, value in figures.items()}
        return {"name": name, "up": True, "draining": False, "reason": "ok", **told}

    said = {"replicas": [replica("r1", 0.0002848307291666667), replica("r2", 0.4567), replica("r3", None)]}
    with playing(tmp_path, {"/api/replicas": [(200, said)]}):
        rows = cli("get", "replicas").table()
        document = cli("get", "replicas", "--json").items("replicas")
    assert [row[5] for row in rows[1:]] == ["<0.1%", "45.7%", "-"]
    assert document[0]["kv_usage"]["value"] == 0.0002848307291666667
