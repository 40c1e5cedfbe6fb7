"""One adapter folder, read: what its configuration and its weights' headers say, without reading any weights.

It does not judge: DoRA, whole matrices in ``modules_to_save`` and methods other than LoRA are reported as they are, and
whether an engine can serve them is decided elsewhere. What is odd about a folder and still readable is a warning.

The rank that matters is the largest one in use: ``rank_pattern`` may give single modules more than ``r``, tensors may have
more than the configuration says, and an engine sized for ``r`` refuses those. ``target_modules`` may be one string, a
regex or ``all-linear``: it stays a string. When it is null, as in folders saved by some trainers, the modules are taken
from the tensor names.

``layout_id`` says whether two adapters are alike in all but the values of their weights. It costs no reading, so it is
there before anything is admitted; the identity of the content is :func:`loraledger.adapters.reading.digest.content_digest`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from loraledger.adapters.reading.files import config_file, ignored_weights, read_small
from loraledger.adapters.reading.header import Header
from loraledger.adapters.reading.modules import Inventory, take_inventory
from loraledger.adapters.reading.peft import PeftConfig, read_config
from loraledger.adapters.reading.shards import RawWeights, parse_weights, read_weights
from loraledger.errors import InputFileError

MAX_CONFIG: Final = 1024 * 1024
"""Bytes; the largest seen in public folders is below 100 KB."""

MAX_REMEMBERED: Final = 256 * 1024
"""Bytes of configuration and header; four times those of 448 tensors."""

_NO_BEHAVIOUR: Final = frozenset({"base_claim", "peft_type", "peft_version", "target_modules", "task_type", "unknown"})
"""Fields of the configuration that may differ between adapters of one layout: what targets came to is in the tensors."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What one folder holds, by its configuration and its weights' header."""

    name: str
    path: Path
    """As configured or found; symbolic links in it are not resolved."""
    config: PeftConfig
    inventory: Inventory
    rank: int
    """Effective: the largest rank of any module, by the configuration and by the tensors."""
    target_modules: tuple[str, ...] | str
    """Module names, sorted; or the one string (regex, ``all-linear``) that the configuration has."""
    base_claim: str | None
    """The base model that the adapter says it is for: a hint, since names neither prove nor disprove."""
    bytes_disk: int
    """Length of the weights file, or of all shards."""
    parameters: int
    dtypes: tuple[str, ...]
    """By safetensors' names, sorted: ``("BF16",)``."""
    files: tuple[Path, ...]
    """The configuration first, then what an engine reads: the weights file, or the index and its shards."""
    sharded: bool
    ignored: tuple[str, ...]
    """Weights that were left alone, such as ``adapter_model.bin`` beside the safetensors."""
    layout_id: str
    """16 hex digits over tensor names, types and shapes and the configuration's fields that change behaviour."""
    warnings: tuple[str, ...]
    reading: object = field(default=None, repr=False, compare=False)
    """Holds what is shared with folders that say the same; see :class:`FolderReader`."""

    @property
    def scalings(self) -> Mapping[str, float]:
        """By module (base-layer name): alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
        return {name: self.config.scaling_of(name) for name in self.inventory.modules}


class FolderReader:
    """Reads many folders.

    Adapters of one tenant, or of one training pipeline, mostly have the very same configuration and header: a thousand
    take a tenth of the time and a fraction of the memory when what was made of both is kept and shared. The largest are
    remembered only while one who asked holds them: 130,000 tensors take 18 MB.
    """

    def __init__(self, keep: int = 64) -> None:
        """``keep``: how many pairs of configuration and header to remember unheld, those used last; 0: share nothing."""
        self._keep = keep
        self._held: WeakValueDictionary[bytes, _Reading] = WeakValueDictionary()
        self._known: OrderedDict[bytes, _Reading] = OrderedDict()

    def read(self, name: str, path: Path, *, root: Path | None = None) -> AdapterFolder:
        """As :func:`read_folder`."""
        try:
            config_path = config_file(path, root)
            config = read_small(config_path, MAX_CONFIG)
            weights = read_weights(path, root)
            ignored = ignored_weights(path, weights.files[0].name)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise InputFileError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
        reading = self._reading(config, weights)
        return AdapterFolder(
            name=name,
            path=path,
            config=reading.config,
            inventory=reading.inventory,
            rank=reading.rank,
            target_modules=reading.target_modules,
            base_claim=reading.config.base_claim,
            bytes_disk=weights.nbytes,
            parameters=reading.parameters,
            dtypes=reading.dtypes,
            files=(config_path, *weights.files),
            sharded=bool(weights.index),
            ignored=ignored,
            layout_id=reading.layout_id,
            warnings=(*reading.warnings, *_file_warnings(weights, ignored)),
            reading=reading,
        )

    def _reading(self, config: bytes, weights: RawWeights) -> _Reading:
        if not self._keep:
            return _read(config, weights)
        key, length = _key(config, weights)
        reading = self._held.get(key)
        if reading is None:
            self._held[key] = reading = _read(config, weights)
        if length <= MAX_REMEMBERED:
            self._known[key] = reading
            self._known.move_to_end(key)
            if len(self._known) > self._keep:
                self._known.popitem(last=False)
        return reading


def _key(config: bytes, weights: RawWeights) -> tuple[bytes, int]:
    """What says all that :func:`_read` goes by, in 32 bytes, and how many bytes that was."""
    sha, length = hashlib.sha256(), 0
    lengths = b"%d," * len(weights.headers) % tuple(header.data_bytes for header in weights.headers)
    for part in (config, weights.index, lengths, *(header.json for header in weights.headers)):
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
        length += len(part)
    return sha.digest(), length


def read_folder(name: str, path: Path, *, root: Path | None = None) -> AdapterFolder:
    """The adapter in folder ``path``. With ``root``, its files must lie inside ``root`` after links are followed.

    Raises :class:`InputFileError` saying what is wrong and what to do; an unreadable file is one of those things.
    """
    return FolderReader(keep=0).read(name, path, root=root)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Reading:
    """What configuration and headers say together, wherever they lie."""

    config: PeftConfig
    inventory: Inventory
    rank: int
    target_modules: tuple[str, ...] | str
    parameters: int
    dtypes: tuple[str, ...]
    layout_id: str
    warnings: tuple[str, ...]


def _read(raw_config: bytes, raw_weights: RawWeights) -> _Reading:
    config = read_config(raw_config)
    header = parse_weights(raw_weights)
    inventory = take_inventory(header.tensors, config)
    # Modules have the rank that the configuration gives them, but for those that are listed as deviating.
    deviating = (inventory.modules[module].rank for module in inventory.unconfigured)
    return _Reading(
        config=config,
        inventory=inventory,
        rank=max((config.max_rank, *deviating)),
        target_modules=_targets(config, inventory),
        parameters=header.parameters,
        dtypes=tuple(sorted(header.dtypes)),
        layout_id=_layout_id(header, config),
        warnings=tuple(_warnings(config, inventory)),
    )


def _targets(config: PeftConfig, inventory: Inventory) -> tuple[str, ...] | str:
    if config.target_modules is not None:
        return config.target_modules
    if not inventory.modules:
        raise InputFileError("neither target_modules nor any tensor name says which modules it changes")
    return tuple(sorted({module.suffix for module in inventory.modules.values()}))


def _layout_id(header: Header, config: PeftConfig) -> str:
    """16 hex digits of SHA-256 over names, types and shapes, sorted by name, and the fields that change behaviour."""
    layout: dict[str, object] = {name: tensor.shape for name, tensor in header.tensors.items()}
    if len(header.dtypes) > 1:
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()}
    behaviour = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in _NO_BEHAVIOUR}
    parts = (sorted(header.dtypes), layout, behaviour)
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:16]


def _warnings(config: PeftConfig, inventory: Inventory) -> Iterator[str]:
    if config.target_modules is None:
        yield "target_modules is null: the modules are taken from the tensors"
    if config.unknown:
        yield f"unknown fields of the configuration, ignored: {_some(config.unknown)}"
    if inventory.unconfigured:
        yield f"tensors of another rank than the configuration says: {_some(inventory.unconfigured)}"


def _file_warnings(weights: RawWeights, ignored: tuple[str, ...]) -> Iterator[str]:
    if weights.index:
        yield f"weights in {len(weights.headers)} files: engines read one file"
    if ignored:
        yield f"ignored beside {weights.files[0].name}: {_some(ignored)}"


def _some(names: tuple[str, ...], limit: int = 3) -> str:
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(repr(name[:100]) for name in names[:limit]) + more
