"""Rendezvous (highest random weight) hashing of (adapter, replica): every gateway agrees without talking.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998: each key goes to the member with the highest
weight; a member that leaves moves only its own keys. Each name is hashed once (BLAKE2b, 64 bits) and a pair is mixed with the
finalizer of splitmix64, about 0.4 us, because hashing the joined names anew for 1,000 replicas would cost a millisecond.
"""

from __future__ import annotations

from hashlib import blake2b

_MASK = (1 << 64) - 1


def seed_of(name: str) -> int:
    """A 63-bit number for a name, the same in each process (63, so that it fits a signed integer everywhere)."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def weight(adapter_seed: int, replica_seed: int) -> int:
    """The weight of a pair: uniform in 64 bits, symmetric in nothing, equal in all processes."""
    x = (adapter_seed * 0x9E3779B97F4A7C15 + replica_seed) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
