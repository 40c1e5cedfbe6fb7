"""The fate of an adapter on engines whose sources were read and never run.

================== ======== ============================================================================================
rule               engine   where
================== ======== ============================================================================================
rank_over_max      SGLang   ``srt/lora/mem_pool.py: can_support``; any whole number may be set
dora               SGLang   ``srt/lora/lora_manager.py: validate_new_adapter`` refuses; the others ignore the vectors
not_targeted       SGLang   ``can_support``: one target outside ``--lora-target-modules`` refuses the adapter
scaling            all      SGLang ``srt/lora/lora.py`` and S-LoRA ``lora_adapter.py``: alpha / r for all modules (issue
                            sgl-project/sglang 40835 for rsLoRA); LoRAX ``adapters/lora.py``: knows rsLoRA, no patterns
layer_gap          LoRAX    ``adapters/lora.py: LoraWeights.load``: a kind of module that lacks one layer is dropped whole
missing_attention  S-LoRA   ``lora_layer_weight.py: load_hf_weights_cpu`` joins q, k, v and o, and fails where one is missing
not_attention      S-LoRA   the same reads nothing but q, k, v and o
head_widths        S-LoRA   the same reshapes all of them by the heads of a model without grouped KV heads
================== ======== ============================================================================================

None of them compares shapes before it copies, so other shapes are refused here. LoRAX asks for exact names; SGLang and
S-LoRA go by the layer's number and the module's last part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from loraledger.adapters.reading.folder import AdapterFolder
from loraledger.adapters.reading.modules import LoraModule
from loraledger.adapters.sizing.basemodel import BaseModel, BaseModule
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.verdict.alone import ENGINE_NAMES, Finding, some
from loraledger.adapters.verdict.fit import FUSED, base_name, below, fused_names, misshapen

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")

Placed = list[tuple[LoraModule, BaseModule]]


def judged_by_source(
    adapter: AdapterFolder, base: BaseModel | None, engine: EngineSettings
) -> tuple[list[Finding], int]:
    """Findings on SGLang, LoRAX or S-LoRA, and how many modules it applies."""
    name = ENGINE_NAMES[engine.engine]
    found = [
        Finding("not_run", "warn", "loraledger", f"judged by what {name}'s source says, not compared with a real one")
    ]
    found += _scaling(adapter, engine)
    pairs = list(adapter.inventory.modules.values())
    if base is not None:
        placed, lost = _place(pairs, base, engine)
        found += misshapen(placed, engine)
        if lost:
            effect = f"are not in the base: {some(lost)}"
            refuses = engine.engine == "sglang"
            message = f"{len(lost)} of {len(pairs)} modules {effect}"
            found.append(Finding("not_in_base", "refuse" if refuses else "drop", "engine", message))
        found += base_name(adapter, base)
        pairs = [pair for pair, _ in placed]
    if engine.engine == "sglang":
        found += _sglang(adapter, engine)
    if engine.engine == "lorax":
        gaps, pairs = _layer_gaps(pairs, base)
        found += gaps
    if engine.engine == "slora":
        found += _slora(adapter, base)
        pairs = [pair for pair in pairs if pair.suffix in _ATTENTION]
    return found, len(pairs)


def _place(pairs: list[LoraModule], base: BaseModel, engine: EngineSettings) -> tuple[Placed, list[str]]:
    tails = {} if engine.engine == "lorax" else {below(name): module for name, module in base.modules.items()}
    placed: Placed = []
    lost: list[str] = []
    for pair in pairs:
        module = base.find(pair.name) or tails.get(below(pair.name))
        if module is None:
            lost.append(pair.name)
        else:
            placed.append((pair, module))
    return placed, lost


def _scaling(adapter: AdapterFolder, engine: EngineSettings) -> Iterator[Finding]:
    config = adapter.config
    root = config.use_rslora and engine.engine == "lorax"
    used = config.alpha / (math.sqrt(config.rank) if root else config.rank)
    other = [name for name, scaling in adapter.scalings.items() if not math.isclose(scaling, used)]
    if other:
        cause = "use_rslora" if config.use_rslora and not root else "rank_pattern or alpha_pattern"
        message = (
            f"{cause}: {some(other)} is scaled by {config.scaling_of(other[0]):.4g},"
            f" and {ENGINE_NAMES[engine.engine]} scales by {used:.4g}"
        )
        yield Finding("scaling", "refuse", "loraledger", message, "fold the difference into B and drop the setting")


def _sglang(adapter: AdapterFolder, engine: EngineSettings) -> Iterator[Finding]:
    parts = sorted({pair.suffix for pair in adapter.inventory.modules.values()})
    targets = engine.lora_target_modules
    if targets is None:
        message = (
            "lora_target_modules is not set: SGLang takes what its first adapters target, and refuses others later"
        )
        yield Finding("targets_unset", "warn", "engine", message, f"set --lora-target-modules {' '.join(parts)[:200]}")
        return
    # get_normalized_target_modules: split names stand for the fused layer, so q_proj lets k and v in as well.
    fused = {part: name for name, split in FUSED.items() for part in split}
    allowed = {fused.get(target, target) for target in targets}
    outside = [part for part in parts if fused.get(part, part) not in allowed]
    if outside and "all" not in allowed:
        message = f"{', '.join(outside)[:200]} is outside lora_target_modules, and SGLang refuses an adapter with more"
        remedy = f"add {' '.join(outside)[:200]} to --lora-target-modules"
        yield Finding("not_targeted", "refuse", "engine", message, remedy)


def _layer_gaps(pairs: list[LoraModule], base: BaseModel | None) -> tuple[list[Finding], list[LoraModule]]:
    found = []
    fused = sorted({pair.suffix for pair in pairs} & set(FUSED))
    if fused:
        found.append(fused_names(fused))
    if base is None:
        return found, pairs
    there = Counter(module.suffix for module in base.modules.values())
    here = Counter(pair.suffix for pair in pairs)
    short = sorted(part for part in here if here[part] < there[part])
    if short:
        message = f"{', '.join(short)[:200]} is not in every layer: LoRAX drops such a kind of module whole"
        found.append(Finding("layer_gap", "drop", "engine", message))
    return found, [pair for pair in pairs if pair.suffix not in short]


def _slora(adapter: AdapterFolder, base: BaseModel | None) -> Iterator[Finding]:
    parts = {pair.suffix for pair in adapter.inventory.modules.values()}
    missing = [part for part in _ATTENTION if part not in parts]
    outside = sorted(parts - set(_ATTENTION))
    if missing:
        message = f"S-LoRA joins the pairs of q, k, v and o, and it has none for {', '.join(missing)}"
        yield Finding("missing_attention", "refuse", "engine", message)
    if outside:
        message = f"S-LoRA reads attention only, and drops {', '.join(outside)[:200]}"
        yield Finding("not_attention", "drop", "engine", message)
    if base is not None and base.kv_heads != base.heads:
        message = f"S-LoRA needs as many KV heads as heads, and the base has {base.kv_heads} and {base.heads}"
        yield Finding("head_widths", "refuse", "engine", message)
