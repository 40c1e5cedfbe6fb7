"""Inputs for the tests that run the fuzzers' targets: seeds that were cut, joined and changed."""

from __future__ import annotations

from hypothesis import strategies as st


def cut_and_joined(*seeds: bytes) -> st.SearchStrategy[bytes]:
    """Pieces of ``seeds`` and of anything, in any order."""
    piece = st.sampled_from(seeds).flatmap(
        lambda seed: st.tuples(st.integers(0, len(seed)), st.integers(0, len(seed))).map(
            lambda cut: seed[cut[0] : cut[1]]
        )
    )
    changed = st.sampled_from(seeds).flatmap(
        lambda seed: st.tuples(st.integers(0, len(seed)), st.integers(0, 3), st.binary(max_size=3)).map(
            lambda change: seed[: change[0]] + change[2] + seed[change[0] + change[1] :]
        )
    )
    return changed | st.lists(piece | st.binary(max_size=4), max_size=4).map(b"".join)
