"""Who may call what.

Keys are kept as SHA-256 digests. A bearer is hashed and compared with *every* digest by ``hmac.compare_digest``, without an
early exit, so that the time taken says nothing about which keys exist. That is 0.05 us a key; a connection that sends the same
header again is not asked twice (see ``client``).

An ``Access`` never changes: new grants are a new object, put in place of the old one between two requests.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from os.path import commonprefix
from typing import Final

import msgspec

from loraledger.errors import ConfigError, UnknownModelError

_NEAR: Final = 8
_LOOKED_AT: Final = 256
_NAME_LENGTH: Final = 64
# difflib takes 100 us for two names of 44 characters: with these bounds a wrong name costs the event loop 3 ms at most,
# however many adapters a tenant has.
_SHOWN_LENGTH: Final = 128


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: the digests (32 bytes) of its keys, the adapters it may call, and whether it may call the base."""

    tenant: str
    key_hashes: tuple[bytes, ...]
    adapters: frozenset[str]
    base: bool = True


class Access:
    """All grants at one moment. ``base_names``: the names under which the base model is called, the main one first.

    ``created`` (seconds since the epoch) is what the model list shows. Raises ConfigError for digests of the wrong size, for a
    key that two tenants share, and for no base name.
    """

    def __init__(self, grants: Iterable[Grant], base_names: Sequence[str], created: int = 0) -> None:
        if not base_names:
            raise ConfigError("the base model needs at least one name")
        self._grants = {grant.tenant: grant for grant in grants}
        self._base_names = tuple(base_names)
        self._created = created
        self._keys = [(digest, grant.tenant) for grant in self._grants.values() for digest in grant.key_hashes]
        owners: dict[bytes, str] = {}
        for digest, tenant in self._keys:
            if len(digest) != hashlib.sha256().digest_size:
                raise ConfigError(f"tenant {tenant}: a key hash is {len(digest)} bytes, not a SHA-256 digest of 32")
            if owners.setdefault(digest, tenant) != tenant:
                raise ConfigError(f"tenants {owners[digest]} and {tenant} share a key: give each its own")

    def authenticate(self, bearer: bytes) -> str | None:
        """The tenant whose key ``bearer`` is, or None. Takes the same time whatever the key."""
        offered = hashlib.sha256(bearer).digest()
        found: str | None = None
        for digest, tenant in self._keys:
            if hmac.compare_digest(digest, offered):
                found = tenant
        return found

    def resolve(self, tenant: str, model: str) -> str | None:
        """The adapter that ``model`` names for this tenant; None is the base model.

        Base names win, because an adapter under a base name would capture everybody's traffic to the base. Raises
        UnknownModelError, with a near miss only from what the tenant may call.
        """
        grant = self._grants.get(tenant)
        if grant is not None:
            if grant.base and model in self._base_names:
                return None
            if model in grant.adapters and model not in self._base_names:
                return model
        near = self._near_miss(grant, model)
        hint = f" Did you mean `{near}`?" if near else ""
        shown = model if len(model) <= _SHOWN_LENGTH else model[:_SHOWN_LENGTH] + "..."
        raise UnknownModelError(
            f"The model `{shown}` does not exist or you do not have access to it.{hint}", param="model"
        )

    def models(self, tenant: str) -> list[dict[str, object]]:
        """The entries of ``/v1/models`` for this tenant: the base under its names if granted, then its own adapters."""
        grant = self._grants.get(tenant)
        if grant is None:
            return []
        main = self._base_names[0]
        base = [self._entry(name, main, None) for name in self._base_names] if grant.base else []
        return base + [self._entry(name, name, main) for name in sorted(grant.adapters)]

    def _entry(self, name: str, root: str, parent: str | None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "loraledger",
            "root": root,
            "parent": parent,
        }

    def _near_miss(self, grant: Grant | None, model: str) -> str | None:
        if grant is None or not 0 < len(model) <= _NAME_LENGTH:
            return None
        names = (*(self._base_names if grant.base else ()), *grant.adapters)
        alike = (n for n in names if abs(len(n) - len(model)) <= 2 and (n[:2] == model[:2] or n[-2:] == model[-2:]))
        looked_at = sorted(itertools.islice(alike, _LOOKED_AT), key=lambda n: (-_shared(n, model), n))
        return next(iter(get_close_matches(model, looked_at[:_NEAR], n=1, cutoff=0.75)), None)


def _shared(name: str, model: str) -> int:
    return len(commonprefix([name, model]))  # noqa: RUF071 - names, not paths


def bearer_of(authorization: bytes | None) -> bytes | None:
    """The token of an ``Authorization: Bearer`` value; None when there is none."""
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(b" ")
    return token.strip(b" ") or None if scheme.lower() == b"bearer" else None


def key_of(authorization: bytes | None, api_key: bytes | None) -> bytes | None:
    """The key of a request: the bearer of ``Authorization``, or ``x-api-key``, where Anthropic's clients put it.

    None when there is none, when ``Authorization`` is of another scheme, and when the two differ: which of them is meant?
    """
    if authorization is None:
        return api_key or None
    bearer = bearer_of(authorization)
    return bearer if api_key is None or api_key == bearer else None
