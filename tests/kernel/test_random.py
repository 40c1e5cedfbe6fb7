from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraledger import events as ev
from loraledger.kernel import affinity, pumping
from loraledger.kernel.policies import policy_names
from loraledger.kernel.settings import FleetSettings
from loraledger.kernel.state import FleetState, RequestState

from .world import REPLICAS, World, world_settings


def play(
    policy: str,
    pick: Callable[[int], int],
    actions: int,
    fleet: Callable[[str], FleetSettings] = world_settings,
) -> World:
    world = World(fleet(policy), pick)
    for name in REPLICAS:
        world._up(name)
    for _ in range(actions):
        world.act()
    world.settle()
    return world


def digest_of(policy: str, seed: int, actions: int) -> str:
    world = play(policy, random.Random(seed).randrange, actions)
    return sha256(b"".join(world.log)).hexdigest()


@given(st.sampled_from(policy_names()), st.binary(min_size=1, max_size=1500))
@settings(max_examples=250, deadline=None)
def test_whatever_happens_the_books_balance_and_every_request_ends(policy: str, choices: bytes) -> None:
    left = list(choices[::-1])
    world = World(world_settings(policy), lambda n: left.pop() % n if left else 0)
    for name in REPLICAS:
        world._up(name)
    while left:
        world.act()
    world.settle()


@pytest.mark.parametrize("seed", range(60))
def test_long_histories_balance_too(seed: int) -> None:
    policy = policy_names()[seed % len(policy_names())]
    world = play(policy, random.Random(seed).randrange, 600)
    assert len(world.ended) > 40


@pytest.mark.parametrize("seed", range(6))
def test_histories_balance_when_replicas_are_sampled(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "ALL", 2)
    play("bounded-affinity", random.Random(seed).randrange, 600)


def test_who_is_not_tried_could_not_have_been_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[bool] = Counter()
    outgrows = pumping._outgrows

    def told(state: FleetState, request: RequestState, room: int) -> bool:
        found[outgrows(state, request, room)] += 1
        return outgrows(state, request, room)

    def never(state: FleetState, request: RequestState, room: int) -> bool:
        return False

    for seed in range(40):
        policy = policy_names()[seed % len(policy_names())]
        logs = []
        for spared in (told, never):
            monkeypatch.setattr(pumping, "_outgrows", spared)
            logs.append(play(policy, random.Random(seed).randrange, 400, tight).log)
        assert logs[0] == logs[1]
    assert found[True] > 100


def tight(policy: str) -> FleetSettings:
    """KV is what is short."""
    settings = world_settings(policy)
    replicas = [msgspec.structs.replace(spec, kv_tokens=2_000) for spec in settings.replicas]
    return msgspec.structs.replace(settings, replicas=tuple(replicas))


def test_the_histories_reach_what_they_are_meant_to_reach() -> None:
    counters: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for seed in range(100, 172):
        world = play(policy_names()[seed % 4], random.Random(seed).randrange, 400)
        counters.update(world.fleet.state.counters)
        endings.update(world.ended.values())
        changed.update(event.variable for event, _, _ in world.steps if isinstance(event, ev.RolloutSet))
        changed.update("decided" for policy, _ in world.policies.elements() if policy != world.settings.policy)
    assert changed.keys() == {"policy", "policy.tick_s", "policy.externality", "tenant.concurrency", "pins", "decided"}
    assert endings.keys() >= {"ok", "refused", "cancelled", "lost", "upstream_reset"}
    assert counters.keys() >= {
        "adapters_parked",
        "adapters_suspected",
        "drift:registration_found",
        "drift:residency",
        "engine_exits",
        "engine_restarts",
        "loads_failed",
        "rejected:adapter_load_failed",
        "rejected:adapter_parked",
        "rejected:gateway_queue_full",
        "rejected:load_deadline",
        "rejected:model_not_found",
        "rejected:queue_deadline",
        "rejected:replica_check_deadline",
        "rejected:retry_budget_spent",
        "rejected:tenant_queue_full",
        "rejected:upstream_failed",
        "retries",
    }


def test_the_same_history_gives_the_same_bytes_under_another_hash_seed() -> None:
    histories = [(policy, seed, 400) for seed, policy in enumerate(policy_names())]
    program = f"from kernel.test_random import digest_of\nfor history in {histories!r}: print(digest_of(*history))\n"
    here = [digest_of(*history) for history in histories]
    assert len(set(here)) == len(here)
    for hash_seed in ("0", "12345"):
        there = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.split() == here
