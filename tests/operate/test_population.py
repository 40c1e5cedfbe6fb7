from __future__ import annotations

import subprocess
import sys

import pytest

from loraledger.operate.population import treated

TENANTS = [f"tenant-{number}" for number in range(1000)]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_the_share_is_met_and_both_parts_have_somebody(share: float) -> None:
    members = treated(TENANTS, share, "c1")
    assert len(members) == min(999, max(1, round(share * 1000)))
    assert set(members) < set(TENANTS)


def test_of_two_replicas_one_is_treated_and_of_one_none() -> None:
    assert len(treated(["r1", "r2"], 0.1, "c1")) == 1
    assert len(treated(["r1", "r2"], 0.9, "c1")) == 1
    assert treated(["r1"], 0.5, "c1") == ()
    assert treated([], 0.5, "c1") == ()


def test_another_salt_draws_other_members_and_the_order_of_names_is_nothing() -> None:
    first = treated(TENANTS, 0.1, "c1")
    assert treated(reversed(TENANTS), 0.1, "c1") == first
    again = treated(TENANTS, 0.1, "c2")
    assert len(set(first) & set(again)) < 40  # 10 of 100 by chance


def test_a_larger_share_keeps_the_members_of_a_smaller_one() -> None:
    assert set(treated(TENANTS, 0.1, "c1")) < set(treated(TENANTS, 0.2, "c1"))


def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    code = "from loraledger.operate.population import treated; print(treated([f'tenant-{n}' for n in range(1000)], 0.02, 'c1'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "77"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(treated(TENANTS, 0.02, "c1"))
