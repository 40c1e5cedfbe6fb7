"""Put what stdin holds between two marks of a page: how the make targets write their tables into docs/accuracy.md.

    python tools/section.py docs/accuracy.md reproduce < table.md

The marks are ``<!-- NAME -->`` and ``<!-- /NAME -->``, each on a line of its own; text outside of them is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path


def replaced(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the marks of ``name``. Raises ``ValueError`` when the page lacks them."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs {begin.strip()} and {end.strip()} once each, on lines of their own")
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n{text.strip()}\n\n{end}{after}"


def main() -> None:
    """Replace the section that the arguments name."""
    page, text = Path(sys.argv[1]), sys.stdin.read()
    if not text.strip():
        sys.exit("nothing came on stdin: the page is left as it is")
    page.write_text(replaced(page.read_text(encoding="utf-8"), sys.argv[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
