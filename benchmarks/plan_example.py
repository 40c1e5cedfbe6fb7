"""The files that docs/plan.md walks through, written into a new folder. Run: python -m benchmarks.plan_example FOLDER

Settings and offers as the page shows them, a base model by its configuration, forty adapters of true size without data (a hole
for their weights), and the first minute of the slice of Azure's trace that comes with the demo.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # small files of true form are made there

from adapters.build_weights import BASE_8B, build, pairs
from plan.small import BASE, ROOT, azure

PAGE = ROOT / "docs/plan.md"


def write_example(folder: Path) -> None:
    """Files that the page's commands read, in ``folder``, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (fleet,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "fleet.yaml").write_text(fleet, encoding="utf-8")
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


def main() -> None:
    """Into the folder that is named, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} is there already: name a new folder")
    write_example(folder)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    main()
