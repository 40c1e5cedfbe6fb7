"""What is kept of a replica between two decisions: each step of the bench compares it with what it would be now."""

from __future__ import annotations

from loraledger import events as ev
from loraledger.kernel.cost import load_time, stand

from .bench import Bench, adapter, fleet_of, replica


def full() -> Bench:
    """One replica whose two slots idle adapters hold, ``a0`` the next to go."""
    bench = Bench(fleet_of([replica("r1", slots=2)], [adapter(f"a{number}") for number in range(4)]))
    for name in ("a0", "a1"):
        bench.hold(name, "r1")
    return bench


def test_the_holder_of_the_oldest_slot_is_weighed_with_the_bytes_that_it_has_now() -> None:
    bench = full()
    r1 = bench.replica("r1")
    assert stand(bench.fleet.state, r1)[3:] == (bench.adapter("a0"), load_time(r1, 20 << 20) + r1.spec.activation)
    bench.declare(adapter("a0", bytes=1 << 30))
    assert stand(bench.fleet.state, r1)[4] == load_time(r1, 1 << 30) + r1.spec.activation


def test_an_adapter_that_left_the_catalog_is_not_weighed() -> None:
    bench = full()
    bench.feed(ev.AdapterRetired(bench.now, "a0"))
    assert stand(bench.fleet.state, bench.replica("r1"))[3:] == (None, 0)
    bench.arrive("a3")
    assert bench.only(ev.Queue).reason == "loading"
