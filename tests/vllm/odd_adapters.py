"""Adapters on the tiny base that an engine refuses, takes in part, or takes and does not apply; and some that are merely unusual.

Run as a script inside the engine's environment, `python -P odd_adapters.py FOLDER BASE`: it prints the folder that holds the
result and builds it only when it is missing (15 s). The result is keyed by the hash of this file and by the base's folder,
which is keyed by its own script. `names.json` lists the adapters in the order of this file. `experts-base` is a second base,
a mixture of experts, and `experts.json` lists its adapters.

What PEFT can make is made by PEFT. The rest is written tensor by tensor, as hand-edited, converted or half-copied folders
are. `NAME.twin` is the adapter NAME cut down to what the engine applies of it: both must answer alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Tensors = dict[str, Any]
Made = tuple[Tensors, dict[str, Any]]
"""Tensors by name, and the fields of adapter_config.json."""

PREFIX = "base_model.model."
LAYERS = 4
ATTENTION = {"q_proj": (256, 256), "k_proj": (256, 128), "v_proj": (256, 128), "o_proj": (256, 256)}
MLP = {"gate_proj": (256, 512), "up_proj": (256, 512), "down_proj": (512, 256)}
QV = ("q_proj", "v_proj")
ALL = (*ATTENTION, *MLP)
FIRST = f"{PREFIX}model.layers.0.self_attn."
GAIN = 2.0  # as in model.py: an adapter moves a layer's output by about as much as the layer itself


def full_name(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if module in ATTENTION else 'mlp'}.{module}"


def shapes(modules: Iterable[str] = QV, layers: Iterable[int] = range(LAYERS)) -> dict[str, tuple[int, int]]:
    """Full name -> (in, out)."""
    return {full_name(layer, module): {**ATTENTION, **MLP}[module] for layer in layers for module in modules}


def pairs(sizes: Mapping[str, tuple[int, int]], rank: int = 8, seed: int = 1, prefix: str = PREFIX) -> Tensors:
    """Random A and B of each module: variance of 2 B A x is GAIN squared."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, (inputs, outputs) in sizes.items():
        a = torch.empty(rank, inputs).normal_(0.0, inputs**-0.5, generator=generator)
        b = torch.empty(outputs, rank).normal_(0.0, GAIN / (2 * rank**0.5), generator=generator)
        tensors |= {f"{prefix}{name}.lora_A.weight": a, f"{prefix}{name}.lora_B.weight": b}
    return tensors


def config(rank: int = 8, modules: Iterable[str] | None = QV, **changes: Any) -> dict[str, Any]:
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": None if modules is None else list(modules),
        "bias": "none",
    }
    return fields | changes


def from_peft(base: Path, method: str = "LoraConfig", **options: Any) -> Made:
    """What PEFT saves for these options, its LoRA weights randomised as in `pairs`."""
    import peft
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    made: Any = getattr(peft, method)(task_type="CAUSAL_LM", **options)
    model: Any = peft.get_peft_model(LlamaForCausalLM.from_pretrained(str(base)), made)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name or "lora_embedding_A" in name:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
            elif "lora_B" in name or "lora_embedding_B" in name:
                weight.normal_(0.0, GAIN / (2 * weight.shape[-1] ** 0.5), generator=generator)
    model.peft_config["default"].base_model_name_or_path = "base"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = Path(folder)
        return load_file(saved / "adapter_model.safetensors"), json.loads((saved / "adapter_config.json").read_text())


def cast(tensors: Tensors, dtype: str) -> Tensors:
    import torch

    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def zeros(*shape: int) -> Any:
    import torch

    return torch.zeros(*shape)


def without(tensors: Tensors, *endings: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(endings)}


def of_rank(base: Path) -> dict[str, Made]:
    """Ranks in the configuration, in its patterns, and in the tensors."""
    qv = shapes()
    narrow, wide = pairs(qv, 8), pairs(qv, 16)
    mixed = {name: (narrow if name.endswith("lora_A.weight") else wide)[name] for name in narrow}
    mixed_back = {name: (wide if name.endswith("lora_A.weight") else narrow)[name] for name in narrow}
    return {
        "plain": (pairs(qv), config()),
        "rank-96": (pairs(qv, 96), config(96)),
        "rank-768": (pairs(qv, 768), config(768)),
        "pattern-32": from_peft(base, r=8, lora_alpha=16, target_modules=list(QV), rank_pattern={"q_proj": 32}),
        "pattern-96": from_peft(
            base, r=8, lora_alpha=16, target_modules=list(QV), rank_pattern={"layers.3.self_attn.q_proj": 96}
        ),
        "pattern-for-nothing": (pairs(qv), config(rank_pattern={"no_such_module": 96})),
        "config-96-tensors-8": (pairs(qv), config(96)),
        "tensors-16": (wide, config(8)),
        "tensors-96": (pairs(qv, 96), config(8)),
        "pair-8-16": (mixed, config(8)),
        "pair-16-8": (mixed_back, config(8)),
    }


def of_kind(base: Path) -> dict[str, Made]:
    """Plain LoRA in other types and with other scalings; and what is not plain LoRA."""
    qv = list(QV)
    dora = from_peft(base, r=8, lora_alpha=16, target_modules=qv, use_dora=True)
    biased = from_peft(base, r=8, lora_alpha=16, target_modules=qv, lora_bias=True)
    return {
        "bf16": (cast(pairs(shapes()), "bfloat16"), config()),
        "fp16": (cast(pairs(shapes()), "float16"), config()),
        "fp64": (cast(pairs(shapes()), "float64"), config()),
        "fp8": (cast(pairs(shapes()), "float8_e4m3fn"), config()),
        "int8": (cast(pairs(shapes()), "int8"), config()),
        "rslora": from_peft(base, r=16, lora_alpha=8, target_modules=qv, use_rslora=True),
        "alpha-pattern": from_peft(base, r=8, lora_alpha=16, target_modules=qv, alpha_pattern={"q_proj": 32}),
        "all-linear": from_peft(base, r=8, lora_alpha=16, target_modules="all-linear"),
        "targets-null": (pairs(shapes()), config(modules=None)),
        "zero-b": ({n: t * n.endswith("lora_A.weight") for n, t in pairs(shapes()).items()}, config()),
        "dora": dora,
        "dora-unsaid": (dora[0], dora[1] | {"use_dora": False}),
        "dora-without-vectors": (pairs(shapes()), config(use_dora=True)),
        "bias-all": (pairs(shapes()), config(bias="all")),
        "lora-bias": biased,
        "lora-bias-unsaid": (biased[0], biased[1] | {"lora_bias": False}),
        "pissa": (pairs(shapes()), config(init_lora_weights="pissa_niter_4")),
        "gaussian": (pairs(shapes()), config(init_lora_weights="gaussian")),
        "activated": (pairs(shapes()), config(alora_invocation_tokens=[5, 6])),
        "replicated": (pairs(shapes()), config(layer_replication=[[0, 4], [0, 4]])),
        "block-diagonal": (pairs(shapes()), config(use_bdlora={"nblocks": 2})),
        "qalora": (pairs(shapes()), config(use_qalora=True)),
        "ia3": from_peft(base, "IA3Config", target_modules=qv, feedforward_modules=[]),
        "adalora": from_peft(base, "AdaLoraConfig", target_modules=qv, init_r=8, target_r=8, total_step=10),
    }


def of_table(base: Path) -> dict[str, Made]:
    """Token tables, heads, added tokens, and whole matrices."""
    qv = list(QV)
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    embedded = from_peft(base, r=8, lora_alpha=16, target_modules=[*qv, "embed_tokens"])
    table = f"{PREFIX}model.embed_tokens."
    head = {"lm_head": (256, vocabulary)}
    short = {"lm_head": (256, vocabulary - 30)}
    small = pairs(shapes()) | {
        f"{table}lora_embedding_A": zeros(8, vocabulary - 30),
        f"{table}lora_embedding_B": zeros(256, 8),
    }
    scored = {f"{PREFIX}score.weight": zeros(2, 256)}
    return {
        "saved-head": from_peft(base, r=8, lora_alpha=16, target_modules=qv, modules_to_save=["lm_head"]),
        "saved-table": from_peft(base, r=8, lora_alpha=16, target_modules=qv, modules_to_save=["embed_tokens"]),
        "saved-table-unsaid": (pairs(shapes()) | {f"{table}weight": zeros(vocabulary, 256)}, config()),
        "saved-score": (pairs(shapes()) | scored, config(modules_to_save=["score"], task_type="SEQ_CLS")),
        "saved-score-unsaid": (pairs(shapes()) | scored, config()),
        "score-without-weights": (
            pairs(shapes()),
            config(modules_to_save=["classifier", "score"], task_type="SEQ_CLS"),
        ),
        "classifies": (pairs(shapes()), config(task_type="SEQ_CLS")),
        "table": (without(embedded[0], "base_layer.weight"), embedded[1]),
        "table-with-base": embedded,
        "table-too-small": (small, config(modules=[*qv, "embed_tokens"])),
        "head": (pairs(shapes() | head), config(modules=[*qv, "lm_head"])),
        "head-too-small": (pairs(shapes() | short), config(modules=[*qv, "lm_head"])),
        "tokens": from_peft(base, r=8, lora_alpha=16, target_modules=qv, trainable_token_indices=[1, 2]),
    }


def of_shape(base: Path) -> dict[str, Made]:
    """Made for another base: wider, narrower, or only in one dimension."""
    wide = {name: (2 * i, 2 * o) for name, (i, o) in shapes().items()}
    thin = {name: (i // 2, o // 2) for name, (i, o) in shapes().items()}
    tall = {name: (i, 2 * o) for name, (i, o) in shapes().items()}
    low = {name: (i, o // 2) for name, (i, o) in shapes().items()}
    row = {name: (i // 2, o) for name, (i, o) in shapes(["o_proj", "down_proj"]).items()}
    broad = {name: (2 * i, o) for name, (i, o) in shapes(["o_proj", "down_proj"]).items()}
    return {
        "wider": (pairs(wide), config()),
        "narrower": (pairs(thin), config()),
        "taller": (pairs(tall), config()),
        "lower": (pairs(low), config()),
        "row-narrower": (pairs(row), config(modules=["o_proj", "down_proj"])),
        "row-wider": (pairs(broad), config(modules=["o_proj", "down_proj"])),
    }


def of_name(base: Path) -> dict[str, Made]:
    """Modules under names that the base does not have, or only in part."""
    everything = pairs(shapes(ALL))
    vision = {"language_model." + name: size for name, size in shapes().items()}
    half = pairs(shapes(layers=[0, 1]), seed=2)
    lost = pairs(shapes(layers=[2, 3]), seed=3, prefix=PREFIX + "language_model.")
    deep = shapes(layers=range(6))
    odd = {"model.layers.0.self_attn.rotary_proj": (256, 256)}
    odder = {"model.layers.0.mlp.experts.base_layer": (256, 256)}
    fused = {f"model.layers.{layer}.self_attn.qkv_proj": (256, 512) for layer in range(LAYERS)}
    infix = {n.replace(".weight", ".default.weight"): t for n, t in pairs(shapes()).items()}
    kept = [name for name in shapes(ALL) if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj")]
    return {
        "wrong-prefix": (pairs(vision), config()),
        "half-wrong-prefix": (half | lost, config()),
        "half-wrong-prefix.twin": (half, config()),
        "six-layers": (pairs(deep, seed=4), config()),
        "six-layers.twin": (
            {n: t for n, t in pairs(deep, seed=4).items() if ".4." not in n and ".5." not in n},
            config(),
        ),
        "layers-beyond": (pairs(shapes(layers=[4, 5])), config()),
        "odd-module": (pairs(shapes() | odd), config(modules=[*QV, "rotary_proj"])),
        "odd-base-layer": (pairs(shapes() | odder, seed=5), config()),
        "odd-base-layer.twin": (
            without(pairs(shapes() | odder, seed=5), "base_layer.lora_A.weight", "base_layer.lora_B.weight"),
            config(),
        ),
        "fused": (pairs(fused), config(modules=["qkv_proj"])),
        "infix": (infix, config()),
        "no-prefix": (pairs(shapes(), prefix=""), config()),
        "all-modules": (everything, config(modules=ALL)),
        "all-modules.twin": (
            {n: t for n, t in everything.items() if n.removeprefix(PREFIX).split(".lora_")[0] in kept},
            config(modules=ALL),
        ),
        "mlp-only": (pairs(shapes(list(MLP))), config(modules=list(MLP))),
        "k-only": (pairs(shapes(["k_proj"])), config(modules=["k_proj"])),
    }


def of_tensor(base: Path) -> dict[str, Made]:
    """Tensors that are missing, or that no engine knows."""
    fused, single = shapes(), shapes(["o_proj"])
    unscaled = config(lora_alpha=8)
    return {
        "a-only": (without(pairs(fused), "0.self_attn.q_proj.lora_B.weight"), config()),
        "a-only-unscaled": (without(pairs(fused), "0.self_attn.q_proj.lora_B.weight"), unscaled),
        "b-only": (without(pairs(fused), "0.self_attn.q_proj.lora_A.weight"), config()),
        "a-only-single": (without(pairs(single), "0.self_attn.o_proj.lora_B.weight"), unscaled),
        "b-only-single": (without(pairs(single), "0.self_attn.o_proj.lora_A.weight"), unscaled),
        "extra": (pairs(fused) | {FIRST + "q_proj.gate_scale": zeros(1)}, config()),
        "extra-bias": (pairs(fused) | {FIRST + "q_proj.bias": zeros(256)}, config()),
        "extra-base": (pairs(fused) | {FIRST + "q_proj.base_layer.weight": zeros(256, 256)}, config()),
        "sharded": (pairs(fused), config()),
    }


EXPERT = {"gate_proj": (256, 64), "up_proj": (256, 64), "down_proj": (64, 256)}
EXPERTS = 4


def make_experts(base: Path, folder: Path) -> None:
    """A random Qwen3 mixture of experts of two layers, with the tokenizer of `base`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = json.loads((base / "config.json").read_text())
    shared = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    torch.manual_seed(20261)
    settings = Qwen3MoeConfig(
        **{
            key: fields[key]
            for key in (*shared, "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
        },
        num_hidden_layers=2,
        moe_intermediate_size=64,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(settings).save_pretrained(str(folder))
    for file in base.glob("*token*"):
        shutil.copy(file, folder)


def experts(layers: Iterable[int] = (0, 1), numbers: Iterable[int] = range(EXPERTS)) -> dict[str, tuple[int, int]]:
    return {
        f"model.layers.{layer}.mlp.experts.{number}.{name}": size
        for layer in layers
        for number in numbers
        for name, size in EXPERT.items()
    }


def of_experts() -> dict[str, Made]:
    """Pairs on single experts and on all experts of a layer, for `experts-base`."""
    one = "model.layers.0.mlp.experts.1.gate_proj"
    mixed = pairs(experts()) | pairs({one: EXPERT["gate_proj"]}, 16)
    all_in_one = {"mlp.experts.base_layer": (256, 128), "mlp.experts": (64, 256)}
    fused = pairs(
        {f"model.layers.{layer}.{name}": size for layer in (0, 1) for name, size in all_in_one.items()}, 8 * EXPERTS
    )
    fused_config = config(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    gates = {name: size for name, size in experts().items() if name.endswith("gate_proj")}
    return {
        "experts-router": (pairs({f"model.layers.{layer}.mlp.gate": (256, EXPERTS) for layer in (0, 1)}), config()),
        "experts-all": (pairs(experts()), config()),
        "experts-of-one-layer": (pairs(experts(layers=[0])), config()),
        "experts-three": (pairs(experts(numbers=range(3))), config()),
        "experts-five": (pairs(experts(numbers=range(5))), config()),
        "experts-gates": (pairs(gates), config()),
        "experts-two-ranks": (mixed, config(rank_pattern={one: 16})),
        "experts-narrower": (pairs({name: (i // 2, o // 2) for name, (i, o) in experts().items()}), config()),
        "experts-fused": (fused, fused_config),
        "experts-fused-gates": ({n: t for n, t in fused.items() if "base_layer" in n}, fused_config),
    }


def write(folder: Path, made: Made) -> None:
    from safetensors.torch import save_file

    tensors, fields = made
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=1))
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if folder.name != "sharded":
        save_file(contiguous, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(contiguous)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"adapter_model-0000{number}-of-00002.safetensors"
        save_file({name: contiguous[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in contiguous.values())}, "weight_map": weight_map}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def build(folder: Path, base: Path) -> None:
    """One folder per adapter, the second base, and the lists of names."""
    names: list[str] = []
    for group in (of_rank, of_kind, of_table, of_shape, of_name, of_tensor):
        for name, made in group(base).items():
            write(folder / name, made)
            names.append(name)
    make_experts(base, folder / "experts-base")
    for name, made in of_experts().items():
        write(folder / name, made)
    (folder / "experts.json").write_text(json.dumps(list(of_experts()), indent=1))
    (folder / "names.json").write_text(json.dumps(names, indent=1))


def ensure(cache: Path, base: Path) -> Path:
    """The folder under `cache` of this script's result, built when it is missing."""
    key = hashlib.sha256(Path(__file__).read_bytes() + base.parent.name.encode()).hexdigest()[:16]
    done = cache / f"odd-{key}"
    if not done.exists():
        scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
        try:
            build(scratch, base)
            scratch.rename(done)
        except OSError:
            if not (done / "names.json").exists():  # a parallel run that finished first is as good
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return done


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.stdout.write(f"{ensure(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())}\n")
