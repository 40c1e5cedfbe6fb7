"""What vLLM itself allocates for LoRA, found by building its models and its LoRA manager in this process, without a server.

Run inside the engine's environment: ``python -P bytes_of_engine.py FILE``, where FILE is a JSON list of jobs, objects:

- ``model``: folder with a ``config.json``; weights are vLLM's dummies, so none are needed.
- ``engine``: keyword arguments of ``EngineArgs`` (``max_lora_rank``, ``lora_target_modules``, ``dtype`` ...).
- ``ranks``: tensor-parallel ranks to build rank 0 of. Nothing is computed, so the other ranks need not exist: it is enough
  that the process group of this one says that it has so many members.
- ``adapters``: folders to load as the worker does.
- ``weights``: true to count the weights of the model too. Once a model: vLLM's Transformers backend changes its class.

It prints a JSON list, an object for each job: ``slot`` (bytes of one slot: every storage of a ``*_stacked`` tensor, over the
slots), ``modules`` (wrapped layers, each with its bytes a slot), ``host`` (bytes of the tensors of each loaded adapter, in
order), ``weights`` (bytes of the parameters of the ``transformers`` model of that configuration), or ``error``.

A process costs 8 s, nearly all of it imports, and a job 0.05 to 1 s.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

SLOTS = 2


def start() -> None:
    """Import vLLM and make process groups of one member."""
    import torch

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import registry

    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU runner does: there is no accelerator
    # vLLM looks at a model's class in a process of its own, 7 s for each architecture; here it may as well import it.
    registry._LazyRegisteredModel.inspect_model_cls = lambda lazy: registry._ModelInfo.from_model_cls(
        lazy.load_model_cls()
    )
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
        initialize_model_parallel(1, 1)
    gc.freeze()  # each loaded model collects garbage twice, 0.5 s a time while all that was imported is looked through


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """The result of one job."""
    import torch

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.model_executor.model_loader import get_model

    fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256}
    slots = {"enable_lora": True, "max_loras": SLOTS, "max_cpu_loras": 64}
    weights = parameters(job["model"]) if job.get("weights") else None
    with set_current_vllm_config(VllmConfig()):  # the Transformers backend asks for one while it is imported
        config = EngineArgs(model=job["model"], **fixed, **slots, **job.get("engine", {})).create_engine_config()
    ranks = job.get("ranks", 1)
    config.parallel_config.tensor_parallel_size = ranks
    group = parallel_state.get_tp_group()
    group.world_size = ranks
    try:
        with set_current_vllm_config(config):
            model = get_model(vllm_config=config)
            manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
            manager.create_lora_manager(model, config)
            host = []
            for number, adapter in enumerate(job.get("adapters", []), start=1):
                manager.add_adapter(LoRARequest(str(number), number, adapter))
                kept = loaded(manager._adapter_manager.list_adapters()[number])
                host.append(sum({tensor.data_ptr(): size(tensor) for tensor in kept}.values()))
    finally:
        group.world_size = 1
    storages = dict(stacked(model))
    modules: dict[str, int] = {}
    for name, storage in storages.values():
        modules[name] = modules.get(name, 0) + storage // SLOTS
    return {"slot": sum(modules.values()), "modules": modules, "host": host, "weights": weights}


def stacked(model: torch.nn.Module) -> Iterator[tuple[int, tuple[str, int]]]:
    """Address, module and bytes of each storage behind a ``*_stacked`` attribute."""
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, value in vars(module).items():
            if attribute.endswith("_stacked"):
                for tensor in value if isinstance(value, tuple | list) else (value,):
                    storage = tensor.untyped_storage()
                    yield storage.data_ptr(), (name, storage.nbytes())


def loaded(adapter: Any) -> Iterator[torch.Tensor]:
    """The tensors that the host cache holds for ``adapter``; those of fused experts come twice, under two names."""
    for weights in adapter.loras.values():
        for part in (weights.lora_a, weights.lora_b):
            yield from (tensor for tensor in (part if isinstance(part, list) else [part]) if tensor is not None)


def size(tensor: torch.Tensor) -> int:
    """Bytes of its values."""
    return int(tensor.numel() * tensor.element_size())


def parameters(folder: str) -> int:
    """Bytes of the weights that ``transformers`` gives a model of that configuration, each shared one once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    if config.tie_word_embeddings:
        model.tie_weights()
    return sum(map(size, model.parameters()))


def main() -> None:
    """Measure each job; one that fails leaves the others alone."""
    answers, sys.stdout = sys.stdout, sys.stderr
    start()
    results: list[dict[str, Any]] = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            results.append(measure(job))
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    answers.write(json.dumps(results))


if __name__ == "__main__":
    main()
