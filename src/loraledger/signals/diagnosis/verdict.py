"""What a diagnosis is: five findings with the figures that they rest on, and the answer that they lead to.

Theory of operation. Structs only. Whatever is claimed is a ``Claim``: a text, and the names of the figures (``Evidence``) that it
rests on, each of which stands in one of the five findings with a value that is known. A finding whose figures are unknown says
``unknown`` and claims nothing. ``Diagnosis.sentence`` is the answer in a line, made of the claims.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loraledger.signals.figures import Window

Pool = Literal["floor", "adapters", "kv", "routing", "demand", "nothing"]
"""Which of the capacity problems limits; ``routing``: capacity is there and work is sent past it; ``demand``: more is asked."""

Cause = Literal[
    "arrivals",
    "longer prompts",
    "longer answers",
    "cold adapters",
    "slow loads",
    "slots",
    "restarts",
    "hot adapter",
    "skew",
    "kv",
    "floor",
    "none",
]
"""The mechanism, finer than the pool."""

Confidence = Literal["high", "medium", "low"]
Verdict = Literal["seen", "not seen", "unknown"]
"""Whether a finding's question is answered with yes, with no, or cannot be answered from this record."""

Value = int | float | str | None


class Evidence(msgspec.Struct, frozen=True):
    """One figure. ``None``: not known. ``unit``: ``s``, ``share``, ``a minute``, ``tokens``, ... empty for names and tests."""

    name: str
    value: Value
    baseline: Value = None
    unit: str = ""


class Finding(msgspec.Struct, frozen=True):
    """One of the five steps. ``verdict``: what was asked for was seen, was not, or cannot be told."""

    number: int
    question: str
    evidence: tuple[Evidence, ...]
    verdict: Verdict
    sentence: str


class Claim(msgspec.Struct, frozen=True):
    """Something said, and the names of the figures of the findings that it rests on."""

    text: str
    evidence: tuple[str, ...]


class Experiment(msgspec.Struct, frozen=True):
    """The next one. ``command``: ready to paste; ``question``: what its answer tells; ``before``: makes the trace it plays."""

    question: str
    before: str
    command: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The answer and how it was reached."""

    window: Window
    baseline: Window | None
    """``None``: there was nothing to compare with, and only absolute signs count."""
    requests: int
    findings: tuple[Finding, ...]
    """Five, in order."""
    pool: Pool
    cause: Cause
    confidence: Confidence
    doubts: tuple[str, ...]
    """Why the confidence is not higher: what is missing, and what would supply it."""
    claims: tuple[Claim, ...]
    """What the answer rests on, as ``sentence`` says it."""
    details: tuple[Claim, ...]
    """What else the figures show of it, for a person."""
    remedies: tuple[Claim, ...]
    """What would help, and what it costs. None of these is tried yet: ``experiment`` tries one."""
    not_helping: tuple[Claim, ...]
    """What would not help, and why."""
    not_observable: tuple[str, ...]
    """What no figure of a record tells."""
    experiment: Experiment
    sentence: str
    measure_again: str | None = None
    """The version changed: figures before it are of another system."""
