from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.incidents.kinds import KINDS, Incident, Kind
from benchmarks.incidents.play import play

MINUTES = 2.0
SEED = 1001
"""A seed of its own: the published matrix begins at 0."""


@pytest.fixture(scope="session")
def incidents(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Incident]:
    """One of each kind, recorded."""
    folder: Path = tmp_path_factory.mktemp("incidents")
    return {kind: play(kind, SEED, folder / str(number), MINUTES) for number, kind in enumerate(KINDS)}
