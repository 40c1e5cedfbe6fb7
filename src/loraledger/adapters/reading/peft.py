"""``adapter_config.json``: what PEFT and its relatives wrote about an adapter.

Strict about what an engine needs (``r``, ``lora_alpha``, ``target_modules``: a file without them is refused by name) and
about the type of each field that changes behaviour; tolerant of everything else, because PEFT adds fields with each
release (0.18 to 0.21 are known by name here), old files lack most of them, and null may stand for any that is optional.
Nothing is judged: DoRA, whole matrices, block-diagonal pairs are reported as they are. A method other than LoRA that
has LoRA's three fields is read, and any other is refused by its own name.

A field that nobody here knows may be one that changes what the adapter does. Those that are set to something are
listed in ``unknown``.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from loraledger.adapters.reading.files import CONFIG_NAME
from loraledger.adapters.reading.jsonfile import read_object
from loraledger.adapters.reading.patterns import NamePatterns, check_cost
from loraledger.errors import InputFileError

MAX_RANK: Final = 1_000_000
"""No matrix has as many rows; above it, arithmetic on a rank stops being exact."""

_REQUIRED: Final = ("r", "lora_alpha", "target_modules")

_HARMLESS: Final = frozenset(
    {
        "arrow_config", "auto_mapping", "corda_config", "enable_lora", "ensure_weight_tying", "eva_config",
        "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
        "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "merge_weights", "qalora_group_size",
        "revision", "runtime_config", "velora_config",
    }
)  # fmt: skip
"""Known, and without effect on what a saved adapter does: they steered training, or the tensors show their result."""

_KNOWN: Final = _HARMLESS.union(
    {
        "alora_invocation_tokens", "alpha_pattern", "base_model_name_or_path", "bias", "init_lora_weights",
        "layer_replication", "lora_alpha", "lora_bias", "modules_to_save", "peft_type", "peft_version", "r",
        "rank_pattern", "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_bdlora",
        "use_dora", "use_qalora", "use_rslora",
    }
)  # fmt: skip

_JSON_NAMES: Final[Mapping[type, str]] = {list: "a list", dict: "an object"}


@dataclass(frozen=True)
class PeftConfig:
    """The fields that change what an adapter is or does; the rest is listed in ``unknown``."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | str | None
    """Sorted names; one string (a regex, ``all-linear``); ``None`` where the file says null."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    modules_to_save: tuple[str, ...]
    target_parameters: tuple[str, ...]
    bias: str
    init: bool | str
    """``init_lora_weights``: some inits changed the base's weights in training."""
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    trainable_tokens: bool
    layer_replication: bool
    activated: bool
    """Activated LoRA (``alora_invocation_tokens``)."""
    block_diagonal: bool
    """``use_bdlora``."""
    quantized: bool
    """``use_qalora``."""
    peft_type: str | None
    """Method, upper case (``LORA``)."""
    task_type: str | None
    base_claim: str | None
    peft_version: str | None
    unknown: tuple[str, ...]
    """Keys that this reader does not know and that are set to something."""

    @property
    def max_rank(self) -> int:
        """The largest of ``r`` and the values of ``rank_pattern``: what vLLM holds against ``max_lora_rank``."""
        return max([self.rank, *self.rank_pattern.values()])

    def rank_of(self, module: str) -> int:
        """The rank that ``module`` (base-layer name) is configured to have."""
        key = self._rank_keys.find(_parameter(module)) if self.rank_pattern else None
        return self.rank if key is None else self.rank_pattern[key]

    def scaling_of(self, module: str) -> float:
        """alpha / rank of ``module``, alpha / sqrt(rank) for rsLoRA (arXiv 2312.03732; ``peft_helper.py: _scaling``)."""
        key = self._alpha_keys.find(_parameter(module)) if self.alpha_pattern else None
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def check_cost(self, modules: Sequence[str]) -> None:
        """Raises :class:`InputFileError` when an engine would take too long to find the ranks and scalings of ``modules``."""
        if self.rank_pattern or self.alpha_pattern:
            check_cost((self._rank_keys, self._alpha_keys), [_parameter(module) for module in modules])

    @cached_property
    def _rank_keys(self) -> NamePatterns:
        return NamePatterns(f"{CONFIG_NAME}: rank_pattern", self.rank_pattern)

    @cached_property
    def _alpha_keys(self) -> NamePatterns:
        return NamePatterns(f"{CONFIG_NAME}: alpha_pattern", self.alpha_pattern)


def read_config(raw: bytes) -> PeftConfig:
    """The configuration in ``raw``, the bytes of the file. Raises :class:`InputFileError` naming the field and what to do."""
    fields = read_object(CONFIG_NAME, raw)
    method = _text(fields, "peft_type")
    missing = [key for key in _REQUIRED if key not in fields]
    if missing and method is not None and method.upper() != "LORA":
        raise InputFileError(f"is an adapter of type {method.upper()[:40]!r}, not LoRA: only LoRA can be served")
    if missing:
        raise InputFileError(f"{CONFIG_NAME} lacks {', '.join(missing)}: the engine needs them, save the adapter again")
    parameters = _names(fields, "target_parameters")
    config = PeftConfig(
        rank=_rank(fields["r"], "r"),
        alpha=_alpha(fields["lora_alpha"], "lora_alpha"),
        target_modules=_targets(fields["target_modules"], elsewhere=bool(parameters)),
        rank_pattern={key: _rank(value, where) for key, where, value in _pattern(fields, "rank_pattern")},
        alpha_pattern={key: _alpha(value, where) for key, where, value in _pattern(fields, "alpha_pattern")},
        modules_to_save=_names(fields, "modules_to_save"),
        target_parameters=parameters,
        bias=_text(fields, "bias") or "none",
        init=_init(fields),
        use_rslora=_flag(fields, "use_rslora"),
        use_dora=_flag(fields, "use_dora"),
        lora_bias=_flag(fields, "lora_bias"),
        trainable_tokens=_is_set(fields, "trainable_token_indices", (list, dict)),
        layer_replication=_is_set(fields, "layer_replication", (list,)),
        activated=_is_set(fields, "alora_invocation_tokens", (list,)),
        block_diagonal=_is_set(fields, "use_bdlora", (dict,)),
        quantized=_flag(fields, "use_qalora"),
        peft_type=None if method is None else method.upper(),
        task_type=_text(fields, "task_type"),
        base_claim=_text(fields, "base_model_name_or_path"),
        peft_version=_text(fields, "peft_version"),
        unknown=_unknown(fields),
    )
    _ = config._rank_keys, config._alpha_keys  # Built now: a key that cannot be matched is refused here, never later.
    return config


def _parameter(module: str) -> str:
    """The name that patterns are matched against.

    A pair on ``target_parameters`` is stored under the module that owns the parameter, and matched by the parameter's
    own name (vLLM, ``peft_helper.py: get_rank_and_scaling``).
    """
    if module.endswith(".experts.base_layer"):
        return module.removesuffix("base_layer") + "gate_up_proj"
    return f"{module}.down_proj" if module.endswith(".experts") else module


def _unknown(fields: Mapping[str, Any]) -> tuple[str, ...]:
    keys = (key for key, value in fields.items() if key not in _KNOWN and not _says_nothing(value))
    return tuple(sorted(key if key.isprintable() else ascii(key) for key in keys))


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _wrong(key: str, value: object, must: str) -> InputFileError:
    return InputFileError(f"{CONFIG_NAME}: {key} is {reprlib.repr(value)} and must be {must}")


def _rank(value: object, key: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _wrong(key, value, f"a whole number of 1 or more, up to {MAX_RANK:,}")
    return value


def _alpha(value: object, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise _wrong(key, value, "a number above 0 and below 1e30")
    return float(value)


def _pattern(fields: Mapping[str, Any], key: str) -> list[tuple[str, str, object]]:
    """Of each entry the key, how messages call it, and the value, not yet checked."""
    value = fields.get(key)
    if value is None:
        return []
    if not isinstance(value, dict):
        raise InputFileError(f"{CONFIG_NAME}: {key} must map module names to numbers")
    return [(module, f"{key}[{reprlib.repr(module)}]", number) for module, number in value.items()]


def _targets(value: object, *, elsewhere: bool) -> tuple[str, ...] | str | None:
    if value is None or (isinstance(value, str) and value and value.isprintable()):
        return value
    names = _names({"target_modules": value}, "target_modules")
    if not names and not elsewhere:
        raise InputFileError(f"{CONFIG_NAME}: target_modules is empty: the adapter would change nothing")
    return names


def _names(fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = fields.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and item and item.isprintable() for item in value):
        raise InputFileError(f"{CONFIG_NAME}: {key} must be a list of module names")
    return tuple(sorted(set(value)))


def _text(fields: Mapping[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and not (isinstance(value, str) and value.isprintable()):
        raise _wrong(key, value, "printable text or null")
    return value or None


def _flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, value, "true, false or null")
    return value is True


def _is_set(fields: Mapping[str, Any], key: str, kinds: tuple[type, ...]) -> bool:
    """Whether ``key`` is set to something; what exactly does not matter, since no engine here serves it."""
    value = fields.get(key)
    if not isinstance(value, (*kinds, type(None), bool)):
        raise _wrong(key, value, "null, or " + " or ".join(_JSON_NAMES[kind] for kind in kinds))
    return bool(value)


def _init(fields: Mapping[str, Any]) -> bool | str:
    value = fields.get("init_lora_weights")
    if value is not None and not isinstance(value, bool | str):
        raise _wrong("init_lora_weights", value, "true, false or a name")
    return True if value is None else value
