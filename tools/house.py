"""House numbers: fails when a module or function is longer than the house allows, or says too little of itself.

Limits: modules 400 lines (kernel 250), functions 60 without their docstring (90th percentile 25), every module of more than 15
lines opens with a docstring, no ``global`` statement.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MODULE, KERNEL, FUNCTION, P90 = 400, 250, 60, 25


def lengths(tree: ast.AST) -> list[tuple[int, str, int]]:
    """(lines without the docstring, name, first line) of each function in ``tree``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                doc = node.body[0]
                lines -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
            found.append((lines, node.name, node.lineno))
    return found


def main() -> int:
    """Check ``src`` and ``probe/src``; returns the exit code."""
    findings, functions = [], []
    for path in sorted([*Path("src").rglob("*.py"), *Path("probe/src").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = text.count("\n")
        limit = KERNEL if "kernel" in path.parts else MODULE
        if lines > limit:
            findings.append(f"{path}: {lines} lines (limit {limit})")
        if lines > 15 and ast.get_docstring(tree) is None:
            findings.append(f"{path}: opens without saying what it is for")
        findings += [f"{path}: global statement" for node in ast.walk(tree) if isinstance(node, ast.Global)]
        for length, name, first in lengths(tree):
            functions.append(length)
            if length > FUNCTION:
                findings.append(f"{path}:{first} {name}: {length} lines (limit {FUNCTION})")
    functions.sort()
    p90 = functions[int(0.9 * (len(functions) - 1))]
    if p90 > P90:
        findings.append(f"90th percentile of function length is {p90} (limit {P90})")
    print(
        f"{len(functions)} functions, median {functions[len(functions) // 2]}, p90 {p90}, longest {functions[-1]} lines"
    )
    print("\n".join(findings), file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
