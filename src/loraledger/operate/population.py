"""Who gets a change first: a share of the tenants or replicas, by hash.

Theory of operation. A name's place on a circle of 2**64 points is its BLAKE2b hash with the change's salt; the first share of the
circle is treated. So membership needs no list, is the same in every process, and another salt draws other members. Of few names a
share cannot be met by chance: of two replicas a tenth would mostly be none. So the names with the smallest hashes are taken, as
many as the share comes to, at least one, and never all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def treated(names: Iterable[str], share: float, salt: str) -> tuple[str, ...]:
    """The members of ``names`` that get the change, in order of their hash; none where there are fewer than two names.

    ``share`` is above 0 and below 1; its part of the names is rounded to the nearest number, from 1 to all but one.
    """
    order = sorted(set(names), key=lambda name: (_place(name, salt), name))
    if len(order) < 2:
        return ()
    return tuple(order[: min(len(order) - 1, max(1, round(share * len(order))))])


def _place(name: str, salt: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=hashlib.blake2b(salt.encode(), digest_size=32).digest())
    return int.from_bytes(digest.digest(), "big")
