"""Units: what is read is exact, what is shown is close, what is spelled reads back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger.units import (
    format_bytes,
    format_duration,
    format_rate,
    parse_bytes,
    parse_duration,
    parse_rate,
    spell_bytes,
    spell_duration,
    spell_rate,
)

AMOUNTS = st.integers(min_value=0, max_value=10**18)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GiB", 17_179_869_184),
        ("42MB", 42_000_000),
        ("1.5 KiB", 1536),
        ("0.1GB", 100_000_000),
        ("1kB", 1000),
        ("1KB", 1000),
        ("512", 512),
        (" 64KiB ", 65536),
        ("0B", 0),
        (7, 7),
    ],
)
def test_sizes_are_read_exactly(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["16G", "16Gi", "16gib", "-1B", "1e3", "", "GiB", "1 2B", "0.3B", "١B", True, None, 1.5, -1, "9" * 21 + "B"]
)
def test_sizes_that_could_be_misread_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|unit|whole|negative"):
        parse_bytes(text)


def test_an_unknown_unit_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'G' in '16G' is no unit.*GiB.*GB"):
        parse_bytes("16G")


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1.5s", 1_500_000_000),
        ("200ms", 200_000_000),
        ("5m", 300_000_000_000),
        ("1d", 86_400_000_000_000),
        ("0s", 0),
        ("0.001us", 1),
    ],
)
def test_durations_are_read_exactly(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize("text", ["30", 30, 0, "30 sec", "1h30m", "0.1ns", "-1s", None, True])
def test_durations_without_a_plain_unit_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"unit|duration|whole"):
        parse_duration(text)


def test_rates_are_sizes_a_second() -> None:
    assert parse_rate("200MB/s") == 200_000_000
    assert parse_rate("1.5GiB / s") == 1_610_612_736
    assert parse_rate(5) == 5
    for text in ("200MB", "200MB/m", "/s", "1s/s"):
        with pytest.raises(ValueError, match=r"rate|size"):
            parse_rate(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (83_886_080, "80 MiB"),
        (42_000_000, "40.1 MiB"),
        (1_048_575, "1 MiB"),
        (1024 * 1023, "1023 KiB"),
        (20_132_659_200, "18.8 GiB"),
        (2**60, "1048576 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_sizes_are_shown_in_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_times_and_rates_are_shown_in_three_digits() -> None:
    assert format_duration(200_000_000) == "200 ms"
    assert format_duration(1_234_567) == "1.23 ms"
    assert format_duration(90_000_000_000) == "1.5 m"
    assert format_duration(999_999_999) == "1 s"
    assert format_duration(-5) == "-5 ns"
    assert format_rate(200_000_000) == "191 MiB/s"


def test_spellings_are_short() -> None:
    assert [spell_bytes(n) for n in (0, 65536, 42_000_000, 1, 1536)] == ["0B", "64KiB", "42MB", "1B", "1536B"]
    assert [spell_duration(n) for n in (0, 1_500_000_000, 300 * 10**9, 75 * 10**9)] == ["0ns", "1500ms", "5m", "75s"]
    assert spell_rate(200_000_000) == "200MB/s"


@settings(deadline=None)
@given(AMOUNTS)
def test_spellings_read_back_to_the_same_amount(amount: int) -> None:
    assert parse_bytes(spell_bytes(amount)) == amount
    assert parse_duration(spell_duration(amount)) == amount
    assert parse_rate(spell_rate(amount)) == amount


@settings(deadline=None)
@given(AMOUNTS)
def test_what_is_shown_is_within_half_a_percent(amount: int) -> None:
    number, unit = format_bytes(amount).split()
    assert abs(float(number) * parse_bytes(f"1{unit}") - amount) <= 0.0051 * amount
    number, unit = format_duration(amount).split()
    assert abs(float(number) * parse_duration(f"1{unit}") - amount) <= 0.0051 * amount
