"""Writes the reference parts of docs/ from the code that they describe: settings from the schema, columns from the tables.

    python tools/docs.py           write docs/configuration.md and docs/record.md
    python tools/docs.py --check   exit 1 if they are not what the code says
    python tools/docs.py --replay  run the example of docs/replay.md again and write what it prints (a test compares)
    python tools/docs.py --signals the same of docs/signals.md
    python tools/docs.py --plan    the same of docs/plan.md, on the files of benchmarks.plan_example

Text outside the generated marks is kept.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from loraledger.config.schema import Settings
from loraledger.record.tables import TABLES

BEGIN, END = "<!-- generated -->", "<!-- /generated -->"


def settings_table() -> str:
    """One row a setting: path, default, meaning."""
    lines = ["| setting | default | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{path}` | {default} | {meaning} |" for path, default, meaning in _settings(Settings, "")]
    return "\n".join(lines)


def _settings(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        nested, many = _nested(field.annotation)
        meaning = (field.description or "").replace("|", "\\|")
        yield path, _default(field), meaning
        if nested is not None:
            yield from _settings(nested, f"{path}[]." if many else f"{path}.")


def _nested(annotation: object) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    arguments = getattr(annotation, "__args__", ())
    found = [a for a in arguments if isinstance(a, type) and issubclass(a, BaseModel)]
    many = getattr(annotation, "__origin__", None) in (tuple, list)
    return (found[0], many) if found and found[0].__name__ != "SecretRef" else (None, False)


def _default(field: FieldInfo) -> str:
    if field.default is not PydanticUndefined:
        value = field.default
        if value is None or isinstance(value, bool):
            return {True: "`true`", False: "`false`", None: "`null`"}[value]
        return f"`{value}`" if _plain(value) else ""
    return "see there" if field.default_factory is not None else "required"


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def tables() -> str:
    """Each table of the record, a row a column."""
    parts = []
    for name, table in TABLES.items():
        parts.append(f"### `{name}`\n\n| column | type | meaning |\n| --- | --- | --- |")
        parts[-1] += "".join(
            f"\n| `{c.name}` | {c.type} | {c.doc}{' One of ' + ', '.join(f'`{v}`' for v in c.values) + '.' if c.values else ''} |"
            for c in table.columns
        )
    return "\n\n".join(parts)


def rerun(page: Path, prepare: Callable[[Path], None] | None = None) -> None:
    """Put into ``page`` what the commands in its examples print now, in a folder that ``prepare`` fills."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fleet.yaml").write_text(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0], encoding="utf-8")
        for prompts in re.findall(r"`prompts\.json` is `([^`]*)`", text):
            (Path(folder) / "prompts.json").write_text(prompts, encoding="utf-8")
        if prepare is not None:
            prepare(Path(folder))

        def printed(example: re.Match[str]) -> str:
            words = [sys.executable, "-X", "utf8", "-m", "loraledger.cli.main", *shlex.split(example[1])[1:]]
            done = subprocess.run(words, cwd=folder, capture_output=True, encoding="utf-8", check=True)
            if not example[2]:
                return example[0]
            return (
                f"```text\n$ {example[1]}\n"
                + "\n".join(map(str.rstrip, done.stdout.strip("\n").splitlines()))
                + "\n```"
            )

        text = re.sub(r"```text\n\$ (loraledger [^\n]*)\n(.*?)```", printed, text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")


def main() -> int:
    """Write or check; returns the exit code."""
    if "--replay" in sys.argv:
        rerun(Path("docs/replay.md"))
        return 0
    if "--signals" in sys.argv:
        rerun(Path("docs/signals.md"))
        return 0
    if "--plan" in sys.argv:
        sys.path.insert(0, ".")
        rerun(Path("docs/plan.md"), importlib.import_module("benchmarks.plan_example").write_example)
        return 0
    stale = []
    for path, text in ((Path("docs/configuration.md"), settings_table()), (Path("docs/record.md"), tables())):
        before = path.read_text(encoding="utf-8")
        head, _, rest = before.partition(BEGIN)
        _, _, tail = rest.partition(END)
        after = f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"
        if after != before:
            stale.append(str(path))
            if "--check" not in sys.argv:
                path.write_text(after, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"not what the code says: {', '.join(stale)}; run `python tools/docs.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
