"""A tiny random Llama and real PEFT adapters on it, built inside the engine's own virtual environment.

Run as a script, `python -P model.py FOLDER`: it prints the folder that holds the result and builds it only when it is
missing. The main environment never imports torch; it reads `manifest.json` there. The result is keyed by the hash of
this file, so an edit builds anew beside the old one, and a build becomes visible by one rename, never half done.

The weights are random, so the model talks nonsense; what tests need is that the nonsense is *identifiable* and
*stable*:

- Base weights are drawn with a standard deviation of 0.12 (transformers' default is 0.02), which spreads the logits.
  Each adapter then moves them by about as much as the base layer does, so that any two of the 13 models part within
  the first tokens of a greedy answer. Measured over 1,248 greedy steps of 13 models: the best token leads the second
  by 0.56 nats in the median, by over 0.05 in 94 %, and by 0.002 at least, far over float32 noise. Prompts that repeat
  one character are the exception: models may answer them alike.
- Weights are float32. An engine that batches requests otherwise sums in another order than one that does not, and in
  bfloat16 that alone can flip a greedy choice.
- Only printable ASCII has rows in the output head. The other rows are zero, thus a logit of 0 against a maximum of
  8 to 10: answers are valid text, one character a token, and never stop before `max_tokens`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

RANKS = (8, 16, 32, 64)
ATTENTION = ("q_proj", "v_proj")
EVERY_MODULE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = 12
TOO_WIDE_RANK = 128  # over the engines' --max-lora-rank 64
SPECIALS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>")
PRINTABLE = range(0x20, 0x7F)
BASE_STD = 0.12
ADAPTER_GAIN = 2.0  # standard deviation of an adapter's output for an input of unit variance; a base layer's is 1.9
CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def adapter_plan() -> dict[str, tuple[int, tuple[str, ...]]]:
    """Give name -> (rank, target modules): each rank once per block of four, blocks alternate q,v and all seven."""
    plan: dict[str, tuple[int, tuple[str, ...]]] = {
        f"a{i:02d}": (RANKS[i % 4], EVERY_MODULE if i // 4 % 2 else ATTENTION) for i in range(ADAPTERS)
    }
    return plan | {"too-wide": (TOO_WIDE_RANK, ATTENTION)}


def save_tokenizer(folder: Path) -> int:
    """Write a byte-level tokenizer without merges (one token a byte) and its chat template; return the vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=1024
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))
    return len(vocabulary)


def make_base(folder: Path) -> LlamaForCausalLM:
    """Save the base model and its tokenizer: 4 layers, hidden 256, 4 query and 2 key-value heads of 64."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    vocabulary = save_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=BASE_STD,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    torch.manual_seed(20260)
    model = LlamaForCausalLM(config)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    spoken = torch.zeros(vocabulary, 1)
    spoken[tokenizer.convert_tokens_to_ids([chr(c) if c > 0x20 else "Ġ" for c in PRINTABLE])] = 1.0
    with torch.no_grad():
        model.lm_head.weight.mul_(spoken)
    model.save_pretrained(str(folder))
    return model


def make_adapter(base: Path, folder: Path, seed: int, rank: int, modules: tuple[str, ...]) -> None:
    """Save one PEFT adapter whose A and B are random: variance of (alpha / r) B A x is ADAPTER_GAIN squared."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    scaling = 2.0
    config = LoraConfig(
        r=rank, lora_alpha=int(scaling * rank), target_modules=list(modules), task_type="CAUSAL_LM", bias="none"
    )
    model: Any = get_peft_model(LlamaForCausalLM.from_pretrained(str(base)), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
            elif "lora_B" in name:
                weight.normal_(0.0, ADAPTER_GAIN / (scaling * rank**0.5), generator=generator)
    # A fixed name instead of this machine's path keeps the files the same wherever they are built.
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained(str(folder), save_embedding_layers=False)


def build(folder: Path) -> None:
    """Fill an empty folder with `base/`, one folder per adapter, and `manifest.json` that names them."""
    make_base(folder / "base")
    plan = adapter_plan()
    for seed, (name, (rank, modules)) in enumerate(plan.items(), start=1):
        make_adapter(folder / "base", folder / name, seed, rank, modules)
    manifest = {
        "base": "base",
        "adapters": {name: {"rank": rank, "modules": modules} for name, (rank, modules) in plan.items()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def ensure(cache: Path) -> Path:
    """Return the folder under `cache` of this script's result, building it when it is missing."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    done = cache / key
    if not done.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
        try:
            build(scratch)
            scratch.rename(done)
        except OSError:
            if not (done / "manifest.json").exists():  # a parallel run that finished first is as good
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return done


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.stdout.write(f"{ensure(Path(sys.argv[1]).resolve())}\n")
