"""The table of the peers: ratios within rounds, aims judged, and a reason in the place of figures."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.catalog import Kind, Peer
from benchmarks.peers.running import Proxy
from benchmarks.peers.table import COLUMNS, ratios, rows


def proxy(name: str, kind: Kind, *rounds: tuple[float, float, float]) -> Proxy:
    peer = Peer(name, "something", Path, lambda *_: [], kind, "1.0")
    figures = [
        dict(zip(COLUMNS, (request, event, 0.9, p50, 2 * p50, 100.0, 95.0), strict=True))
        for request, event, p50 in rounds
    ]
    return Proxy(peer, "1.0", rounds=figures, stream_kib=12.3)


OURS = proxy("loraledger", "ours", (100.0, 20.0, 0.4), (110.0, 22.0, 0.5), (120.0, 24.0, 0.6))


def test_ratios_are_of_the_same_round_and_say_whether_the_aim_is_met() -> None:
    rust = proxy("router", "rust", (200.0, 15.0, 0.8), (110.0, 15.0, 0.5), (120.0, 15.0, 0.3))
    nginx = proxy("nginx", "limit", (10.0, 10.0, 0.2), (10.0, 11.0, 0.2), (10.0, 8.0, 0.2))
    slow = proxy("litellm", "python", (1000.0, 90.0, 9.0), (1100.0, 90.0, 9.0), (2400.0, 90.0, 9.0))
    assert ratios([OURS, rust, nginx, slow]) == [
        "CPU a request, ours to the best Rust router: 1.00 [0.50 to 1.00]; aim <= 1: met",
        "added p50, ours to the best Rust router: 1.00 [0.50 to 2.00]; aim <= 1: met",
        "added p99, ours to the best Rust router: 1.00 [0.50 to 2.00]; aim <= 1: met",
        "streams a second, ours to the best Rust router: 1.00 [1.00 to 1.00]",
        "CPU an event, ours to nginx: 2.00 [2.00 to 3.00]; aim <= 1.2: missed by 1.7 x",
        "CPU a request, litellm to ours: 10.00 [10.00 to 20.00]; aim >= 15: missed by 1.5 x",
    ]


def test_who_failed_has_a_row_with_the_reason_and_no_ratio() -> None:
    gone = proxy("router", "rust", (200.0, 15.0, 0.8))
    gone.drop("HTTP/1.1 404 Not Found:\n a0 | a1")
    told = rows([OURS, gone])
    assert len({len(row) for row in told}) == 1
    assert told[2][:3] == ["router 1.0", "something", "none: HTTP/1.1 404 Not Found: a0 / a1"]
    assert ratios([OURS, gone])[0] == "CPU a request, ours to the best Rust router: none, nobody to compare with"


def test_the_best_of_several_is_chosen_in_each_round() -> None:
    first = proxy("one", "rust", (50.0, 1.0, 1.0), (400.0, 1.0, 1.0), (400.0, 1.0, 1.0))
    second = proxy("two", "rust", (400.0, 1.0, 1.0), (55.0, 1.0, 1.0), (60.0, 1.0, 1.0))
    assert ratios([OURS, first, second])[0].startswith(
        "CPU a request, ours to the best Rust router: 2.00 [2.00 to 2.00]"
    )
