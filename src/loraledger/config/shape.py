"""Walks the types of the settings, so that names can be looked up in them before any value is.

Three callers need it: environment and flags (is there such a field, and does it take text or YAML?), and messages (what
could an unknown field have meant?). A step is a field's name as the file writes it, a list index or the key of a free
mapping.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from loraledger.config.origin import Where

ANY_INDEX = "#"
"""Stands for a list index in the spellings of :func:`all_steps`."""


class Place(NamedTuple):
    """A place that settings have, and what it takes."""

    where: Where
    takes: Any
    """The annotation of the value there, without ``Annotated`` and ``None``."""

    @property
    def is_text(self) -> bool:
        """Whether a value is taken letter by letter: ``8`` stays the string and is not a number."""
        return self.takes in (str, Path) or get_origin(self.takes) is Literal

    @property
    def is_path(self) -> bool:
        """Whether it takes a path."""
        return self.takes is Path


def locate(model: type[BaseModel], steps: Sequence[str]) -> Place | None:
    """The place that ``steps`` lead to, or None when there is none."""
    where: list[str | int] = []
    takes: Any = model
    for step in steps:
        inner = _inside(takes, step)
        if inner is None:
            return None
        where.append(int(step) if get_origin(takes) is tuple else step)
        takes = inner
    return Place(tuple(where), takes)


def fields_at(model: type[BaseModel], where: Where) -> dict[str, str]:
    """Names and descriptions of the fields of the section at ``where``; empty when there is no section."""
    place = locate(model, [str(step) for step in where])
    if place is None or not _is_model(place.takes):
        return {}
    return {field.alias or name: field.description or "" for name, field in place.takes.model_fields.items()}


def all_steps(takes: Any) -> Iterator[tuple[str, ...]]:  # noqa: ANN401 - an annotation has no narrower type
    """The steps to each field below ``takes``, list indices as ``ANY_INDEX``, in the order of the models."""
    takes = _bare(takes)
    if _is_model(takes):
        for name, field in takes.model_fields.items():
            yield (field.alias or name,)
            yield from ((field.alias or name, *rest) for rest in all_steps(field.annotation))
    elif get_origin(takes) is tuple:
        yield from ((ANY_INDEX, *rest) for rest in all_steps(get_args(takes)[0]))


def _inside(takes: Any, step: str) -> Any:  # noqa: ANN401 - as above
    if _is_model(takes):
        for name, field in takes.model_fields.items():
            if step == (field.alias or name):
                return _bare(field.annotation)
        return None
    if get_origin(takes) is tuple:
        return _bare(get_args(takes)[0]) if step.isascii() and step.isdecimal() and len(step) < 7 else None
    return _bare(get_args(takes)[1]) if get_origin(takes) is dict else None


def _bare(annotation: Any) -> Any:  # noqa: ANN401 - as above
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
            continue
        choices = [arg for arg in get_args(annotation) if arg is not type(None)]
        if get_origin(annotation) in (Union, types.UnionType) and len(choices) == 1:
            annotation = choices[0]
            continue
        return annotation


def _is_model(takes: Any) -> bool:  # noqa: ANN401 - as above
    return isinstance(takes, type) and issubclass(takes, BaseModel)
