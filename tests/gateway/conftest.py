from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

BOTH_LOOPS = frozenset(
    f"test_{name}.py"
    for name in ("attempts", "bounds", "cases", "clients", "drain", "gone", "openai_client", "serving")
)
"""Tests of raw sockets run on both loops: uvloop is optional at run time."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    plain: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop}
    return {**plain, "uvloop": uvloop.new_event_loop} if item.path.name in BOTH_LOOPS else plain
