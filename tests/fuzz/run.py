"""Fuzz one reader: ``python tests/fuzz/run.py header --seconds 300``. Needs atheris, which only this script uses.

New inputs that reach new code go to a scratch folder; one that breaks a promise is printed, kept beside it and ends the
run with status 1. Copy it into ``tests/fuzz/corpus/TARGET`` under a telling name: the tests replay that folder.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

CORPUS = Path(__file__).parent / "corpus"
ADAPTER_TOKENS = [
    *("dtype", "shape", "data_offsets", "__metadata__", "format", "BF16", "F4", "F8_E4M3", "BOOL", "C64"),
    *("base_model.model.", ".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_magnitude_vector"),
    *("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "modules_to_save", "peft_type", "use_dora"),
    *("target_parameters", "init_lora_weights", "all-linear", "trainable_token_indices", "layer_replication"),
]
HTTP_TOKENS = [
    *("\r\n", "\r\n\r\n", "\n\n", "\r\n0\r\n\r\n", " HTTP/1.1", " HTTP/1.0", "GET /v1/models", "POST /v1/completions"),
    *("Host: h", "Authorization: Bearer sk-acme", "Content-Length: ", "Transfer-Encoding: chunked", ";a=b"),
    *("Connection: close", "Expect: 100-continue", "x-api-key: sk-acme", "Content-Type: application/json"),
]
BODY_TOKENS = [
    *('"model":', '"alpaca"', '"stream":true', '"stream_options":{', '"include_usage":', '"lora_path":', '"messages":'),
    *('"max_tokens":', '"store":', "null", "NaN", "1e400", "\\u006d", "\\ud800", "\ufeff"),
]
SSE_TOKENS = [
    *("data: ", "\n\n", "\r\n\r\n", "\r\r", "[DONE]", "event: ", ": ", '"model":"alpaca@3fa9c1d20b7e"', '"choices":[]'),
    *('"usage":', '"error":', '"response":{', '"message":{', '"type":', '"delta":{', '"content":'),
    *("content_block_delta", "response.output_text.delta"),
]


class Target(NamedTuple):
    """Where a target is, what of the product it exercises, and what its inputs are made of."""

    module: str
    instrumented: str
    tokens: list[str]


TARGETS = {
    "header": Target("fuzz.targets", "loraledger.adapters", ADAPTER_TOKENS),
    "config": Target("fuzz.targets", "loraledger.adapters", ADAPTER_TOKENS),
    "http": Target("fuzz.requests", "loraledger.gateway", HTTP_TOKENS),
    "sse": Target("fuzz.streams", "loraledger.gateway", SSE_TOKENS),
    "peek": Target("fuzz.bodies", "loraledger.gateway", BODY_TOKENS),
}


def main() -> None:
    """Run until the time is over or a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=300)
    options = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.exit("fuzzing needs atheris: .venv/bin/python -m pip install atheris")
    chosen = TARGETS[options.target]
    with atheris.instrument_imports(include=[chosen.instrumented]):
        module = importlib.import_module(chosen.module)
    target: Callable[[bytes, Path], object] = getattr(module, options.target)
    scratch = Path(tempfile.mkdtemp(prefix=f"fuzz-{options.target}-"))
    (scratch / "found").mkdir()
    # In memory where there is such a folder: on a busy disk, writing one input has taken over 5 s.
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else scratch))
    tokens = scratch / "tokens"
    hexed = ["".join(f"\\x{byte:02x}" for byte in token.encode()) for token in chosen.tokens]
    tokens.write_text("".join(f'"{token}"\n' for token in hexed))
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
