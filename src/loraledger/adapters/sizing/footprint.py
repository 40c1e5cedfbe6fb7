"""What one adapter, and one slot, costs in bytes on each tier of each engine.

Two sizes must not be mixed. A *slot* is room that the engine sets aside at start for any adapter: padded to its largest rank,
for every module that it serves, resident or not. What an adapter *fills* follows its own rank and modules: on the host, and
as the used part of a slot. All figures are of one rank process; a host holds one copy for each of them.
Pipeline parallelism, which deals out whole layers, is not modelled.

vLLM 0.32 and the formulas for it agree to the byte: ``tests/vllm/test_bytes.py`` compares the storages of real layers. The
formulas of the other engines are read from their sources, which their docstrings name; nothing of them was run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from loraledger.adapters.reading.folder import AdapterFolder
from loraledger.adapters.reading.modules import LoraModule
from loraledger.adapters.sizing.basemodel import DTYPE_BYTES, BaseModel, BaseModule, divide
from loraledger.adapters.sizing.engine import EngineSettings

_TABLES: Final = ("embedding", "head")
_SLORA_MODULES: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_FP16: Final = 2
_FILLED: Final = {"k_proj": "v_proj", "up_proj": "gate_proj"}
"""SGLang stacks the first beside the second, and fills in zeros of its shape where an adapter lacks the first."""


@dataclass(frozen=True, slots=True)
class SlotBytes:
    """One slot on one rank process."""

    projections: int
    embeddings: int
    """Room for ``embed_tokens`` and ``lm_head``, which engines keep beside the projections."""

    @property
    def total(self) -> int:
        """Both."""
        return self.projections + self.embeddings


@dataclass(frozen=True, slots=True)
class HostBytes:
    """One adapter in the host cache of one rank process."""

    exact: int
    pinned: int
    """Upper bound where the allocator of pinned memory rounds each tensor up to a power of two."""


def slot_bytes(base: BaseModel, engine: EngineSettings) -> SlotBytes | None:
    """One slot of ``engine``, whatever is in it; ``None`` for engines without slots, or when no shapes are known.

    vLLM: bytes x sum of A and B over the wrapped layers at ``max_lora_rank`` (``vllm/lora/layers/*: create_lora_weights``),
    see :func:`_pair`. SGLang: the same sum with A of packed layers repeated (``srt/lora/mem_pool.py: get_lora_A_shape,
    get_lora_B_shape``), in the model's type, without routers, token tables only where targeted. Without targets SGLang takes
    the union of what its first adapters target; here every projection is counted.

    Raises :class:`InputFileError` when the model cannot be cut over that many ranks.
    """
    if engine.engine not in ("vllm", "sglang") or not base.shaped:
        return None
    rank, width = engine.max_lora_rank, lora_width(base, engine)
    part = divide(rank, engine.tensor_parallel, "max_lora_rank") if _sharded(engine) else rank
    sums = {False: 0, True: 0}
    for module in served(base, engine).values():
        pairs = (_experts_here(pair, engine) * _pair(pair, engine, rank, part) for pair in module.pairs())
        sums[module.kind in _TABLES] += width * sum(pairs)
    return SlotBytes(projections=sums[False], embeddings=sums[True])


def served(base: BaseModel, engine: EngineSettings) -> dict[str, BaseModule]:
    """The modules of ``base`` that have room in a slot of ``engine``."""
    targets = engine.lora_target_modules
    reached = base.reached(targets)
    if engine.engine != "sglang":
        return dict(reached)
    left_out = ("replicated",) if targets is not None else ("replicated", *_TABLES)
    return {name: module for name, module in reached.items() if module.kind not in left_out}


def host_bytes(adapter: AdapterFolder, engine: EngineSettings, base: BaseModel | None = None) -> HostBytes | None:
    """``adapter`` in the host cache of one rank process; ``None`` for engines without one.

    vLLM: A and B of every pair in the file, at its own rank, cast to the LoRA type, whole on each rank and whether or not the
    engine applies it (``vllm/lora/lora_model.py: from_lora_tensors``); packing keeps q, k and v as tensors of their own and
    stacks the experts of one projection into one (``lora_weights.py: pack, pack_moe``). Where experts are dealt out, a rank
    reads its own alone; of fused ones it keeps all of A (its part is a view of it) and its part of B. Without ``base``,
    ``auto`` is taken as 16 bits. SGLang: as stored, plus zeros for a missing k or up (``srt/lora/lora.py: normalize_qkv_proj,
    normalize_gate_up_proj``). S-LoRA: all in float16.

    ``pinned``: PyTorch's host allocator rounds to powers of two (``ATen/core/CachingHostAllocator.h``). Experts cost more there:
    blocks of single tensors that were stacked stay cached after the first load, not counted here, and B of gate and up of fused
    experts is pinned under two names (``model_manager.py: _create_merged_loras_inplace``), counted twice.
    """
    if engine.engine == "lorax":
        return None
    tensors = list(_host_tensors(adapter, engine, base))
    return HostBytes(
        exact=sum(size for size, _ in tensors),
        pinned=sum(copies << (size - 1).bit_length() for size, copies in tensors if size),
    )


def adapter_device_bytes(adapter: AdapterFolder, base: BaseModel, engine: EngineSettings) -> int | None:
    """What ``adapter`` itself fills on the device, without padding, on the rank that holds most of it.

    Modules that the engine does not apply fill nothing. vLLM and SGLang: :func:`_pair` at the adapter's own rank; with
    ``fully_sharded_loras`` the rows of A go to the first ranks first (``column_parallel_linear.py: slice_lora_a``), so rank 0
    has ``min(r, max_lora_rank / ranks)`` of them. LoRAX: the file's bytes, which is how it accounts for an adapter
    (``router/src/loader.rs``). S-LoRA: its cells. ``None`` when no shapes are known.
    """
    if engine.engine == "lorax":
        return adapter.bytes_disk
    if not base.shaped:
        return None
    if engine.engine == "slora":
        return slora_cells(adapter, base) * base.kv_bytes_per_token("float16")
    room = served(base, engine)
    rows = engine.max_lora_rank // engine.tensor_parallel if _sharded(engine) else engine.max_lora_rank
    filled = 0
    for pair in adapter.inventory.modules.values():
        module = base.find(pair.name)
        owner = room.get(_owner(module.name)) if module is not None else None
        if module is not None and owner is not None:
            filled += _held(module, owner, engine) * _pair(module, engine, pair.rank, min(pair.rank, rows))
    return filled * lora_width(base, engine)


def slora_cells(adapter: AdapterFolder, base: BaseModel) -> int:
    """Cells of S-LoRA's unified pool (S-LoRA, arXiv 2311.03285, section 5.1); one cell is K and V of one token, in float16.

    4 x rank where q, k, v and o all are as wide as the model and nothing else is adapted: a row of A and a row of B fill one
    cell (``slora/server/router/model_infer/infer_adapter.py: load_adapters``), 16 x rank x layers x hidden bytes. That code
    knows no other adapters; for those, the bytes of the pairs over the bytes of a cell, rounded up.
    """
    pairs = adapter.inventory.modules.values()
    plain = base.kv_heads == base.heads and base.heads * base.head_dim == base.hidden
    if plain and all(pair.suffix in _SLORA_MODULES for pair in pairs):
        return 4 * adapter.rank
    return _ceil(sum(a + b for a, b in map(_elements, pairs)) * _FP16, base.kv_bytes_per_token("float16"))


def kv_tokens(device_bytes: int, base: BaseModel, engine: EngineSettings) -> int:
    """Tokens of KV cache that ``device_bytes`` on one rank process would hold, rounded up. ``base`` must have layers."""
    cache = served_dtype(base, engine) if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    return _ceil(device_bytes, base.kv_bytes_per_token(cache, engine.tensor_parallel))


def served_dtype(base: BaseModel, engine: EngineSettings) -> str:
    """The type that the engine serves the base in (vLLM ``config/model.py: _resolve_auto_dtype``)."""
    if engine.dtype != "auto":
        return engine.dtype
    return "bfloat16" if base.dtype == "float32" else base.dtype


def lora_width(base: BaseModel, engine: EngineSettings) -> int:
    """Bytes of one LoRA value in a slot: the type of the served model, even where its weights are quantized, unless
    ``lora_dtype`` is set (``vllm/config/lora.py: verify_with_model_config``)."""
    if engine.engine == "vllm" and engine.lora_dtype != "auto":
        return DTYPE_BYTES[engine.lora_dtype]
    return DTYPE_BYTES[served_dtype(base, engine)]


def _pair(module: BaseModule, engine: EngineSettings, rank: int, part: int) -> int:
    """Values of A and B of one pair (one expert's) on one rank process.

    ``part`` is the rows of A where a column-parallel layer cuts them. By ``create_lora_weights`` of
    ``column_parallel_linear.py``, ``base_linear.py`` (row, replicated), ``vocab_parallel_embedding.py``,
    ``logits_processor.py`` and ``fused_moe.py`` in ``vllm/lora/layers``: a column layer cuts B by outputs, a row layer A by
    inputs; ``fully_sharded_loras`` cuts the other one too. Token tables are whole on each rank; SGLang cuts B of ``lm_head``.
    """
    dealt = engine.expert_parallel and ".experts" in module.name
    ranks = 1 if dealt else engine.tensor_parallel
    if module.kind == "column":
        return part * module.in_features + module.rank_outputs(ranks) * rank
    if module.kind == "row":
        inputs = divide(module.in_features, ranks, module.name)
        outputs = divide(module.out_features, ranks, module.name) if _sharded(engine) else module.out_features
        return rank * (inputs + outputs)
    if module.kind == "head" and engine.engine == "sglang":
        return rank * (module.in_features + _ceil(module.out_features, ranks))
    return rank * (module.in_features + module.out_features)


def _experts_here(module: BaseModule, engine: EngineSettings) -> int:
    """How many of the experts in ``module`` one rank process holds."""
    ranks = engine.tensor_parallel if engine.expert_parallel and module.experts > 1 else 1
    return divide(module.experts, ranks, f"experts of {module.name}")


def _held(module: BaseModule, owner: BaseModule, engine: EngineSettings) -> int:
    """How many experts of ``module``, a part of ``owner``, the first rank process holds; 1 for a module without experts."""
    if owner.kind != "experts" or module.experts > 1:
        return _experts_here(module, engine)
    number = module.name[len(owner.name) + 1 :].partition(".")[0]
    return int(int(number) < _experts_here(owner, engine)) if number.isdecimal() else 1


def _owner(name: str) -> str:
    """The base's module that holds the one called ``name``: all experts of a layer are one module."""
    head, found, _ = name.rpartition(".experts.")
    return f"{head}.experts" if found else name


def _elements(pair: LoraModule) -> tuple[int, int]:
    rows = pair.rank * pair.experts
    return rows * pair.in_features, rows * pair.out_features


def _host_tensors(adapter: AdapterFolder, engine: EngineSettings, base: BaseModel | None) -> Iterator[tuple[int, int]]:
    """Bytes of each tensor that the host cache of one rank process holds for ``adapter``, and how often it is pinned."""
    if engine.engine == "sglang":
        yield from _sglang_tensors(adapter)
        return
    width = _FP16 if base is None or engine.engine == "slora" else lora_width(base, engine)
    dealt = engine.tensor_parallel if engine.expert_parallel else 1
    stacks: dict[tuple[str, str], list[int]] = {}
    for pair in adapter.inventory.modules.values():
        head, found, tail = pair.name.rpartition(".experts.")
        number, _, projection = tail.partition(".")
        a, b = (elements * width for elements in _elements(pair))
        if found and number.isdecimal():
            stack = stacks.setdefault((head, projection), [0, 0])
            stack[0] += a
            stack[1] += b
        else:
            yield a, 1
            yield (_ceil(b, dealt) if pair.experts > 1 else b), 2 if tail == "base_layer" else 1
    for stack in stacks.values():
        yield from ((_ceil(size, dealt), 1) for size in stack)


def _sglang_tensors(adapter: AdapterFolder) -> Iterator[tuple[int, int]]:
    pairs = adapter.inventory.modules
    for pair in pairs.values():
        head, _, _ = pair.name.rpartition(".")
        zeros = sum(pair.suffix == model and f"{head}.{absent}" not in pairs for absent, model in _FILLED.items())
        a, b = _elements(pair)
        width = pair.nbytes // max(a + b, 1)
        yield from ((a * width, 1), (b * width, 1)) * (1 + zeros)


def _sharded(engine: EngineSettings) -> bool:
    return engine.engine == "vllm" and engine.fully_sharded_loras


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)
