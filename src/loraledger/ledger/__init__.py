"""Three accounts of each replica's memory (base floor, adapters, KV), which of them limits, and budgets before an engine starts.

Pure functions on frozen data: no clock, no file, no socket. Times come in as integer nanoseconds.
"""

from loraledger.ledger.accounts import FloorAccount, KvAccount, Ledger, ledger_of
from loraledger.ledger.facts import AdapterFacts, Latencies, ReplicaFacts
from loraledger.ledger.figures import Figure, believed, configured, observed, unknown
from loraledger.ledger.limit import Evidence, Limit, Thresholds, limiting
from loraledger.ledger.residency import AdapterAccount, TierLatency

__all__ = [
    "AdapterAccount",
    "AdapterFacts",
    "Evidence",
    "Figure",
    "FloorAccount",
    "KvAccount",
    "Latencies",
    "Ledger",
    "Limit",
    "ReplicaFacts",
    "Thresholds",
    "TierLatency",
    "believed",
    "configured",
    "ledger_of",
    "limiting",
    "observed",
    "unknown",
]
