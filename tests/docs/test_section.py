"""Pages take tables between their marks, and never a smaller one in silence."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from tools.section import main, replaced

PAGE = "# A page\n\n<!-- one -->\nold\n<!-- /one -->\n\nprose\n<!-- two -->\n<!-- /two -->\nend\n"
BIG = "a table\n\n- 9 of 12 lines pass (75 %)\n"
SMALL = "a table\n\n- 4 of 4 lines pass (100 %)\n"


def test_only_what_is_between_the_marks_is_replaced() -> None:
    assert replaced(PAGE, "one", " new\n\n") == PAGE.replace("old", "\nnew\n")
    assert replaced(PAGE, "two", "new") == PAGE.replace("<!-- /two", "\nnew\n\n<!-- /two")


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace("<!-- one", "<!-- no"),
        PAGE.replace("<!-- /one", "<!-- /no"),
        PAGE + PAGE,
        PAGE.replace("<!-- one -->", "see <!-- one --> there"),
        "<!-- /one -->\n<!-- one -->\n",
    ],
)
def test_marks_are_there_once_each_in_order_on_their_own_lines(page: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        replaced(page, "one", "new")


def test_a_table_of_fewer_lines_does_not_replace_a_larger_one_unasked() -> None:
    page = PAGE.replace("old", BIG)
    assert replaced(page, "one", SMALL) is None
    assert replaced(page, "one", "nothing counted") is None
    for smaller in (False, True):
        assert replaced(page, "one", BIG.replace("9", "8"), smaller=smaller) is not None
        assert replaced(page, "two", SMALL, smaller=smaller) is not None
    assert "4 of 4" in (replaced(page, "one", SMALL, smaller=True) or "")


def run(monkeypatch: pytest.MonkeyPatch, text: str, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["section.py", *map(str, words)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    main()


def test_the_page_on_disk_is_written_or_left_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    run(monkeypatch, BIG, page, "one")
    written = page.read_text(encoding="utf-8")
    assert "9 of 12" in written
    assert capsys.readouterr().err == ""
    run(monkeypatch, SMALL, page, "one")
    assert page.read_text(encoding="utf-8") == written
    said = capsys.readouterr().err
    assert "left as it is: this table has 4 lines and the one there 12" in said
    assert f"{page} one --smaller" in said
    for text, name in (("  \n", "one"), (BIG, "three")):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, text, page, name)
        assert ended.value.code not in (0, None)
    assert page.read_text(encoding="utf-8") == written
    run(monkeypatch, SMALL, page, "one", "--smaller")
    assert "4 of 4" in page.read_text(encoding="utf-8")
