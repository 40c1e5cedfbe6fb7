"""What one engine replica is made of, and how long its steps take.

Theory of operation. One decode step reads all weights once and each sequence's keys and values once, so its time is linear in
sequences and in KV tokens; a prefill is bound by memory while it is short and by arithmetic once it is long, hence a floor and
a slope. ::

    step = base + per_seq * decoding + per_kv_token * kv_tokens + prefill + adapter * distinct adapters + loads
    prefill = max(prefill_floor, prefill_offset + per_token * prefill_tokens)      0 without prefill tokens

The default numbers are fits to a measurement-based kernel database for Llama-3.1-8B in bf16 on one H100 under vLLM: decode over
batches of 1 to 256 and contexts of 128 to 4,096 as 6.32 ms + 11.1 us a sequence + 40.7 ns a KV token (27 points, 2.6 % mean
error, 8.2 % worst); prefill steps of 16 to 4,096 tokens as max(7.4 ms, 1 ms + 20.75 us a token) (3.7 % mean, 15.3 % worst).
``prefill_offset_ps`` is negative because the base step is already counted: it makes a pure prefill step equal to that fit.
An activation takes 7.8 to 8.1 ms for that model below the engine's maximum rank whatever the adapter's size, because zeroing
the slot dominates. A load from disk is 6 ms + bytes at 760 MB/s: a fit to cold loads of 11 and 45 MB on a CPU server of vLLM
0.32.0. ``adapter_step_ps`` is a guess (0.5 % of the base step; no measurement of it was found), and so is ``kv_blocks``:
give the count that the engine itself reports, since a guessed one is the largest error a simulator can make.

All times are integer picoseconds, so that sums are exact and never depend on the order of addition.
"""

from __future__ import annotations

import msgspec

PS_PER_S = 1_000_000_000_000
PS_PER_MS = 1_000_000_000
PS_PER_US = 1_000_000


class TwinProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and costs of one replica. Counts are plain, ``*_ps`` are picoseconds, bytes are bytes.

    ``slots`` is vLLM's ``max_loras``, ``host_entries`` ``max_cpu_loras``, ``max_rank`` ``max_lora_rank``, ``max_seqs``
    ``max_num_seqs``, ``token_budget`` ``max_num_batched_tokens``. Raises ``ValueError`` naming the field that cannot be.
    """

    slots: int = 8
    host_entries: int = 32
    max_rank: int = 64
    max_seqs: int = 256
    token_budget: int = 2048
    kv_blocks: int = 24_576
    block_size: int = 16

    step_base_ps: int = 6_320 * PS_PER_US
    step_per_seq_ps: int = 11_100_000
    step_per_kv_token_ps: int = 40_700
    prefill_per_token_ps: int = 20_750_000
    prefill_floor_ps: int = 1_080 * PS_PER_US
    prefill_offset_ps: int = -5_320 * PS_PER_US
    adapter_step_ps: int = 30 * PS_PER_US

    load_overhead_ps: int = 6 * PS_PER_MS
    load_bytes_per_s: int = 760_000_000
    activation_ps: int = 8 * PS_PER_MS

    def __post_init__(self) -> None:
        for field in ("slots", "max_rank", "max_seqs", "kv_blocks", "block_size", "step_base_ps", "load_bytes_per_s"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: must be at least 1")
        for field in (
            "step_per_seq_ps",
            "step_per_kv_token_ps",
            "prefill_per_token_ps",
            "prefill_floor_ps",
            "adapter_step_ps",
            "load_overhead_ps",
            "activation_ps",
        ):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)}: must not be negative")
        if self.host_entries < self.slots:
            raise ValueError(f"host_entries is {self.host_entries}: must be at least slots ({self.slots}), as in vLLM")
        if self.token_budget < self.max_seqs:
            raise ValueError(
                f"token_budget is {self.token_budget}: must be at least max_seqs ({self.max_seqs}), as in vLLM"
            )

    @property
    def kv_tokens(self) -> int:
        """How many tokens' keys and values fit."""
        return self.kv_blocks * self.block_size

    def blocks(self, tokens: int) -> int:
        """KV blocks that hold ``tokens`` tokens of one sequence."""
        return -(-tokens // self.block_size)

    def step_ps(self, decoding: int, kv_tokens: int, prefill_tokens: int, adapters: int) -> int:
        """One step without its loads: ``decoding`` sequences reading ``kv_tokens`` in all, ``adapters`` distinct ones."""
        time = (
            self.step_base_ps
            + self.step_per_seq_ps * decoding
            + self.step_per_kv_token_ps * kv_tokens
            + self.adapter_step_ps * adapters
        )
        if prefill_tokens:
            time += max(self.prefill_floor_ps, self.prefill_offset_ps + self.prefill_per_token_ps * prefill_tokens)
        return time

    def load_ps(self, size: int) -> int:
        """Disk to host for an adapter of ``size`` bytes, activation not included."""
        return self.load_overhead_ps + size * PS_PER_S // self.load_bytes_per_s
