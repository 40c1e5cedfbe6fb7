"""``loraledger compare``, from the command line to its tables; what it refuses and what it warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plan.small import BASE, canary

from .conftest import Cli, Done

HEAD = "name,provider,gpu,count,memory,host_link,price_per_hour,currency,term,region,as_of\n"
L40S = "l40s,m,L40S,1,,,1.00,USD,spot,,2026-11-30\n"
H100 = "h100,m,H100 SXM,1,80GB,64GB/s,3.00,USD,spot,,2026-11-29\n"
TINY = "tiny,m,L4,1,8GB,,0.10,USD,spot,,2026-11-30\n"
ODD = "odd,m,Voodoo 5,1,8GB,,0.10,USD,spot,,2026-11-30\n"
HEADING = ("canary", "engine", "times", "wanted", "tried")
ORDER = (
    "memory of one unit",
    "the best of each",
    "what clients waited",
    "policy x hardware: cost",
    "what nothing else beats",
    "recommended",
    "how sure",
)
EURO = "euro,m,L40S,1,,,1.00,EUR,spot,,2026-11-30\n"


class Compare:
    """Runs the verb on rows of offers, and a canary of one minute unless another is there."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli, self.folder = cli, folder

    def __call__(self, *words: str, rows: tuple[str, ...] = (L40S, H100, TINY)) -> Done:
        (self.folder / "offers.csv").write_text(HEAD + "".join(rows), encoding="utf-8")
        if not (self.folder / "canary.jsonl").exists():
            canary(self.folder, requests=40)
        few = () if "--slots" in words else ("--slots", "4,8")
        return self.cli("compare", "offers.csv", "--trace", "canary.jsonl", "--base", BASE, "--jobs", "1", *few, *words)


@pytest.fixture
def compare(cli: Cli, tmp_path: Path) -> Compare:
    return Compare(cli, tmp_path)


def test_the_tables_follow_the_questions(compare: Compare) -> None:
    done = compare()
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()[:6] if line[0] != " "] == list(HEADING)
    places = [done.out.index(f"\n{text}") for text in ORDER]
    assert places == sorted(places)
    assert "sha256:" in done.out
    assert "seed 7" in done.out
    assert "\n- 1 x l40s, " in done.out
    assert "tiny: does not fit: " in done.out
    assert "prices are those of 2026-11-29 to 2026-11-30" in done.out
    assert "no profile was given" in done.err
    again = compare()
    assert again.out == done.out


def test_the_document_holds_all_of_it(compare: Compare) -> None:
    items: dict[str, Any] = compare("--json", "--slo", "ttft=2s,itl=80ms", "--policy", "round-robin").items("compare")
    assert items["objective"] == {"ttft_s": 2.0, "itl_s": 0.08, "share": 0.99, "preemptions_per_1000": 10.0}
    assert items["policies"] == ["round-robin"]
    assert items["ladder"] == [4, 8]
    candidates = {one["offer"]: one for one in items["candidates"]}
    assert list(candidates) == ["h100", "l40s", "tiny"]
    for one in candidates.values():
        if one["fits"]:
            assert one["usable_bytes"] + one["floor_bytes"] == one["headline_bytes"]
            assert one["at_most"]
    cells = items["cells"]
    assert items["recommended"] == cells[0]
    assert cells[0]["offer"] == "l40s"
    assert cells[0]["cost_per_hour"] == cells[0]["units"] * 1.0
    hourly = cells[0]["tokens_per_s"] * 3600
    assert cells[0]["cost_per_million_tokens"] == pytest.approx(cells[0]["cost_per_hour"] / hourly * 1e6)
    assert [grid["policies"] for grid in items["grids"]] == [["round-robin"]] * 3
    assert items["at_worst"]["first"]["estimated"]
    assert not items["at_worst"]["second"]["estimated"]
    assert set(items["at_worst"]["order_holds"]) == {"both_at_worst", "first_at_worst"}
    assert items["reasons"]
    assert items["uncertainty"]
    assert items["pareto"]


def test_overhead_and_utilization_come_off_the_device(compare: Compare) -> None:
    words = (
        "--json",
        "--policy",
        "round-robin",
        "--slots",
        "4",
        "--overhead",
        "2GiB",
        "--gpu-memory-utilization",
        "0.9",
    )
    items: dict[str, Any] = compare(*words, rows=(L40S,)).items("compare")
    (one,) = items["candidates"]
    plain: dict[str, Any] = compare(*words[:5], rows=(L40S,)).items("compare")
    assert not one["at_most"]
    assert items["engine"]["overhead_bytes"] == 2 * 2**30
    kept = one["headline_bytes"] * 0.02
    assert plain["candidates"][0]["usable_bytes"] - one["usable_bytes"] == pytest.approx(2 * 2**30 + kept, abs=2)


def test_a_gpu_that_nobody_knows_is_named_and_set_aside(compare: Compare) -> None:
    done = compare("--policy", "round-robin", rows=(L40S, ODD))
    assert done.code == 0
    assert "odd is set aside: 'Voodoo 5' is no GPU that is known" in done.err
    assert "odd" not in done.out


@pytest.mark.parametrize(
    ("words", "rows", "code", "said"),
    [
        (("--slo", "ttft"), (L40S,), 2, "--slo ttft: write ttft=TIME"),
        (("--slo", "itl=50ms"), (L40S,), 2, "ttft is missing"),
        (("--slo", "ttft=1s,ttft=2s"), (L40S,), 2, "write ttft=TIME"),
        (("--slo", "ttft=0s"), (L40S,), 2, "nothing is that quick"),
        (("--slo", "ttft=soon"), (L40S,), 2, "--slo ttft=soon"),
        (("--share", "0"), (L40S,), 2, "--share 0"),
        (("--slots", "8,8"), (L40S,), 2, "each once"),
        (("--slots", "0"), (L40S,), 2, "whole numbers from 1"),
        (("--speed", "0"), (L40S,), 2, "--speed 0: "),
        (("--speed", "1,2"), (L40S,), 2, "--speed 1,2: one number"),
        (("--policy", "robin"), (L40S,), 2, "--policy robin: no such policy; did you mean 'round-robin'"),
        (("--profile-gpu", "Voodoo"), (L40S,), 3, "say which with --profile-gpu"),
        (("--profile", "nothing"), (L40S,), 3, "profile nothing"),
        (("--max-lora-rank", "8"), (L40S,), 3, "ranks up to 16, above --max-lora-rank 8"),
        (("--adapters", "nowhere"), (L40S,), 3, "no adapter can be read"),
        ((), (L40S, EURO), 3, "EUR and USD, which cannot be compared"),
        ((), (ODD,), 3, "no offer of a GPU that is known"),
        ((), (TINY,), 3, "no offer fits: tiny does not fit"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_played(
    compare: Compare, tmp_path: Path, words: tuple[str, ...], rows: tuple[str, ...], code: int, said: str
) -> None:
    done = compare(*words, rows=rows)
    assert done.code == code
    assert said in done.err
    assert not done.out
    assert not list(tmp_path.glob("compare-*/[0-9a-f]*.json"))


def test_a_profile_of_another_model_is_doubted(compare: Compare) -> None:
    done = compare("--policy", "round-robin", "--slots", "4", rows=(L40S,))
    assert "of another model" not in done.err
    other = compare.folder / "other"
    other.mkdir()
    text = (BASE.parent / "llama-2-7b/config.json").read_text(encoding="utf-8")
    (other / "config.json").write_text(text, encoding="utf-8")
    done = compare.cli(
        *("compare", "offers.csv", "--trace", "canary.jsonl", "--base", other, "--jobs", "1"),
        *("--slots", "4", "--policy", "round-robin", "--replicas-max", "1", "--out", "another"),
    )
    assert done.code == 0
    assert "is of another model (Llama-3.1-8B (bf16)" in done.err
