"""Fresh replicas for each test that may hurt them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .fleet import Emulator, write_adapters

Pair = tuple[Emulator, Emulator]


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    """Eight adapters, a0 to a7."""
    return write_adapters(tmp_path / "adapters", [f"a{number}" for number in range(8)])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two fast replicas."""
    with ExitStack() as stack:
        yield stack.enter_context(Emulator(tmp_path)), stack.enter_context(Emulator(tmp_path))


@pytest.fixture
def slow_pair(tmp_path: Path) -> Iterator[Pair]:
    """Two replicas at the speed of a real one: 150 tokens a second."""
    with ExitStack() as stack:
        slow = [stack.enter_context(Emulator(tmp_path, speed=1.0)) for _ in range(2)]
        yield slow[0], slow[1]
