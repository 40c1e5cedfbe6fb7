"""What docs/plan.md walks through: dated offers, a base by its configuration, forty adapters, a minute of traffic."""

from __future__ import annotations

import shutil
from pathlib import Path

from adapters.build_weights import BASE_8B, build, pairs
from plan.small import BASE, ROOT, azure


def write_example(folder: Path) -> None:
    """Files that the page's commands read, in ``folder``. Adapters have true sizes and no data."""
    shutil.copy(ROOT / "tests/plan/offers.csv", folder)
    shutil.copytree(BASE, folder / BASE.name)
    azure(folder / "slice.csv", 60)
    every = BASE_8B.projections()
    modules = {name: every[name] for name in ("self_attn.q_proj", "self_attn.v_proj")}
    for number in range(40):
        rank = (8, 16)[number % 2]
        config = {
            "peft_type": "LORA",
            "lora_alpha": 32,
            "base_model_name_or_path": BASE.name,
            "r": rank,
            "target_modules": ["q_proj", "v_proj"],
        }
        spec = pairs(modules, rank, BASE_8B.layers, stem="model.layers.{i}.", dtype="BF16")
        build(folder / "adapters" / f"a{number}", config, spec)
