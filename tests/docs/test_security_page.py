from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE, TESTS = (ROOT / "docs/security.md").read_text(encoding="utf-8").split("\n### The tests\n")
IDENTITY = re.compile(r"[A-Z]+\d*")
ROWS = {
    cells[0]: cells[1]
    for line in TESTS.splitlines()
    if line.startswith("| ") and IDENTITY.fullmatch((cells := [cell.strip() for cell in line.split("|")[1:-1]])[0])
}


def test_each_row_of_bad_input_names_tests_that_are_listed_once() -> None:
    used = [
        identity.strip()
        for line in TABLE.splitlines()
        if line.startswith("| ") and line.count("|") == 5
        for identity in line.split("|")[4].split(",")
    ]
    listed = [line.split("|")[1].strip() for line in TESTS.splitlines() if line.startswith("| ")]
    assert len(used) > 100
    assert {identity for identity in used if IDENTITY.fullmatch(identity)} == set(ROWS)
    assert sorted(identity for identity in listed if IDENTITY.fullmatch(identity)) == sorted(ROWS)


@pytest.mark.parametrize("identity", ROWS)
def test_a_listed_test_is_there(identity: str) -> None:
    file = ""
    found = re.findall(r"`([\w./]*\.py)?(?:::(\w+))?`", ROWS[identity])
    assert found
    for name, test in found:
        file = name or file
        path = ROOT / (file if "/" in file else f"tests/gateway/{file}")
        assert not test or f"def {test}(" in path.read_text(encoding="utf-8")
        assert path.is_file()
