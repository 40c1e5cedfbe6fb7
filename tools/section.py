"""Put what stdin holds between two marks of a page: how the make targets write their tables into docs/.

    python tools/section.py PAGE NAME [--smaller] < table.md

The marks are ``<!-- NAME -->`` and ``<!-- /NAME -->``, each on a line of its own; text outside of them is kept. A table that
counts its lines ("363 of 383 lines pass") replaces one with as many or fewer: where part of the data is missing, or a program ran
in part, the page is left as it is, and that is said. ``--smaller`` puts it there all the same.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

_COUNTED = re.compile(r"\d+ of (\d+) lines pass")


def split(page: str, name: str) -> tuple[str, str, str]:
    """``page`` up to and with the first mark of ``name``, what is between the marks, the rest. Raises ``ValueError``."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page needs {begin.strip()} and {end.strip()} once each, in order, on lines of their own")
    before, _, rest = page.partition(begin)
    between, _, after = rest.partition(end)
    return before + begin, between, end + after


def counted(text: str) -> int:
    """How many lines ``text`` says that it counts; 0 if it says nothing of it."""
    found = _COUNTED.search(text)
    return int(found[1]) if found else 0


def replaced(page: str, name: str, text: str, *, smaller: bool = False) -> str | None:
    """``page`` with ``text`` between the marks of ``name``; ``None`` where that counts fewer lines and may not.

    Raises ``ValueError`` when the page lacks the marks.
    """
    before, between, after = split(page, name)
    if counted(text) < counted(between) and not smaller:
        return None
    return f"{before}\n{text.strip()}\n\n{after}"


def main() -> None:
    """Replace the section that the arguments name."""
    parser = argparse.ArgumentParser(description="Put stdin between two marks of a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("name")
    parser.add_argument("--smaller", action="store_true", help="also where the table there counts more lines")
    given = parser.parse_args()
    text, page = sys.stdin.read(), given.page.read_text(encoding="utf-8")
    if not text.strip():
        sys.exit("nothing came on stdin: the page is left as it is")
    try:
        new = replaced(page, given.name, text, smaller=given.smaller)
    except ValueError as error:
        sys.exit(f"{given.page}: {error}")
    if new is None:
        old = counted(split(page, given.name)[1])
        print(
            f"{given.page} is left as it is: this table has {counted(text)} lines and the one there {old}, so part of what it "
            f"is made of is missing; python {sys.argv[0]} {given.page} {given.name} --smaller writes it all the same",
            file=sys.stderr,
        )
        return
    given.page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
