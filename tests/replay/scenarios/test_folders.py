from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from loraledger.errors import InputFileError
from loraledger.replay.fleet.outcome import RUN_FILE
from loraledger.replay.scenarios.folders import held, sweep_folder, whole


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_a_killed_sweep_left_half_done_is_gone_once_the_folder_is_held(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "o", "sha256:1")
    (folder / ".slots=9.partial" / "record" / ".scratch").mkdir(parents=True)
    (folder / ".slots=9.partial" / ".run.json.new").touch()
    (folder / ".slots=8.partial").mkdir()
    with held(folder):
        assert names(folder) == {"replay.json"}


def test_what_is_not_a_half_done_run_stays(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "o", "sha256:1")
    (folder / ".mine.partial" / "record").mkdir(parents=True)
    (folder / ".mine.partial" / "notes.txt").write_text("mine")
    (folder / ".file.partial").touch()
    (folder / ".link.partial").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "record").mkdir(parents=True)
    before = names(folder)
    with held(folder):
        assert names(folder) == before
    assert (tmp_path / "elsewhere" / "record").is_dir()


def test_a_half_done_run_stays_while_another_sweep_holds_the_folder(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "o", "sha256:1")
    with held(folder):
        (folder / ".slots=9.partial" / "record").mkdir(parents=True)
        with pytest.raises(InputFileError, match="another replay writes into"), held(folder):
            pass
        assert names(folder) == {"replay.json", ".slots=9.partial"}


def test_a_run_takes_its_name_when_it_is_complete_and_not_before(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with whole(directory) as partial:
        partial.mkdir()
        (partial / RUN_FILE).write_text("1")
        assert names(tmp_path) == {".run.partial"}
    with suppress(RuntimeError), whole(directory) as partial:
        partial.mkdir()
        (partial / RUN_FILE).write_text("2")
        raise RuntimeError
    assert (directory / RUN_FILE).read_text() == "1"


def test_a_folder_that_cannot_be_replaced_is_an_error_in_one_line(tmp_path: Path) -> None:
    refused = pytest.raises(InputFileError, match=r"run: cannot be written: No such file.*; give --out another folder$")
    with refused, whole(tmp_path / "run"):
        pass  # nothing is there to take the name


@pytest.mark.parametrize(
    "name", ["record/notes.txt", "record/requests/mine.csv", "record/requests/date=a/hour=1/mine.parquet"]
)
def test_a_file_of_yours_inside_a_record_keeps_the_run(tmp_path: Path, name: str) -> None:
    folder = sweep_folder(tmp_path / "o", "sha256:1")
    for run in ("run", ".run2.partial"):
        (folder / run / name).parent.mkdir(parents=True)
        (folder / run / name).write_text("mine")
        (folder / run / RUN_FILE).touch()
        (folder / run / "record" / ".replay").touch()
    with (
        pytest.raises(InputFileError, match=f"run/{name} is no part of a run and would be lost"),
        whole(folder / "run"),
    ):
        pass
    with held(folder):
        pass
    assert [(folder / run / name).read_text() for run in ("run", ".run2.partial")] == ["mine", "mine"]


def test_a_record_that_is_a_link_keeps_the_run(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_FILE).touch()
    (tmp_path / "run" / "record").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputFileError, match="run/record is no part of a run"), whole(tmp_path / "run"):
        pass


def test_a_run_is_put_aside_before_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", ".run.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RUN_FILE).write_text(name)
    seen: list[set[str]] = []
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: seen.append(names(tmp_path)))
    with whole(tmp_path / "run") as partial:
        assert partial.is_dir()
    assert seen[-1] == {"run", ".run.replaced.partial"}
    assert (tmp_path / "run" / RUN_FILE).read_text() == ".run.partial"
