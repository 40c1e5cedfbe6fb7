"""Where an adapter's pairs go on a base: by the names of its modules first, then by their shapes.

vLLM looks at names three times, and only the first look can refuse (``vllm/lora``):

1. ``lora_model.py: check_unexpected_modules``: the *last part* of each name must be one that the model has anywhere (of an
   expert: from ``experts.`` on; names with ``base_layer`` are let through). Otherwise the adapter is refused whole.
2. ``model_manager.py: activate_adapter``: each wrapped layer fetches its pair by *full name*. Pairs that nobody fetches are
   dropped without a word: another prefix, layers that the base lacks.
3. ``utils.py: is_in_target_modules``: ``--lora-target-modules`` leaves layers unwrapped; their pairs are dropped likewise,
   whatever their shape.

Then ``layers/*.py: set_lora`` copies ``A[:rows, :columns]`` into the slot. A pair that is too large fails there, after the
adapter got a host entry and a slot. One that is too small **loads and is applied to the first rows**: that is why shapes are
compared here. Under tensor parallelism even a pair that is too large may load, because each rank cuts its part out of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from loraledger.adapters.reading.folder import AdapterFolder
from loraledger.adapters.reading.modules import LoraModule
from loraledger.adapters.sizing.basemodel import BaseModel, BaseModule
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.verdict.alone import By, Finding, some

FUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused names, and the split ones that stand for the same."""


@dataclass(slots=True)
class Fit:
    """What became of each pair."""

    placed: list[tuple[LoraModule, BaseModule]] = field(default_factory=list)
    """Applied, if nothing refuses the adapter."""
    unknown: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    filtered: list[str] = field(default_factory=list)


class _KnownParts:
    """Last parts of names that vLLM lets through on one base."""

    def __init__(self, base: BaseModel) -> None:
        modules = base.modules.values()
        self.leaves = {module.suffix for module in modules}
        self.experts = {(m.experts, m.projections) for m in modules if m.kind == "experts" and not m.fused_experts}

    def lets_through(self, name: str) -> bool:
        """Whether a pair of this name leaves the adapter loadable; not whether it is applied."""
        at = name.find(".experts")
        if "base_layer" in name:
            return True
        if at < 0:
            return name.rpartition(".")[2] in self.leaves
        first, _, rest = name[at + 1 :].partition(".")
        if not rest:
            return first in self.leaves
        number, _, projection = rest.partition(".")
        plain = number.isascii() and number.isdecimal() and len(number) < 7 and (number == "0" or number[0] != "0")
        return first == "experts" and plain and any(int(number) < n and projection in p for n, p in self.experts)


def place(adapter: AdapterFolder, base: BaseModel, engine: EngineSettings) -> Fit:
    """Sort the pairs of ``adapter`` by what vLLM does with their names."""
    known = _KnownParts(base)
    kept = {module.layer for module in base.reached(engine.lora_target_modules).values()}
    fit = Fit()
    for pair in adapter.inventory.modules.values():
        module = base.find(pair.name)
        if not known.lets_through(pair.name):
            fit.unknown.append(pair.name)
        elif module is None:
            fit.lost.append(pair.name)
        elif module.layer not in kept:
            fit.filtered.append(pair.name)
        else:
            fit.placed.append((pair, module))
    return fit


def findings(fit: Fit, adapter: AdapterFolder, base: BaseModel, engine: EngineSettings) -> Iterator[Finding]:
    """What ``fit`` means for the adapter on vLLM."""
    total = len(adapter.inventory.modules)
    if fit.unknown:
        message = f"{len(fit.unknown)} of {total} modules have names that the base has nowhere: {some(fit.unknown)}"
        yield Finding("unknown_module", "refuse", "engine", message, _other_name(fit.unknown[0], base))
    if fit.lost:
        message = f"{len(fit.lost)} of {total} modules are not in the base, and the engine drops them: {some(fit.lost)}"
        yield Finding("not_in_base", "drop", "engine", message, _right_name(fit.lost[0], base))
    if fit.filtered:
        targets = ", ".join(engine.lora_target_modules or ())
        message = (
            f"{len(fit.filtered)} of {total} modules are outside lora_target_modules ({targets[:120]}), and the engine drops"
            f" them: {some(fit.filtered)}"
        )
        parts = sorted({name.rpartition(".")[2] for name in fit.filtered})
        yield Finding(
            "not_targeted", "drop", "engine", message, f"add {' '.join(parts)[:200]} to --lora-target-modules"
        )
    yield from misshapen(fit.placed, engine)
    yield from _experts(fit.placed, base)
    fused = sorted({pair.suffix for pair, _ in fit.placed if pair.suffix in FUSED})
    if fused:
        yield fused_names(fused)


def fused_names(names: Iterable[str]) -> Finding:
    """The warning on an adapter with fused modules."""
    message = f"its modules are fused ({', '.join(names)}): some engines and versions accept split names only"
    return Finding("fused_names", "warn", "engine", message)


def base_name(adapter: AdapterFolder, base: BaseModel) -> Iterator[Finding]:
    """A note when the adapter names another base than the one it is judged against."""
    claim = adapter.base_claim
    if claim is not None and _leaf(claim) != _leaf(base.name):
        message = f"says it is for {claim[:120]!r}, judged on {base.name[:120]!r}: names neither prove nor disprove, shapes do"
        yield Finding("base_name", "warn", "loraledger", message)


def misshapen(placed: Iterable[tuple[LoraModule, BaseModule]], engine: EngineSettings) -> Iterator[Finding]:
    """The refusal of pairs that have another shape than the module they go to; unknown shapes (0) fit all."""
    wrong = [(pair, module) for pair, module in placed if module.shaped and _shape(pair) != _shape(module)]
    if not wrong:
        return
    pair, module = wrong[0]
    by: By = "engine" if any(_too_large(*both, engine) for both in wrong) else "loraledger"
    effect = "the engine fails on it" if by == "engine" else "the engine would apply it in part"
    experts = f", {pair.experts} experts against {module.experts}" if pair.experts != module.experts else ""
    message = (
        f"{some([found.name for found, _ in wrong])}: in {pair.in_features:,} and out {pair.out_features:,} in the adapter,"
        f" {module.in_features:,} and {module.out_features:,} in the base{experts}: {effect}"
    )
    yield Finding("shape", "refuse", by, message, "it was trained on another base: serve it on that one")


def _shape(module: LoraModule | BaseModule) -> tuple[int, int, int]:
    return module.in_features, module.out_features, module.experts


def _too_large(pair: LoraModule, module: BaseModule, engine: EngineSettings) -> bool:
    """Whether vLLM fails on it: one side larger than the slot's, unless each rank cuts its part out of that side."""
    if pair.embedding and pair.in_features != module.in_features:
        return True  # lora_model.py: from_lora_tensors compares the vocabulary
    cut = engine.tensor_parallel > 1
    cut_in = cut and module.kind == "row"
    cut_out = cut and (module.kind == "column" or (module.kind == "row" and engine.fully_sharded_loras))
    return (pair.in_features > module.in_features and not cut_in) or (
        pair.out_features > module.out_features and not cut_out
    )


def _experts(placed: Iterable[tuple[LoraModule, BaseModule]], base: BaseModel) -> Iterator[Finding]:
    """Experts come all or not at all (``lora_weights.py: pack_moe``; ``model_manager.py: _stack_moe_lora_weights``)."""
    single: Counter[str] = Counter()
    ranks: dict[tuple[str, str], set[int]] = {}
    fused: dict[str, list[str]] = {}
    for pair, _ in placed:
        head, found, tail = f"{pair.name}.".rpartition(".experts.")
        if not found:
            continue
        layer, tail = f"{head}.experts", tail.rstrip(".")
        if tail in ("", "base_layer"):
            fused.setdefault(layer, []).append(tail)
        else:
            single[layer] += 1
            ranks.setdefault((layer, tail.partition(".")[2]), set()).add(pair.rank)
    for layer, tails in fused.items():
        half = tails == ["base_layer"]  # nobody fetches it, so nobody misses the other
        who: By = "loraledger" if half else "engine"
        if not base.modules[layer].fused_experts:
            message = f"{layer!r}: pairs that hold all experts, and vLLM keeps this base's experts apart"
            remedy = "start vLLM with --enable-mixed-moe-lora-format and load it with is_3d_lora_weight, or save a pair an expert"
            yield Finding("expert_format", "refuse", who, message, remedy)
            return
        if len(tails) == 1:
            message = f"{layer!r}: has the pair of {'gate and up' if half else 'down'} alone, and vLLM needs both"
            yield Finding(
                "expert_missing", "refuse", who, message, "train gate_up_proj and down_proj of the experts together"
            )
            return
    for layer, count in single.items():
        module = base.modules[layer]
        if count != 3 * module.experts:
            message = (
                f"{layer!r}: {count} pairs for {module.experts} experts: vLLM needs gate, up and down of all or of none"
            )
            yield Finding("expert_missing", "refuse", "engine", message, "train all three projections of every expert")
            return
    if any(len(found) > 1 for found in ranks.values()):
        message = "experts of one layer have different ranks for the same projection, which vLLM cannot stack"
        yield Finding("expert_ranks", "refuse", "engine", message, "give all experts one rank")


def _other_name(name: str, base: BaseModel) -> str:
    leaf = name.rpartition(".")[2]
    leaves = {module.suffix for module in base.modules.values()}
    if leaf in FUSED and leaves.issuperset(FUSED[leaf]):
        return f"split {leaf}: give each of {', '.join(FUSED[leaf])} the same A and its own rows of B"
    for fused, split in FUSED.items():
        if leaf in split and fused in leaves:
            return f"this base has {fused}: stack the pairs of {', '.join(split)} block-diagonally, at the sum of their ranks"
    return f"this base has {', '.join(sorted(leaves))[:200]}: train it on those"


def _right_name(name: str, base: BaseModel) -> str:
    tail = below(name)
    other = next((there for there in base.modules if below(there) == tail), None)
    if other is not None:
        return f"rename its tensors: this base calls {name[:120]!r} {other[:120]!r}"
    return f"it was trained on another base: this one has {base.layers} layers" if base.layers else ""


def below(name: str) -> str:
    """``name`` from ``layers.`` on, which engines and checkpoints agree on; else its last part."""
    at = name.find("layers.")
    return name[at:] if at >= 0 else name.rpartition(".")[2]


def _leaf(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()
