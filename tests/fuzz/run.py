"""Fuzz one reader: ``python tests/fuzz/run.py header --seconds 300``. Needs atheris, which only this script uses.

New inputs that reach new code go to a scratch folder; one that breaks a promise is printed, kept beside it and ends the
run with status 1. Copy it into ``tests/fuzz/corpus/TARGET`` under a telling name: the tests replay that folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

TOKENS = [
    *("dtype", "shape", "data_offsets", "__metadata__", "format", "BF16", "F4", "F8_E4M3", "BOOL", "C64"),
    *("base_model.model.", ".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_magnitude_vector"),
    *("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "modules_to_save", "peft_type", "use_dora"),
    *("target_parameters", "init_lora_weights", "all-linear", "trainable_token_indices", "layer_replication"),
]


def main() -> None:
    """Run until the time is over or a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=("header", "config"))
    parser.add_argument("--seconds", type=int, default=300)
    options = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.exit("fuzzing needs atheris: .venv/bin/python -m pip install atheris")
    with atheris.instrument_imports(include=["loraledger.adapters"]):
        from fuzz.targets import CORPUS, TARGETS
    target = TARGETS[options.target]
    scratch = Path(tempfile.mkdtemp(prefix=f"fuzz-{options.target}-"))
    (scratch / "found").mkdir()
    # In memory where there is such a folder: on a busy disk, writing one input has taken over 5 s.
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else scratch))
    tokens = scratch / "tokens"
    tokens.write_text("".join(f'"{token}"\n' for token in TOKENS))
    arguments = [
        *(sys.argv[0], str(scratch / "found"), str(CORPUS / options.target), f"-max_total_time={options.seconds}"),
        *(f"-dict={tokens}", "-max_len=8192", "-timeout=10", "-rss_limit_mb=1024", f"-artifact_prefix={scratch}/"),
    ]
    print(f"new inputs and failures: {scratch}", file=sys.stderr)

    def once(data: bytes) -> None:
        target(data, folder)

    atheris.Setup(arguments, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
