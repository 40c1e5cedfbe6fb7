"""Nobody reaches or sees what another tenant has: generated attempts over real sockets at a whole gateway before emulated engines.

Judged by what the engines were sent, which is logged in front of them, and by what the answers say. ``audit`` may call everything:
with it the judge is shown what a hit looks like.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import loraledger.engines.emulator
from e2e.fleet import write_adapter
from loraledger.config import settings_from
from loraledger.engines.emulator import EmulatorServer, EmulatorSettings
from loraledger.engines.emulator_api import emulator_app
from loraledger.engines.emulator_text import Speech
from loraledger.events import engine_name, parse_engine_name
from loraledger.gateway.serve import Gateway
from loraledger.twin.profile import TwinProfile
from support.gateway import digest_of, replica
from support.gateway import tenant as tenant_settings

from .intruder import CHAT, COMPLETIONS, Attempt, Draw, Sent, Target, attempts
from .support import Answer, RawClient, until

SEED = "20"
EACH = 32
OWN = {
    "acme": ("acme-sql", "org/acme@main", "shared-tone"),
    "birch": ("birch-legal", "birch:notes/v2", "shared-tone"),
    "cedar": ("cedar.faq", "cedar+ops"),
}
GRANTED = {**OWN, "audit": tuple(dict.fromkeys(name for names in OWN.values() for name in names))}
WITHOUT_BASE = {"cedar"}
BASE = "house-8b"
LONG = 100_000
"""Tokens of an answer that nobody waits for the end of: 25 s at the engines' speed."""
TOKENIZER = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Paths that need no adapter: a request for one goes to the base model's tokenizer."""
MARKER = re.compile(r"marker .*? end")


@dataclass(frozen=True)
class Got:
    """One request as an engine got it."""

    path: str
    body: bytes

    @property
    def marker(self) -> str:
        found = MARKER.search(self.body.decode("utf-8", "replace"))
        return found[0] if found else ""

    @property
    def pairs(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = json.loads(self.body, object_pairs_hook=list)
        return found


@dataclass
class World:
    """A gateway and two engines in a thread of their own. ``got``: what the engines were posted, in order."""

    folder: Path
    got: list[Got] = field(default_factory=list)
    targets: dict[str, Target] = field(default_factory=dict)
    port: int = 0
    ready: threading.Event = field(default_factory=threading.Event)

    async def serve(self, stop: asyncio.Event) -> None:
        profile = TwinProfile(slots=8, host_entries=16)
        fast = EmulatorSettings(model=BASE, profile=profile, speed=25.0, max_model_len=2 * LONG)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loraledger.engines.emulator, "emulator_app", self._logged)
            one, two = EmulatorServer(fast), EmulatorServer(fast)
        async with one, two:
            gateway = Gateway(settings_from(self._settings([one.url, two.url]), self.folder), {})
            await gateway.start()
            assert gateway.plane is not None
            self.port = gateway.plane.port
            await until(lambda: all(known.up for known in gateway.state.replicas.values()))
            self.ready.set()
            await stop.wait()
            await gateway.stop()

    def _settings(self, urls: list[str]) -> dict[str, Any]:
        listed = []
        for number, name in enumerate(GRANTED["audit"]):
            path = write_adapter(self.folder / "adapters", f"folder-{number}")
            listed.append({"name": name, "path": str(path)})
            self.targets[name] = Target(name, digest_of(path), str(path))
        return {
            "base": {"names": [BASE]},
            "listen": {"port": 0},
            "control": {"port": 0},
            "replicas": [replica(f"r{i}", url, slots=8, host_entries=16) for i, url in enumerate(urls)],
            "adapters": {"list": listed, "store": str(self.folder / "store")},
            "tenants": [
                tenant_settings(name, list(own), base=name not in WITHOUT_BASE) for name, own in GRANTED.items()
            ],
            "record": {"dir": str(self.folder / "record"), "segment_bytes": "1MiB"},
        }

    def _logged(self, engine: Any) -> ASGIApp:
        app = emulator_app(engine)

        async def logged(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            body, more = b"", True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            self.got.append(Got(scope["path"], body))
            held: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def again() -> Message:
                return held.pop() if held else await receive()

            await app(scope, again, send)

        return logged

    def speakers(self, tenant: str) -> dict[str, str]:
        """Name on an engine without generation, to who speaks under it, of all that ``tenant`` may call."""
        found = {name: engine_name(name, self.targets[name].digest) for name in GRANTED[tenant]}
        return {**({} if tenant in WITHOUT_BASE else {BASE: "base"}), **{engine: engine for engine in found.values()}}

    def secrets(self, tenant: str) -> set[str]:
        """Words that only a reader of foreign adapters could know."""
        foreign = [self.targets[name] for name in GRANTED["audit"] if name not in GRANTED[tenant]]
        return {word for target in foreign for word in (target.name, target.digest[:12], target.path)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from _served(tmp_path_factory.mktemp("tenants"))


@pytest.fixture
def own_world(tmp_path: Path) -> Iterator[World]:
    """One where requests may still be on their way when the test ends."""
    yield from _served(tmp_path)


def _served(folder: Path) -> Iterator[World]:
    made = World(folder)
    failures: list[BaseException] = []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(made.serve(stop))
        except BaseException as error:  # shown below, where pytest sees it
            failures.append(error)
            made.ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert made.ready.wait(30)
    if not failures:
        yield made
        loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
    assert failures == []


@dataclass
class Played:
    """One attempt, the answers to it in order, and what the engines got meanwhile."""

    attempt: Attempt
    answers: list[Answer]
    got: list[Got]


async def play(world: World, attempt: Attempt) -> Played:
    before = len(world.got)
    client = await RawClient.to(world.port)
    answers: list[Answer] = []
    try:
        for data in attempt.writes:
            await client.send(data)
            await asyncio.sleep(0)
        while len(answers) < max(1, len(attempt.requests)):
            answers.append(await asyncio.wait_for(client.answer(), 20))
        if attempt.kind == "smuggled":  # and whatever comes after what should have been the last
            while True:
                answers.append(await asyncio.wait_for(client.answer(), 0.05))
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        pass  # a connection that was closed over an attempt has no more answers
    finally:
        client.close()
    return Played(attempt, answers, world.got[before:])


def faults(world: World, played: Played) -> list[str]:
    """Everything in which this attempt reached or saw more than its tenants may."""
    asked = {sent.marker: sent for sent in played.attempt.requests}
    active = [sent.tenant for sent in asked.values() if sent.tenant]
    found = []
    for got in played.got:
        model = str(dict(got.pairs).get("lora_name" if got.path.endswith("_lora_adapter") else "model"))
        if got.path.endswith("_lora_adapter"):
            allowed = {name for tenant in active for name in world.speakers(tenant)}
        elif got.marker in asked and asked[got.marker].tenant:
            allowed = set(world.speakers(str(asked[got.marker].tenant))) | ({BASE} if got.path in TOKENIZER else set())
            names = [name for name, _ in got.pairs]
            found += [
                f"{name} was sent to an engine" for name in names if name.startswith("lora") or names.count(name) > 1
            ]
        else:
            allowed = set()
        if plain(model) not in allowed:
            found.append(f"{got.path} reached {model}: {got.body!r}")
    for sent, answer in zip(played.attempt.requests, played.answers, strict=False):
        found += said_too_much(world, sent, answer)
    if played.attempt.kind == "smuggled":
        found += [f"answered {answer.status}" for answer in played.answers if answer.status < 400]
    return [f"{fault}, in {b''.join(played.attempt.writes)!r}" for fault in found]


def plain(model: str) -> str:
    parts = parse_engine_name(model)
    return model if parts is None else f"{parts[0]}@{parts[1]}"


def said_too_much(world: World, sent: Sent, answer: Answer) -> Iterator[str]:
    shown = answer.body.decode("utf-8", "replace") + str(answer.headers)
    if sent.tenant is None:
        if answer.status < 400:
            yield f"answered {answer.status} without a key"
        return
    for secret in world.secrets(sent.tenant):
        if shown.count(secret) > sent.said.count(secret):  # its own words may come back to it
            yield f"the answer says {secret}: {shown}"
    if answer.status == 200 and sent.path in (CHAT, COMPLETIONS):
        prompt = f"user: {sent.marker}\n" if sent.path == CHAT else sent.marker
        words = [Speech(speaker, prompt).text(4) for speaker in world.speakers(sent.tenant).values()]
        if content(answer) not in words:
            yield f"{content(answer)!r} is none of its adapters' words"


def content(answer: Answer) -> str:
    if answer.headers["content-type"].startswith("text/event-stream"):
        choices = [choice for event in answer.events() for choice in event["choices"]]
        return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    (choice,) = answer.json()["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def masked(played: Played) -> list[tuple[int, str]]:
    """Status and words of each answer, without those that the request itself said."""
    found = []
    for sent, answer in zip(played.attempt.requests, played.answers, strict=False):
        words = json.loads(answer.body)["error"] if answer.status >= 400 and answer.body else {}
        found.append((answer.status, str({name: str(word).replace(sent.said, "SAID") for name, word in words.items()})))
    return found


def key(tenant: str) -> str:
    return f"key-{tenant}"


def draw(world: World, seed: str, intruder: str, victim: str) -> Draw:
    only = [name for name in OWN[victim] if name not in OWN[intruder]]
    made = Draw(
        f"{SEED}-{intruder}-{seed}", intruder, OWN[intruder][0], world.targets[only[0]], key(intruder), key(victim)
    )
    made.target = world.targets[made.rng.choice(only)]
    return made


def of_both(attempt: Attempt, victim: str) -> Attempt:
    """With the owner of the other key named, where there is one."""
    named = tuple(
        Sent(sent.marker, victim, sent.path, sent.stream, sent.model) if sent.tenant == "the other" else sent
        for sent in attempt.requests
    )
    return Attempt(attempt.kind, attempt.writes, named, attempt.twin)


def generated(world: World) -> list[Attempt]:
    found: list[Attempt] = []
    for intruder, victim in (("acme", "birch"), ("birch", "cedar"), ("cedar", "acme")):
        made = attempts(lambda seed: draw(world, seed, intruder, victim), EACH // 3 + 1)  # noqa: B023 - used up here
        found += [of_both(attempt, victim) for attempt in made]
    return found


def asking(tenant: str, model: str, marker: str, path: str = COMPLETIONS) -> Attempt:
    """A plain request for ``model`` with the key of ``tenant``."""
    body = {"model": model, "prompt": marker, "messages": [{"role": "user", "content": marker}], "max_tokens": 4}
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key(tenant)}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return Attempt("plain", (head.encode() + data,), (Sent(marker, tenant, path, model=json.dumps(model).encode()),))


async def test_no_generated_attempt_reaches_another_tenants_adapter_or_lists_it(world: World) -> None:
    made = generated(world)
    counts = Counter(attempt.kind for attempt in made)
    print(f"{len(made)} attempts by three tenants: {dict(counts)}")
    assert len(made) >= 200
    played = [await play(world, attempt) for attempt in made]
    twins = [await play(world, attempt.twin) for attempt in made if attempt.twin is not None]
    found = [fault for one in (*played, *twins) for fault in faults(world, one)]
    assert not found, "\n".join(found)
    assert all(one.answers for one in played if one.attempt.kind not in ("smuggled", "listing"))
    pairs = zip([one for one in played if one.attempt.twin], twins, strict=True)
    told_apart = [(one.attempt, masked(one), masked(twin)) for one, twin in pairs if masked(one) != masked(twin)]
    assert told_apart == [], "an answer tells whether a foreign adapter exists"
    statuses = Counter(answer.status for one in played for answer in one.answers)
    assert statuses[404] > 200, "most attempts must get as far as the name"
    assert statuses[200] > 50, "the intruders must be able to reach their own"


async def test_each_tenant_reaches_and_lists_its_own(world: World) -> None:
    for tenant, names in GRANTED.items():
        for number, name in enumerate(names):
            for path in (CHAT, COMPLETIONS):
                played = await play(world, asking(tenant, name, f"marker own {tenant} {number} end", path))
                assert [answer.status for answer in played.answers] == [200]
                assert faults(world, played) == []
                sent = [got for got in played.got if got.path == path]
                assert [plain(dict(got.pairs)["model"]) for got in sent] == [
                    engine_name(name, world.targets[name].digest)
                ]
        listed = f"GET /v1/models HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key(tenant)}\r\n\r\n".encode()
        (answer,) = (await play(world, Attempt("listing", (listed,), ()))).answers
        own = [entry["id"] for entry in answer.json()["data"]]
        assert own == [*([] if tenant in WITHOUT_BASE else [BASE]), *sorted(names)]


async def test_the_judge_sees_a_hit_when_there_is_one(world: World) -> None:
    """What ``audit`` may call is put before the judge as if ``cedar`` had called it."""
    foreign = [name for name in GRANTED["audit"] if name not in GRANTED["cedar"]]
    for number, name in enumerate([*foreign, BASE]):
        played = await play(world, asking("audit", name, f"marker hit {number} end"))
        assert [answer.status for answer in played.answers] == [200]
        assert faults(world, played) == []
        (sent,) = played.attempt.requests
        as_cedar = Attempt("plain", (), (Sent(sent.marker, "cedar", sent.path),))
        assert any(" reached " in fault for fault in faults(world, Played(as_cedar, [], played.got)))
        words = faults(world, Played(as_cedar, played.answers, []))
        assert any("none of its adapters' words" in fault for fault in words)
        assert name == BASE or any(f"says {name}" in fault for fault in words)
    twins = [
        Played(
            asking("cedar", "x", "m"), [Answer(404, {}, json.dumps({"error": {"message": hint}}).encode(), True)], []
        )
        for hint in "ab"
    ]
    assert masked(twins[0]) != masked(twins[1])


async def test_ids_that_collide_mix_nothing_up(own_world: World) -> None:
    """Others send the id of an open stream, its own and the gateway's, and leave: it goes on to its end in its own words."""
    world, owner = own_world, GRANTED["birch"][0]
    speaker = engine_name(owner, world.targets[owner].digest)
    body = json.dumps({"model": owner, "prompt": "a long one", "max_tokens": LONG, "stream": True}).encode()
    victim = await RawClient.to(world.port)
    await victim.send(
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key('birch')}\r\nX-Request-Id: same\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    reading = asyncio.create_task(victim.answer())
    (answer,) = (await play(world, asking("acme", "acme-sql", "marker id end"))).answers
    boot, _, number = answer.headers["x-request-id"].rpartition("-")
    ids = ["same", *(f"{boot}-{int(number) + step}" for step in range(-3, 4))]
    before = len(world.got)
    asked: list[Sent] = []
    for turn, (taken, intruder) in enumerate([(taken, intruder) for taken in ids for intruder in ("acme", "cedar")]):
        for model in (owner, OWN[intruder][0]):
            attempt = asking(intruder, model, f"marker id {turn} {model} end")
            with_id = attempt.writes[0].replace(b"Host: g", f"Host: g\r\nX-Request-Id: {taken}".encode())
            played = await play(world, Attempt("id", (with_id,), attempt.requests))
            assert [answer.status for answer in played.answers] == [404 if model == owner else 200]
            assert [
                fault for answer in played.answers for fault in said_too_much(world, attempt.requests[0], answer)
            ] == []
            asked += attempt.requests
            leaver = await RawClient.to(world.port)
            await leaver.send(with_id)
            leaver.reset()
    assert not reading.done(), "the stream has to be open all the while"
    victim.writer.transport.abort()
    words = content(await reading)
    assert len(words) > 100
    assert Speech(speaker, "a long one").text(len(words.split())) == words
    assert faults(world, Played(Attempt("id", (), tuple(asked)), [], world.got[before:])) == []
