"""The profile file: what is written is read back, and anything else is refused in one line that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loraledger.twin.calibrated import Calibrated, Term, decode, encode
from loraledger.twin.profile import TwinProfile

PROFILE = Calibrated(
    name="one",
    engine="vllm",
    engine_version="0.32.0",
    model="base",
    device="two cores",
    date="2026-11-29",
    source="loraledger calibrate",
    profile=TwinProfile(decode_table=((1, 5, 0), (256, 9, 1)), prefill_table=((8, 3), (2048, 400))),
    block_bytes=524_288,
    boundary_ps=7,
    terms=(Term(name="decode", points=4, error_mean=0.01, error_worst=0.02),),
    notes=("a note",),
)


def changed(**changes: Any) -> bytes:
    return json.dumps(json.loads(encode(PROFILE)) | changes).encode()


def test_a_written_profile_reads_back_equal_and_is_text_for_people() -> None:
    data = encode(PROFILE)
    assert decode(data) == PROFILE
    assert encode(decode(data)) == data
    assert data.count(b"\n") > 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile": {"step_per_kv_token_ps": -1}}, "profile: step_per_kv_token_ps is -1"),
        ({"profile": {"decode_table": [[1, 5, -2], [256, 9, 1]]}}, "slope of 1 sequences is -2"),
        ({"profile": {"slots": 0}}, "slots is 0"),
        ({"profile": {"prefill_table": [[8, 9], [2048, 3]]}}, "prefill_table: negative slope"),
        ({"profile": {"step_base_ps": 10**17}}, "profile.step_base_ps"),
        ({"profile": {"step_base_ps": 10**16}}, "profile.step_base_ps is 10000000000000000: that comes to 10,000 s"),
        ({"profile": {"step_per_seq_ps": 10**13}}, "profile.step_per_seq_ps is 10000000000000: that comes to 2,560 s"),
        (
            {"profile": {"step_per_kv_token_ps": 10**10}},
            "profile.step_per_kv_token_ps is 10000000000: that comes to 3,932 s",
        ),
        ({"profile": {"prefill_per_token_ps": 10**12}}, "profile.prefill_per_token_ps"),
        (
            {"profile": {"prefill_offset_ps": -(10**15)}},
            "profile.prefill_offset_ps is -1000000000000000: that comes to 1,000 s",
        ),
        ({"profile": {"rank_step_ps": 10**13, "rank_cost": "max"}}, "profile.rank_step_ps"),
        ({"profile": {"activation_per_rank_ps": 10**14}}, "profile.activation_per_rank_ps"),
        (
            {"profile": {"decode_table": [[1, 10**15, 0], [256, 10**15, 0]]}},
            "profile.decode_table: intercept of 1 sequences",
        ),
        ({"profile": {"decode_table": [[1, 9, 0], [256, 9, 10**10]]}}, "profile.decode_table: slope of 256 sequences"),
        ({"profile": {"mixed_table": [[8, 3], [2048, 10**15]]}}, "profile.mixed_table: time of 2048 tokens"),
        ({"profile": {"load_bytes_per_s": 99_999}}, "profile.load_bytes_per_s is 99999: must be at least 100000"),
        ({"boundary_per_seq_ps": 10**13}, "boundary_per_seq_ps is 10000000000000: that comes to 2,560 s"),
        ({"load_call_ps": 601 * 10**12}, "load_call_ps is 601000000000000: that comes to 601 s"),
        ({"terms": [{"name": "decode", "points": -1}]}, "terms[0]: points is -1: must not be negative"),
        ({"terms": [{"name": "decode", "points": 1, "error_mean": -0.1}]}, "error_mean is -0.1: must not be negative"),
        (
            {"terms": [{"name": "decode", "points": 1, "error_worst": -0.1}]},
            "error_worst is -0.1: must not be negative",
        ),
        ({"terms": [{"name": "decode", "points": 1, "worst": 0.1}]}, "terms[0]: Object contains unknown field `worst`"),
        ({"boundary_ps": -1}, "boundary_ps is -1"),
        ({"block_bytes": 0}, "block_bytes is 0"),
        ({"loraledger_profile": 2}, "loraledger_profile"),
        ({"date": 5}, "date"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_bad_field_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        decode(changed(**changes))
    assert words in str(caught.value)


def test_what_a_very_slow_engine_takes_is_believed() -> None:
    slow = {"step_base_ps": 599 * 10**12, "prefill_per_token_ps": 290 * 10**9, "load_bytes_per_s": 100_000}
    assert decode(changed(profile=slow)).profile.step_base_ps == 599 * 10**12


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'"text"', b"null", b"{}"])
def test_what_is_no_profile_is_refused_with_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(data)
