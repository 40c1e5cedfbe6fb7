"""Finds the settings and puts them together: file < environment < flags.

The file is the one given by ``--config``, else by ``LORALEDGER_CONFIG``, else ``loraledger.yaml`` in the working
directory. ``LORALEDGER_A__B`` sets field ``b`` of section ``a``; list entries go by index
(``LORALEDGER_REPLICAS__0__URL``). What takes text is taken letter by letter; everything else is YAML
(``LORALEDGER_BASE__NAMES='[llama, base]'``).

Nothing is ignored. A misspelt variable that silently does nothing is the worst kind of setting (common settings
libraries let it pass even where unknown fields are forbidden), so every variable that begins with ``LORALEDGER_`` must
name a field, or be referred to by a secret. All problems are reported at once, each with its file and line, its full
path and the remedy, in one :class:`~loraledger.errors.ConfigError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from loraledger.config import shape
from loraledger.config.checks import InconsistentError, nearest
from loraledger.config.origin import Origin, Problem, Tree, Where, dotted, leaves
from loraledger.config.schema import Settings
from loraledger.config.yamltree import read_value, read_yaml
from loraledger.errors import ConfigError

DEFAULT_NAME: Final = "loraledger.yaml"
PREFIX: Final = "LORALEDGER_"
CONFIG_VARIABLE: Final = "LORALEDGER_CONFIG"
_MAX_FILE: Final = 64 * 2**20
_MAX_SHOWN: Final = 50


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, the file that they came from (None: environment and flags alone), and where each value comes from."""

    settings: Settings
    source: Path | None
    tree: Tree

    def shown(self) -> Iterator[tuple[str, object, Origin]]:
        """Each value as (path, value as a file would spell it, origin), in the order of the schema."""
        for where, value in leaves(self.settings):
            yield dotted(where), value, self.tree.origin_of(where)


def load(
    config: Path | None = None,
    *,
    env: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    cwd: Path | None = None,
) -> Loaded:
    """Settings from file, environment and flags.

    ``flags`` are dotted paths (``listen.port``, ``replicas.0.url``) to values; text among them is read as in the
    environment. ``cwd`` is where the default file is looked for and what relative paths in environment and flags count
    from (default: the working directory). Raises :class:`ConfigError` listing everything that is wrong.
    """
    cwd = Path.cwd() if cwd is None else cwd
    source = _find(config, env, cwd)
    tree, problems = (Tree(), []) if source is None else read_yaml(_read(source), _name(source, cwd))
    overlay = _Overlay(tree, problems, cwd)
    overlay.environment(env)
    for path, value in (flags or {}).items():
        overlay.set(path.split("."), value, Origin("flag", path))
    if source is None and not tree.data and not problems:
        raise ConfigError(f"no settings found: give --config FILE, set {CONFIG_VARIABLE}, or write ./{DEFAULT_NAME}")
    root = cwd if source is None else source.absolute().parent
    return Loaded(_typed(tree, problems, root), source, tree)


def settings_from(data: Mapping[str, Any], root: Path | None = None) -> Settings:
    """Settings from plain data as a file would hold it; relative paths count from ``root`` when it is given.

    Raises :class:`ConfigError` listing everything that is wrong.
    """
    return _typed(Tree(dict(data)), [], root)


def _find(config: Path | None, env: Mapping[str, str], cwd: Path) -> Path | None:
    if config is not None:
        return cwd / config
    if CONFIG_VARIABLE in env:
        if not env[CONFIG_VARIABLE]:
            raise ConfigError(f"{CONFIG_VARIABLE} is empty: unset it, or name the file")
        return cwd / env[CONFIG_VARIABLE]
    default = cwd / DEFAULT_NAME
    return default if default.exists() else None


def _read(source: Path) -> str:
    try:
        if source.is_file() and source.stat().st_size > _MAX_FILE:
            raise ConfigError(
                f"{source} is over {_MAX_FILE:,} bytes: keep adapters in a folder (adapters.folder) instead"
            )
        return source.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{source} does not exist: correct --config or {CONFIG_VARIABLE}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error


def _name(source: Path, cwd: Path) -> str:
    return str(source.relative_to(cwd)) if source.is_relative_to(cwd) else str(source)


@dataclass(slots=True)
class _Overlay:
    """Puts environment and flags over a tree; what cannot be put is a problem."""

    tree: Tree
    problems: list[Problem]
    cwd: Path

    def environment(self, env: Mapping[str, str]) -> None:
        # Sorted: a whole list goes before its entries, and the outcome never depends on the order of the environment.
        names = sorted(name for name in env if name.startswith(PREFIX) and name != CONFIG_VARIABLE)
        unknown = [name for name in names if not self._variable(name, env[name])]
        referred = set(_secret_variables(self.tree.data))
        for name in unknown:
            if name not in referred:
                self.problems.append(Problem((), f"no such setting{_nearest_variable(name)}", Origin("env", name)))

    def _variable(self, name: str, value: str) -> bool:
        steps = name.removeprefix(PREFIX).lower().split("__")
        if name != name.upper() or shape.locate(Settings, steps) is None:
            return False
        self.set(steps, value, Origin("env", name))
        return True

    def set(self, steps: Sequence[str], value: object, origin: Origin) -> None:
        place = shape.locate(Settings, steps)
        if place is None:
            known = [".".join(known) for known in shape.all_steps(Settings)]
            self.problems.append(Problem((), f"no such setting{_close(origin.name, known)}", origin))
            return
        try:
            reason = self.tree.place(place.where, self._value(place, value), origin)
        except ConfigError as error:
            reason = f"{dotted(place.where)}: {error.message}"
        if reason is not None:
            self.problems.append(Problem((), reason, origin))

    def _value(self, place: shape.Place, value: object) -> object:
        if not isinstance(value, str):
            return value
        if not place.is_text:
            return read_value(value)
        if value == "null":
            return None
        # A relative path on a command line is meant from where the command is given, not from the file's folder.
        return str(self.cwd / value) if place.is_path and value and not re.match(r"~|\w+://", value) else value


def _close(name: str, known: Sequence[str], prefix: str = "") -> str:
    """A hint; indices in ``name`` stand in the candidates as ``ANY_INDEX`` and are put back into the answer."""
    indices = re.findall(r"(?<=[._])\d+(?=[._]|$)", name)
    close = difflib.get_close_matches(re.sub(r"(?<=[._])\d+(?=[._]|$)", shape.ANY_INDEX, name), known, n=1, cutoff=0.6)
    if not close:
        return ": see `loraledger config schema` for what there is"
    meant = close[0]
    for index in indices:
        meant = meant.replace(shape.ANY_INDEX, index, 1)
    return f"; did you mean {prefix}{meant.replace(shape.ANY_INDEX, '0')}?"


def _nearest_variable(name: str) -> str:
    # Compared without the prefix, which would make all names look alike.
    known = ["__".join(steps).upper() for steps in shape.all_steps(Settings)]
    return _close(name.removeprefix(PREFIX).upper(), known, PREFIX)


def _secret_variables(data: object) -> Iterator[str]:
    """Names of environment variables that the secrets in ``data`` refer to."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key == "env" and isinstance(value, str):
                yield value
            yield from _secret_variables(value)
    elif isinstance(data, list):
        for item in data:
            yield from _secret_variables(item)


def _typed(tree: Tree, problems: list[Problem], root: Path | None) -> Settings:
    found = list(problems)
    try:
        settings = Settings.model_validate(tree.data, context={"root": root})
    except ValidationError as error:
        found += _explained(error)
    else:
        if not found:
            return settings
    raise ConfigError(_report(tree, found))


def _explained(error: ValidationError) -> Iterator[Problem]:
    for item in error.errors(include_url=False):
        where: Where = item["loc"]
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, InconsistentError):
            yield from cause.found
        elif item["type"] == "extra_forbidden":
            yield Problem(where, f"unknown field{nearest(str(where[-1]), shape.fields_at(Settings, where[:-1]))}")
        elif item["type"] == "missing":
            description = shape.fields_at(Settings, where[:-1]).get(str(where[-1]), "")
            yield Problem(where, f"is missing: add it. {description}".rstrip())
        elif cause is not None:
            yield Problem(where, str(cause))
        elif item["type"] != "default_factory_not_called":
            yield Problem(where, _type_message(item["type"], item["msg"], where, item["input"]))


def _type_message(kind: str, message: str, where: Where, value: object) -> str:
    text = message.removeprefix("Input ")
    text = text[:1].lower() + text[1:]
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        text = "should be a section of fields (field: value)"
    elif kind in {"tuple_type", "list_type"}:
        text = "should be a list ([a, b], or one `- entry` a line)"
    # What stands where a key belongs may be the key itself, and never goes into a message.
    secret = any(step in {"key", "key_hashes"} for step in where)
    if secret or isinstance(value, Mapping | list | tuple):
        return text
    remedy = ": put it in quotes" if kind == "string_type" else ""
    return f"{text}, not {'null' if value is None else repr(value)}{remedy}"


def _report(tree: Tree, problems: Sequence[Problem]) -> str:
    lines = []
    for where, message, given in problems[:_MAX_SHOWN]:
        origin = given or tree.nearest_origin(where)
        parts = ["" if origin.kind == "default" else str(origin), dotted(where), message]
        lines.append(": ".join(part for part in parts if part))
    if len(problems) > _MAX_SHOWN:
        lines.append(f"and {len(problems) - _MAX_SHOWN} more")
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f"{len(problems)} problems in the settings:", *lines])
