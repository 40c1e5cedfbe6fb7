"""The gateway and vLLM read the same out of a body, on every path, however cleverly it is written."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loraledger.errors import BadRequestError
from loraledger.gateway.paths import FORMS
from loraledger.gateway.peek import REFUSED, STEERING, peek
from support import bodies

from .engine import ENVIRONMENT, PYTHON, require_environment

COUNT = 600
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
FIXED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 3},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
Read = dict[str, str] | None


@dataclass(frozen=True)
class Pair:
    """A body that the gateway takes: the model it found, and what vLLM reads in the client's body and in the gateway's."""

    model: str
    theirs: Read
    forwarded: Read


def read_by_vllm(written: list[tuple[str, bytes]]) -> list[Read]:
    lines = "".join(json.dumps([path, base64.b64encode(body).decode()]) + "\n" for path, body in written)
    script = Path(__file__).with_name("read_bodies.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, "-P", script], input=lines, capture_output=True, text=True, check=False, env={**env, **ENVIRONMENT}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # vLLM says things on stdout while it is imported.
    return [json.loads(line) for line in done.stdout.splitlines()[-len(written) :]]


@pytest.fixture(scope="module")
def pairs() -> dict[str, list[Pair]]:
    """By path. One process reads them all, because it takes 10 s to import vLLM."""
    require_environment()
    looked: list[tuple[str, bytes, str, bytes]] = []
    for path, fixed in FIXED.items():
        for seed in range(COUNT):
            body = bodies.body(seed, fixed)
            with contextlib.suppress(BadRequestError):
                peeked = peek(body, FORMS[path.encode()])
                looked.append((path, body, peeked.model, peeked.rewrite("engine")))
    read = read_by_vllm([(path, body) for path, body, _, _ in looked] + [(path, sent) for path, _, _, sent in looked])
    found: dict[str, list[Pair]] = {path: [] for path in FIXED}
    for (path, _, model, _), theirs, forwarded in zip(looked, read[: len(looked)], read[len(looked) :], strict=True):
        found[path].append(Pair(model, theirs, forwarded))
    return found


def test_every_path_is_compared() -> None:
    assert {form.path for form in FORMS.values()} == set(FIXED)


@pytest.mark.parametrize("path", FIXED)
def test_vllm_reads_the_model_that_was_routed_and_all_else_as_it_was(path: str, pairs: dict[str, list[Pair]]) -> None:
    form = FORMS[path.encode()]
    dropped = {*STEERING, *REFUSED, *form.unset, *form.fixed, "model", "stream_options"}
    for pair in pairs[path]:
        assert pair.forwarded is None or pair.forwarded["model"] == "'engine'"
        if pair.theirs is not None:
            assert pair.theirs["model"] == repr(pair.model)
            assert pair.forwarded is not None
            kept = {name: value for name, value in pair.theirs.items() if not name.startswith("lora")}
            assert without(dropped, pair.forwarded) == without(dropped, kept)
    assert sum(pair.theirs is not None for pair in pairs[path]) > COUNT / 10


def without(names: set[str], read: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in read.items() if name not in names}
