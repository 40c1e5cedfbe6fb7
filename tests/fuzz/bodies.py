"""What the look into a body promises, with the standard library's ``json`` as the second reader: it is the one inside vLLM.

Of what is taken, both read the same model and the same stream, and the engine gets the same body but for what is rewritten or taken
out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from loraledger.errors import BadRequestError
from loraledger.gateway.paths import FORMS, Form
from loraledger.gateway.peek import REFUSED, STEERING, Peek
from loraledger.gateway.peek import peek as look

ENGINE_NAME: Final = "alpaca@3fa9c1d20b7e"


def peek(data: bytes, _: Path) -> Peek | None:
    """Look into ``data`` as the body of a request to each path; returns what chat made of it, if it was taken."""
    found = {path: _taken(data, form) for path, form in FORMS.items()}
    for path, looked in found.items():
        if looked is None:
            continue
        form, fields = FORMS[path], _read(data)
        assert isinstance(fields, dict)
        assert fields["model"] == looked.model
        assert looked.stream == (form.streams and fields.get("stream") is True)
        assert looked.max_tokens is None or looked.max_tokens >= 0
        raw = looked.rewrite(ENGINE_NAME)
        names = [name for name, _ in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items()]
        assert [name for name, _ in json.loads(raw, object_pairs_hook=_Pairs, parse_int=str)] == names, (
            "one comes twice"
        )
        assert _plain(_read(raw)) == _plain(_forwarded(fields, form)), path
    return found[b"/v1/chat/completions"]


class _Pairs(list[tuple[str, Any]]):
    """An object as it was written, names that come twice included."""


def _taken(data: bytes, form: Form) -> Peek | None:
    try:
        return look(data, form)
    except BadRequestError as error:
        message = error.message
    assert message.isprintable(), message
    return None


def _read(raw: bytes) -> Any:
    """What ``json`` reads, each number as it was written: none is too long, and 1.0 is not 1."""
    return json.loads(raw, parse_int=lambda digits: {"number": digits}, parse_float=lambda digits: {"number": digits})


def _plain(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True)


def _forwarded(fields: dict[str, Any], form: Form) -> dict[str, Any]:
    """What is promised to go to the engine instead of ``fields``."""
    dropped = {*STEERING, *REFUSED, *form.unset}
    kept = {name: value for name, value in fields.items() if name not in dropped and not name.startswith("lora")}
    kept |= {name: json.loads(bytes(value)) for name, value in form.fixed.items()}
    kept["model"] = ENGINE_NAME
    options = kept.get("stream_options")
    if (
        form.stream_options
        and kept.get("stream") is True
        and isinstance(options, dict | None | bool)
        and options is not True
    ):
        options = dict(options or {})
        if options.get("include_usage") is not True:
            options.pop("continuous_usage_stats", None)
            kept["stream_options"] = {**options, "include_usage": True}
    return kept
