"""The rules are those of vLLM 0.32's ``LRUCacheWorkerLoRAManager.add_adapter``, written out again in ``reference_use``."""

from collections.abc import Iterable
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from loraledger.tiers import EngineTiers, Movement
from loraledger_probe.pins import Pins

NAMES = ("ant", "bee", "cow", "doe", "elk", "fox")


def filled(slots: int, host_entries: int, *names: str) -> EngineTiers:
    tiers = EngineTiers(slots, host_entries)
    for name in names:
        tiers.use(name)
    return tiers


def test_first_use_loads_and_activates() -> None:
    tiers = EngineTiers(2, 4)
    assert tiers.tier("ant") == "disk"
    assert tiers.use("ant") == Movement(loaded=True, activated=True)
    assert tiers.tier("ant") == "gpu"


def test_use_of_an_active_adapter_moves_nothing() -> None:
    assert filled(2, 4, "ant", "bee").use("ant") == Movement()


def test_full_slots_push_the_oldest_back_to_the_host() -> None:
    tiers = filled(2, 4, "ant", "bee", "ant")
    assert tiers.use("cow") == Movement(loaded=True, activated=True, evicted_slot="bee")
    assert (tiers.tier("ant"), tiers.tier("bee"), tiers.tier("cow")) == ("gpu", "host", "gpu")


def test_return_from_the_host_is_an_activation_only() -> None:
    tiers = filled(1, 2, "ant", "bee")
    assert tiers.use("ant") == Movement(activated=True, evicted_slot="bee")


def test_full_host_drops_its_oldest_to_disk() -> None:
    tiers = filled(1, 2, "ant", "bee")
    assert tiers.use("cow") == Movement(loaded=True, activated=True, evicted_host="ant", evicted_slot="bee")
    assert (tiers.tier("ant"), tiers.tier("bee")) == ("disk", "host")


def test_leaving_the_host_empties_the_slot_too() -> None:
    tiers = filled(2, 2, "ant", "bee")
    assert tiers.use("cow") == Movement(loaded=True, activated=True, evicted_host="ant", evicted_slot="ant")
    assert list(tiers.active) == ["bee", "cow"]


def test_what_is_pinned_leaves_after_what_is_not_and_the_batch_last() -> None:
    tiers = filled(3, 3, "ant", "bee", "cow")
    tiers.pinned["ant"] = None
    assert tiers.leaving() == ["bee", "cow", "ant"]
    tiers.arrange(["bee"])
    assert list(tiers.active) == list(tiers.host) == ["cow", "ant", "bee"]
    assert tiers.use("doe") == Movement(True, True, "cow", "cow")
    tiers.arrange(["bee", "doe"])
    assert tiers.use("elk") == Movement(True, True, "ant", "ant")
    assert tiers.pinned == {}


class List:
    """One of vLLM's lists, as far as the probe's pins touch it."""

    def __init__(self, names: Iterable[str]) -> None:
        self.order = list(names)

    def __contains__(self, name: str) -> bool:
        return name in self.order

    def touch(self, name: str) -> None:
        if name in self.order:
            self.order.remove(name)
            self.order.append(name)


@given(
    st.permutations(NAMES), st.integers(1, 5), st.sets(st.integers(0, 5)), st.lists(st.sampled_from(NAMES), unique=True)
)
def test_lists_are_arranged_as_the_probe_arranges_them(
    order: list[str], slots: int, pins: set[int], batch: list[str]
) -> None:
    tiers = filled(slots, 5, *order)
    tiers.pinned.update((name, None) for n, name in enumerate(tiers.active) if n in pins)
    probe = Pins()
    for name in tiers.pinned:
        probe.add(name, name)  # type: ignore[arg-type]
    manager = SimpleNamespace(_registered_adapters=List(tiers.host), _active_adapters=List(tiers.active))
    if probe:
        probe.arrange(manager, batch)  # type: ignore[arg-type]
        tiers.arrange(batch)
    assert list(tiers.host) == manager._registered_adapters.order
    assert list(tiers.active) == manager._active_adapters.order


def test_one_of_the_batch_is_no_more_pinned_than_the_others() -> None:
    tiers = filled(3, 4, "ant", "bee", "cow")
    tiers.pinned.update(dict.fromkeys(("ant", "cow")))
    tiers.arrange(["bee", "ant"])
    assert list(tiers.active) == ["cow", "bee", "ant"]


def test_without_a_pin_only_the_batch_becomes_young() -> None:
    tiers = filled(2, 3, "cow", "ant", "bee")
    tiers.arrange(["ant"])
    assert (list(tiers.active), list(tiers.host)) == (["bee", "ant"], ["cow", "bee", "ant"])


def test_a_pin_ends_with_the_slot_and_with_the_process() -> None:
    for end in (lambda tiers: tiers.drop("ant", "gpu"), lambda tiers: tiers.drop("ant", "host"), EngineTiers.clear):
        tiers = filled(2, 3, "ant", "bee")
        tiers.pinned["ant"] = None
        end(tiers)
        assert tiers.pinned == {}


def test_lists_do_not_protect_the_batch_in_hand() -> None:
    tiers = filled(2, 2, "gone", "ant", "bee")
    moves = [tiers.use(name) for name in ("gone", "ant")]
    assert [move.loaded for move in moves] == [True, True], "loading one member evicted the other, which is read again"


def test_order_of_the_same_batch_decides_what_is_read_again() -> None:
    tiers = filled(2, 2, "gone", "ant", "bee")
    moves = [tiers.use(name) for name in ("ant", "gone")]
    assert [move.loaded for move in moves] == [False, True]


def test_round_robin_over_one_more_than_fits_always_misses() -> None:
    tiers = filled(2, 3, "ant", "bee", "cow", "doe")
    assert [tiers.use(name).loaded for name in ("ant", "bee", "cow", "doe") * 3] == [True] * 12


def test_drop_from_the_slot_keeps_the_host_copy() -> None:
    tiers = filled(2, 4, "ant")
    tiers.drop("ant", "gpu")
    assert tiers.tier("ant") == "host"


def test_drop_from_the_host_leaves_nothing() -> None:
    tiers = filled(2, 4, "ant")
    tiers.drop("ant", "host")
    assert tiers.tier("ant") == "disk"
    assert not tiers.active


def test_drop_of_an_absent_adapter_is_harmless() -> None:
    tiers = filled(2, 4, "ant")
    tiers.drop("bee", "host")
    assert list(tiers.host) == ["ant"]


def test_new_process_holds_nothing() -> None:
    tiers = filled(2, 4, "ant", "bee", "cow")
    tiers.clear()
    assert not tiers.host
    assert not tiers.active


def reference_use(active: list[str], host: list[str], slots: int, entries: int, name: str) -> bool:
    """Oldest first in both lists; returns whether the disk was read."""
    read = name not in host
    if read:
        if len(host) + 1 > entries:
            oldest = host.pop(0)
            if oldest in active:
                active.remove(oldest)
    else:
        host.remove(name)
    host.append(name)
    if name in active:
        active.remove(name)
    elif len(active) >= slots:
        active.pop(0)
    active.append(name)
    return read


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.sampled_from(NAMES), max_size=40))
def test_both_lists_equal_the_reference_after_every_use(slots: int, more: int, uses: list[str]) -> None:
    tiers = EngineTiers(slots, slots + more)
    active: list[str] = []
    host: list[str] = []
    for name in uses:
        before, host_before = set(active), set(host)
        expected_victim = tiers.victim(name)
        move = tiers.use(name)
        assert move.loaded == reference_use(active, host, slots, slots + more, name)
        assert move.activated == (name not in before)
        assert (list(tiers.active), list(tiers.host)) == (active, host)
        left_slot, left_host = before - set(active), host_before - set(host)
        assert left_slot == ({move.evicted_slot} - {None})
        assert left_host == ({move.evicted_host} - {None})
        assert expected_victim == move.evicted_slot
        assert set(active) <= set(host)


def test_what_a_step_ran_is_the_youngest_in_both_lists_and_what_has_no_slot_is_left_alone() -> None:
    tiers = EngineTiers(2, 3)
    for name in "abc":
        tiers.use(name)
    tiers.touch(["b", "a", "x"])
    assert (list(tiers.active), list(tiers.host)) == (["c", "b"], ["a", "c", "b"])


def test_a_load_while_all_slots_are_held_fills_the_host_in_place_of_what_is_idle() -> None:
    tiers = EngineTiers(2, 3)
    for name in "abc":
        tiers.use(name)
    assert tiers.fetch("d") == Movement(loaded=True, evicted_host="a")
    assert (list(tiers.active), list(tiers.host)) == (["b", "c"], ["d", "b", "c"])
    assert tiers.fetch("d") == Movement()
    assert tiers.fetch("e") == Movement(loaded=True, evicted_host="d")


def test_a_load_into_a_host_cache_of_running_adapters_alone_pushes_one_out() -> None:
    tiers = EngineTiers(2, 2)
    for name in "ab":
        tiers.use(name)
    assert tiers.fetch("c") == Movement(True, True, "a", "a")
    assert (list(tiers.active), list(tiers.host)) == (["b", "c"], ["b", "c"])
