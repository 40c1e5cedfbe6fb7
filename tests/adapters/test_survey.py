"""Which folders are found, what a row keeps, and what all rows come to."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from adapters.build_weights import Dims, build, pairs
from adapters.conftest import CONFIG, MakeAdapter
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.survey import Row, Slots, Unreadable, find, slots_of, sum_up, survey
from loraledger.errors import InputFileError

BASE = Dims(hidden=64, ff=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=1000)


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    return BASE.write(tmp_path / "base")


def write_adapter(folder: Path, rank: int, *, layers: int = 2, **changes: object) -> Path:
    """An adapter of q and v, for the base above while it has 2 layers."""
    modules = {name: shape for name, shape in BASE.projections().items() if name[-6:] in ("q_proj", "v_proj")}
    return build(folder, {**CONFIG, "r": rank, **changes}, pairs(modules, rank, layers))


def names(paths: list[Path]) -> list[str]:
    places, problems = find(paths)
    assert problems == []
    return [place.name for place in places]


def reasons(path: Path) -> list[str]:
    places, problems = find([path])
    assert places == []
    return [problem.reason for problem in problems]


def rows_of(tmp_path: Path, base: BaseModel | None, engine: EngineSettings) -> list[Row | Unreadable]:
    return list(survey(find([tmp_path / "adapters"])[0], base, engine))


def test_an_adapter_and_a_folder_of_adapters_are_found_by_name(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    for name in ("b", "a", ".hidden"):
        make_adapter(name, parent=tmp_path / "many")
    (tmp_path / "many" / "notes").mkdir()
    (tmp_path / "many" / "README").write_text("none")
    make_adapter("alone")
    assert names([tmp_path / "many", tmp_path / "alone"]) == ["a", "b", "alone"]


def test_only_one_level_is_looked_through(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter("a", parent=tmp_path / "upper" / "lower")
    assert reasons(tmp_path / "upper") == [
        "holds no adapter: neither it nor any of its sub-folders has an adapter_config.json"
    ]


def test_a_folder_that_is_met_twice_is_taken_once(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter("a", parent=tmp_path / "many")
    assert names([tmp_path / "many", tmp_path / "many" / "a"]) == ["a"]


def test_the_working_directory_has_a_name(make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_adapter("here"))
    assert names([Path()]) == ["here"]


def test_paths_that_lead_to_no_adapter_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert "does not exist" in reasons(tmp_path / "gone")[0]
    assert "is not a folder" in reasons(tmp_path / "file")[0]
    assert "holds no adapter" in reasons(tmp_path / "empty")[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list any folder")
def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    assert "cannot be listed" in reasons(tmp_path / "closed")[0]


def test_weights_without_a_configuration_are_a_row_that_says_so(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    (make_adapter("bare", parent=tmp_path / "adapters") / "adapter_config.json").unlink()
    (row,) = rows_of(tmp_path, None, EngineSettings())
    assert isinstance(row, Unreadable)
    assert "has no adapter_config.json" in row.reason


def test_a_link_out_of_the_folder_it_is_found_in_is_not_followed(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    outside = make_adapter("outside", parent=tmp_path / "elsewhere")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "a").symlink_to(outside)
    (row,) = rows_of(tmp_path, None, EngineSettings())
    assert isinstance(row, Unreadable)
    assert "leads out of" in row.reason
    assert names([tmp_path / "adapters" / "a"]) == ["a"]  # a person who names the link itself means it


def test_one_bad_folder_does_not_stop_the_others(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter("a", parent=tmp_path / "adapters")
    make_adapter("b", parent=tmp_path / "adapters", weights=b"")
    make_adapter("c", parent=tmp_path / "adapters")
    assert [type(row) for row in rows_of(tmp_path, None, EngineSettings())] == [Row, Unreadable, Row]


def test_folders_are_read_when_their_row_is_asked_for(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter("a", parent=tmp_path)
    late = make_adapter("b", parent=tmp_path)
    rows = survey(find([tmp_path / "a", late])[0], None, EngineSettings())
    assert isinstance(next(rows), Row)
    shutil.rmtree(late)
    assert isinstance(next(rows), Unreadable)


def test_a_row_keeps_little_of_an_adapter(tmp_path: Path, base: BaseModel) -> None:
    for number in range(20):
        write_adapter(tmp_path / "adapters" / f"a{number}", 8, layers=64)
    places, _ = find([tmp_path / "adapters"])
    list(survey(places[:1], base, EngineSettings()))  # what is made once
    tracemalloc.start()
    rows = list(survey(places[1:], base, EngineSettings()))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept / len(rows) < 16 * 1024


def test_a_row_has_the_bytes_of_each_tier(tmp_path: Path, base: BaseModel) -> None:
    folder = write_adapter(tmp_path / "adapters" / "a", 8)
    (row,) = rows_of(tmp_path, base, EngineSettings(max_loras=2, max_lora_rank=16))
    assert isinstance(row, Row)
    parameters = 2 * 8 * (64 + 64 + 64 + 32)
    assert (row.rank, row.modules, row.suffixes, row.dtypes) == (8, 4, ("q_proj", "v_proj"), ("BF16",))
    assert row.disk == (folder / "adapter_model.safetensors").stat().st_size
    assert row.parameters == parameters
    assert row.lora == 2 * parameters
    assert (row.whole, row.magnitude, row.other) == (0, 0, 0)
    assert row.host is not None
    assert row.host.exact == 2 * parameters
    assert row.device == 2 * parameters
    assert row.verdict.outcome == "loads"


def test_without_a_base_device_figures_are_unknown(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter("a", parent=tmp_path / "adapters")
    rows = rows_of(tmp_path, None, EngineSettings())
    assert isinstance(rows[0], Row)
    assert rows[0].device is None
    totals = sum_up(rows, EngineSettings())
    assert totals.device is None
    assert totals.host is not None
    assert slots_of(None, EngineSettings()) is None


def slot_elements(rank: int) -> tuple[int, int]:
    """A and B of one slot of the base above: layers, token tables."""
    per_layer = (64 + 64) + 2 * (64 + 32) + (64 + 64) + 2 * (64 + 128) + (128 + 64)
    return 2 * rank * per_layer, 2 * rank * (1000 + 64)


@pytest.mark.parametrize("rank", [8, 64])
def test_slots_are_paid_in_kv_tokens_whatever_they_hold(base: BaseModel, rank: int) -> None:
    slots = slots_of(base, EngineSettings(max_loras=3, max_lora_rank=8), rank)
    assert slots is not None
    layers, tables = slot_elements(rank)
    assert (slots.one.projections, slots.one.embeddings) == (2 * layers, 2 * tables)
    assert (slots.max_lora_rank, slots.count, slots.total) == (rank, 3, 3 * 2 * (layers + tables))
    kv = 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, width, bytes
    assert slots.kv_tokens_one == -(-slots.one.total // kv)
    assert slots.kv_tokens == -(-slots.total // kv)


def test_a_base_that_cannot_be_cut_so_is_an_error(base: BaseModel) -> None:
    with pytest.raises(InputFileError, match="3 ranks"):
        slots_of(base, EngineSettings(tensor_parallel=3))


def test_engines_without_slots_have_none(base: BaseModel) -> None:
    assert slots_of(base, EngineSettings(engine="slora")) is None
    assert isinstance(slots_of(base, EngineSettings(engine="sglang", max_loras=2)), Slots)


def test_totals_are_the_sums_of_the_rows(tmp_path: Path, make_adapter: MakeAdapter, base: BaseModel) -> None:
    engine = EngineSettings(max_loras=1, max_lora_rank=64, max_cpu_loras=2)
    for rank in (4, 8, 16):
        write_adapter(tmp_path / "adapters" / f"r{rank}", rank)
    make_adapter("bad", parent=tmp_path / "adapters", weights=b"")
    rows = rows_of(tmp_path, base, engine)
    totals = sum_up(rows, engine)
    read = [row for row in rows if isinstance(row, Row)]
    assert len(read) == 3
    assert totals.unreadable == 1
    assert totals.outcomes == {"loads": 3}
    assert totals.disk == sum(row.disk for row in read)
    assert totals.parameters == sum(row.parameters for row in read)
    host = [2 * 2 * rank * (64 + 64 + 64 + 32) for rank in (4, 8, 16)]
    assert totals.host is not None
    assert totals.host.exact == sum(host)
    assert totals.host.pinned >= totals.host.exact
    assert totals.host_fullest == host[1] + host[2]  # the host cache holds two
    assert totals.device == sum(host)


def test_the_smallest_rank_leaves_aside_what_no_rank_helps(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapters" / "low", 4)
    write_adapter(tmp_path / "adapters" / "odd", 10)
    write_adapter(tmp_path / "adapters" / "dora", 64, use_dora=True)
    engine = EngineSettings(max_lora_rank=8)
    totals = sum_up(rows_of(tmp_path, None, engine), engine)
    assert totals.outcomes == {"loads": 1, "refused": 2}
    assert (totals.fit.smallest, totals.fit.too_big, totals.fit.without_too_big, totals.fit.aside) == (16, (), 16, 1)
    write_adapter(tmp_path / "adapters" / "huge", 768)
    totals = sum_up(rows_of(tmp_path, None, engine), engine)
    assert (totals.fit.smallest, totals.fit.too_big, totals.fit.without_too_big) == (None, ("huge",), 16)


def test_nothing_at_all_has_no_totals() -> None:
    totals = sum_up([], EngineSettings())
    assert (totals.disk, totals.host, totals.device, totals.fit.smallest) == (0, None, None, None)
