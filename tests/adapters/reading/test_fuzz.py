"""The fuzzers' promises, on every input that was kept and on 500 new ones a reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.strategies import cut_and_joined
from fuzz.targets import CONFIG, CORPUS, HEADER, TARGETS

KEPT = sorted(path for target in TARGETS for path in (CORPUS / target).iterdir())

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["(", ".*", "q_proj"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
FULL = json.loads((CORPUS / "config" / "all_keys").read_bytes())
CONFIGS = st.dictionaries(st.sampled_from([*FULL, "x"]), VALUES, max_size=4).map(
    lambda changes: json.dumps({**FULL, **changes}).encode()
)


def test_the_seeds_are_accepted(tmp_path: Path) -> None:
    assert TARGETS["header"](HEADER, tmp_path) is not None
    assert TARGETS["config"](CONFIG, tmp_path) is not None


@pytest.mark.parametrize("path", KEPT, ids=[f"{path.parent.name}-{path.name}" for path in KEPT])
def test_inputs_that_were_found_keep_every_promise(path: Path, tmp_path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes(), tmp_path)


@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=cut_and_joined(HEADER, *(path.read_bytes()[:300] for path in KEPT if path.parent.name == "header")))
def test_headers_keep_every_promise(data: bytes, tmp_path: Path) -> None:
    TARGETS["header"](data, tmp_path)


@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=CONFIGS | cut_and_joined(CONFIG, (CORPUS / "config" / "all_keys").read_bytes()))
def test_configurations_keep_every_promise(data: bytes, tmp_path: Path) -> None:
    TARGETS["config"](data, tmp_path)
