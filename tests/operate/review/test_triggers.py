"""What is new since the last review."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraledger.errors import InputFileError
from loraledger.operate.review.triggers import Fresh, Last, fresh, last_review, remember
from loraledger.record.parquet import write_parquet
from loraledger.record.reader import RecordReader
from loraledger.record.tables import Row
from loraledger.signals.figures import Window
from signals.records import MINUTE, NOON, request

from .made import DAY

KNOWN = Window(NOON - 2 * DAY, NOON)


def found(tmp_path: Path, *rows: Row) -> list[tuple[str, str]]:
    before = [request(arrived_ns=NOON - DAY), request(arrived_ns=NOON - 30 * DAY, adapter="rare", engine_version="0.9")]
    write_parquet({"requests": [*before, *rows]}, tmp_path, "made")
    with RecordReader(tmp_path) as reader:
        return [(one.kind, one.name) for one in fresh(reader, KNOWN, NOON + DAY)]


def test_the_same_system_is_no_news(tmp_path: Path) -> None:
    assert found(tmp_path, request(arrived_ns=NOON), request(arrived_ns=NOON + MINUTE, status="rejected")) == []


@pytest.mark.parametrize(
    ("columns", "news"),
    [
        ({"engine_version": "0.12.0"}, ("engine", "0.12.0")),
        ({"base": "base-70b"}, ("model", "base-70b")),
        ({"config_digest": "sha256:dd"}, ("settings", "sha256:dd")),
        ({"gateway_version": "0.2.0"}, ("gateway", "0.2.0")),
        ({"adapter": "new"}, ("adapter", "new")),
        ({"digest": "sha256:bb"}, ("adapter files", "acme/support")),
    ],
)
def test_each_kind_of_news_is_seen(tmp_path: Path, columns: Row, news: tuple[str, str]) -> None:
    assert found(tmp_path, request(arrived_ns=NOON + MINUTE, **columns)) == [news]


def test_going_back_to_an_old_version_is_news_and_a_rare_adapter_is_not(tmp_path: Path) -> None:
    row = request(arrived_ns=NOON + MINUTE, adapter="rare", engine_version="0.9")
    assert found(tmp_path, row) == [("engine", "0.9")]


def test_what_came_after_the_end_or_in_an_empty_record_is_no_news(tmp_path: Path) -> None:
    assert found(tmp_path, request(arrived_ns=NOON + DAY, engine_version="0.12.0", adapter="new")) == []
    write_parquet({"requests": [request(arrived_ns=NOON)]}, tmp_path / "young", "made")
    with RecordReader(tmp_path / "young") as reader:
        assert fresh(reader, KNOWN, NOON + DAY) == ()


def test_news_come_by_their_first_request(tmp_path: Path) -> None:
    rows = [request(arrived_ns=NOON + n * MINUTE, adapter=f"new{n % 2}") for n in range(1, 5)]
    write_parquet({"requests": [request(arrived_ns=NOON - DAY), *rows]}, tmp_path, "made")
    with RecordReader(tmp_path) as reader:
        assert fresh(reader, KNOWN, NOON + DAY) == (
            Fresh(NOON + MINUTE, "adapter", "new1"),
            Fresh(NOON + 2 * MINUTE, "adapter", "new0"),
        )


def test_the_last_review_is_remembered_and_an_older_one_does_not_push_it_out(tmp_path: Path) -> None:
    assert last_review(tmp_path) is None
    remember(tmp_path, KNOWN, NOON + 1)
    remember(tmp_path, Window(0, DAY), NOON + 2)
    assert last_review(tmp_path) == Last(since_ns=KNOWN.since_ns, until_ns=KNOWN.until_ns, at_ns=NOON + 1)
    remember(tmp_path, Window(NOON, NOON + DAY), NOON + 3)
    assert last_review(tmp_path) == Last(since_ns=NOON, until_ns=NOON + DAY, at_ns=NOON + 3)
    assert [path.name for path in (tmp_path / "reviews").iterdir()] == ["last.json"]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"schema_version":2,"kind":"last_review","since_ns":0,"until_ns":1,"at_ns":1}']
)
def test_a_damaged_note_is_an_error_with_its_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "reviews").mkdir()
    (tmp_path / "reviews/last.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputFileError, match=r"last\.json.*delete it"):
        last_review(tmp_path)
