"""Bytes as they are allocated: sums over tensors that exist, each storage once. Nothing here is estimated.

A slot pool is every tensor that a LoRA layer keeps under a name ending in ``_stacked``: vLLM allocates them when the model
is built, padded to the highest rank, and they stay as they are whichever adapters come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def slot_pool_bytes(modules: Iterable[Any]) -> int:
    """Return the bytes of all slots of this rank. ``modules`` are the LoRA layers (`LoRAModelManager.modules`)."""
    found = (value for module in modules for name, value in vars(module).items() if name.endswith("_stacked"))
    return _storage_bytes(tensor for value in found for tensor in _tensors(value))


def adapter_bytes(adapter: Any) -> int:
    """Return the host bytes of one adapter, as vLLM packed it: actual rank, engine's dtype."""
    total = 0
    for lora in adapter.loras.values():
        for tensor in (*_tensors(lora.lora_a), *_tensors(lora.lora_b)):
            total += tensor.numel() * tensor.element_size()
    return total


def model_bytes(model: Any) -> int:
    """Return the bytes of parameters and buffers: the base model, as slots are neither."""
    return _storage_bytes((*model.parameters(), *model.buffers()))


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "element_size"):
        yield value


def _storage_bytes(tensors: Iterable[Any]) -> int:
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def floor(worker: Any, pool_bytes: int | None, kv: Any) -> dict[str, int | None]:
    """Return what one rank's memory is spent on; None is unknown, never 0.

    ``kv`` is the rank's KVCacheConfig. ``unattributed_bytes`` is what the process held after profiling beyond weights and
    slots. On CPU vLLM profiles nothing, and it repacks weights into objects of its kernels that show no size (of the tiny
    test model's 9,987,112 bytes, parameters are left with 926,784): there these are None.
    """
    on_cpu = getattr(worker.device, "type", "cpu") == "cpu"
    weights = None if on_cpu else model_bytes(worker.model_runner.get_model())
    held = _integer(getattr(worker, "total_consumed", None))
    device_free, device_total = _device_memory(worker)
    return {
        "weights_bytes": weights,
        "slot_pool_bytes": pool_bytes,
        "peak_activation_bytes": _integer(getattr(worker, "peak_activation_memory", None)),
        "kv_bytes": sum(int(tensor.size) for tensor in kv.kv_cache_tensors),
        "kv_blocks": int(kv.num_blocks),
        "unattributed_bytes": None if held is None or weights is None else max(0, held - weights - (pool_bytes or 0)),
        "requested_bytes": _integer(getattr(worker, "requested_memory", None)),
        "device_bytes": device_total,
        "device_free_bytes": device_free,
    }


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)


def _device_memory(worker: Any) -> tuple[int | None, int | None]:
    if getattr(worker.device, "type", "cpu") != "cuda":
        return None, None
    import torch

    free, total = torch.cuda.mem_get_info(worker.device)
    return int(free), int(total)
