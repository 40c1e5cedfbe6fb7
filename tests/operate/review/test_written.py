"""The page and the Markdown: well formed, nothing fetched, nothing of a name taken for markup, the figures as measured."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from loraledger.operate.review import Review, Standing, page, text
from loraledger.operate.review.spelled import Pair, change, iso, spell
from loraledger.operate.review.tables import lines, pair, tables
from loraledger.record.reader import RecordReader
from loraledger.signals.facts import Facts
from operate.changes import change as a_change
from signals.records import NOON

from .made import IMAGE, ODD, SCRIPT, reviewed, weeks

VOID = {"meta", "br", "img", "link", "hr", "input"}
FETCHING = {"src", "href", "srcset", "data", "action", "background", "poster", "xlink:href"}


class Page(HTMLParser):
    """Which elements there are, what they say, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Review:
    hostile = a_change(
        id=SCRIPT, who=IMAGE, why=ODD, before=None, after=SCRIPT, variable="policy", proposed_ns=NOON - 1
    )
    standing = Standing(ranking=(("r1", SCRIPT),), registered=(IMAGE,))
    with weeks(tmp_path_factory.mktemp("found")) as reader:
        return reviewed(reader, [hostile], standing=standing)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Review:
    with RecordReader(tmp_path_factory.mktemp("empty")) as reader:
        return reviewed(reader, facts=Facts())


def test_the_page_is_well_formed_runs_nothing_and_fetches_nothing(found: Review) -> None:
    written = page(found)
    parsed = Page(written)
    assert parsed.open == []
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}
    for _, attributes in parsed.elements:
        assert not attributes.keys() & FETCHING
        assert not [name for name in attributes if name.startswith("on")]
    style = written[written.index("<style>") : written.index("</style>")]
    assert not re.search(r"url\(|@import", style)
    assert "default-src 'none'" in written
    assert {"svg", "table", "caption", "figcaption", "th"} <= tags


def test_every_name_is_text_on_the_page(found: Review) -> None:
    written = page(found)
    assert SCRIPT not in written
    assert IMAGE not in written
    assert "\u202e" not in written
    said = "".join(Page(written).cells)
    assert SCRIPT in said
    assert IMAGE in said
    assert "a|b`c*d_[e](f)\\u202e\\n# g" in said


def test_no_name_is_markup_in_markdown(found: Review) -> None:
    written = text(found)
    assert "<" not in written.replace("&lt;", "")
    assert "\u202e" not in written
    for line in written.splitlines():
        assert not line.startswith("# g")
    assert "a\\|b\\`c\\*d\\_\\[e\\](f)\\\\u202e\\\\n\\# g" in written
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in written.splitlines() if line.startswith("|")]
    starts = [n for n, line in enumerate(written.splitlines()) if line.startswith("| ---")]
    assert len(starts) >= 8
    assert min(widths) >= 4
    rows = [line for line in written.splitlines() if line.startswith("|")]
    for head, rule in pairwise(rows):
        if rule.startswith("| ---"):
            assert len(re.findall(r"(?<!\\)\|", head)) == len(re.findall(r"\|", rule))


def test_every_row_of_a_table_has_a_cell_for_each_column(found: Review) -> None:
    for some in tables(found).values():
        for table in some:
            assert {len(row) for row in table.rows} <= {len(table.columns)}


def test_the_figures_are_those_that_were_measured(found: Review) -> None:
    now, before = found.now.total, found.before.total
    assert now is not None
    assert before is not None
    shown = {line.name: pair(found, line.take) for line in lines(1.0)}
    assert shown["Requests"] == Pair(120, 60)
    assert shown["GPU hit rate"] == Pair(now.hits.gpu_rate, before.hits.gpu_rate)
    assert shown["First token within 1 s"] == Pair(112 / 120, 58 / 60)
    assert shown["Loads"] == Pair(4, 0)
    assert shown["Evictions from slots"] == Pair(0, 3)
    assert shown["Tokens computed again"] == Pair(None, None)
    for written in (page(found), text(found)):
        for line in lines(1.0):
            both = pair(found, line.take)
            assert spell(both.now, line.unit).replace("<", "&lt;") in written
    cells = [cell for cell in Page(page(found)).cells if cell.strip()]
    assert cells[cells.index("Tokens computed again") + 1 :][:2] == ["-", "-"]
    assert cells[cells.index("Requests") + 1 :][:3] == ["120", "60", " x 2.0"]
    assert "| Tokens computed again | - | - |  |" in text(found)


def test_each_replica_class_tenant_and_adapter_is_there(found: Review) -> None:
    named = {table.caption: [row[0] for row in table.rows] for some in tables(found).values() for table in some}
    assert named["Residency by replica"] == ["all", "r1", "r2"]
    assert named["Hit classes"] == ["gpu", "disk"]
    assert named["Latency by tenant"] == [IMAGE, "acme"]
    assert named["Hottest adapters"] == ["a0", SCRIPT, "a|b`c*d_[e](f)\\u202e\\n# g"]
    assert named["Coldest adapters"] == ["never"]
    assert named["Pins that do not pay"] == [IMAGE]
    assert named["Loads by tier and size"][0] == "disk to host or slot"


def test_the_longest_bar_is_the_hottest_adapters(found: Review) -> None:
    bars = re.findall(r'<svg class="bar"[^>]*><rect width="([0-9.]+)"', page(found))
    assert bars == ["100.0", "50.0", "50.0"]


def test_an_empty_record_is_a_page_that_says_so(empty: Review) -> None:
    written = page(empty)
    assert Page(written).open == []
    assert "No request arrived in the window: " in written
    assert "<table" not in written.replace("<table class=narrow>", "")
    assert "No request arrived in the window" in text(empty)
    assert "Nothing: no request arrived." in text(empty)


def test_a_command_is_copied_as_it_is(found: Review) -> None:
    assert found.worst is not None
    experiment = found.worst.diagnosis.experiment
    commands = [found.worst.command, experiment.before, experiment.command]
    cells = [cell.strip() for cell in Page(page(found)).cells]
    assert all(command in cells for command in commands)
    assert "```sh\n" + "\n".join(commands) + "\n```" in text(found)


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (None, "share", "-"),
        (None, "bytes", "-"),
        (0.0, "share", "0.0%"),
        (0.0001, "share", "<0.1%"),
        (0.99999, "share", ">99.9%"),
        (1.0, "share", "100.0%"),
        (0.4123, "s", "0.412"),
        (1234.0, "s", "1,234"),
        (0.0201, "ms", "20.1"),
        (12300, "count", "12,300"),
        (0.123, "count", "0.12"),
        (80 * 2**20, "bytes", "80 MiB"),
    ],
)
def test_a_figure_is_spelled_in_its_unit(value: float | None, unit: str, expected: str) -> None:
    assert spell(value, unit) == expected  # type: ignore[arg-type]


def test_a_change_of_the_unknown_is_not_said() -> None:
    assert change(Pair(None, 1.0), "count") is None
    assert change(Pair(1.0, None), "share") is None
    assert change(Pair(0.5, 0.55), "share") == "-5.0 pt"
    assert change(Pair(3.0, 1.0), "count") == "x 3.0"
    assert change(Pair(1.0, 0.0), "count") == "from 0"
    assert change(Pair(1.1, 1.0), "count") == "+10%"


def test_a_moment_of_a_command_reads_back_to_the_microsecond() -> None:
    assert iso(NOON) == "2026-09-21T12:00:00Z"
    assert iso(NOON + 1_500_000) == "2026-09-21T12:00:00.001500Z"
