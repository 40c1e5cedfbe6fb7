"""Structs as one JSON document: their fields, and the figures that they compute."""

from __future__ import annotations

import msgspec


def document(value: object) -> object:
    """``value`` in plain types. A struct becomes its fields and its properties, so that a rate which a table shows is there too."""
    if isinstance(value, msgspec.Struct):
        computed = [name for name, found in vars(type(value)).items() if isinstance(found, property)]
        return {name: document(getattr(value, name)) for name in (*value.__struct_fields__, *computed)}
    if isinstance(value, dict):
        return {key: document(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [document(item) for item in value]
    return value
