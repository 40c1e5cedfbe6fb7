"""What a tenant does to its folder changes nothing that is served, until the operator has it read again (real engine)."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx2
import pytest

from support.gateway import GatewayProcess

from .engine import Engine, Model
from .test_gateway import PROMPTS, TENANTS, ask_directly, settings_for

OTHERS = ("a01", "a02", "a03", "a05", "a06")
"""More than the four places of the engine's host cache."""


def ask(gateway: GatewayProcess, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    headers = {"authorization": f"Bearer key-{TENANTS[0]}"}
    reply = httpx2.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=60.0, trust_env=False)
    text: str = reply.raise_for_status().json()["choices"][0]["text"]
    return text


def push_out(gateway: GatewayProcess) -> None:
    """Use so many others that the engine has dropped the adapter from its host cache and must read it from disk again."""
    for other in OTHERS:
        ask(gateway, other, PROMPTS[0])


@pytest.fixture
def gateway(engine: Engine, model: Model, tmp_path: Path) -> GatewayProcess:
    folder = tmp_path / "tenant"
    for name in ("a00", *OTHERS):
        shutil.copytree(model.adapters[name], folder / name)
    return GatewayProcess(tmp_path, settings_for((engine,), {name: folder / name for name in ("a00", *OTHERS)}))


def answers_of(engine: Engine, model: Model, name: str) -> dict[str, str]:
    """The certain part of each answer of an engine that is asked directly."""
    with httpx2.Client(base_url=engine.url, timeout=60.0, trust_env=False) as client:
        path = str(model.adapters[name])
        client.post("/v1/load_lora_adapter", json={"lora_name": "direct", "lora_path": path}).raise_for_status()
        found = {prompt: ask_directly(client, "direct", prompt).certain for prompt in PROMPTS}
        client.post("/v1/unload_lora_adapter", json={"lora_name": "direct"}).raise_for_status()
    return found


def test_overwriting_and_deleting_a_folder_changes_no_answer_and_new_weights_are_seen_when_read_again(
    gateway: GatewayProcess, engine: Engine, model: Model, tmp_path: Path
) -> None:
    old, new = answers_of(engine, model, "a00"), answers_of(engine, model, "a08")
    assert all(old[prompt] != new[prompt] for prompt in PROMPTS)
    mine = tmp_path / "tenant" / "a00"
    kept = mine / "adapter_model.safetensors"
    assert kept.stat().st_size == (model.adapters["a08"] / kept.name).stat().st_size, "the same shapes"
    with gateway.start(1):
        for prompt in PROMPTS:
            assert ask(gateway, "a00", prompt).startswith(old[prompt])
        kept.write_bytes((model.adapters["a08"] / kept.name).read_bytes())
        push_out(gateway)
        for prompt in PROMPTS:
            assert ask(gateway, "a00", prompt).startswith(old[prompt]), "overwritten in place"
        saved = tmp_path / "saved"
        mine.rename(saved)
        push_out(gateway)
        for prompt in PROMPTS:
            assert ask(gateway, "a00", prompt).startswith(old[prompt]), "deleted"
        saved.rename(mine)
        found = httpx2.post(f"{gateway.control}/api/rescan", timeout=60.0).raise_for_status().json()
        assert (found["added"], found["changed"], found["removed"], found["problems"]) == ([], ["a00"], [], [])
        for prompt in PROMPTS:
            assert ask(gateway, "a00", prompt).startswith(new[prompt]), "the same name, new weights"
        assert engine.alive()
    rows = [row for row in gateway.rows() if row["adapter"] == "a00"]
    assert len({row["digest"] for row in rows}) == 2
    assert {row["status"] for row in gateway.rows()} == {"ok"}
