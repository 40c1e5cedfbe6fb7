"""Five steps from a window's figures to the pool that limits, what would not help, and the next experiment."""

from loraledger.signals.diagnosis.steps import diagnose
from loraledger.signals.diagnosis.verdict import (
    Cause,
    Claim,
    Confidence,
    Diagnosis,
    Evidence,
    Experiment,
    Finding,
    Pool,
    Verdict,
)

__all__ = [
    "Cause",
    "Claim",
    "Confidence",
    "Diagnosis",
    "Evidence",
    "Experiment",
    "Finding",
    "Pool",
    "Verdict",
    "diagnose",
]
