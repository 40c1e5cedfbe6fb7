"""What the product relies on in vLLM 0.32, seen on the real server. A failure here names what a new version changed.

Two answers are easy to get wrong. An engine core that dies ends a running *stream* cleanly, with status 200 and
`[DONE]`: only an error event in it tells. And the API server exits within a second, so that /health is refused rather
than 503. (With VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1 it stays, and answers 503.)
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .engine import Engine, Model

PROMPTS = ("Hello, world", "The capital of France is", "def main():", "Adapters, slots and hosts.")
ENGINE_DEAD = {
    "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx2.Client]:
    with connect(engine) as client:
        yield client


def connect(engine: Engine) -> httpx2.Client:
    return httpx2.Client(base_url=engine.url, timeout=60.0, trust_env=False)


def load(client: httpx2.Client, name: str, path: Path) -> httpx2.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def unload(client: httpx2.Client, name: str) -> httpx2.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def registry(client: httpx2.Client) -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in client.get("/v1/models").json()["data"]}


def ask(client: httpx2.Client, model: str, prompt: str | list[str], tokens: int = 8, **more: Any) -> httpx2.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    return client.post("/v1/completions", json=body)


def texts(client: httpx2.Client, model: str, prompts: tuple[str, ...] = PROMPTS, tokens: int = 8) -> list[str]:
    """Return the greedy answers in the order of the prompts."""
    choices = ask(client, model, list(prompts), tokens).raise_for_status().json()["choices"]
    return [choice["text"] for choice in sorted(choices, key=lambda choice: int(choice["index"]))]


def chat(client: httpx2.Client, model: str, tokens: int = 4, **more: Any) -> httpx2.Response:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, **more}
    return client.post("/v1/chat/completions", json=body)


def events(answer: httpx2.Response) -> list[str]:
    """Return the payloads of an event stream."""
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line]


def samples(client: httpx2.Client) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return metric name -> series of (labels, value)."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_base_and_all_adapters_answer_each_prompt_differently(client: httpx2.Client, model: Model) -> None:
    said = {"base": texts(client, "base")}
    for name, path in model.adapters.items():
        load(client, name, path).raise_for_status()
        said[name] = texts(client, name)
    for i, prompt in enumerate(PROMPTS):
        by_text = {answers[i]: name for name, answers in said.items()}
        assert len(by_text) == 13, f"two models answer {prompt!r} alike: only {by_text}"
        assert all(len(text) == 8 and text.isascii() and text.isprintable() for text in by_text)


def test_adapters_answer_the_same_alone_and_in_a_mixed_batch(client: httpx2.Client, model: Model) -> None:
    names = list(model.adapters)[:5]
    for name in names:
        load(client, name, model.adapters[name]).raise_for_status()
    alone = [texts(client, name, tokens=24) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(lambda name: texts(client, name, tokens=24), names))
    assert together == alone


def test_registry_lists_base_then_adapters_with_path_and_parent(client: httpx2.Client, model: Model) -> None:
    answer = load(client, "a00", model.adapters["a00"])
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a00' added successfully.")
    assert "content-type" not in answer.headers
    entries = registry(client)
    assert list(entries) == ["base", "a00"]
    shown = [(entry["root"], entry["parent"], entry["max_model_len"]) for entry in entries.values()]
    assert shown == [(str(model.base), None, 1024), (str(model.adapters["a00"]), "base", None)]


@pytest.mark.parametrize("path_of", ["a00", "a01"])
def test_same_name_again_is_refused_whatever_its_path(client: httpx2.Client, model: Model, path_of: str) -> None:
    load(client, "a00", model.adapters["a00"]).raise_for_status()
    answer = load(client, "a00", model.adapters[path_of])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("The lora adapter 'a00' has already been loaded.")
    assert answer.json()["error"]["type"] == "InvalidUserInput"


def test_load_of_a_missing_path_is_404_and_registers_nothing(client: httpx2.Client, tmp_path: Path) -> None:
    answer = load(client, "lost", tmp_path / "lost")
    assert answer.status_code == 404
    error = answer.json()["error"]
    # The path itself may be shown as the word <path>: vLLM hides some folders from clients.
    assert error["message"].startswith("Loading lora lost failed: No adapter found for ")
    assert (error["type"], error["code"]) == ("NotFoundError", 404)
    assert list(registry(client)) == ["base"]


def test_load_over_the_maximum_rank_is_500_registers_nothing_and_leaves_the_engine_up(
    client: httpx2.Client, model: Model
) -> None:
    answer = load(client, "wide", model.too_wide)
    assert answer.status_code == 500
    assert "LoRA rank 128 is greater than max_lora_rank 64." in answer.json()["error"]["message"]
    assert list(registry(client)) == ["base"]
    assert ask(client, "base", "Hi").status_code == 200


def test_load_of_truncated_weights_is_500_and_registers_nothing(
    client: httpx2.Client, model: Model, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model.adapters["a00"], tmp_path / "cut"))
    weights = copy / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    answer = load(client, "cut", copy)
    assert answer.status_code == 500
    assert "Error while deserializing header" in answer.json()["error"]["message"]
    assert list(registry(client)) == ["base"]


def test_unloaded_name_leaves_the_registry_and_requests_for_it_are_404(client: httpx2.Client, model: Model) -> None:
    load(client, "a00", model.adapters["a00"]).raise_for_status()
    answer = unload(client, "a00")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a00' removed successfully.")
    assert list(registry(client)) == ["base"]
    for refused in (ask(client, "a00", "Hi"), ask(client, "a00", "Hi", stream=True), chat(client, "a00", stream=True)):
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert error["message"] == "The model `a00` does not exist. Valid aliases: base."
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)


@pytest.mark.parametrize("name", ["never-loaded", "base"])
def test_unload_of_what_is_no_adapter_is_404(client: httpx2.Client, name: str) -> None:
    answer = unload(client, name)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"The lora adapter '{name}' cannot be found."


def test_metrics_tell_process_start_queue_kv_and_cache_shape(client: httpx2.Client) -> None:
    found = samples(client)
    ((_, started),) = found["process_start_time_seconds"]
    assert 0 < time.time() - started < 3600
    labels = {"engine": "0", "model_name": "base"}
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert found[gauge] == [(labels, 0.0)], gauge
    ((cache, _),) = found["vllm:cache_config_info"]
    assert int(cache["num_gpu_blocks"]) * int(cache["block_size"]) == int(cache["kv_cache_size_tokens"]) == 262_144
    assert int(cache["kv_cache_memory_bytes"]) == 2**30


def test_lora_requests_info_lists_a_running_adapter_under_both_labels_and_then_an_idle_series(
    client: httpx2.Client, model: Model
) -> None:
    load(client, "a00", model.adapters["a00"]).raise_for_status()
    ask(client, "a00", "Hi", tokens=4).raise_for_status()
    series = {
        (labels["running_lora_adapters"], labels["waiting_lora_adapters"]): value
        for labels, value in samples(client)["vllm:lora_requests_info"]
        if labels["max_lora"] == "2"
    }
    assert series[("a00", "a00")] == pytest.approx(time.time(), abs=60)
    assert max(series, key=lambda names: series[names]) == ("", "")


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_stream_ends_with_a_usage_chunk_without_choices_only_when_asked(client: httpx2.Client, kind: str) -> None:
    def stream(**more: Any) -> list[str]:
        answer = (
            chat(client, "base", stream=True, **more)
            if kind == "chat"
            else ask(client, "base", "Hi", 4, stream=True, **more)
        )
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events(answer)

    plain, counted = stream(), stream(stream_options={"include_usage": True})
    assert plain[-1] == counted[-1] == "[DONE]"
    assert not any('"usage"' in event for event in plain)
    usage = json.loads(counted[-2])
    prompt_tokens = 5 if kind == "chat" else 2
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + 4,
        "completion_tokens": 4,
    }
    tokens = [json.loads(event) for event in counted[:-2]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in tokens][-2:] == [None, "length"]
    assert len(tokens) == (5 if kind == "chat" else 4)  # a chat opens with a chunk that only names the role


def test_logprobs_of_a_stream_come_with_each_token(client: httpx2.Client) -> None:
    chunks = events(chat(client, "base", stream=True, logprobs=True, top_logprobs=2))[1:-1]
    assert len(chunks) == 4
    for chunk in chunks:
        choice = json.loads(chunk)["choices"][0]
        (token,) = choice["logprobs"]["content"]
        assert token["token"] == choice["delta"]["content"] == token["top_logprobs"][0]["token"]
        assert token["bytes"] == list(token["token"].encode())
        assert len(token["top_logprobs"]) == 2


def test_request_id_header_becomes_the_answers_id_and_is_not_echoed(client: httpx2.Client) -> None:
    body = {"model": "base", "prompt": ["Hi", "Ho"], "max_tokens": 1, "temperature": 0}
    answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": "K-124"})
    assert answer.json()["id"] == "cmpl-K-124"
    assert len(answer.json()["choices"]) == 2
    assert "x-request-id" not in answer.headers


def test_idle_connection_is_closed_by_the_server_after_five_seconds(engine: Engine) -> None:
    with socket.create_connection(("127.0.0.1", engine.port), timeout=60) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: engine\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        answered = time.monotonic()
        assert idle.recv(1) == b""
        assert 4.5 < time.monotonic() - answered < 30.0


def read_stream(engine: Engine, model: str, opened: list[str]) -> list[str]:
    """Read an 800-token stream to its end; `opened` gets each event as it comes, so that others can wait for it."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 800, "temperature": 0, "stream": True}
    with connect(engine) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        opened.extend(line.removeprefix("data: ") for line in answer.iter_lines() if line)
    return opened


def wait_until_streaming(opened: list[str]) -> None:
    deadline = time.monotonic() + 30
    while len(opened) < 3:
        assert time.monotonic() < deadline, "no stream within 30 s"
        time.sleep(0.02)


def evict_and_delete_the_first(client: httpx2.Client, model: Model, folder: Path) -> None:
    """Register and use six adapters, two more than the host cache holds, then take the files of the first away."""
    for name in list(model.adapters)[:6]:
        load(client, name, Path(shutil.copytree(model.adapters[name], folder / name))).raise_for_status()
        ask(client, name, "Hi", tokens=1).raise_for_status()
    shutil.rmtree(folder / "a00")


def test_vanished_files_of_a_registered_adapter_end_the_engine_and_streams_end_cleanly_with_an_error_event(
    engines: tuple[Engine, Engine], model: Model, tmp_path: Path
) -> None:
    victim, opened = engines[1], list[str]()
    victim.forget_adapters()
    try:
        with connect(victim) as client, ThreadPoolExecutor(2) as pool:
            evict_and_delete_the_first(client, model, tmp_path)
            bystander = pool.submit(read_stream, victim, "a05", opened)
            unstreamed = pool.submit(ask, client, "base", "Hello", 800)
            wait_until_streaming(opened)
            with connect(victim) as another:
                killer = ask(another, "a00", "Hi")
            for answer in (killer, unstreamed.result()):
                assert (answer.status_code, answer.json()) == (500, {"error": ENGINE_DEAD})
            *chunks, error, done = bystander.result()
            assert len(chunks) < 800
            assert json.loads(chunks[-1])["choices"][0]["finish_reason"] is None
            assert (json.loads(error), done) == ({"error": ENGINE_DEAD}, "[DONE]")
        assert victim.process.wait(60) == 0
        with pytest.raises(httpx2.ConnectError), connect(victim) as client:
            client.get("/health")
        assert "EngineDeadError" in victim.log_tail(2000)
    finally:
        victim.restart()


def test_killed_engine_breaks_its_streams_and_comes_back_on_the_same_port_with_an_empty_registry(
    engines: tuple[Engine, Engine], model: Model
) -> None:
    victim, opened = engines[1], list[str]()
    try:
        with connect(victim) as client, ThreadPoolExecutor(1) as pool:
            load(client, "survivor", model.adapters["a00"]).raise_for_status()
            stream = pool.submit(read_stream, victim, "survivor", opened)
            wait_until_streaming(opened)
            before = samples(client)["process_start_time_seconds"][0][1]
            victim.kill9()
            with pytest.raises(httpx2.RemoteProtocolError):
                stream.result()
        assert not victim.alive()
    finally:
        victim.restart()
    with connect(victim) as client:
        assert list(registry(client)) == ["base"]
        assert samples(client)["process_start_time_seconds"][0][1] > before
