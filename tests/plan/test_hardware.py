"""The catalogue: what is in it, how a GPU is found, what a bad file is told, and the ladder."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from loraledger.errors import InputFileError
from loraledger.plan.hardware import RUNGS, Catalogue, catalogue, flops
from loraledger.units import parse_bytes


@pytest.fixture(scope="module")
def gpus() -> Catalogue:
    return catalogue()


OWN = """
sources:
  mine: {title: my own sheet, as_of: 2026-11-01}
gpus:
  - name: x1
    aliases: [Acme X-1]
    memory: {value: 10GiB, source: mine}
    memory_bandwidth: {value: 1TB/s, source: mine}
    bf16: {value: 0.5PFLOP/s, source: mine}
    host_link: {value: 20GB/s, source: mine}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return path


def test_about_a_dozen_gpus_each_figure_with_a_source_and_a_day(gpus: Catalogue) -> None:
    assert len(gpus.gpus) >= 12
    for gpu in gpus.gpus.values():
        for figure in (gpu.memory, gpu.memory_bandwidth, gpu.bf16, gpu.host_link):
            assert figure.source, gpu.name
            assert date.fromisoformat(figure.as_of) <= date(2100, 1, 1)


def test_figures_are_of_one_device_one_way_and_dense(gpus: Catalogue) -> None:
    for gpu in gpus.gpus.values():
        assert 16 * 2**30 < gpu.memory.value < 2**40, gpu.name
        assert 2 * 10**11 < gpu.memory_bandwidth.value < 10**13, gpu.name
        # One way over 16 lanes is 32 or 64 GB/s: twice that would be both ways.
        assert gpu.host_link.value in (32 * 10**9, 64 * 10**9), gpu.name
        # From about 100 to 1,200 FLOP a byte; with sparsity counted an L4 would be at 800.
        assert 50 < gpu.bf16.value / gpu.memory_bandwidth.value < 450, gpu.name


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("nvidia-h100-80gb-hbm3", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        (" A100_80GB ", "a100-80"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_found_by_any_spelling_of_a_name(gpus: Catalogue, spelled: str, name: str) -> None:
    found = gpus.find(spelled)
    assert found is not None
    assert found.name == name


def test_a_name_that_fits_two_is_none_of_them(gpus: Catalogue) -> None:
    assert gpus.find("A100") is None
    assert gpus.hint("A100") == "; that could be a100-40 or a100-80"
    assert gpus.find("") is None


def test_a_misspelt_name_is_told_the_nearest_one(gpus: Catalogue) -> None:
    assert gpus.find("h20o") is None
    assert gpus.hint("h20o") == "; did you mean 'h200'?"
    assert "known: a100-40," in gpus.hint("abacus")


def test_a_file_adds_gpus_and_replaces_those_of_the_same_name(tmp_path: Path, gpus: Catalogue) -> None:
    more = catalogue(
        written(tmp_path, OWN + OWN.split("gpus:\n")[1].replace("x1", "l4").replace("Acme X-1", "L4 24GB"))
    )
    assert set(more.gpus) == {*gpus.gpus, "x1"}
    own = more.find("acme x 1")
    assert own is not None
    assert (own.memory.value, own.bf16.value) == (10 * 2**30, 5 * 10**14)
    assert (own.memory.source, own.memory.as_of, own.memory.recalled) == ("my own sheet", "2026-11-01", False)
    assert more.gpus["l4"].memory.value == 10 * 2**30


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("10GiB", "10G", "x1.memory: 'G' in '10G' is no unit of a size"),
        ("10GiB", "0", "x1.memory: 0: must be more than 0"),
        ("1TB/s", "1TB", "x1.memory_bandwidth: '1TB' is not a rate"),
        ("0.5PFLOP/s", "500", "x1.bf16: '500' is no rate of arithmetic: write it with GFLOP/s, TFLOP/s, PFLOP/s"),
        ("source: mine}", "source: mime}", "x1.memory: source 'mime' is not listed; did you mean 'mine'?"),
        ("host_link", "hostlink", "unknown field `hostlink`"),
        ("name: x1", "name: X 1", "matching regex"),
        ("2026-11-01", "soon", "Invalid RFC3339"),
        ("Acme X-1", "H100", "'H100' is h100-sxm and x1: an alias names one GPU"),
        ("title: my own sheet, ", "", "missing required field `title`"),
        ("  mine:", "  mine: {}\n  mine:", "own.yaml:4: is given twice"),
    ],
)
def test_a_bad_file_is_told_what_is_wrong(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = written(tmp_path, OWN.replace(old, new))
    with pytest.raises(InputFileError) as refused:
        catalogue(path)
    assert complaint in refused.value.message
    assert "own.yaml" in refused.value.message


def test_a_gpu_twice_a_file_that_is_not_there_and_one_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="x1 is there twice"):
        catalogue(written(tmp_path, OWN + OWN.split("gpus:\n")[1]))
    with pytest.raises(InputFileError, match="cannot be read"):
        catalogue(tmp_path / "nowhere.yaml")
    with pytest.raises(InputFileError, match="over 1 MiB"):
        catalogue(written(tmp_path, "#" * (2**20 + 1)))
    bad = tmp_path / "own.yaml"
    bad.write_bytes(b"gpus: \xff")
    with pytest.raises(InputFileError, match="not UTF-8"):
        catalogue(bad)


def test_arithmetic_is_read_exactly() -> None:
    assert flops("362.05TFLOP/s") == 362_050_000_000_000
    with pytest.raises(ValueError, match="no rate of arithmetic"):
        flops("362TFLOPS")


def test_the_ladder_goes_down_from_the_device(gpus: Catalogue) -> None:
    gpu = gpus.gpus["h100-sxm"]
    ladder = gpus.ladder(gpu)
    assert tuple(rung.name for rung in ladder.rungs) == RUNGS
    assert ladder.rung("device").bytes == gpu.memory.value
    rates = [rung.bytes_per_s for rung in ladder.rungs]
    latencies = [ladder.rung(name).latency_ns for name in ("device", "disk", "remote")]
    assert rates == sorted(rates, reverse=True)
    assert latencies == sorted(latencies)
    assert ladder.rung("host").bytes_per_s == gpu.host_link.value
    assert gpus.ladder(gpu, parse_bytes("25GB")).rung("host").bytes_per_s == 25 * 10**9


def test_what_a_rung_takes_is_its_latency_and_bytes_over_its_rate(gpus: Catalogue) -> None:
    disk = gpus.ladder(gpus.gpus["l4"]).rung("disk")
    # The fit that the twin's default profile has: 6 ms + bytes at 760 MB/s.
    assert disk.takes_ns(76_000_000) == 6_000_000 + 100_000_000


def test_a_rung_is_overridden_with_its_source(gpus: Catalogue) -> None:
    ladder = gpus.ladder(gpus.gpus["l4"])
    own = ladder.with_rung("disk", "fio", bytes_per_s=3 * 10**9, size=10**12)
    assert own.rung("disk").bytes_per_s == 3 * 10**9
    assert own.rung("disk").latency_ns == ladder.rung("disk").latency_ns
    assert (own.rung("disk").source, own.rung("disk").bytes) == ("fio", 10**12)
    assert own.rung("host") == ladder.rung("host")
    with pytest.raises(ValueError, match="disk: a rate is 1 byte"):
        ladder.with_rung("disk", "nobody", bytes_per_s=0)
