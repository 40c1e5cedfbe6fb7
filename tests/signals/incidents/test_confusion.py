"""The diagnosis against incidents whose cause is known. ``python -m benchmarks.diagnosis`` prints the whole matrix."""

from __future__ import annotations

from benchmarks.diagnosis import AIM, Answer, diagnosed, matrix, summary
from benchmarks.incidents.kinds import POOLS, Incident, Kind


def test_nine_incidents_in_ten_are_told_right_and_nothing_wrong_is_never_accused(
    incidents: dict[Kind, Incident],
) -> None:
    said = {kind: diagnosed(incident)[0] for kind, incident in incidents.items()}
    wrong = {
        kind: f"{pool}, truly {incidents[kind].pool}" for kind, pool in said.items() if pool != incidents[kind].pool
    }
    assert said["nothing wrong"] == "nothing"
    assert len(wrong) <= (1 - AIM) * len(said) + 1e-9, wrong


def test_the_matrix_counts_what_was_said_of_each_kind_and_the_summary_says_who_was_accused_wrongly() -> None:
    said: list[tuple[Kind, str]] = [("cold scan", "adapters"), ("cold scan", "kv"), ("nothing wrong", "demand")]
    answers = [
        Answer(kind, seed, POOLS[kind], pool, "low", "", 2, (1.0, 0.5)) for seed, (kind, pool) in enumerate(said)
    ]
    headings, scan, nothing = matrix(answers)
    assert dict(zip(headings, scan, strict=True)) == {
        **dict.fromkeys(headings, ""),
        "incident": "cold scan",
        "truly": "adapters",
        "adapters": "1",
        "kv": "1",
        "right": "1/2",
    }
    assert nothing[-1] == "0/1"
    told = summary(answers)
    assert told.startswith(
        "33% of 3 incidents told right (aim 90%: missed); nothing wrong was accused 1 times of 1 (aim 0: missed)"
    )
    assert "6 draws were no such incident. CPU for one: 1.0 s to play, 0.5 s to measure" in told
