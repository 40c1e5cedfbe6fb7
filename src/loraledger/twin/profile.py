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

Where a line is not good enough, tables take its place: per batch size an (intercept, slope per KV token) for decodes (0.9 % mean
error instead of 2.6 % on the same 27 points, in sample), and points to interpolate between for prefills alone and for prefills
beside decodes. The adapter term may also weigh ranks: by the largest in the step, as kernels that pad each adapter to it do (BGMV),
or by their sum, as kernels that do not (MBGMV).

All times are integer picoseconds, so that sums are exact and never depend on the order of addition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

PS_PER_S = 1_000_000_000_000
PS_PER_MS = 1_000_000_000
PS_PER_US = 1_000_000
MOST = 100_000
"""Of what a twin keeps a row for: sequences of a batch, tokens of a block."""


class UnifiedRules(msgspec.Struct, frozen=True, kw_only=True):
    """How S-LoRA's one pool is run. ``order``: who is admitted first; ``early_abort`` gives up on requests that will be late.

    ``kv_bytes_per_token`` prices an adapter as its bytes over this; 0: as 4 cells a rank, which is exact for q, k, v and o of a
    model without grouped heads. ``attempt_steps``: decode steps after a prefill before the next one is tried.
    ``prefill_tokens``: most prompt tokens a prefill; 0: a sixth of the pool, at least 3,072. ``first_token_slo_ps``: a request
    that has waited for all but ``abort_margin_ps`` of it is given up.
    """

    order: Literal["fifo", "lifo", "early_abort"] = "fifo"
    prefetch: bool = False
    kv_bytes_per_token: int = 0
    attempt_steps: int = 10
    prefill_tokens: int = 0
    first_token_slo_ps: int = 6 * PS_PER_S
    abort_margin_ps: int = PS_PER_S // 2


class TwinProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and costs of one replica. Counts are plain, ``*_ps`` are picoseconds, bytes are bytes.

    ``slots`` is vLLM's ``max_loras``, ``host_entries`` ``max_cpu_loras``, ``max_rank`` ``max_lora_rank``, ``max_seqs``
    ``max_num_seqs``, ``token_budget`` ``max_num_batched_tokens``. Raises ``ValueError`` naming the field that cannot be.

    ``layout``: ``slots`` as in vLLM, or ``unified``, S-LoRA's one pool of ``kv_blocks * block_size`` cells for KV and adapters,
    where ``slots``, ``host_entries`` and ``token_budget`` mean nothing and ``unified`` holds the rules. ``slot_bytes``: the
    largest adapter that fits a slot; 0: only ``max_rank`` limits it. ``prefix_block_tokens``: prompt tokens that one number of a
    request's prefix stands for, a multiple of ``block_size``; 0: ``block_size``.

    ``decode_table``: rows (sequences, intercept ps, slope ps a KV token) that replace ``step_base_ps``, ``step_per_seq_ps`` and
    ``step_per_kv_token_ps`` for steps that decode; from 1 to ``max_seqs`` sequences, linear in between. ``prefill_table``: rows
    (prefill tokens, ps beyond the rest of the step) that replace the floor and the line; constant below the first row, up to the
    most tokens that a step can prefill. ``mixed_table``: the same for steps that decode as well; empty: no different.
    ``lora_ps`` is paid once by a step with any adapter, ``rank_step_ps`` a rank by ``rank_cost``, and ``activation_per_rank_ps``
    by an activation.
    """

    layout: Literal["slots", "unified"] = "slots"
    unified: UnifiedRules = UnifiedRules()
    slots: int = 8
    host_entries: int = 32
    max_rank: int = 64
    max_seqs: int = 256
    token_budget: int = 2048
    kv_blocks: int = 24_576
    block_size: int = 16
    slot_bytes: int = 0
    prefix_caching: bool = False
    prefix_block_tokens: int = 0

    step_base_ps: int = 6_320 * PS_PER_US
    step_per_seq_ps: int = 11_100_000
    step_per_kv_token_ps: int = 40_700
    prefill_per_token_ps: int = 20_750_000
    prefill_floor_ps: int = 1_080 * PS_PER_US
    prefill_offset_ps: int = -5_320 * PS_PER_US
    decode_table: tuple[tuple[int, int, int], ...] = ()
    prefill_table: tuple[tuple[int, int], ...] = ()
    mixed_table: tuple[tuple[int, int], ...] = ()
    adapter_step_ps: int = 30 * PS_PER_US
    lora_ps: int = 0
    rank_step_ps: int = 0
    rank_cost: Literal["max", "sum"] = "max"

    load_overhead_ps: int = 6 * PS_PER_MS
    load_bytes_per_s: int = 760_000_000
    activation_ps: int = 8 * PS_PER_MS
    activation_per_rank_ps: int = 0

    def __post_init__(self) -> None:
        for field in ("slots", "max_rank", "max_seqs", "kv_blocks", "block_size", "step_base_ps", "load_bytes_per_s"):
            _at_least(1, field, getattr(self, field))
        for field in _NOT_NEGATIVE:
            _at_least(0, field, getattr(self, field))
        for field in ("max_seqs", "block_size"):
            if getattr(self, field) > MOST:
                raise ValueError(f"{field} is {getattr(self, field)}: must be at most {MOST}")
        if self.layout == "unified":
            _check_rules(self.unified)
            if self.prefix_caching:
                raise ValueError("prefix_caching is on: layout unified has none")
        elif self.layout != "slots":
            raise ValueError(f"layout is {self.layout!r}: must be slots or unified")
        else:
            self._check_slots()
        if self.rank_cost not in ("max", "sum"):
            raise ValueError(f"rank_cost is {self.rank_cost!r}: must be max or sum")
        if self.prefix_block_tokens % self.block_size:
            raise ValueError(
                f"prefix_block_tokens is {self.prefix_block_tokens}: must be a multiple of block_size ({self.block_size})"
            )
        _check_decodes(self.decode_table, self.max_seqs)
        _check_points("prefill_table", self.prefill_table, self.prefill_limit)
        _check_points("mixed_table", self.mixed_table, self.prefill_limit)

    def _check_slots(self) -> None:
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

    @property
    def prefill_limit(self) -> int:
        """The most prompt tokens that one step computes."""
        if self.layout == "slots":
            return self.token_budget
        return self.unified.prefill_tokens or max(self.kv_tokens // 6, 3072)

    def step_ps(
        self, decoding: int, kv_tokens: int, prefill_tokens: int, adapters: int, ranks: Sequence[int] = ()
    ) -> int:
        """One step without its loads: ``decoding`` sequences reading ``kv_tokens`` in all, ``adapters`` distinct ones.

        ``ranks``: theirs, where they are known.
        """
        intercept, slope = self.decode_ps(decoding)
        time = intercept + slope * kv_tokens + self.adapters_ps(adapters, ranks)
        return time + self.prefill_ps(prefill_tokens, decoding) if prefill_tokens else time

    def decode_ps(self, decoding: int) -> tuple[int, int]:
        """What a step with ``decoding`` decoding sequences takes: (at no KV tokens, for each KV token that it reads)."""
        rows = self.decode_table
        if not rows or not decoding:
            return self.step_base_ps + self.step_per_seq_ps * decoding, self.step_per_kv_token_ps
        above = bisect_left(rows, (decoding,))
        if rows[above][0] == decoding:
            return rows[above][1:]
        (low, intercept, slope), (high, intercept2, slope2) = rows[above - 1], rows[above]
        return (
            _between(decoding, low, intercept, high, intercept2),
            _between(decoding, low, slope, high, slope2),
        )

    def prefill_ps(self, tokens: int, decoding: int) -> int:
        """What ``tokens`` (at least 1) prefill tokens add to a step with ``decoding`` decoding sequences."""
        rows = (decoding and self.mixed_table) or self.prefill_table
        if not rows:
            return max(self.prefill_floor_ps, self.prefill_offset_ps + self.prefill_per_token_ps * tokens)
        above = bisect_left(rows, (tokens,))
        if above == 0 or rows[above][0] == tokens:
            return rows[above][1]
        return _between(tokens, *rows[above - 1], *rows[above])

    def adapters_ps(self, adapters: int, ranks: Sequence[int]) -> int:
        """What ``adapters`` distinct adapters of these ranks add to a step."""
        if not adapters:
            return 0
        time = self.lora_ps + self.adapter_step_ps * adapters
        if self.rank_step_ps and ranks:
            time += self.rank_step_ps * (sum(ranks) if self.rank_cost == "sum" else max(ranks))
        return time

    def load_ps(self, size: int) -> int:
        """Disk to host for an adapter of ``size`` bytes, activation not included."""
        return self.load_overhead_ps + size * PS_PER_S // self.load_bytes_per_s

    def activate_ps(self, rank: int) -> int:
        """Host to device for an adapter of rank ``rank``."""
        return self.activation_ps + self.activation_per_rank_ps * rank

    def cells(self, rank: int, size: int) -> int:
        """Cells of the unified pool that an adapter of rank ``rank`` and ``size`` bytes takes."""
        per_token = self.unified.kv_bytes_per_token
        return -(-size // per_token) if per_token else 4 * rank


_NOT_NEGATIVE = (
    "slot_bytes",
    "prefix_block_tokens",
    "step_per_seq_ps",
    "step_per_kv_token_ps",
    "prefill_per_token_ps",
    "prefill_floor_ps",
    "adapter_step_ps",
    "lora_ps",
    "rank_step_ps",
    "load_overhead_ps",
    "activation_ps",
    "activation_per_rank_ps",
)


def _at_least(least: int, field: str, value: int) -> None:
    if value < least:
        raise ValueError(f"{field} is {value}: must {'be at least 1' if least else 'not be negative'}")


def _check_rules(rules: UnifiedRules) -> None:
    if rules.order not in ("fifo", "lifo", "early_abort"):
        raise ValueError(f"unified.order is {rules.order!r}: must be fifo, lifo or early_abort")
    _at_least(1, "unified.attempt_steps", rules.attempt_steps)
    for field in ("kv_bytes_per_token", "prefill_tokens", "first_token_slo_ps", "abort_margin_ps"):
        _at_least(0, f"unified.{field}", getattr(rules, field))


def _check_decodes(rows: tuple[tuple[int, int, int], ...], max_seqs: int) -> None:
    if not rows:
        return
    sequences = [row[0] for row in rows]
    if sequences != sorted(set(sequences)) or sequences[0] != 1 or sequences[-1] < max_seqs:
        raise ValueError(f"decode_table: sequences must rise from 1 to max_seqs ({max_seqs}), and are {sequences}")
    for count, intercept, slope in rows:
        _at_least(1, f"decode_table: intercept of {count} sequences", intercept)
        _at_least(0, f"decode_table: slope of {count} sequences", slope)
    for few, many in pairwise(rows):
        if is_shorter(many, few):
            raise ValueError(
                f"decode_table: a step of {many[0]} sequences is shorter than one of {few[0]}, whatever their context"
            )


def is_shorter(many: tuple[int, int, int], few: tuple[int, int, int]) -> bool:
    """Whether a row of ``decode_table`` makes a step of more sequences shorter than another row, at every context of theirs."""
    return many[1] < few[1] and many[2] * many[0] <= few[2] * few[0]


def _check_points(field: str, rows: tuple[tuple[int, int], ...], limit: int) -> None:
    if not rows:
        return
    tokens = [row[0] for row in rows]
    if tokens != sorted(set(tokens)) or tokens[0] < 1 or tokens[-1] < limit:
        raise ValueError(
            f"{field}: tokens must rise from 1 or more to {limit}, the most a step prefills, and are {tokens}"
        )
    _at_least(0, f"{field}: time of {tokens[0]} tokens", rows[0][1])
    for (low, before), (high, after) in pairwise(rows):
        if after < before:
            raise ValueError(f"{field}: negative slope between {low} and {high} tokens")


def _between(x: int, low: int, at_low: int, high: int, at_high: int) -> int:
    """The line through (``low``, ``at_low``) and (``high``, ``at_high``) at ``x``, rounded down."""
    return (at_low * (high - x) + at_high * (x - low)) // (high - low)
