"""Request bodies as a clever client would write them, drawn from a seed: most are JSON, none is written the usual way."""

from __future__ import annotations

import json
import random
from typing import Any, Final

NAMES: Final = ("Model", "model ", "model\0", "mоdel", "", "😀", "user", "stream", "future", *["model"] * 5)
"""The fourth has a Cyrillic letter."""
MODELS: Final = ("mine", "theirs", "base", "mine ", "Mine", "", "mine\0", "mine/../theirs", "ｍine", "😀", "lora_path")
STEERS: Final = ("lora_path", "lora_name", "priority", "request_id", "kv_transfer_params", "vllm_xargs", "watermarking")
NUMBERS: Final = ("0", "-0", "7", "-1", "1.0", "1e3", "1E+2", "2.50e-1", "1e400", "-0.0", "9" * 30, "0.1" + "0" * 60)
BLANKS: Final = ("", "", "", " ", "\t", "\n", "\r\n", "   ")
DAMAGE: Final = (
    *(b"\x00", b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xef\xbb\xbf", b"\xc2\xa0", b"\x0b", b"\x01", b"\\", b"\\u00"),
    *(b"\\ud800", b'"', b"{", b"}", b"[", b"]", b",", b":", b"NaN", b"Infinity", b"//", b"01", b"+1", b"'"),
    *(b'"model":"theirs",', b',"model":"theirs"', b'{"model":"theirs"}'),
)


def string(rng: random.Random, text: str) -> str:
    """``text`` as a JSON string, each character plain or escaped in one of the ways that there are."""
    return '"' + "".join(_character(rng, character) for character in text) + '"'


def body(seed: int, fixed: dict[str, Any]) -> bytes:
    """A body with ``fixed`` and a model, and with other fields, twice or more, in any order."""
    rng = random.Random(seed)
    fields = [(name, json.dumps(value)) for name, value in fixed.items()]
    fields.append(("model", string(rng, rng.choice(MODELS))))
    for _ in range(rng.randrange(6)):
        name = rng.choice(NAMES if rng.random() < 0.7 else STEERS)
        fields.append((name, string(rng, rng.choice(MODELS)) if name == "model" else _value(rng, 3)))
    rng.shuffle(fields)
    gap = rng.choice(BLANKS)
    text = ",".join(f"{gap}{string(rng, name)}{rng.choice(BLANKS)}:{gap}{value}{gap}" for name, value in fields)
    data = f"{gap}{{{text}}}{gap}".encode("utf-8", "surrogatepass")
    return _damaged(rng, data) if rng.random() < 0.4 else data


def _character(rng: random.Random, character: str) -> str:
    if rng.random() < 0.2 or character < " " or character in '"\\':
        units = character.encode("utf-16-be")
        pairs = [units[at : at + 2].hex() for at in range(0, len(units), 2)]
        return "".join("\\u" + (pair.upper() if rng.random() < 0.5 else pair) for pair in pairs)
    return "\\/" if character == "/" and rng.random() < 0.5 else character


def _value(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(7 if depth else 4)
    if kind == 0:
        return rng.choice(("true", "false", "null"))
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind <= 3:
        return string(rng, rng.choice(MODELS))
    if kind == 4:
        deep = rng.choice((1, 5, 60))
        return "[" * deep + _value(rng, 0) + "]" * deep
    inner = [_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 5:
        return "[" + ",".join(inner) + "]"
    return "{" + ",".join(f"{string(rng, rng.choice(NAMES))}:{value}" for value in inner) + "}"


def _damaged(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    how = rng.randrange(4)
    if how == 0:
        return data[:at] + data[at + 1 :]
    if how == 1:
        return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig")))
    if how == 2:
        return data[:at] + data[rng.randrange(at + 1) : at] + data[at:]
    return data[:at] + rng.choice(DAMAGE) + data[at:]
