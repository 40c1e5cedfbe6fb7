"""Fixtures for tests against real vLLM servers. Nothing here is skipped: a missing environment is a failure.

Two engines serve the whole session, because each costs 25 s to start. A test that ends one starts it again itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from .engine import Engine, Model, ensure_model

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook sees the items of the whole run; first, so that the marker is there when `-m` selects by it.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def model() -> Model:
    """The tiny base model and its 12 adapters, built once per machine."""
    return ensure_model()


@pytest.fixture(scope="session")
def engines(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Two running engines, both with 2 slots and a host cache of 4."""
    folder = tmp_path_factory.mktemp("engines")
    first, second = (Engine(model.base, folder / f"engine{i}.log") for i in range(2))
    with ExitStack() as stack:
        for engine in (first, second):
            stack.callback(engine.stop)
            engine.launch()
        for engine in (first, second):
            engine.wait_healthy()
        yield first, second


@pytest.fixture
def engine(engines: tuple[Engine, Engine]) -> Engine:
    """The first engine, alive and with no adapter registered: an earlier test may have ended it."""
    return _fresh(engines[:1])[0]


@pytest.fixture
def pair(engines: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Both engines, alive and with no adapter registered; a test may end them."""
    first, second = _fresh(engines)
    return first, second


def _fresh(engines: Sequence[Engine]) -> Sequence[Engine]:
    dead = [engine for engine in engines if not engine.alive()]
    for engine in dead:
        engine.launch()
    for engine in engines:
        engine.wait_healthy()
        if engine not in dead:
            engine.forget_adapters()
    return engines
