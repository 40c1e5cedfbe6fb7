"""Formulas of bytes against the storages that vLLM allocates for the same settings: equal, to the byte."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapters.build_weights import build
from loraledger.adapters.reading.folder import read_folder
from loraledger.adapters.sizing.base import read_base
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.sizing.footprint import host_bytes, slot_bytes

from .engine import ENVIRONMENT, PYTHON, Model

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 64}
UNTIED = {"tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, **UNTIED},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 48, "sliding_window": None, **UNTIED},
    "qwen2": {"model_type": "qwen2", **UNTIED},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
    "qwen2-moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96, **MOE, **UNTIED},
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 64, "mlp_only_layers": [0], **MOE, **UNTIED},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **UNTIED},
    "gemma": {"model_type": "gemma", **GELU},
    "gemma2": {"model_type": "gemma2", **GELU},
    "gemma3": {"model_type": "gemma3_text", **GELU},
    "phi3": {"model_type": "phi3", **UNTIED},
    "phi": {"model_type": "phi", "hidden_act": "gelu_new", **UNTIED},
    "granite": {"model_type": "granite", "tie_word_embeddings": True},
    "olmo": {"model_type": "olmo", **UNTIED},
    "olmo2": {"model_type": "olmo2", **UNTIED},
    "olmo3": {"model_type": "olmo3", "layer_types": ["sliding_attention", "full_attention"], **UNTIED},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, **UNTIED},
    "starcoder2": {"model_type": "starcoder2", "use_bias": True, "tie_word_embeddings": True},
    "ministral3": {"model_type": "ministral3", "head_dim": 32, **UNTIED},
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": True},
    "exaone4": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2, **UNTIED},
    "cohere2": {"model_type": "cohere2", "head_dim": 32, "tie_word_embeddings": True},
    "seed-oss": {"model_type": "seed_oss", "head_dim": 32, **UNTIED},
    "ernie": {"model_type": "ernie4_5", "head_dim": 32, "tie_word_embeddings": True},
    "gpt-oss": {"model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, **UNTIED},
}
CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


OTHER_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
RANK_16 = EngineSettings(max_lora_rank=16)
TINY = EngineSettings(max_lora_rank=64, dtype="float32")
ATTENTION = ("q_proj", "v_proj")


@dataclass(frozen=True)
class Job:
    """One measurement: a model, an engine's settings, and adapters by name that the engine loads."""

    model: str
    settings: EngineSettings
    adapters: tuple[str, ...] = ()
    weights: bool = False

    def __str__(self) -> str:
        default = EngineSettings()
        fields = {name: getattr(self.settings, name) for name in EngineSettings.__slots__}
        changed = [f"{name}={value}" for name, value in fields.items() if value != getattr(default, name)]
        return ",".join([self.model, *changed])


def cut(model: str) -> list[Job]:
    """Over 2 and 4 ranks: the small models have two KV heads, so four ranks hold copies."""
    return [
        Job(model, EngineSettings(max_lora_rank=16, tensor_parallel=ranks, fully_sharded_loras=sharded))
        for ranks in (2, 4)
        for sharded in (False, True)
    ]


def dealt(model: str, *adapters: str) -> Job:
    return Job(model, EngineSettings(max_lora_rank=16, tensor_parallel=2, expert_parallel=True), adapters)


def reached(model: str, *targets: str) -> Job:
    return Job(model, EngineSettings(max_lora_rank=8, lora_target_modules=targets))


JOBS = [
    Job("tiny", TINY, ("a00", "a01", "a03", "a04", "a07")),
    Job("tiny", EngineSettings(max_lora_rank=64, dtype="float32", lora_target_modules=ATTENTION), ("a00", "a07")),
    Job("tiny", EngineSettings(max_lora_rank=8, dtype="float32"), ("a00", "a04")),
    Job("tiny", EngineSettings(max_lora_rank=64), ("a00", "a07")),
    Job("tiny", EngineSettings(max_lora_rank=512, dtype="float32", lora_dtype="float16"), ("a07",)),
    *(Job(model, RANK_16, weights=True) for model in FAMILIES),
    *(job for model in ("llama", "qwen3", "phi3", "phi", "qwen2-moe", "mixtral") for job in cut(model)),
    reached("llama", "o_proj"),
    reached("llama", "gate_up_proj"),
    reached("llama", "up_proj", "lm_head"),
    reached("llama", "embed_tokens", "model.layers.1.mlp.down_proj"),
    reached("llama", "model.layers.1.self_attn.q_proj", "k_proj"),
    reached("phi3", "qkv_proj"),
    reached("qwen3-moe", "experts"),
    reached("qwen3-moe", "gate", "experts.1.up_proj"),
    reached("mixtral", "w1", "gate"),
    Job("qwen3-moe", RANK_16, ("each-expert",)),
    Job("gpt-oss", RANK_16, ("all-experts",)),
    Job("gpt-oss", EngineSettings(max_lora_rank=16, tensor_parallel=2, fully_sharded_loras=True)),
    dealt("qwen2-moe"),
    dealt("qwen3-moe", "each-expert"),
    dealt("gpt-oss"),
    Job("mixtral", EngineSettings(max_lora_rank=16, lora_dtype="float16"), ("each-expert-mixtral",)),
    Job("llama", RANK_16, ("tables",)),
]


@pytest.fixture(scope="module")
def folders(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models and adapters by name."""
    root = tmp_path_factory.mktemp("bytes")
    found = {"tiny": model.base, **model.adapters}
    for name, config in FAMILIES.items():
        kind = str(config["model_type"])
        architecture = OTHER_CLASSES.get(kind, f"{kind.capitalize()}ForCausalLM")
        found[name] = root / name
        found[name].mkdir()
        text = json.dumps({"architectures": [architecture], **SMALL, **config})
        (found[name] / "config.json").write_text(text)
    specs: dict[str, dict[str, Any]] = {
        "each-expert": experts("model.layers.1.mlp.experts", ("gate_proj", "down_proj", "up_proj"), 64),
        "each-expert-mixtral": experts("model.layers.1.block_sparse_moe.experts", ("w1", "w2", "w3"), 192),
        "all-experts": {
            "tensors": [
                *pair("model.layers.1.mlp.experts.base_layer", 128, 2 * 192, rank=16),
                *pair("model.layers.1.mlp.experts", 192, 128, rank=16),
            ]
        },
        "tables": {"tensors": [*table("model.embed_tokens"), *pair("lm_head", 128, 320)]},
    }
    for name, spec in specs.items():
        found[name] = build(root / name, {"r": 4, "lora_alpha": 8, "target_modules": ["x"], "peft_type": "LORA"}, spec)
    return found


def pair(module: str, inputs: int, outputs: int, rank: int = 4) -> list[dict[str, object]]:
    shapes = {"A": [rank, inputs], "B": [outputs, rank]}
    at = f"base_model.model.{module}.lora_"
    return [{"name": f"{at}{side}.weight", "dtype": "F32", "shape": shape} for side, shape in shapes.items()]


def table(module: str) -> list[dict[str, object]]:
    shapes = {"A": [4, 320], "B": [128, 4]}
    at = f"base_model.model.{module}.lora_embedding_"
    return [{"name": f"{at}{side}", "dtype": "BF16", "shape": shape} for side, shape in shapes.items()]


def experts(at: str, projections: tuple[str, str, str], inside: int) -> dict[str, object]:
    gate, down, up = projections
    widths = {gate: (128, inside), down: (inside, 128), up: (128, inside)}
    return {
        "tensors": [
            each for i in range(4) for name, width in widths.items() for each in pair(f"{at}.{i}.{name}", *width)
        ]
    }


@pytest.fixture(scope="module")
def measured(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Job, dict[str, Any]]:
    """What the engine allocated, of each job: all in one process, since a process costs 8 s."""
    file = tmp_path_factory.mktemp("jobs") / "jobs.json"
    file.write_text(json.dumps([as_engine_takes_it(job, folders) for job in JOBS]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
    command = [str(PYTHON), "-P", str(Path(__file__).with_name("bytes_of_engine.py")), str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=file.parent, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(JOBS, json.loads(done.stdout), strict=True))


def as_engine_takes_it(job: Job, folders: dict[str, Path]) -> dict[str, object]:
    settings = job.settings
    return {
        "model": str(folders[job.model]),
        "engine": {
            "max_lora_rank": settings.max_lora_rank,
            "fully_sharded_loras": settings.fully_sharded_loras,
            "lora_target_modules": settings.lora_target_modules and list(settings.lora_target_modules),
            "lora_dtype": settings.lora_dtype,
            "dtype": settings.dtype,
            "enable_expert_parallel": settings.expert_parallel,
        },
        "ranks": settings.tensor_parallel,
        "adapters": [str(folders[name]) for name in job.adapters],
        "weights": job.weights,
    }


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_slot_takes_what_the_engine_allocates(
    job: Job, measured: dict[Job, dict[str, Any]], folders: dict[str, Path]
) -> None:
    found = measured[job]
    assert "error" not in found, found["error"]
    base = read_base(folders[job.model])
    slot = slot_bytes(base, job.settings)
    assert slot is not None
    assert slot.total == found["slot"], found["modules"]
    tables = sum(size for name, size in found["modules"].items() if name in ("model.embed_tokens", "logits_processor"))
    assert slot.embeddings == tables


@pytest.mark.parametrize("job", [job for job in JOBS if job.adapters], ids=str)
def test_an_adapter_takes_on_the_host_what_the_engine_keeps(
    job: Job, measured: dict[Job, dict[str, Any]], folders: dict[str, Path]
) -> None:
    base = read_base(folders[job.model])
    computed = [host_bytes(read_folder(name, folders[name]), job.settings, base) for name in job.adapters]
    assert [host.exact for host in computed if host is not None] == measured[job]["host"]


@pytest.mark.parametrize("job", [job for job in JOBS if job.weights], ids=str)
def test_weights_take_what_the_model_library_gives_them(
    job: Job, measured: dict[Job, dict[str, Any]], folders: dict[str, Path]
) -> None:
    base = read_base(folders[job.model])
    assert (base.weight_bytes, base.weight_source) == (measured[job]["weights"], "shapes")


def test_weights_in_a_checkpoint_are_those_of_its_shapes(model: Model, tmp_path: Path) -> None:
    stored = read_base(model.base)
    (tmp_path / "config.json").write_bytes((model.base / "config.json").read_bytes())
    shaped = read_base(tmp_path)
    assert (stored.weight_source, shaped.weight_source) == ("headers", "shapes")
    assert stored.weight_bytes == shaped.weight_bytes == 9_982_976
