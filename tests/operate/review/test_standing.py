"""What the settings have in force."""

from __future__ import annotations

from typing import Any

from loraledger.config import settings_from
from loraledger.operate.change import Change
from loraledger.operate.review.standing import Standing, standing
from loraledger.signals.facts import Facts, ReplicaFacts
from operate.changes import change

from .made import FACTS

KEY = "0" * 64


def settings(**more: Any) -> Any:
    replicas = [
        {"name": name, "url": f"http://127.0.0.1:{n}", "slots": 2, "host_entries": 4}
        for n, name in ((1, "r1"), (2, "r2"))
    ]
    tenants = [
        {"name": name, "key_hashes": [key * 64], "adapters": ["*"], "limits": {"concurrency": n}}
        for name, key, n in more.pop("tenants", [("acme", "0", 8)])
    ]
    return settings_from({"base": {"names": ["base"]}, "replicas": replicas, "tenants": tenants, **more})


def test_without_settings_only_what_the_facts_say_is_known() -> None:
    assert standing(None, FACTS) == Standing(slots=2, host_entries=4, replicas=2)
    assert standing(None, Facts()) == Standing()


def test_parameters_are_those_given_over_the_defaults() -> None:
    found = standing(settings(policy={"params": {"tie_ms": 1.0}}), FACTS)
    assert (found.policy, found.params["tie_ms"], found.params["growth_share"]) == ("bounded-affinity", 1.0, 0.5)
    assert standing(settings(policy={"name": "round-robin"}), FACTS).params == {}


def test_what_is_not_the_same_everywhere_is_not_known() -> None:
    assert standing(settings(), FACTS).concurrency == 8
    assert standing(settings(tenants=[("a", "0", 8), ("b", "1", 9)]), FACTS).concurrency is None
    uneven = Facts(replicas={"r1": ReplicaFacts(slots=2), "r2": ReplicaFacts(slots=4)})
    assert standing(settings(), uneven).slots is None


def test_kept_adapters_are_the_pinned_ones() -> None:
    adapters = [{"name": "a", "path": "/a", "pin": True}, {"name": "b", "path": "/b"}]
    assert standing(settings(adapters={"list": adapters}), FACTS).registered == ("a",)


def test_what_was_accepted_since_is_in_force_as_long_as_the_settings_are_as_they_were() -> None:
    policy = change(before="bounded-affinity", after="least-loaded")
    back = change(id="c2", before="least-loaded", after="bounded-affinity")
    share = change(id="c3", variable="policy.growth_share", before=0.5, after=0.25)
    limit = change(id="c4", variable="tenant.concurrency", before=8, after=4)
    pins = change(id="c5", variable="pins", before=[], after=[["r1", "a"], ["r2", "b"]])

    def found(accepted: dict[str, list[Change]], **more: Any) -> Standing:
        return standing(settings(**more), FACTS, accepted)

    assert (found({"policy": [policy]}).policy, found({"policy": [policy]}).params) == ("least-loaded", {})
    assert found({"policy": [policy]}, policy={"name": "round-robin"}).policy == "round-robin"
    both = found({"policy.growth_share": [share], "policy": [policy, back]})
    assert (both.policy, both.params["growth_share"]) == ("bounded-affinity", 0.25)
    assert found({"tenant.concurrency": [limit]}).concurrency == 4
    assert found({"pins": [pins]}).ranking == (("r1", "a"), ("r2", "b"))


def test_replicas_are_those_of_the_settings_not_those_that_left() -> None:
    gone = Facts(replicas={name: ReplicaFacts(slots=2) for name in ("r1", "r2", "old")})
    assert standing(settings(), gone).replicas == 2
    assert standing(None, gone).replicas == 3


def test_a_held_parameter_of_any_policy_is_in_force() -> None:
    held_back = change(variable="policy.factor", before=1.25, after=1.875)
    found = standing(settings(policy={"name": "bounded-hash"}), FACTS, {"policy.factor": [held_back]})
    assert found.params["factor"] == 1.875
