"""What a replay varies: ``--policy P`` and ``--set KEY=V[,V...]``, and the combinations that they span.

Theory of operation. Each option is an *axis*, a key with the values that it takes; a sweep plays every combination, the last
axis fastest, so that the first combination (the one that the others are judged against) has the first value of each. A
combination is known by its *label*, the keys and values as they were typed. A policy's parameter is left out of the runs of
policies that do not have it; combinations that this makes equal are played once.

What a key means is ``building.py``'s business. Here is what can be said of its text alone: ``ValueError`` names the option, the key
and the value as typed, and what would be taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Final, TypeAlias

from loraledger.config.checks import nearest
from loraledger.config.schema import MAX_RANKS
from loraledger.kernel.policies import make_policy, policy_names
from loraledger.kernel.settings import FleetSettings
from loraledger.units import parse_duration

Value: TypeAlias = int | float | str | Fraction

MAX_COMBINATIONS: Final = 256
MAX_COUNT: Final = 10**9
MAX_REPLICAS: Final = 1024
MAX_SPEED: Final = 10_000
AS_CONFIGURED: Final = "as configured"


@dataclass(frozen=True)
class Axis:
    """A key and, in the order given, each value as typed and as meant."""

    key: str
    values: tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class Changes:
    """One combination: what is not as configured, as meant and as typed."""

    values: Mapping[str, Value] = field(default_factory=dict)
    typed: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tells it apart from the others."""
        return " ".join(f"{key}={text}" for key, text in self.typed.items()) or AS_CONFIGURED

    def count(self, key: str) -> int | None:
        """The whole number at ``key``; ``None``: as configured."""
        value = self.values.get(key)
        return value if isinstance(value, int) else None

    def text(self, key: str) -> str | None:
        """The text at ``key``; ``None``: as configured."""
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    @property
    def speed(self) -> Fraction:
        """What arrival times are divided by."""
        value = self.values.get("speed")
        return value if isinstance(value, Fraction) else Fraction(1)

    def under(self, prefix: str) -> dict[str, Value]:
        """What lies under ``prefix``, as ``limits`` or ``policy``, by the rest of its key."""
        start = f"{prefix}."
        return {key.removeprefix(start): value for key, value in self.values.items() if key.startswith(start)}


def parse_axes(policies: Sequence[str], settings: Iterable[str]) -> tuple[Axis, ...]:
    """The axes of ``--policy`` (outermost) and ``--set``. Raises ``ValueError``."""
    axes = [_axis("--policy ", "policy", policies)] if policies else []
    for text in settings:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"--set {text} is not KEY=VALUE[,VALUE...], such as slots=4,8")
        key = key.strip()
        axis = _axis(f"--set {key}=", key, values.split(","))
        if any(axis.key == other.key for other in axes):
            raise ValueError(f"--set {text}: {key} is given twice: list its values once, separated by commas")
        axes.append(axis)
    return tuple(axes)


def combinations(axes: Sequence[Axis], configured_policy: str) -> tuple[Changes, ...]:
    """Every combination of ``axes``, once. ``configured_policy`` runs where no axis names one. Raises ``ValueError``."""
    number = math.prod(len(axis.values) for axis in axes)
    if number > MAX_COMBINATIONS:
        sizes = " x ".join(str(len(axis.values)) for axis in axes)
        raise ValueError(
            f"--policy and --set span {sizes} = {number:,} combinations, limit {MAX_COMBINATIONS}: sweep fewer values at a time"
        )
    found: dict[str, Changes] = {}
    for chosen in product(*(axis.values for axis in axes)):
        pairs = {axis.key: pair for axis, pair in zip(axes, chosen, strict=True)}
        policy = pairs["policy"][0] if "policy" in pairs else configured_policy
        fits = {key: pair for key, pair in pairs.items() if _has(policy, key)}
        changes = Changes(
            {key: value for key, (_, value) in fits.items()}, {key: text for key, (text, _) in fits.items()}
        )
        found.setdefault(changes.label, changes)
    for axis in axes:
        if not any(axis.key in changes.values for changes in found.values()):
            having = ", ".join(policy for policy in policy_names() if _has(policy, axis.key))
            raise ValueError(f"--set {axis.key}: no policy that runs has this parameter: give --policy one of {having}")
    return tuple(found.values())


def keys() -> tuple[str, ...]:
    """Everything that ``--set`` knows."""
    return (*_KEYS, *dict.fromkeys(f"policy.{name}" for policy in policy_names() for name in _parameters(policy)))


def _axis(typed: str, key: str, texts: Sequence[str]) -> Axis:
    """``typed``: the option up to the value, as the operator typed it."""
    parse = _KEYS.get(key)
    if parse is None:
        if key not in keys():
            raise ValueError(f"--set {key}: no such key{nearest(key, keys()) or _known(key)}")
        parse = _number
    values: dict[str, Value] = {}
    for text in (text.strip() for text in texts):
        if text in values:
            raise ValueError(f"{typed}{text} is there twice: list each value once")
        try:
            values[text] = parse(text)
        except ValueError as error:
            raise ValueError(f"{typed}{text}: {error}") from error
    return Axis(key, tuple(values.items()))


def _known(key: str) -> str:
    """A hint of what ``key`` could have been: the keys of its family, else the plain ones and the families."""
    family = f"{key.partition('.')[0]}."
    kin = [known for known in keys() if known.startswith(family)] if "." in key else []
    plain = [known if "." not in known else f"{known.partition('.')[0]}.*" for known in keys()]
    return f"; known: {', '.join(kin or dict.fromkeys(plain))}"


def _has(policy: str, key: str) -> bool:
    return not key.startswith("policy.") or key.removeprefix("policy.") in _parameters(policy)


def _parameters(policy: str) -> Mapping[str, float]:
    return make_policy(FleetSettings((), policy=policy)).defaults


def _count(text: str) -> int:
    return _whole(text, least=1)


def _whole(text: str, least: int = 0, most: int = MAX_COUNT) -> int:
    digits = text.isascii() and text.removeprefix("-").isdecimal() and len(text) <= len(str(MAX_COUNT)) + 1
    value = int(text) if digits else None
    if value is None or not least <= value <= most:
        raise ValueError(f"a whole number from {least} to {most:,} is wanted")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("a finite number is wanted, such as 2 or 0.5")
    return value


def _share(text: str) -> float:
    try:
        value = _number(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1 is wanted")
    return value


def _rank(text: str) -> int:
    value = _count(text) if text.isascii() and text.isdecimal() else 0
    if value not in MAX_RANKS:
        raise ValueError(f"no max_lora_rank of the engine, which takes {', '.join(map(str, MAX_RANKS))}")
    return value


def _speed(text: str) -> Fraction:
    try:
        value = Fraction(text) if len(text) <= 32 and "e" not in text.lower() else Fraction(0)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not Fraction(1, MAX_SPEED) <= value <= MAX_SPEED:
        raise ValueError(f"a number or a fraction from 1/{MAX_SPEED} to {MAX_SPEED:,} is wanted, such as 1.5 or 4/3")
    return value


def _policy(text: str) -> str:
    if text not in policy_names():
        raise ValueError(f"no such policy{nearest(text, policy_names())}")
    return text


def _profile(text: str) -> str:
    if not text:
        raise ValueError("a file or a shipped profile is wanted")
    return text


def _ranking(text: str) -> str:
    if not text:
        raise ValueError("a file is wanted, as loraledger advise --pins writes it")
    return text


def _residency(text: str) -> str:
    if text not in ("lru", "ranked"):
        raise ValueError("lru or ranked is wanted")
    return text


_KEYS: Final[Mapping[str, Callable[[str], Value]]] = {
    "policy": _policy,
    "profile": _profile,
    "residency": _residency,
    "pins": _ranking,
    "speed": _speed,
    "replicas": lambda text: _whole(text, 1, MAX_REPLICAS),
    "slots": _count,
    "host_entries": _count,
    "max_rank": _rank,
    "max_seqs": _count,
    "token_budget": _count,
    "kv_blocks": _count,
    "tenants.concurrency": _count,
    "tenants.queue": _whole,
    "tenants.queue_deadline": parse_duration,
    "limits.queue_total": _whole,
    "limits.retry_ratio": _share,
    "limits.retry_burst": _whole,
    "limits.load_backoff": parse_duration,
    "limits.load_backoff_max": parse_duration,
    "limits.park": parse_duration,
    "limits.loads_per_minute": _count,
}
