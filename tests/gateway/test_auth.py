from __future__ import annotations

import hmac
import time

import pytest

from loraledger.errors import ConfigError, UnknownModelError
from loraledger.gateway.auth import Access, Grant, bearer_of, key_of

from .support import BASE, KEY, access, digest


def test_a_key_names_its_tenant_and_nothing_else_does() -> None:
    grants = access()
    assert grants.authenticate(KEY.encode()) == "acme"
    assert grants.authenticate(b"sk-other") == "other"
    for wrong in (b"", b"sk-acm", b"sk-acme ", digest(KEY), digest(KEY).hex().encode()):
        assert grants.authenticate(wrong) is None


@pytest.mark.parametrize("key", [b"sk-0", b"sk-4", b"wrong"])
def test_every_hash_is_compared_whichever_matches(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    grants = [
        Grant(tenant=f"t{i}", key_hashes=(digest(f"sk-{i}"), digest(f"old-{i}")), adapters=frozenset())
        for i in range(5)
    ]
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    Access(grants, [BASE]).authenticate(key)
    assert len(compared) == 10


@pytest.mark.parametrize(
    ("authorization", "token"),
    [
        (b"Bearer k", b"k"),
        (b"bearer  k", b"k"),
        (b"Basic k", None),
        (b"Bearer", None),
        (b"Bearer ", None),
        (b"k", None),
        (b"", None),
        (None, None),
    ],
)
def test_only_a_bearer_token_is_a_key(authorization: bytes | None, token: bytes | None) -> None:
    assert bearer_of(authorization) == token


@pytest.mark.parametrize(
    ("authorization", "api_key", "key"),
    [
        (None, b"k", b"k"),
        (None, b"", None),
        (None, None, None),
        (b"Bearer k", None, b"k"),
        (b"Bearer k", b"k", b"k"),
        (b"Bearer k", b"other", None),
        (b"Bearer k", b"", None),
        (b"Bearer", b"k", None),
        (b"Basic k", b"k", None),
    ],
)
def test_a_second_place_for_the_key_never_overrules_the_first(
    authorization: bytes | None, api_key: bytes | None, key: bytes | None
) -> None:
    assert key_of(authorization, api_key) == key


def test_own_adapters_and_base_names_resolve() -> None:
    assert access().resolve("acme", "alpaca") == "alpaca"
    assert access().resolve("acme", BASE) is None
    assert access().resolve("acme", "base") is None


def test_a_base_name_wins_over_an_adapter_of_that_name() -> None:
    for base in (True, False):
        grants = Access([Grant(tenant="t", key_hashes=(), adapters=frozenset({"base"}), base=base)], [BASE, "base"])
        if base:
            assert grants.resolve("t", "base") is None
        else:
            with pytest.raises(UnknownModelError):
                grants.resolve("t", "base")


@pytest.mark.parametrize(
    ("tenant", "model"),
    [("acme", "other"), ("acme", "Alpaca"), ("acme", ""), ("other", BASE), ("other", "alpaca"), ("nobody", "alpaca")],
)
def test_what_is_not_granted_is_unknown(tenant: str, model: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        access().resolve(tenant, model)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_a_near_miss_is_suggested_only_from_what_the_tenant_may_call() -> None:
    with pytest.raises(UnknownModelError, match="Did you mean `alpaca`"):
        access().resolve("acme", "alpacca")
    with pytest.raises(UnknownModelError) as caught:
        access().resolve("other", "alpacca")
    assert "alpaca`?" not in caught.value.message
    with pytest.raises(UnknownModelError) as caught:
        access().resolve("acme", "othr")
    assert "other" not in caught.value.message


@pytest.mark.parametrize("model", ["adapter-99999-" + "x" * 50, "adapter-00001-" + "x" * 49, "y" * 1_000_000])
def test_a_wrong_name_is_cheap_whatever_its_length_and_however_many_adapters(model: str) -> None:
    adapters = frozenset(f"adapter-{i:05d}-{'x' * 50}" for i in range(5000))
    grants = Access([Grant(tenant="t", key_hashes=(), adapters=adapters)], [BASE])
    best = 1.0
    for _ in range(3):
        started = time.process_time()
        with pytest.raises(UnknownModelError) as caught:
            grants.resolve("t", model)
        best = min(best, time.process_time() - started)
        assert len(caught.value.message) < 400
    assert best < 0.1


def test_bad_grants_are_refused_at_once() -> None:
    grant = Grant(tenant="a", key_hashes=(digest("k"),), adapters=frozenset())
    with pytest.raises(ConfigError, match="share a key"):
        Access([grant, Grant(tenant="b", key_hashes=(digest("k"),), adapters=frozenset())], [BASE])
    with pytest.raises(ConfigError, match="not a SHA-256"):
        Access([Grant(tenant="a", key_hashes=(b"short",), adapters=frozenset())], [BASE])
    with pytest.raises(ConfigError, match="at least one name"):
        Access([grant], [])


def test_the_model_list_has_what_clients_need() -> None:
    assert access().models("other") == [
        {
            "id": "other",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "loraledger",
            "root": "other",
            "parent": BASE,
        }
    ]
    assert access().models("nobody") == []
