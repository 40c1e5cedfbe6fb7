import asyncio
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, AuthenticationError, NotFoundError

from engines.emulated import adapter, client, complete, data, emulator, load, metrics
from loraledger.engines.emulator import EmulatorServer, EmulatorSettings
from loraledger.twin.profile import PS_PER_S, TwinProfile

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}


# --- answers


async def test_openai_client_streams_and_reads_the_same_answer(tmp_path: Path) -> None:
    async with emulator() as server, client(server) as http:
        await load(http, "support", adapter(tmp_path, "support"))
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as openai:
            whole = await openai.chat.completions.create(
                model="support", messages=[{"role": "user", "content": "hi"}], max_tokens=9
            )
            stream = await openai.chat.completions.create(
                model="support",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=9,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
    text = whole.choices[0].message.content
    assert text
    assert len(text.split()) == 9
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len("user: hi\n") // 4 + 1, 9)


async def test_chat_stream_has_the_frames_of_the_real_server() -> None:
    async with emulator() as server, client(server) as http:
        body = {**CHAT, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-request-id": "K-1"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    role, *tokens, usage, done = data(answer.text)
    assert all(frame["id"] == "chatcmpl-K-1" and frame["model"] == "base" for frame in (role, *tokens, usage))
    assert role["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [frame["choices"][0]["finish_reason"] for frame in tokens] == [None, None, "length"]
    assert all(set(frame["choices"][0]["delta"]) == {"content"} for frame in tokens)
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}
    assert done == "[DONE]"


async def test_completion_stream_without_usage_names_none() -> None:
    async with emulator() as server, client(server) as http:
        answer = await complete(http, max_tokens=2, stream=True)
    first, last, done = data(answer.text)
    assert (first["object"], first["choices"][0]["finish_reason"]) == ("text_completion", None)
    assert last["choices"][0]["finish_reason"] == "length"
    assert "usage" not in answer.text
    assert done == "[DONE]"


async def test_sixteen_tokens_unless_the_request_says() -> None:
    async with emulator() as server, client(server) as http:
        default = (await http.post("/v1/chat/completions", json=CHAT)).json()
        newer = (await http.post("/v1/chat/completions", json={**CHAT, "max_completion_tokens": 5})).json()
    assert default["usage"]["completion_tokens"] == 16
    assert newer["usage"]["completion_tokens"] == 5


async def test_adapters_differ_and_replicas_agree(tmp_path: Path) -> None:
    def name(adapter: str, digest: str, rest: str = "") -> str:
        return f"{adapter}@{digest * 12}{rest}"

    paths = {key: adapter(tmp_path, key) for key in ("a", "b")}
    texts: list[str] = []
    async with emulator() as one, emulator() as two, client(one) as first, client(two) as second:
        for http, model, path in (
            (first, name("a", "1"), paths["a"]),
            (second, name("a", "1", "~2"), paths["a"]),
            (first, name("a", "2"), paths["a"]),
            (first, name("b", "1"), paths["b"]),
        ):
            assert (await load(http, model, path)).status_code == 200
            texts.append((await complete(http, model)).json()["choices"][0]["text"])
        texts.append((await complete(first)).json()["choices"][0]["text"])
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 101}, "max_tokens"),
        ({"prompt": "x" * 400}, "input_tokens"),
        ({"n": 2}, "n"),
        ({"prompt": ["two", "prompts"]}, "prompt"),
        ({"prompt": 7}, "body"),
    ],
)
async def test_bad_request_names_its_field(change: dict[str, Any], param: str) -> None:
    async with emulator(max_model_len=100) as server, client(server) as http:
        body = {"model": "base", "prompt": "hello", **change}
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_output_is_cut_to_the_context_length() -> None:
    async with emulator(max_model_len=20) as server, client(server) as http:
        usage = (await complete(http, max_tokens=20)).json()["usage"]
    assert usage["total_tokens"] == 20


async def test_token_ids_count_as_tokens() -> None:
    async with emulator() as server, client(server) as http:
        answer = await http.post("/v1/completions", json={"model": "base", "prompt": [5, 6, 7]})
    assert answer.json()["usage"]["prompt_tokens"] == 3


# --- registry


async def test_load_answers_in_plain_words_and_lists_the_adapter(tmp_path: Path) -> None:
    path = adapter(tmp_path, "x")
    async with emulator() as server, client(server) as http:
        answer = await load(http, "x", path)
        listed = (await http.get("/v1/models")).json()["data"]
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'x' added successfully.")
    assert "content-type" not in answer.headers
    shown = [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in listed]
    assert shown == [("base", "base", None, 8192), ("x", path, "base", None)]


async def test_refused_loads_use_the_real_words(tmp_path: Path) -> None:
    good = adapter(tmp_path, "good")
    bare = tmp_path / "bare"
    bare.mkdir()
    adapter(tmp_path, "hollow")
    (tmp_path / "hollow" / "adapter_model.safetensors").unlink()
    async with emulator() as server, client(server) as http:
        await load(http, "good", good)
        answers = {
            "duplicate": await load(http, "good", good),
            "base": await load(http, "base", good),
            "empty": await load(http, "", good),
            "missing": await load(http, "m", str(tmp_path / "nope")),
            "no config": await load(http, "m", str(bare)),
            "no weights": await load(http, "m", str(tmp_path / "hollow")),
            "rank": await load(http, "m", adapter(tmp_path, "big", rank=65)),
            "no path": await http.post("/v1/load_lora_adapter", json={"lora_name": "m"}),
        }
        listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
    statuses = {name: answer.status_code for name, answer in answers.items()}
    assert statuses == {
        "duplicate": 400,
        "base": 400,
        "empty": 400,
        "missing": 404,
        "no config": 404,
        "no weights": 500,
        "rank": 500,
        "no path": 400,
    }
    assert "has already been loaded" in answers["duplicate"].json()["error"]["message"]
    assert "LoRA rank 65 is greater than max_lora_rank 64." in answers["rank"].json()["error"]["message"]
    assert "No adapter found for" in answers["missing"].json()["error"]["message"]
    assert listed == ["base", "good"]


async def test_unloaded_name_is_unknown_again(tmp_path: Path) -> None:
    path = adapter(tmp_path, "x")
    async with emulator() as server, client(server) as http:
        await load(http, "x", path)
        answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
        again = await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
        asked = await complete(http, "x")
        reloaded = await load(http, "x", path)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
    assert (again.status_code, again.json()["error"]["message"]) == (404, "The lora adapter 'x' cannot be found.")
    assert asked.status_code == 404
    assert reloaded.status_code == 200


async def test_two_loads_of_one_name_at_once_are_one(tmp_path: Path) -> None:
    path = adapter(tmp_path, "x")
    async with emulator() as server, client(server) as http:
        answers = await asyncio.gather(load(http, "x", path), load(http, "x", path))
    assert sorted(answer.status_code for answer in answers) == [200, 400]


async def test_unknown_model_is_a_404_and_never_a_stream() -> None:
    async with emulator() as server, client(server) as http:
        plain, streamed = await complete(http, "nobody"), await complete(http, "nobody", stream=True)
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as openai:
            with pytest.raises(NotFoundError):
                await openai.completions.create(model="nobody", prompt="x")
    expected = {
        "message": "The model `nobody` does not exist. Valid aliases: base.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert (plain.status_code, plain.json()["error"]) == (404, expected)
    assert (streamed.status_code, streamed.json()["error"]) == (404, expected)


async def test_without_runtime_updating_there_is_no_such_route(tmp_path: Path) -> None:
    async with emulator(runtime_updating=False) as server, client(server) as http:
        answer = await load(http, "x", adapter(tmp_path, "x"))
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


async def test_key_guards_v1_and_nothing_else() -> None:
    async with emulator(api_key="s3cret") as server, client(server) as http:
        refused = [await complete(http), await http.get("/v1/models", headers={"authorization": "Bearer wrong"})]
        open_paths = [(await http.get(path)).status_code for path in ("/health", "/metrics", "/version")]
        allowed = await http.get("/v1/models", headers={"authorization": "Bearer s3cret"})
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as openai:
            with pytest.raises(AuthenticationError):
                await openai.models.list()
    assert [(answer.status_code, answer.json()) for answer in refused] == [(401, {"error": "Unauthorized"})] * 2
    assert open_paths == [200, 200, 200]
    assert allowed.status_code == 200


# --- time


async def busy(http: httpx2.AsyncClient, running: int, generated: int = 1) -> None:
    """Wait until so many requests run, and so many tokens were generated since the start."""
    async with asyncio.timeout(20):
        while True:
            shown = await metrics(http)
            tokens = shown["vllm:generation_tokens_total"][0][1]
            if shown["vllm:num_requests_running"][0][1] == running and tokens >= generated:
                return
            await asyncio.sleep(0.01)


async def test_speed_divides_the_wall_clock() -> None:
    async def wall(speed: float) -> float:
        async with emulator(speed=speed) as server, client(server) as http:
            began = time.monotonic()
            await complete(http, max_tokens=300)
            return time.monotonic() - began

    slow = await wall(1.0)
    assert slow > 300 * 0.00632
    assert min([await wall(100.0) for _ in range(3)]) < slow / 2


async def test_load_stalls_a_running_stream(tmp_path: Path) -> None:
    async with emulator(speed=1.0, load_delay_s=2.0) as server, client(server) as http:
        arrivals: list[float] = []

        async def listen() -> None:
            body = {**CHAT, "max_tokens": 300, "stream": True}
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    arrivals.append(time.monotonic())  # noqa: PERF401 - looked at meanwhile

        listening = asyncio.create_task(listen())
        async with asyncio.timeout(20):
            while len(arrivals) < 10:
                await asyncio.sleep(0.01)
        assert (await load(http, "x", adapter(tmp_path, "x"))).status_code == 200
        await listening
    gaps = sorted(late - early for early, late in pairwise(arrivals))
    assert gaps[-1] > 1.5, "the load"
    assert gaps[-2] < 1.5, "nothing else"


# --- metrics


async def test_metrics_carry_the_names_and_counts_of_the_engine() -> None:
    began = time.time()
    async with emulator() as server, client(server) as http:
        fresh = await metrics(http)
        await complete(http, max_tokens=4)
        used = await metrics(http)
    labels = {"engine": "0", "model_name": "base"}
    assert fresh["vllm:generation_tokens_total"] == [(labels, 0.0)]
    assert used["vllm:generation_tokens_total"] == [(labels, 4.0)]
    assert used["vllm:prompt_tokens_total"] == [(labels, float(len("once upon a time") // 4 + 1))]
    assert ({**labels, "finished_reason": "length"}, 1.0) in used["vllm:request_success_total"]
    assert used["vllm:num_preemptions_total"] == [(labels, 0.0)]
    assert used["vllm:num_requests_running"] == used["vllm:num_requests_waiting"] == [(labels, 0.0)]
    assert used["vllm:kv_cache_usage_perc"] == [(labels, 0.0)]
    info = used["vllm:cache_config_info"][0][0]
    assert (info["num_gpu_blocks"], info["block_size"], info["kv_cache_size_tokens"]) == ("24576", "16", "393216")
    assert abs(used["process_start_time_seconds"][0][1] - began) < 60


async def test_adapter_family_keeps_every_combination_it_ever_had(tmp_path: Path) -> None:
    name = "vllm:lora_requests_info"
    async with emulator(speed=1.0) as server, client(server) as http:
        await load(http, "x", adapter(tmp_path, "x"))
        await load(http, "y", adapter(tmp_path, "y"))
        assert name not in await metrics(http)
        long = asyncio.create_task(complete(http, "x", max_tokens=450))
        await busy(http, 1)
        await complete(http, "y", max_tokens=3)
        await long
        series = (await metrics(http))[name]
    assert [labels["running_lora_adapters"] for labels, _ in series] == ["x", "x,y", ""]
    assert all(labels["running_lora_adapters"] == labels["waiting_lora_adapters"] for labels, _ in series)
    assert {labels["max_lora"] for labels, _ in series} == {"2"}
    assert max(series, key=lambda item: item[1])[0]["running_lora_adapters"] == ""


async def test_busy_engine_shows_running_waiting_and_blocks() -> None:
    profile = TwinProfile(max_seqs=1)
    async with emulator(profile=profile, speed=1.0) as server, client(server) as http:
        asks = [asyncio.create_task(complete(http, max_tokens=8000)) for _ in range(2)]
        async with asyncio.timeout(20):
            while (shown := await metrics(http))["vllm:num_requests_waiting"][0][1] != 1:
                await asyncio.sleep(0.01)
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
    assert shown["vllm:num_requests_running"][0][1] == 1
    assert shown["vllm:kv_cache_usage_perc"][0][1] > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_is_cancelled(stream: bool) -> None:
    async with emulator(speed=1.0) as server, client(server) as http:
        body = {**CHAT, "max_tokens": 8000, "stream": stream}
        asked = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await busy(http, 1)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(20):
            while (await metrics(http))["vllm:num_requests_running"][0][1] > 0:
                await asyncio.sleep(0.01)
        shown = await metrics(http)
    assert shown["vllm:kv_cache_usage_perc"][0][1] == 0
    assert all(value == 0 for _, value in shown["vllm:request_success_total"])


# --- death


async def doomed(http: httpx2.AsyncClient, folder: Path) -> None:
    """Registers x and y where the host holds one, and removes the files of x, which is no longer there."""
    for name in ("x", "y"):
        assert (await load(http, name, adapter(folder, name))).status_code == 200
    (folder / "x" / "adapter_config.json").unlink()


async def test_vanished_files_end_the_engine_for_everyone(tmp_path: Path) -> None:
    async with emulator(slots=1, host_entries=1, speed=5.0) as server, client(server) as http:
        await doomed(http, tmp_path)
        streamed = asyncio.create_task(complete(http, max_tokens=5000, stream=True))
        waiting = asyncio.create_task(complete(http, max_tokens=5000))
        await busy(http, 2, generated=100)
        killer = await complete(http, "x")
        later = await complete(http)
        health, listed, frozen = await http.get("/health"), await http.get("/v1/models"), await metrics(http)
        refused = await load(http, "z", adapter(tmp_path, "z"))
        bystander, cut = await waiting, data((await streamed).text)
    dead = {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    for answer in (killer, bystander, later, refused):
        assert (answer.status_code, answer.json()) == (500, {"error": dead})
    assert len(cut) > 2
    assert cut[-2:] == [{"error": dead}, "[DONE]"]
    assert all(frame["choices"][0]["finish_reason"] is None for frame in cut[:-2])
    assert (health.status_code, listed.status_code) == (503, 200)
    assert frozen["vllm:num_requests_running"][0][1] == 2


async def test_dead_engine_can_close_its_port(tmp_path: Path) -> None:
    async with emulator(slots=1, host_entries=1, keep_alive_on_death=False) as server, client(server) as http:
        await doomed(http, tmp_path)
        assert (await complete(http, "x")).status_code == 500
        async with asyncio.timeout(20):
            await server.closed()
        with pytest.raises(httpx2.ConnectError):
            await http.get("/health")


async def test_killed_emulator_breaks_its_streams_and_refuses() -> None:
    async with emulator(speed=1.0) as server, client(server) as http:
        body = {**CHAT, "max_tokens": 500, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            server.kill()
            with pytest.raises(httpx2.RemoteProtocolError):
                _ = [line async for line in lines]
        with pytest.raises(httpx2.ConnectError):
            await http.get("/health")


async def test_new_engine_on_the_same_port_has_another_start_and_no_adapters(tmp_path: Path) -> None:
    async with emulator() as server, client(server) as http:
        await load(http, "x", adapter(tmp_path, "x"))
        old = (await metrics(http))["process_start_time_seconds"][0][1]
        port = int(server.url.rpartition(":")[2])
    async with emulator(port=port) as server, client(server) as http:
        new = (await metrics(http))["process_start_time_seconds"][0][1]
        listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
    assert new > old
    assert listed == ["base"]


async def test_leaving_the_block_ends_open_streams() -> None:
    async with emulator(speed=1.0) as server, client(server) as http:
        asked = asyncio.create_task(complete(http, max_tokens=8000, stream=True))
        await busy(http, 1)
        await server.__aexit__(None, None, None)
        assert "EngineCore encountered an issue" in (await asked).text


# --- settings and command line


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"speed": 0.0}, "speed"), ({"load_delay_s": -1.0}, "load_delay_s"), ({"max_model_len": 10**9}, "max_model_len")],
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is "):
        EmulatorSettings(**changes)


async def test_module_runs_as_a_program_and_stops_on_sigterm() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = (
        "-m",
        "loraledger.engines.emulator",
        "--port",
        "0",
        "--slots",
        "3",
        "--model",
        "llama",
        "--speed",
        "50",
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
        assert (await complete(http, "llama")).status_code == 200
        assert (await metrics(http))["vllm:lora_requests_info"][0][0]["max_lora"] == "3"
    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()
    assert (process.returncode, errors.decode()) == (0, "")


async def test_bad_option_is_a_usage_error() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loraledger.engines.emulator", "--slots", "0", env=env, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert "slots is 0: must be at least 1" in errors.decode()


async def test_answers_survive_a_burst_on_one_engine() -> None:
    profile = TwinProfile(kv_blocks=600, max_seqs=64)
    async with emulator(profile=profile) as server, client(server) as http:
        answers = await asyncio.gather(*(complete(http, max_tokens=100, stream=True) for _ in range(100)))
        shown = await metrics(http)
    assert {answer.text.count('"text"') for answer in answers} == {100}
    assert shown["vllm:generation_tokens_total"][0][1] == 100 * 100
    assert shown["vllm:kv_cache_usage_perc"][0][1] == 0


async def test_load_takes_its_modelled_time(tmp_path: Path) -> None:
    profile = TwinProfile(load_overhead_ps=PS_PER_S // 5, load_bytes_per_s=10_000)
    async with EmulatorServer(EmulatorSettings(profile=profile)) as server, client(server) as http:
        began = time.monotonic()
        await load(http, "x", adapter(tmp_path, "x", size=1000))
        took = time.monotonic() - began
    assert took > 0.3
