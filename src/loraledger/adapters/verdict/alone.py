"""Rules that need the adapter alone, and the words that all rules share.

What vLLM 0.32 does with each oddity, from its sources and from loading one such adapter each into a real server
(``tests/vllm/test_verdict.py``). *Takes it* means: the load answers 200 and the adapter then gives other answers than it
was trained for, so loraledger refuses in the engine's place.

================== ==================== ================================================================================
rule               vLLM                 where (``vllm/lora/``)
================== ==================== ================================================================================
rank_over_max      refuses              ``peft_helper.py: validate_legal`` (r and all of rank_pattern, used or not); only
                                        the tensors too large: ``layers/base_linear.py: set_lora``, after the slot is lost
rank_disagrees     takes it             ``lora_weights.py: from_config``: scaling from the configuration, rank from the file
pair_ranks         takes it             ``set_lora`` copies A and B apart; the surplus of one meets zeros in the other
half_pair          by module            ``lora_weights.py: pack`` leaves out a half of q, k, v, gate or up (B always, A when
                                        alpha = r); other modules fail an assertion in ``set_lora``
dora               refuses              ``peft_helper.py: _validate_features``; vectors without ``use_dora``: ``utils.py:
                                        parse_fine_tuned_lora_name``
modules_to_save    refuses              ``_validate_features``, all but ``classifier`` and ``score``
classifier         refuses the weights  ``model_manager.py: _validate_modules_to_save``; takes it when only the
                                        configuration names a head
bias, init, ...    refuses              ``_validate_features``, ``validate_legal``
whole_matrix       refuses              ``parse_fine_tuned_lora_name``
saved_table        skips them           ``utils.py: is_base_embedding_weights``: ``embed_tokens.base_layer.weight`` only
unknown_tensor     refuses              ``parse_fine_tuned_lora_name``
infix              refuses              the same: ``lora_A.default.weight`` is no known ending
sharded            refuses              ``lora_model.py: from_local_checkpoint`` opens ``adapter_model.safetensors``, else a
                                        pickle, else nothing
method             takes it             ``peft_type`` is never read; tensors of other methods mostly have unknown names
stored_type        casts                ``lora_model.py: from_lora_tensors``: ``.to(dtype)``, no scales
================== ==================== ================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from loraledger.adapters.reading.folder import AdapterFolder
from loraledger.adapters.reading.peft import PeftConfig
from loraledger.adapters.sizing.basemodel import BaseModel
from loraledger.adapters.sizing.engine import EngineSettings, smallest_max_rank
from loraledger.adapters.sizing.footprint import lora_width, slot_bytes
from loraledger.config.schema import MAX_RANKS
from loraledger.units import format_bytes

By = Literal["engine", "loraledger"]

ENGINE_NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang", "lorax": "LoRAX", "slora": "S-LoRA"}

_HEADS: Final = frozenset({"classifier", "score"})
_CLASSIFIES: Final = frozenset({"SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"})
_PLAIN_INITS: Final = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Inits that leave the base as it was (``peft_helper.py: _init_is_supported``)."""
_SKIPPED_TABLES: Final = ("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")
_FLOATS: Final = frozenset({"BF16", "F16", "F32", "F64"})
_RETRAIN: Final = "train it again as plain LoRA, or merge it into a copy of the base"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that speaks for the outcome, or that the operator should know beside it."""

    rule: str
    """Stable name: ``rank_over_max``, ``dora``, ``shape``, ``unknown_module`` ..."""
    effect: Literal["refuse", "drop", "warn"]
    by: By
    """Who refuses. ``loraledger``: the engine would take it and serve wrong answers."""
    message: str
    remedy: str = ""
    """What would mend it, with its cost where it has one."""


def some(names: Sequence[str]) -> str:
    """``names`` for a message: the first, and how many more."""
    return f"{names[0][:120]!r}" + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")


def alone(adapter: AdapterFolder, base: BaseModel | None, engine: EngineSettings) -> Iterator[Finding]:
    """Findings about ``adapter`` by itself. ``base`` only turns the remedy of a rank into bytes."""
    by: By = "engine" if engine.engine == "vllm" else "loraledger"
    yield from _pairs(adapter, engine)
    yield from _method(adapter.config, engine, by)
    yield from _heads(adapter, by)
    yield from _tensors(adapter, by)
    yield from _types(adapter, base, engine)
    if engine.engine in ("vllm", "sglang") and adapter.rank > engine.max_lora_rank:
        yield rank_over_max(adapter, base, engine)
    if engine.engine == "vllm" and adapter.sharded:
        yield _sharded(adapter)


def rank_over_max(adapter: AdapterFolder, base: BaseModel | None, engine: EngineSettings) -> Finding:
    """The refusal of a rank, with the smallest setting that takes it and what that costs each slot."""
    config = adapter.config
    source = f"r is {config.rank}"
    if adapter.rank > config.max_rank:
        source = f"its tensors have rank {adapter.rank}, r is {config.rank}"
    elif config.max_rank > config.rank:
        source = f"rank_pattern goes up to {config.max_rank}, r is {config.rank}"
    needed = smallest_max_rank(adapter.rank) if engine.engine == "vllm" else adapter.rank
    if needed is None:
        message = f"rank {adapter.rank} ({source}): no setting takes it, the largest max_lora_rank is {MAX_RANKS[-1]}"
        return Finding("rank_over_max", "refuse", "engine", message, "train it again, or cut it by SVD to a lower rank")
    message = (
        f"rank {adapter.rank} ({source}) is above max_lora_rank {engine.max_lora_rank}; it takes {needed} at least"
    )
    remedy = f"start the engine with --max-lora-rank {needed}{_cost(base, engine, needed)}"
    return Finding("rank_over_max", "refuse", "engine", message, remedy)


def _cost(base: BaseModel | None, engine: EngineSettings, needed: int) -> str:
    now = slot_bytes(base, engine) if base is not None else None
    then = slot_bytes(base, replace(engine, max_lora_rank=needed)) if base is not None else None
    if now is None or then is None:
        return ": every slot grows, in proportion to the rank"
    more = then.total - now.total
    ranks = " on each rank process" if engine.tensor_parallel > 1 else ""
    return (
        f": raising max_lora_rank {engine.max_lora_rank} -> {needed} makes each slot {more:,} bytes larger"
        f" (x max_loras {engine.max_loras} = {format_bytes(more * engine.max_loras)}{ranks})"
    )


def _pairs(adapter: AdapterFolder, engine: EngineSettings) -> Iterator[Finding]:
    inventory, config = adapter.inventory, adapter.config
    if not (inventory.modules or inventory.halves or inventory.mismatched):
        yield Finding("no_pairs", "refuse", "engine", "has no module with both A and B: there is nothing to apply")
    if inventory.halves:
        message = f"only A or only B of {some(inventory.halves)}: engines fail on some and leave out others"
        yield Finding("half_pair", "refuse", "loraledger", message, "save it again: a half-copied file looks like this")
    if inventory.mismatched:
        message = f"A and B of {some(inventory.mismatched)} have different ranks: the engine would use the smaller part"
        yield Finding("pair_ranks", "refuse", "loraledger", message, "save it again")
    if inventory.unconfigured:
        first = inventory.modules[inventory.unconfigured[0]]
        message = (
            f"{some(inventory.unconfigured)}: rank {first.rank} in the file, {config.rank_of(first.name)} in the configuration,"
            " by which the engine would scale"
        )
        yield Finding("rank_disagrees", "refuse", "loraledger", message, "correct r or rank_pattern, or save it again")
    if inventory.infixed and engine.engine == "vllm":
        message = (
            f"its tensors carry the adapter's own name, as in {some(inventory.infixed)}, and vLLM knows no such names"
        )
        yield Finding("infix", "refuse", "engine", message, "save it with save_pretrained, which takes the name out")


def _method(config: PeftConfig, engine: EngineSettings, by: By) -> Iterator[Finding]:
    name = ENGINE_NAMES[engine.engine]
    if config.peft_type not in (None, "LORA"):
        message = f"its peft_type is {config.peft_type[:40]}, which {name} would read as plain LoRA"
        yield Finding("method", "refuse", "loraledger", message, _RETRAIN)
    unlike = (
        ("dora", config.use_dora, "is DoRA (use_dora)"),
        ("bias", config.bias != "none", f"has trained biases (bias {config.bias[:20]!r})"),
        ("bias", config.lora_bias, "has biases in its pairs (lora_bias)"),
        ("activated_lora", config.activated, "is activated LoRA (alora_invocation_tokens)"),
        ("layer_replication", config.layer_replication, "repeats layers of the base (layer_replication)"),
        ("block_diagonal", config.block_diagonal, "is block-diagonal (use_bdlora)"),
        ("qalora", config.quantized, "is QALoRA (use_qalora)"),
    )
    for rule, is_set, message in unlike:
        if is_set:
            who: By = "engine" if rule == "dora" and engine.engine == "sglang" else by
            yield Finding(rule, "refuse", who, f"{message}, which {name} has not", _RETRAIN)
    if isinstance(config.init, str) and config.init.lower() not in _PLAIN_INITS:
        message = (
            f"was started with init_lora_weights {config.init[:40]!r}, which changed the base's weights in training"
        )
        remedy = "convert it with PEFT's path_initial_model_for_weight_conversion"
        yield Finding("init", "refuse", by, message, remedy)
    if config.target_parameters:
        message = "target_parameters: pairs that hold all experts of a layer need a recent engine (read by vLLM 0.32)"
        yield Finding("expert_parameters", "warn", "engine", message)


def _heads(adapter: AdapterFolder, by: By) -> Iterator[Finding]:
    config = adapter.config
    heads = sorted(_HEADS.intersection(config.modules_to_save))
    others = [name for name in config.modules_to_save if name not in _HEADS]
    if others:
        whole = adapter.inventory.whole
        size = f" ({format_bytes(whole.nbytes)} of {format_bytes(adapter.bytes_disk)})" if whole.nbytes else ""
        message = f"has whole matrices in place of the base's: modules_to_save {some(others)}{size}"
        yield Finding("modules_to_save", "refuse", by, message, "merge it into a copy of the base, or train it without")
    if heads:
        who: By = by if adapter.inventory.whole.names else "loraledger"
        message = f"is a classifier: its head ({', '.join(heads)}) takes the place of a generator's"
        yield Finding("classifier", "refuse", who, message, "serve it on the base of a classifier")
    elif config.task_type not in (None, "CAUSAL_LM"):
        kind = "a classifier's" if config.task_type in _CLASSIFIES else "not a text generator's"
        yield Finding(
            "task", "warn", "engine", f"its task_type is {config.task_type[:40]}, {kind}: it may be a mistake"
        )


def _tensors(adapter: AdapterFolder, by: By) -> Iterator[Finding]:
    inventory, config = adapter.inventory, adapter.config
    skipped = [name for name in inventory.whole.names if name.endswith(_SKIPPED_TABLES)]
    whole = [name for name in inventory.whole.names if not name.endswith(_SKIPPED_TABLES)]
    if skipped:
        message = f"holds a copy of a token table, which the engine skips: {some(skipped)}: if tokens were added, they are lost"
        yield Finding("saved_table", "warn", "engine", message)
    if whole and not config.modules_to_save:
        message = f"has whole matrices beside its pairs: {some(whole)}"
        yield Finding("whole_matrix", "refuse", by, message, "save it with save_embedding_layers=False, or merge it")
    if inventory.magnitude.names and not config.use_dora:
        message = f"has DoRA's vectors ({some(inventory.magnitude.names)}) though use_dora is not set"
        yield Finding("dora", "refuse", by, message, _RETRAIN)
    if inventory.other.names:
        message = f"has tensors that no engine knows: {some(inventory.other.names)}"
        yield Finding("unknown_tensor", "refuse", by, message, "save it again with PEFT, as plain LoRA")


def _types(adapter: AdapterFolder, base: BaseModel | None, engine: EngineSettings) -> Iterator[Finding]:
    whole_numbers = _are(adapter.dtypes, "IUB") - {"BF16"}
    small = _are(adapter.dtypes, "F") - _FLOATS
    if whole_numbers:
        message = (
            f"is stored as {', '.join(sorted(whole_numbers))}: the engine would use the numbers without their scales"
        )
        yield Finding("stored_type", "refuse", "loraledger", message, "save it in bfloat16")
    elif small:
        message = (
            f"is stored as {', '.join(sorted(small))}, without scales: right only if the values are meant as they are"
        )
        yield Finding("stored_type", "warn", "engine", message)
    elif (
        engine.engine == "vllm"
        and {"F32", "F64"} & set(adapter.dtypes)
        and (base is None or lora_width(base, engine) == 2)
    ):
        message = f"is stored as {', '.join(adapter.dtypes)} and cast to 16 bits: host and slot bytes follow lora_dtype"
        yield Finding("stored_type", "warn", "engine", message)


def _are(dtypes: Iterable[str], initials: str) -> set[str]:
    return {dtype for dtype in dtypes if dtype[:1] in initials}


def _sharded(adapter: AdapterFolder) -> Finding:
    pickles = [name for name in adapter.ignored if not name.endswith(".safetensors")]
    message = "its weights are in several files, and vLLM opens adapter_model.safetensors alone"
    if pickles:
        message = f"its weights are in several files: vLLM would unpickle {some(pickles)} instead"
    return Finding("sharded", "refuse", "loraledger" if pickles else "engine", message, "save it as one file")
