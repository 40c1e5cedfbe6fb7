from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.ledger.figures import configured, unknown
from loraledger.ledger.layouts import Layout, Unified, layout_of

from .replicas import GIB, MIB, replica

KINDS = pytest.mark.parametrize(
    "layout", [layout_of(replica()), layout_of(replica(layout="unified"))], ids=lambda it: it.name
)


@KINDS
@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 2 * GIB), max_size=8))
def test_adapters_and_kv_share_the_same_bytes_whoever_is_resident(layout: Layout, sizes: list[int]) -> None:
    resident = [configured(size, "bytes") for size in sizes]
    with_them, without = layout.adapter_bytes(resident).value, layout.adapter_bytes([]).value
    kv, kv_without = layout.kv_bytes(resident).value, layout.kv_bytes([]).value
    assert with_them is not None
    assert without is not None
    assert kv is not None
    assert kv_without is not None
    assert with_them + kv == without + kv_without


@KINDS
@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 2 * GIB), max_size=8), more=st.integers(1, 2 * GIB))
def test_one_adapter_more_never_gives_kv_tokens(layout: Layout, sizes: list[int], more: int) -> None:
    resident = [configured(size, "bytes") for size in sizes]
    fewer = layout.kv_tokens([*resident, configured(more, "bytes")]).value
    tokens = layout.kv_tokens(resident).value
    assert fewer is not None
    assert tokens is not None
    assert fewer <= tokens
    assert (fewer == tokens) == (layout.name == "slots")


def test_slots_hold_as_many_as_they_are_whatever_the_size() -> None:
    layout = layout_of(replica())
    assert layout.capacity(configured(1, "bytes")).value == layout.capacity(configured(GIB, "bytes")).value == 4


@settings(deadline=None)
@given(pool=st.integers(1, 10**5), cell=st.integers(1, 10**5), size=st.integers(1, 10**8))
def test_unified_capacity_is_how_often_it_really_fits(pool: int, cell: int, size: int) -> None:
    layout = Unified(configured(pool * cell, "bytes"), configured(pool, "tokens"))
    one, capacity = configured(size, "bytes"), layout.capacity(configured(size, "bytes")).value
    assert isinstance(capacity, int)
    left, over = (
        layout.kv_tokens([one] * min(capacity, 50)).value,
        layout.kv_tokens([one] * min(capacity + 1, 51)).value,
    )
    assert left is not None
    assert over is not None
    assert left >= 0
    assert capacity >= 50 or over < 0


def test_a_plain_adapter_of_a_unified_pool_takes_four_cells_a_rank() -> None:
    layers, hidden, rank = 32, 4096, 16
    cell = 2 * layers * hidden * 2
    layout = Unified(configured(1000 * cell, "bytes"), configured(1000, "tokens"))
    one = configured(16 * rank * layers * hidden, "bytes")
    assert layout.cells(one).value == 4 * rank
    assert layout.kv_tokens([one]).value == 1000 - 64


def test_unknown_sizes_stay_unknown() -> None:
    layout = layout_of(replica(layout="unified"))
    assert layout.kv_tokens([unknown("bytes")]).value is None
    assert layout.capacity(unknown("bytes")).value is None
    assert layout.capacity(configured(0, "bytes")).value is None
    assert layout_of(replica(slots=unknown("slots"))).capacity(configured(MIB, "bytes")).value is None
