"""What a profile file may not hold: keys that are there twice, keys that mean nothing."""

import pytest

from loraledger.errors import InputFileError
from loraledger.replay.scenarios.profiles import DEFAULT, parse_profile, read_profile
from loraledger.twin.calibrated import encode

TEXT = encode(read_profile(DEFAULT))


def with_text(old: str, new: str) -> bytes:
    assert TEXT.count(old.encode()) == 1
    return TEXT.replace(old.encode(), new.encode())


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"slots": 8,', '"slots": 8, "slots": 9,', "slots is given twice: keep one"),
        ('"loraledger_profile": 1,', '"loraledger_profile": 1, "name": "other",', "name is given twice: keep one"),
        ('"order": "fifo"', '"order": "lifo", "order": "fifo"', "order is given twice: keep one"),
        ('"name": "decode",', '"name": "decode", "name": "decode",', "name is given twice: keep one"),
        ('"slots": 8,', '"slots": 8, "a\\nb": 1, "a\\nb": 2,', r"'a\\nb' is given twice: keep one"),
        ('"slots": 8,', '"slots": 8, "a\\nb": 1,', r"profile\.'a\\nb': no such field"),
        ('"order": "fifo"', '"order": "fifo", "odrer": "fifo"', r"profile\.unified\.odrer: no such field; did you mean 'order'"),
        ('"name": "decode",', '"name": "decode", "misses": 1,', r"terms\[0\]: Object contains unknown field `misses`"),
        ('"step_base_ps": 6320000000', '"step_base_ps": 10000000000000000', r"profile\.step_base_ps is 10000000000000000"),
    ],
)  # fmt: skip
def test_a_key_that_is_there_twice_or_means_nothing_is_refused_by_name(old: str, new: str, reason: str) -> None:
    with pytest.raises(InputFileError, match=rf"^profile x: {reason}[^\n]*$"):
        parse_profile("x", with_text(old, new))


def test_equal_keys_of_different_objects_are_no_duplicates() -> None:
    assert parse_profile("x", TEXT) == read_profile(DEFAULT)
