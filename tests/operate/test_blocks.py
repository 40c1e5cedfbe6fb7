from __future__ import annotations

import random

import numpy as np
import pytest

from loraledger.operate.blocks import Blocks, figures, replayed
from loraledger.record.tables import Row
from loraledger.units import NS_PER_S

S = NS_PER_S


def row(ended_s: float, tenant: str = "t1", **columns: object) -> Row:
    plain: Row = {
        "tenant": tenant,
        "replica": "r1",
        "adapter": "a",
        "hit_class": "gpu",
        "arrived_ns": int((ended_s - 2) * S),
        "first_token_ns": int((ended_s - 1.5) * S),
        "finished_ns": int(ended_s * S),
        "itl_mean_ns": 10_000_000,
        "generated_tokens": 11,
        "preemptions": 0,
        "status": "ok",
    }
    return plain | columns


def test_a_request_counts_where_it_ended_and_on_the_side_of_its_tenant() -> None:
    blocks = Blocks("tenant", {"t1"}, 100 * S, 10 * S)
    rows = [row(105, "t1")] * 6 + [row(106, "t2", hit_class="disk")] * 7 + [row(99, "t1")] * 50
    assert [over for one in rows for over in blocks.take(one)] == []
    (first,) = blocks.take(row(111, "t1"))
    assert (first.began_ns, first.treated_requests, first.control_requests) == (100 * S, 6, 7)
    assert (first.treated["hit_rate"], first.control["hit_rate"]) == (1.0, 0.0)
    assert first.difference("hit_rate") == 1.0
    (second,) = blocks.until(120 * S)
    assert (second.treated_requests, second.treated["hit_rate"]) == (1, None)  # of one request nothing is said


def test_by_replica_the_one_that_answered_counts_and_what_reached_none_does_not() -> None:
    blocks = Blocks("replica", {"r2"}, 0, 10 * S)
    rows = [row(3, replica="r2")] * 5 + [row(3, replica="r1")] * 6 + [row(3, replica=None)] * 9
    (found,) = replayed(rows, blocks, 10 * S)
    assert (found.treated_requests, found.control_requests) == (5, 6)


def test_what_the_client_got_wrong_or_left_counts_for_nobody() -> None:
    rows = [row(3)] * 5 + [row(3, status="client_error")] * 9 + [row(3, status="client_gone")] * 9 + [{"tenant": "t1"}]
    (found,) = replayed(rows, Blocks("tenant", {"t1"}, 0, 10 * S), 10 * S)
    assert (found.treated_requests, found.control_requests) == (5, 0)


def test_silence_gives_empty_blocks_and_a_long_one_does_not_give_millions() -> None:
    blocks = Blocks("tenant", {"t1"}, 0, S)
    assert len(blocks.until(5 * S)) == 5
    assert len(blocks.until(10**6 * S)) <= 1000
    assert len(blocks.until((10**6 + 3) * S)) <= 3


@pytest.mark.parametrize("seed", range(5))
def test_figures_are_those_of_numpy_on_the_same_rows(seed: int) -> None:
    chance = random.Random(seed)
    rows = [
        row(
            chance.uniform(5, 9),
            adapter=chance.choice(["a", "b", None]),
            hit_class=chance.choice(["gpu", "host", "disk", "base", "unknown"]),
            first_token_ns=chance.choice([None, int(chance.uniform(7.1, 9) * S)]),
            preemptions=chance.choice([None, 0, 1, 3]),
            itl_mean_ns=chance.choice([None, chance.randrange(10**6, 10**8)]),
            generated_tokens=chance.choice([None, 1, 7, 100]),
            status=chance.choice(["ok", "rejected"]),
        )
        for _ in range(200)
    ]
    found = figures(rows, S)
    ttft = np.array(
        [r["first_token_ns"] - r["arrived_ns"] for r in rows if r["first_token_ns"] is not None],  # type: ignore[operator]
        dtype=np.float64,
    )
    ttft = ttft[ttft >= 0] / S
    bearing = [r["hit_class"] == "gpu" for r in rows if r["adapter"] and r["hit_class"] in ("gpu", "host", "disk")]
    told = [r["preemptions"] for r in rows if r["preemptions"] is not None]
    gaps = np.array(
        [
            (r["itl_mean_ns"], r["generated_tokens"] - 1)  # type: ignore[operator]
            for r in rows
            if r["itl_mean_ns"] is not None and r["generated_tokens"] is not None and r["generated_tokens"] > 1  # type: ignore[operator]
        ],
        dtype=np.float64,
    )
    assert found["hit_rate"] == pytest.approx(np.mean(bearing))
    assert found["ttft_mean"] == pytest.approx(np.mean(ttft))
    assert found["ttft_p50"] == pytest.approx(np.quantile(ttft, 0.5))
    assert found["ttft_p90"] == pytest.approx(np.quantile(ttft, 0.9))
    assert found["ttft_p99"] == pytest.approx(np.quantile(ttft, 0.99))
    assert found["preemptions"] == pytest.approx(1000 * np.mean(np.array(told, dtype=np.float64)))
    assert found["itl_mean"] == pytest.approx(np.average(gaps[:, 0], weights=gaps[:, 1]) / S)
    assert found["refused"] == pytest.approx(np.mean([r["status"] == "rejected" for r in rows]))
    assert found["attainment"] == pytest.approx(np.sum(ttft <= 1) / len(rows))
