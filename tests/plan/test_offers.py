"""Offers: both forms, what is checked, and that nothing is guessed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraledger.errors import InputFileError
from loraledger.plan.hardware import Catalogue, catalogue
from loraledger.plan.offers import FIELDS, MAX_OFFERS, read_offers

EXAMPLE = Path(__file__).parent / "offers.csv"
GOOD: dict[str, Any] = {
    "name": "a",
    "provider": "market-a",
    "gpu": "H200",
    "price_per_hour": 3.5,
    "currency": "USD",
    "term": "spot",
    "as_of": "2026-11-30",
}


@pytest.fixture(scope="module")
def gpus() -> Catalogue:
    return catalogue()


def as_json(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "offers.json"
    path.write_text(json.dumps(rows))
    return path


def as_csv(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "offers.csv"
    path.write_text(text)
    return path


def complaint(path: Path, gpus: Catalogue) -> str:
    with pytest.raises(InputFileError) as refused:
        read_offers(path, gpus)
    return refused.value.message


def test_the_committed_example_holds_eight_dated_offers(gpus: Catalogue) -> None:
    found = read_offers(EXAMPLE, gpus)
    assert len(found.offers) == 8
    assert (found.unknown, found.notes, found.currencies) == ((), (), ("USD",))
    assert all(offer.as_of and offer.price_per_hour > 0 for offer in found.offers)
    by_name = {offer.name: offer for offer in found.offers}
    assert by_name["a100-40-2"].headline_bytes == by_name["a100-80-1"].headline_bytes == 80 * 2**30
    assert by_name["l40s-1"].host_link == 25 * 10**9
    assert by_name["a10g-1"].host_link is None


def test_csv_and_json_of_the_same_offers_are_the_same(tmp_path: Path, gpus: Catalogue) -> None:
    with EXAMPLE.open(newline="") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    path = tmp_path / "offers.json"
    path.write_text(json.dumps({"offers": rows}))
    found = read_offers(path, gpus)
    assert found.offers == read_offers(EXAMPLE, gpus).offers
    assert found.digest != read_offers(EXAMPLE, gpus).digest


def test_what_may_be_left_out_has_no_invented_value(tmp_path: Path, gpus: Catalogue) -> None:
    (offer,) = read_offers(as_json(tmp_path, GOOD), gpus).offers
    assert (offer.count, offer.host_link, offer.region) == (1, None, None)
    assert offer.memory_bytes == gpus.gpus["h200"].memory.value


def test_an_unknown_gpu_is_named_and_its_offer_is_set_aside(tmp_path: Path, gpus: Catalogue) -> None:
    path = as_json(
        tmp_path, GOOD, {**GOOD, "name": "b", "gpu": "A100", "memory": "80GB"}, {**GOOD, "name": "c", "gpu": "X9"}
    )
    found = read_offers(path, gpus)
    assert [offer.name for offer in found.offers] == ["a"]
    assert [(each.name, each.gpu) for each in found.unknown] == [("b", "A100"), ("c", "X9")]
    assert found.unknown[0].hint == "that could be a100-40 or a100-80"


def test_a_short_name_that_is_taken_for_one_of_two_is_said(tmp_path: Path, gpus: Catalogue) -> None:
    found = read_offers(as_json(tmp_path, {**GOOD, "gpu": "h100"}), gpus)
    assert found.offers[0].gpu.name == "h100-sxm"
    assert found.notes == ("a: 'h100' is taken for h100-sxm; it may be h100-pcie: ask",)


@pytest.mark.parametrize("memory", ["141GB", "141GiB", 141 * 10**9])
def test_gb_for_gib_is_the_same_device(tmp_path: Path, gpus: Catalogue, memory: object) -> None:
    found = read_offers(as_json(tmp_path, {**GOOD, "memory": memory}), gpus)
    assert found.notes == ()
    assert found.offers[0].memory_bytes == gpus.gpus["h200"].memory.value


def test_memory_that_is_not_the_devices_is_used_and_said(tmp_path: Path, gpus: Catalogue) -> None:
    found = read_offers(as_json(tmp_path, {**GOOD, "memory": "71GiB"}), gpus)
    assert found.offers[0].memory_bytes == 71 * 2**30
    assert "a: 71 GiB a device is offered and h200 has 140 GiB" in found.notes[0]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", None, "offer 1, name: is missing"),
        ("name", "two\nlines", "offer 1, name: must be 1 to 200 printable characters"),
        ("provider", 7, "offer 1, provider: 7 is not text"),
        ("count", 0, "offer 1, count: 0 is not a number of devices: write 1 to 1,024"),
        ("count", True, "offer 1, count: True is not a number of devices"),
        ("count", 1.5, "offer 1, count: 1.5 is not a number of devices"),
        ("memory", "80G", "offer 1, memory: 'G' in '80G' is no unit of a size"),
        ("memory", -1, "offer 1, memory: -1 is negative"),
        ("memory", 0, "offer 1, memory: 0 is out of range"),
        ("host_link", "25GB", "offer 1, host_link: '25GB' is not a rate"),
        ("price_per_hour", "cheap", "offer 1, price_per_hour: 'cheap' is not a price: write a number of 0 or more"),
        ("price_per_hour", -1, "offer 1, price_per_hour: -1 is not a price"),
        ("price_per_hour", None, "offer 1, price_per_hour: is missing"),
        ("price_per_hour", "1e3", "offer 1, price_per_hour: '1e3' is not a price"),
        ("price_per_hour", True, "offer 1, price_per_hour: True is not a price"),
        ("currency", "dollars", "offer 1, currency: 'dollars' is no currency"),
        ("as_of", "yesterday", "offer 1, as_of: 'yesterday' is no date"),
        ("as_of", "2026-W10-1", "offer 1, as_of: '2026-W10-1' is no date"),
        ("as_of", None, "offer 1, as_of: is missing"),
        ("term", " ", "offer 1, term: must be 1 to 200 printable characters"),
        ("prise", 1, "offer 1: field 'prise' is not known"),
    ],
)
def test_a_wrong_field_is_named_with_file_row_and_remedy(
    tmp_path: Path, gpus: Catalogue, field: str, value: object, said: str
) -> None:
    message = complaint(as_json(tmp_path, {**GOOD, field: value}), gpus)
    assert message.startswith(f"offers.json {said}")


def test_all_that_is_wrong_is_said_at_once_and_a_name_twice_too(tmp_path: Path, gpus: Catalogue) -> None:
    message = complaint(as_json(tmp_path, GOOD, {**GOOD, "count": 0}, {**GOOD, "name": "b", "currency": "usd"}), gpus)
    assert [line.partition(":")[0] for line in message.splitlines()] == [
        "offers.json offer 2, name",
        "offers.json offer 2, count",
        "offers.json offer 3, currency",
    ]
    assert "'a' is that of offer 1 too" in message


def test_complaints_are_bounded(tmp_path: Path, gpus: Catalogue) -> None:
    message = complaint(as_json(tmp_path, *[{**GOOD, "name": f"n{n}", "count": 0} for n in range(70)]), gpus)
    assert message.splitlines()[-1] == "and 20 more"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "offers.csv line 1: lacks name, provider"),
        ("name,gpu\n", "offers.csv line 1: lacks provider, price_per_hour"),
        ("name,name\n", "offers.csv line 1: column 'name' is there twice"),
        ("name,provider1\n", "offers.csv line 1: column 'provider1' is not known; did you mean 'provider'?"),
        (f"{','.join(GOOD)}\na,b\n", "offers.csv line 2: 2 cells under 7 columns"),
        (f"{','.join(GOOD)}\n", "offers.csv: holds no offer"),
        (f'{",".join(GOOD)}\n"a\n', "offers.csv line 2: is not CSV"),
    ],
)
def test_a_table_that_cannot_be_read_is_told_why(tmp_path: Path, gpus: Catalogue, text: str, said: str) -> None:
    assert complaint(as_csv(tmp_path, text), gpus).startswith(said)


def test_a_row_is_named_by_its_line_and_empty_lines_are_passed_over(tmp_path: Path, gpus: Catalogue) -> None:
    header, row = ",".join(GOOD), ",".join(str(value) for value in GOOD.values())
    path = as_csv(tmp_path, f"\ufeff{header}\n\n{row}\n{row.replace('a,', 'b,', 1).replace('3.5', 'x')}\n")
    assert complaint(path, gpus).startswith("offers.csv line 4, price_per_hour: 'x' is not a price")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ('{"offer": []}', "must be a list of offers"),
        ("[1]", "offer 1: must be an object with name"),
        ('[{"name": "a", "name": "b"}]', "a field is given twice"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds no offer"),
    ],
)
def test_a_document_that_cannot_be_read_is_told_why(tmp_path: Path, gpus: Catalogue, text: str, said: str) -> None:
    path = tmp_path / "offers.json"
    path.write_text(text)
    assert said in complaint(path, gpus)


def test_files_are_bounded(tmp_path: Path, gpus: Catalogue) -> None:
    assert "cannot be read" in complaint(tmp_path / "none.csv", gpus)
    assert "over 4 MiB" in complaint(as_csv(tmp_path, "x" * (2**22 + 1)), gpus)
    header = ",".join(GOOD)
    rows = "\n".join(f"n{n},p,L4,1,USD,spot,2026-11-30" for n in range(MAX_OFFERS + 1))
    assert f"over {MAX_OFFERS:,} offers" in complaint(as_csv(tmp_path, f"{header}\n{rows}"), gpus)
    (tmp_path / "offers.csv").write_bytes(b"name\xff")
    assert "not UTF-8" in complaint(tmp_path / "offers.csv", gpus)


cells = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers()))


@given(row=st.dictionaries(st.sampled_from(FIELDS), cells))
def test_whatever_a_row_holds_it_is_an_offer_or_a_complaint(
    tmp_path_factory: pytest.TempPathFactory, gpus: Catalogue, row: dict[str, object]
) -> None:
    path = as_json(tmp_path_factory.getbasetemp(), {**GOOD, **row})
    try:
        found = read_offers(path, gpus)
    except InputFileError as error:
        said = error.message
    else:
        said = ""
        assert len(found.offers) + len(found.unknown) == 1
    assert not said or said.startswith("offers.json offer 1")
