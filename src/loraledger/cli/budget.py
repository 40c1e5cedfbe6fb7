"""``loraledger budget``: what fits on a device, before an engine is started.

With ``--adapter`` a size is given and the rest of the device is divided by it. With ``--base`` the engine's own rules are followed
to the byte: slots from the base's shapes and the engine's flags, KV in whole blocks from what remains.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraledger.cli.engine_flags import DtypeOption, LoraDtypeOption, ShardedOption, TargetsOption, check_flags, listed
from loraledger.cli.options import JsonOption
from loraledger.cli.output import print_json, print_table
from loraledger.errors import InputFileError, ObjectiveError
from loraledger.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from loraledger.adapters.sizing.engine import EngineSettings
    from loraledger.adapters.survey import Unreadable
    from loraledger.ledger.budget import ExactBudget, FolderBudget, Plan, RoughBudget

_BAR = 12
"""Characters of a bar for the whole device: a table of one below 100 GB then fits on 80 columns."""
_COLUMNS = ("part", "size", "bytes", "share", "", "what")

Part = tuple[str, int, str]
"""Name, bytes, a few words."""


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _in_bytes(help_: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(parser=_size, metavar="SIZE", help=help_)
    return option


_Device = Annotated[int, _in_bytes("Memory of one device, such as 80GiB.")]
_Floor = Annotated[int | None, _in_bytes("Estimate: weights and all that the engine takes beside KV.")]
_Adapter = Annotated[int | None, _in_bytes("Estimate: one adapter on the device.")]
_Safety = Annotated[int, _in_bytes("To keep free.")]
_Kv = Annotated[int | None, _in_bytes("KV cache that is wanted. With --base it defaults to what remains.")]
_KvTokens = Annotated[int | None, typer.Option(min=1, help="The same in tokens, such as max_model_len; needs --base.")]
_Base = Annotated[Path | None, typer.Option(help="Folder of the base model (config.json): exact figures.")]
_Adapters = Annotated[list[Path] | None, typer.Option(help="Adapter folder, or folder of such folders; repeatable.")]
_Slots = Annotated[int, typer.Option(min=1, help="Slots.")]
_Rank = Annotated[int, typer.Option(min=1, help="Largest rank that a slot takes.")]
_Host = Annotated[int | None, typer.Option(min=1, help="Host cache entries. Default: max_loras.")]
_Ranks = Annotated[int, typer.Option("--tp", min=1, help="Devices that share the model.")]
_KvType = Annotated[str, typer.Option(help="auto: the base model's.")]
_Utilization = Annotated[float | None, typer.Option(min=0.01, max=1.0, help="Default: 0.92, as vLLM 0.32.")]
_Overhead = Annotated[
    int | None, _in_bytes("Activation peak, graphs, runtime, as the engine logs them. Default: unknown.")
]


def budget(
    device_memory: _Device,
    floor: _Floor = None,
    adapter: _Adapter = None,
    safety: _Safety = 0,
    kv: _Kv = None,
    kv_tokens: _KvTokens = None,
    base: _Base = None,
    adapters: _Adapters = None,
    max_loras: _Slots = 1,
    max_lora_rank: _Rank = 16,
    max_cpu_loras: _Host = None,
    tensor_parallel: _Ranks = 1,
    fully_sharded_loras: ShardedOption = None,
    lora_target_modules: TargetsOption = None,
    lora_dtype: LoraDtypeOption = None,
    dtype: DtypeOption = None,
    kv_cache_dtype: _KvType = "auto",
    gpu_memory_utilization: _Utilization = None,
    overhead: _Overhead = None,
    as_json: JsonOption = False,
) -> None:
    """Say what fits on a device: adapters of a given size, or exactly the slots and KV of an engine.

    Exit code 3: base or adapters cannot be read; 5: floor, slots and KV do not fit.
    """
    if base is None:
        if floor is None or kv is None or adapter is None or kv_tokens is not None or adapters:
            raise typer.BadParameter("give --floor, --kv and --adapter for an estimate, or --base for exact figures")
        _rough(device_memory, floor, safety, kv, adapter, as_json)
        return
    if floor is not None or adapter is not None or (kv is not None and kv_tokens is not None):
        raise typer.BadParameter("--base works out --floor and --adapter itself, and takes one of --kv and --kv-tokens")
    from loraledger.adapters.sizing.engine import EngineSettings

    engine = EngineSettings(
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_cpu_loras=max_cpu_loras,
        tensor_parallel=tensor_parallel,
        fully_sharded_loras=bool(fully_sharded_loras),
        lora_target_modules=listed(lora_target_modules),
        lora_dtype=lora_dtype or "auto",
        dtype=dtype or "auto",
        kv_cache_dtype=kv_cache_dtype,
    )
    plan = _plan(device_memory, base, engine, gpu_memory_utilization, safety, overhead, kv, kv_tokens)
    _exact(plan, adapters or [], as_json)


def _plan(
    device: int,
    base: Path,
    engine: EngineSettings,
    utilization: float | None,
    safety: int,
    overhead: int | None,
    kv: int | None,
    kv_tokens: int | None,
) -> Plan:
    from loraledger.adapters.sizing.base import read_base
    from loraledger.ledger.budget import BLOCK_TOKENS, UTILIZATION, Plan, kv_for

    check_flags(engine)
    try:
        read = read_base(base)
    except InputFileError as error:
        raise InputFileError(f"--base: {error.message}") from error
    wanted = kv if kv_tokens is None else kv_for(kv_tokens, read, engine)
    return Plan(device, read, engine, utilization or UTILIZATION, safety, overhead, wanted, BLOCK_TOKENS)


def _rough(device: int, floor: int, safety: int, kv: int, adapter: int, as_json: bool) -> None:
    from loraledger.ledger.budget import rough_budget

    if adapter < 1:
        raise typer.BadParameter("--adapter must be at least one byte")
    found = rough_budget(device, floor, safety, kv, adapter)
    if as_json:
        print_json("budget", _rough_document(found))
    else:
        parts = [("floor", floor, ""), ("safety", safety, "kept free"), ("kv cache", kv, ""), ("left", found.left, "")]
        _print_parts(device, parts)
        print()
        left = format_bytes(max(0, found.left))
        print(f"{left} left for adapters: {found.adapters} of {format_bytes(adapter)}, and {_spare(found)} over")
        print("an engine with padded slots holds fewer: --base DIR works them out to the byte")
        sys.stdout.flush()
    if found.left < 0:
        raise ObjectiveError(f"floor, safety and KV are {format_bytes(-found.left)} more than the device")


def _spare(found: RoughBudget) -> str:
    return format_bytes(max(0, found.spare))


def _rough_document(found: RoughBudget) -> dict[str, object]:
    return {
        "exact": False,
        "device_bytes": found.device,
        "floor_bytes": found.floor,
        "safety_bytes": found.safety,
        "kv_bytes": found.kv,
        "adapter_bytes": found.adapter,
        "left_bytes": found.left,
        "adapters": found.adapters,
        "spare_bytes": found.spare,
        "fits": found.left >= 0,
    }


def _exact(plan: Plan, paths: Sequence[Path], as_json: bool) -> None:
    from loraledger.adapters.survey import Unreadable, find, sum_up, survey
    from loraledger.cli.adapters.report import complaint
    from loraledger.ledger.budget import exact_budget, folder_budget

    found = exact_budget(plan)
    places, problems = find(paths)
    rows = list(survey(places, plan.base, plan.engine))
    folder = folder_budget(plan, sum_up(rows, plan.engine)) if paths else None
    if as_json:
        print_json("budget", _document(plan, found, folder))
    else:
        _print_exact(plan, found, folder)
        sys.stdout.flush()
    bad: list[Unreadable] = [*problems, *(row for row in rows if isinstance(row, Unreadable))]
    for item in bad:
        print(f"loraledger: {complaint(item)}", file=sys.stderr)
    if bad:
        raise InputFileError(f"{len(bad)} could not be read")
    if not found.fits:
        raise ObjectiveError(f"{format_bytes(-found.left)} too much for the device: {_remedies(found, folder)}")


def _remedies(found: ExactBudget, folder: FolderBudget | None) -> str:
    levers = [f"{found.largest_slots} slots fit"] if found.largest_slots else ["no slot of this rank fits"]
    smaller = folder.at_smallest if folder else None
    if smaller is not None and smaller.left > found.left:
        fits = "fits" if smaller.fits else "is not enough"
        levers.append(f"max_lora_rank {smaller.slots.max_lora_rank} takes all adapters and {fits}")
    return f"{', '.join(levers)}; else quantize the base, shard it (--tp), or want less KV"


def _print_exact(plan: Plan, found: ExactBudget, folder: FolderBudget | None) -> None:
    engine, ranks = plan.engine, plan.engine.tensor_parallel
    each = "" if ranks == 1 else f"; figures of one of {ranks} devices"
    print(
        f"engine  max_loras {engine.max_loras}, max_lora_rank {engine.max_lora_rank}, max_cpu_loras {engine.host_entries}{each}"
    )
    print(f"base    {plan.base.name}: {plan.base.architecture}, KV {format_bytes(found.kv_bytes_per_token)} a token")
    print()
    _print_parts(found.device, list(_parts(found)))
    print()
    for line in (*_facts(found), *_of_folder(found, folder)):
        print(line)


def _parts(found: ExactBudget) -> Iterator[Part]:
    slots = found.slots
    yield "weights", found.weights, ""
    if found.overhead is not None:
        yield "overhead", found.overhead, ""
    yield "slots", slots.total, f"{slots.count} x {format_bytes(slots.one.total)}"
    yield "kv cache", found.kv, f"{'up to ' if found.kv_at_most else ''}{found.kv_tokens:,} tokens"
    yield "kept free", found.kept, ""
    yield "left", found.left, _of_rest(found)


def _of_rest(found: ExactBudget) -> str:
    if not found.fits:
        return "does not fit"
    return "goes to KV too" if found.kv_wanted else ""


def _facts(found: ExactBudget) -> Iterator[str]:
    slots = found.slots
    if found.overhead is None:
        where = "lies in the KV figure" if found.kv_at_most else "must fit into what is left"
        yield f"overhead is not known and {where}: give --overhead SIZE, from the engine's log"
    yield f"slots take {slots.kv_tokens:,} KV tokens away, one slot {slots.kv_tokens_one:,}, whoever is in them"
    least = "this KV" if found.kv_wanted else "one block of KV"
    yield f"largest max_loras that leaves {least}: {_largest(found)}"


def _largest(found: ExactBudget) -> str:
    return f"{found.largest_slots:,}" if found.largest_slots else "none"


def _of_folder(found: ExactBudget, folder: FolderBudget | None) -> Iterator[str]:
    if folder is None:
        return
    count, smaller = found.slots.count, folder.at_smallest
    yield f"adapters that the engine can take: {folder.adapters}"
    if smaller is not None and smaller.slots.max_lora_rank != found.slots.max_lora_rank:
        freed = found.slots.total - smaller.slots.total
        price = f"{format_bytes(abs(freed))} or {found.tokens(abs(freed)):,} KV tokens"
        what = "gives back" if freed > 0 else "takes another"
        yield f"max_lora_rank {smaller.slots.max_lora_rank} is enough for them and {what} {price}"
    if folder.too_big:
        yield f"too large for any max_lora_rank: {len(folder.too_big)}"
    if folder.turns:
        yield f"{folder.adapters} adapters on {count} slots take turns: one step runs at most {count} of them"
    if folder.host is not None:
        yield f"host: up to {format_bytes(folder.host)} for {found.host_entries} entries of the largest adapters"


def _print_parts(device: int, parts: Sequence[Part]) -> None:
    print_table(
        _COLUMNS,
        [*(_row(device, part) for part in parts), _row(device, ("device", device, ""))],
        ["size", "bytes", "share"],
    )


def _row(device: int, part: Part) -> list[object]:
    name, count, what = part
    share = count / device if device else 0.0
    return [name, format_bytes(count), f"{count:,}", f"{share:.1%}", _bar(share), what]


def _bar(share: float) -> str:
    """A bar whose length is the share; of what is there at least a thin one."""
    length = round(min(1.0, max(0.0, share)) * _BAR)
    wide = (sys.stdout.encoding or "").lower().startswith("utf")
    full, thin = ("█", "▏") if wide else ("#", "|")
    return full * length or (thin if share > 0 else "")


def _document(plan: Plan, found: ExactBudget, folder: FolderBudget | None) -> dict[str, object]:
    slots, guess = found.slots, found.kv_at_most
    return {
        "exact": True,
        "device_bytes": found.device,
        "weight_bytes": found.weights,
        "weight_source": plan.base.weight_source,
        "overhead_bytes": found.overhead,
        "slots": slots.count,
        "max_lora_rank": slots.max_lora_rank,
        "slot_bytes": slots.one.total,
        "slot_projection_bytes": slots.one.projections,
        "slot_embedding_bytes": slots.one.embeddings,
        "all_slots_bytes": slots.total,
        "slot_kv_tokens": slots.kv_tokens_one,
        "all_slots_kv_tokens": slots.kv_tokens,
        "kv_bytes": None if guess else found.kv,
        "kv_bytes_at_most": found.kv,
        "kv_tokens": None if guess else found.kv_tokens,
        "kv_tokens_at_most": found.kv_tokens,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "block_tokens": found.block_tokens,
        "kept_free_bytes": found.kept,
        "left_bytes": None if found.overhead is None and found.kv_wanted else found.left,
        "left_bytes_at_most": found.left,
        "fits": found.fits,
        "largest_max_loras": found.largest_slots,
        "tensor_parallel": plan.engine.tensor_parallel,
        "host_entries": found.host_entries,
        "adapters": None if folder is None else _folder_document(found, folder),
    }


def _folder_document(found: ExactBudget, folder: FolderBudget) -> dict[str, object]:
    smaller = folder.at_smallest
    return {
        "accepted": folder.adapters,
        "smallest_max_lora_rank": folder.smallest_max_rank,
        "all_slots_bytes_at_smallest": None if smaller is None else smaller.slots.total,
        "freed_bytes_at_smallest": None if smaller is None else found.slots.total - smaller.slots.total,
        "too_big": list(folder.too_big),
        "host_bytes_at_most": folder.host,
        "take_turns": folder.turns,
    }
