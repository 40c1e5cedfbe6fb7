"""What the tensors of an adapter are: LoRA pairs by module, whole matrices, magnitude vectors, and what nobody knows.

PEFT stores a pair as ``base_model.model.<module>.lora_A.weight`` and ``.lora_B.weight``, on token tables as
``.lora_embedding_A`` and ``_B``; some trainers leave the adapter's own name in (``.lora_A.default.weight``), which engines
do not read. DoRA adds ``.lora_magnitude_vector``. Whatever else ends in ``.weight`` is a whole matrix beside the pairs
(``modules_to_save``, resized token tables), a ``.bias`` belongs to the matrix of its module, and everything left is of no
kind that an engine reads.

**Experts.** For ``target_parameters`` PEFT keeps one pair for all experts of a layer: the pair's rank axis is experts x
rank, on ``mlp.experts.base_layer`` for the first parameter and ``mlp.experts`` for the second. Taken for a rank, that axis
would be 64 times too large; divided by the configured rank it gives the number of experts. Trainers that write a pair for each
expert (``mlp.experts.3.gate_proj``) give ordinary modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import msgspec

from loraledger.adapters.reading.header import Tensor
from loraledger.adapters.reading.peft import PeftConfig

_PREFIX: Final = "base_model.model."
_A: Final = ".lora_A.weight"
_B: Final = ".lora_B.weight"


class LoraModule(msgspec.Struct, frozen=True, gc=False):
    """The pair A (rank x in) and B (out x rank) on one module of the base.

    A struct, since an adapter may have 100,000 of them: a frozen dataclass takes ten times as long to make.
    """

    name: str
    """By base-layer name, without PEFT's ``base_model.model.``: ``model.layers.0.self_attn.q_proj``."""
    rank: int
    """Of one expert, where the tensors hold several."""
    in_features: int
    out_features: int
    parameters: int
    nbytes: int
    """As stored."""
    experts: int = 1
    """Experts that the pair's rank axis holds (``target_parameters``); 1 elsewhere."""
    embedding: bool = False
    """Stored as ``lora_embedding_A`` / ``_B``."""

    @property
    def suffix(self) -> str:
        """Last part of the name: ``q_proj``."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one sort together."""

    names: tuple[str, ...] = ()
    parameters: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Inventory:
    """All tensors of one adapter, sorted by what they are."""

    modules: Mapping[str, LoraModule]
    """By base-layer name, in the file's order."""
    whole: Part
    """Whole matrices saved beside the pairs (``modules_to_save``, resized token tables)."""
    magnitude: Part
    """DoRA's magnitude vectors."""
    other: Part
    """Tensors of no kind that an engine reads: trainable tokens, biases, other methods."""
    halves: tuple[str, ...]
    """Modules that have only A or only B."""
    mismatched: tuple[str, ...]
    """Modules whose A and B disagree on the rank."""
    infixed: tuple[str, ...] = ()
    """Modules whose tensors carry the adapter's own name (``lora_A.default.weight``)."""
    unconfigured: tuple[str, ...] = ()
    """Modules whose tensors have another rank than the configuration gives them."""


def take_inventory(tensors: Mapping[str, Tensor], config: PeftConfig) -> Inventory:
    """``tensors`` of an adapter's weights, by what they are; ``config`` says which rank axes hold several experts.

    Raises :class:`InputFileError` when the patterns of ``config`` cost too much on so many modules.
    """
    if config.rank_pattern or config.alpha_pattern:  # Before any is matched.
        config.check_cost([_module(name.rpartition(".lora_")[0]) for name in tensors if ".lora_A." in name])
    pairs = _Pairs(config)
    odd = pairs.add_plain(tensors)
    sorts = _Sorts()
    for name in odd:
        sorts.take(name, tensors)
    for stem in dict.fromkeys((*sorts.lefts, *sorts.rights)):
        if stem in sorts.lefts and stem in sorts.rights:
            pairs.add(_module(stem), sorts.lefts[stem], sorts.rights[stem], embedding=stem in sorts.tables)
        else:
            pairs.halves.append(_module(stem))
    return Inventory(
        modules=pairs.modules,
        whole=_part(sorts.whole, tensors),
        magnitude=_part(sorts.magnitude, tensors),
        other=_part(sorts.other, tensors),
        halves=tuple(pairs.halves),
        mismatched=tuple(pairs.mismatched),
        infixed=tuple(sorts.infixed),
        unconfigured=tuple(pairs.unconfigured),
    )


def _module(stem: str) -> str:
    """The base-layer name, from all of a tensor's name that comes before ``.lora_``."""
    return stem.removeprefix(_PREFIX)


@dataclass(slots=True)
class _Pairs:
    """Modules, made of A and B."""

    config: PeftConfig
    modules: dict[str, LoraModule] = field(default_factory=dict)
    halves: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    unconfigured: list[str] = field(default_factory=list)

    def add_plain(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Make a module of each plain pair in ``tensors``; return the names of the rest.

        Nearly all pairs have two dimensions and the one rank of the configuration. What :meth:`add` does is written out
        here for those: 0.8 microseconds a pair instead of 1.2, of 3.3 that reading a pair takes in all.
        """
        modules = self.modules
        rank = 0 if self.config.rank_pattern else self.config.rank
        unmatched = 0
        odd = []
        for name, left in tensors.items():
            if name.endswith(_A):
                stem = name[: -len(_A)]
                right = tensors.get(stem + _B)
                if right is None:
                    odd.append(name)
                    continue
                unmatched -= 1
                module = stem.removeprefix(_PREFIX)
                a, b = left.shape, right.shape
                if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank or module in modules:
                    self.add(module, left, right)
                    continue
                begin_a, end_a = left.data_offsets
                begin_b, end_b = right.data_offsets
                width, height = a[1], b[0]
                nbytes = end_a - begin_a + end_b - begin_b
                modules[module] = LoraModule(module, rank, width, height, rank * (width + height), nbytes)
            elif name.endswith(_B):
                unmatched += 1
            else:
                odd.append(name)
        if unmatched:  # Some B has no A; asking each costs as much as the loop above.
            odd += [name for name in tensors if name.endswith(_B) and name[: -len(_B)] + _A not in tensors]
        return odd

    def add(self, name: str, left: Tensor, right: Tensor, embedding: bool = False) -> None:
        """Make the module ``name`` of A and B, or note why there is none."""
        axis, width, height, inner = _sizes(left.shape, right.shape)
        if axis != inner or name in self.modules:
            self.mismatched.append(name)
            return
        rank, experts = self.config.rank_of(name), 1
        if axis != rank:
            if axis % rank == 0 and _holds_experts(name, self.config.target_parameters):
                experts = axis // rank
            else:
                self.unconfigured.append(name)
                rank = axis
        parameters, nbytes = axis * (width + height), left.nbytes + right.nbytes
        self.modules[name] = LoraModule(name, rank, width, height, parameters, nbytes, experts, embedding)


@dataclass(slots=True)
class _Sorts:
    """Tensors that are no plain pair on a linear layer. A and B are keyed by all of the name that comes before ``.lora_``."""

    lefts: dict[str, Tensor] = field(default_factory=dict)
    rights: dict[str, Tensor] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)
    infixed: dict[str, None] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)
    magnitude: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def take(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Sort in one of ``tensors``."""
        stem, _, tail = name.rpartition(".lora_")
        what, _, rest = tail.partition(".")
        side = self.lefts if what in ("A", "embedding_A") else self.rights
        table = what in ("embedding_A", "embedding_B")
        infix = rest.removesuffix("weight").removesuffix(".")
        if not stem:
            weight = name.removesuffix("bias") + "weight" if name.endswith(".bias") else name
            (self.whole if weight.endswith(".weight") and weight in tensors else self.other).append(name)
        elif what == "magnitude_vector":
            self.magnitude.append(name)
        elif (table or (what in ("A", "B") and rest.endswith("weight"))) and "." not in infix and stem not in side:
            side[stem] = tensors[name]
            if table:
                self.tables.add(stem)
            if infix:
                self.infixed[_module(stem)] = None
        else:
            self.other.append(name)


def _sizes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Rank axis and input of A, output and rank axis of B; two unequal axes when they cannot be a pair.

    A convolution's pair has four dimensions: A (rank, in, k, k), B (out, rank, 1, 1).
    """
    if len(a) < 2 or len(b) < 2:
        return 0, 0, 0, 1
    return a[0], prod(a[1:]), b[0], prod(b[1:])


def _holds_experts(name: str, target_parameters: Sequence[str]) -> bool:
    """Whether the pair on ``name`` was made for ``target_parameters``, by the name of the module that owns them."""
    owner = "." + name
    while owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
    parents = (f".{parameter}".rpartition(".")[0] for parameter in target_parameters)
    return owner.endswith((".experts", *filter(None, parents)))


def _part(names: Sequence[str], tensors: Mapping[str, Tensor]) -> Part:
    return Part(
        names=tuple(names),
        parameters=sum(tensors[name].parameters for name in names),
        nbytes=sum(tensors[name].nbytes for name in names),
    )
