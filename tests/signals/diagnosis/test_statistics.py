from __future__ import annotations

import pytest

from loraledger.signals.diagnosis.statistics import clustering, ratio_z, share_z


def test_chi_squared_of_a_table_worked_by_hand() -> None:
    # Expected 30 and 70 of each: (10^2 / 30 + 10^2 / 70) * 2 = 9.5238.
    found = clustering({"r1": (40, 60), "r2": (20, 80)})
    assert found is not None
    assert found.chi2 == pytest.approx(9.5238, abs=1e-4)
    assert found.freedom == 1
    assert found.v == pytest.approx((9.5238 / 200) ** 0.5, abs=1e-4)
    assert found.p == pytest.approx(0.00203, rel=0.1)


@pytest.mark.parametrize(("chi2", "rows", "p"), [(3.841, 2, 0.05), (9.488, 5, 0.05), (18.467, 5, 0.001)])
def test_the_tail_is_that_of_the_tables(chi2: float, rows: int, p: float) -> None:
    from loraledger.signals.diagnosis.statistics import _tail

    assert _tail(chi2, rows - 1) == pytest.approx(p, rel=0.15)


def test_the_effect_does_not_grow_with_the_counts_as_the_significance_does() -> None:
    small, large = (
        clustering({"r1": (40, 60), "r2": (35, 65)}),
        clustering({"r1": (40_000, 60_000), "r2": (35_000, 65_000)}),
    )
    assert small is not None
    assert large is not None
    assert large.p < 1e-6 < small.p
    assert large.v == pytest.approx(small.v)
    assert large.v < 0.1


def test_replicas_with_too_few_expected_counts_are_left_out() -> None:
    both = {"r1": (40, 60), "r2": (20, 80)}
    assert clustering({**both, "r3": (1, 2)}) == clustering(both)
    assert clustering({"r1": (40, 60), "r3": (1, 2)}) is None
    assert clustering({"r1": (0, 100), "r2": (0, 100)}) is None
    assert clustering({}) is None


def test_shares_and_ratios_are_judged_by_their_standard_error() -> None:
    assert share_z(60, 100, 40, 100) == pytest.approx(2.828, abs=1e-3)
    assert share_z(0, 0, 1, 2) == share_z(0, 5, 0, 5) == 0
    assert ratio_z(2.0, 200, 100) == pytest.approx(0.6931 / (0.015**0.5), abs=1e-2)
    assert ratio_z(None, 1, 1) == ratio_z(2.0, 0, 1) == 0
