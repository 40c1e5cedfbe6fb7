"""Where each value comes from: the default, a line of the file, an environment variable or a flag.

A wrong value in production is looked for in the wrong place first, so every leaf keeps its origin and ``config show
--origin`` prints it. Places are tuples of keys and indices (``("replicas", 0, "url")``), written ``replicas[0].url``.
Containers keep an origin too, because an error about a field that is missing must point at the section that lacks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from pydantic import BaseModel

Where: TypeAlias = tuple[str | int, ...]
"""A place in the settings: keys and list indices from the top."""


def dotted(where: Where) -> str:
    """``("replicas", 0, "url")`` as ``replicas[0].url``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where)
    return text.removeprefix(".")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from. Prints as ``default``, ``loraledger.yaml:12``, ``env:NAME`` or ``flag:NAME``."""

    kind: Literal["default", "file", "env", "flag"]
    name: str = ""
    line: int | None = None
    """1-based, for files."""

    def __str__(self) -> str:
        """The form that is shown to people."""
        if self.kind == "default":
            return "default"
        return f"{self.name}:{self.line}" if self.kind == "file" else f"{self.kind}:{self.name}"


DEFAULT = Origin("default")


class Problem(NamedTuple):
    """One thing that is wrong, and where. ``origin`` is given when the tree's own would point elsewhere."""

    where: Where
    message: str
    origin: Origin | None = None


@dataclass(slots=True)
class Tree:
    """Settings before they are typed: plain data, and the origin of everything in it that was written by someone."""

    data: dict[str, object] = field(default_factory=dict)
    origins: dict[Where, Origin] = field(default_factory=dict)

    def place(self, where: Where, value: object, origin: Origin) -> str | None:
        """Put ``value`` at ``where``, over what is there. The reason as text when the place cannot exist, else None."""
        container: object = self.data
        for depth, step in enumerate(where[:-1], 1):
            missing: object = [] if isinstance(where[depth], int) else {}
            reason = _ensure(container, step, missing)
            if reason is not None:
                return f"{dotted(where[:depth])}: {reason}"
            container = container[step]  # type: ignore[index]
        reason = _ensure(container, where[-1], None)
        if reason is not None:
            return f"{dotted(where)}: {reason}"
        container[where[-1]] = value  # type: ignore[index]
        for stale in [known for known in self.origins if known[: len(where)] == where]:
            del self.origins[stale]
        self.origins.update(dict.fromkeys(_places(where, value), origin))
        return None

    def origin_of(self, where: Where) -> Origin:
        """Origin of the value at ``where``: the default when nobody wrote it."""
        return self.origins.get(where, DEFAULT)

    def nearest_origin(self, where: Where) -> Origin:
        """Origin of ``where`` or of the closest thing around it that somebody wrote."""
        for depth in range(len(where), 0, -1):
            if where[:depth] in self.origins:
                return self.origins[where[:depth]]
        return DEFAULT


def leaves(settings: BaseModel) -> Iterator[tuple[Where, object]]:
    """Each value of ``settings`` with its place, in the order of the models, spelled as a file would spell it.

    An empty list or mapping is a leaf. Secrets are references here, so nothing in it is secret.
    """
    yield from _leaves((), settings.model_dump(mode="json", by_alias=True))


def _leaves(where: Where, value: object) -> Iterator[tuple[Where, object]]:
    children = _children(value)
    if not children:
        yield where, value
    for step, child in children:
        yield from _leaves((*where, step), child)


def _places(where: Where, value: object) -> Iterator[Where]:
    yield where
    for step, child in _children(value):
        yield from _places((*where, step), child)


def _children(value: object) -> list[tuple[str | int, object]]:
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _ensure(container: object, step: str | int, missing: object) -> str | None:
    """Make ``container[step]`` exist, as ``missing`` when it does not (or is null). The reason when it cannot."""
    if isinstance(container, dict) and isinstance(step, str):
        if container.get(step) is None:
            container[step] = missing
        return None
    if isinstance(container, list) and isinstance(step, int):
        if step > len(container):
            return f"the list has {len(container)} entries: the next one is [{len(container)}]"
        if step == len(container):
            container.append(missing)
        return None
    return "what is set there is neither a section nor a list that this could go into"
