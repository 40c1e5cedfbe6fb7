from typing import Any

import msgspec

from loraledger.twin.events import TwinRequest
from loraledger.twin.replica import ReplicaTwin
from twin.test_replica import PLAIN, drain, times


def make(**changes: Any) -> ReplicaTwin:
    """Blocks of 4 tokens; a prefill is 1000 + max(50, 5 a token)."""
    twin = ReplicaTwin(msgspec.structs.replace(PLAIN, **{"prefix_caching": True, **changes}))
    for name in ("x", "y"):
        twin.register(0, name, 0, 8)
    drain(twin)
    twin.advance(10_000)
    return twin


def first_token_after(
    twin: ReplicaTwin, name: str, prompt: int, prefix: tuple[int, ...], adapter: str | None = None
) -> int:
    """How long the first token of a request takes on an idle replica."""
    at = next_free(twin)
    twin.submit(at, TwinRequest(name, adapter, prompt, 1, prefix))
    return times(drain(twin), name)[0] - at


def next_free(twin: ReplicaTwin) -> int:
    return twin._given_ps + 1


def test_same_beginning_is_computed_once() -> None:
    twin = make()
    assert first_token_after(twin, "a", 40, tuple(range(10))) == 1000 + 5 * 40
    assert first_token_after(twin, "b", 44, tuple(range(11))) == 1000 + 50
    assert first_token_after(twin, "c", 40, (0, 1, 2, 77)) == 1000 + 5 * 28


def test_last_token_is_always_computed() -> None:
    twin = make(prefill_floor_ps=0)
    first_token_after(twin, "a", 40, tuple(range(10)))
    assert first_token_after(twin, "b", 40, tuple(range(10))) == 1000 + 5 * 4


def test_other_adapter_or_a_reload_of_it_shares_nothing() -> None:
    twin = make(adapter_step_ps=0)
    first_token_after(twin, "a", 40, tuple(range(10)), "x")
    assert first_token_after(twin, "b", 40, tuple(range(10)), "x") == 1000 + 50
    assert first_token_after(twin, "c", 40, tuple(range(10)), "y") == 1000 + 200
    assert first_token_after(twin, "d", 40, tuple(range(10))) == 1000 + 200
    at = next_free(twin)
    twin.forget(at, "x")
    twin.register(at, "x", 0, 8)
    drain(twin)
    assert first_token_after(twin, "e", 40, tuple(range(10)), "x") == 1000 + 200


def test_free_blocks_are_reused_until_the_line_comes_round() -> None:
    twin = make(kv_blocks=12)
    first_token_after(twin, "a", 16, (1, 2, 3, 4))
    first_token_after(twin, "b", 32, ())  # the 8 blocks that were free before: "a" can still be found
    assert first_token_after(twin, "c", 17, (1, 2, 3, 4)) == 1000 + 50
    first_token_after(twin, "d", 48, ())
    assert first_token_after(twin, "e", 20, (1, 2, 3, 4)) == 1000 + 5 * 20


def test_tail_of_a_prompt_leaves_before_its_beginning() -> None:
    twin = make(kv_blocks=12, prefill_floor_ps=0)
    first_token_after(twin, "a", 16, (1, 2, 3, 4))
    first_token_after(twin, "b", 40, ())  # 8 blocks and the 2 that "a" let go first, its last ones
    assert first_token_after(twin, "c", 16, (1, 2, 3, 4)) == 1000 + 5 * 8


def test_one_number_may_name_several_blocks() -> None:
    twin = make(prefix_block_tokens=8, prefill_floor_ps=0)
    first_token_after(twin, "a", 23, (1, 2))
    assert first_token_after(twin, "b", 23, (1, 2)) == 1000 + 5 * (23 - 16)


def test_without_prefix_caching_nothing_is_reused() -> None:
    twin = make(prefix_caching=False)
    first_token_after(twin, "a", 40, tuple(range(10)))
    assert first_token_after(twin, "b", 40, tuple(range(10))) == 1000 + 200
