"""``/metrics`` of an emulated engine, in the names and with the traps of vLLM 0.32.

``vllm:lora_requests_info`` is written as the engine writes it: one more series for each combination of adapters that was ever
active, none of them removed, both labels naming the same adapters, the value the unix time when the combination was last
current, an adapter absent until a request of it has produced a token, and the whole family absent before the first request's
statistics. Whoever reads it must cope with that, so the emulator must not be kinder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from loraledger.twin.events import TwinSample
from loraledger.twin.profile import TwinProfile

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"
_FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")


class Counters(msgspec.Struct):
    """What the engine has counted since it started. ``combinations``: adapter names, comma-joined, to unix seconds."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    combinations: dict[str, float] = msgspec.field(default_factory=dict)


def exposition(model: str, started: float, profile: TwinProfile, sample: TwinSample, counters: Counters) -> str:
    """The page. ``started``: unix seconds at which this engine came up."""
    labels = {"engine": "0", "model_name": model}
    usage = sample.kv_used_blocks / sample.kv_blocks
    cache = {
        "block_size": str(profile.block_size),
        "cache_dtype": "auto",
        "enable_prefix_caching": "False",
        "engine": "0",
        "kv_cache_size_tokens": str(profile.kv_tokens),
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(profile.kv_blocks),
    }
    combinations = [
        ({"max_lora": str(profile.slots), "running_lora_adapters": names, "waiting_lora_adapters": names}, at)
        for names, at in counters.combinations.items()
    ]
    finished = [
        ({**labels, "finished_reason": reason}, counters.finished if reason == "length" else 0)
        for reason in _FINISH_REASONS
    ]
    families = [
        _family("process_start_time_seconds", "gauge", [({}, started)]),
        _family("vllm:num_requests_running", "gauge", [(labels, sample.running)]),
        _family("vllm:num_requests_waiting", "gauge", [(labels, sample.waiting)]),
        _family("vllm:kv_cache_usage_perc", "gauge", [(labels, usage)]),
        _family("vllm:num_preemptions", "counter", [(labels, sample.preemptions)]),
        _family("vllm:prompt_tokens", "counter", [(labels, counters.prompt_tokens)]),
        _family("vllm:generation_tokens", "counter", [(labels, counters.generation_tokens)]),
        _family("vllm:request_success", "counter", finished),
        _family("vllm:lora_requests_info", "gauge", combinations) if combinations else "",
        _family("vllm:cache_config_info", "gauge", [(cache, 1)]),
    ]
    return "".join(families)


def _family(name: str, kind: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> str:
    series = f"{name}_total" if kind == "counter" else name
    lines = [f"# HELP {series} Emulated.", f"# TYPE {series} {kind}"]
    for labels, value in samples:
        shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"{series}{{{shown}}} {float(value)!r}" if shown else f"{series} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
