"""The probe's parts without an engine: settings, spool and reader, ring, guard, pins, and the endpoints that refuse."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from loraledger_probe import settings
from loraledger_probe.endpoints import Endpoints
from loraledger_probe.guard import FAULT_LIMIT, Guard, Hook
from loraledger_probe.names import client_id, client_id_inside
from loraledger_probe.pins import Pins
from loraledger_probe.replay import Residency
from loraledger_probe.ring import Ring
from loraledger_probe.spool import Spool
from loraledger_probe.tail import Tail

ROOT = Path(__file__).parents[2]
Json = dict[str, Any]
ON = {"LORALEDGER_PROBE": "1", "VLLM_PLUGINS": "loraledger"}


def event(n: int, kind: str = "x", pid: int = 1, **fields: Any) -> Json:
    return {"pid": pid, "n": n, "rank": 0, "role": "worker", "mono_ns": n, "wall_ns": n, "kind": kind, **fields}


# Settings


@pytest.mark.parametrize("environment", [{}, {"LORALEDGER_PROBE": "0"}, {"LORALEDGER_PROBE": "true"}])
def test_off_it_imports_nothing_of_vllm_and_leaves_no_trace(environment: dict[str, str], tmp_path: Path) -> None:
    script = (
        "import sys, loraledger_probe.plugin as plugin\n"
        "plugin.register(); plugin.endpoints().attach_router(None)\n"
        "print({'vllm', 'torch', 'msgspec', 'starlette', 'asyncio'} & set(sys.modules))"
    )
    given = {
        **environment,
        "PYTHONPATH": str(ROOT / "probe/src"),
        "TMPDIR": str(tmp_path),
        "VLLM_PLUGINS": "loraledger",
    }
    done = subprocess.run([sys.executable, "-P", "-c", script], env=given, capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("plugins", "wanted"),
    [(None, "loraledger"), ("mine", "mine,loraledger"), ("loraledger2", "loraledger2,loraledger")],
)
def test_a_vllm_plugins_that_does_not_name_the_probe_is_answered_with_the_line_to_set(
    plugins: str | None, wanted: str
) -> None:
    environment = {"LORALEDGER_PROBE": "1"} | ({} if plugins is None else {"VLLM_PLUGINS": plugins})
    assert not settings.enabled(environment)
    assert settings.plugins_problem(environment).endswith(f"set VLLM_PLUGINS={wanted}")
    assert settings.enabled({**environment, "VLLM_PLUGINS": wanted})


def test_children_share_the_folder_of_the_first_process_which_is_private(tmp_path: Path) -> None:
    environment = {**ON, "LORALEDGER_PROBE_DIR": str(tmp_path / "probe")}
    first = settings.load(environment)
    second = settings.load(environment)
    assert (first.spool, first.boot) == (second.spool, second.boot)
    assert first.spool.stat().st_mode & 0o777 == 0o700
    assert first.spool.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_enter_or_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("open", "link"):
        with pytest.raises(settings.SettingsError, match="chmod 700"):
            settings.load({**ON, "LORALEDGER_PROBE_DIR": str(tmp_path / name)})


def test_folders_of_dead_engines_are_removed_and_of_living_ones_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    living = settings.load({**ON, "LORALEDGER_PROBE_DIR": str(tmp_path)})
    dead = tmp_path / "boot-dead"
    dead.mkdir()
    (dead / "lock").touch()
    fresh = settings.load({**ON, "LORALEDGER_PROBE_DIR": str(tmp_path)})
    assert {path.name for path in tmp_path.iterdir()} == {living.spool.name, fresh.spool.name}


def test_a_key_comes_from_a_file_or_the_environment_and_a_short_one_is_none(tmp_path: Path) -> None:
    base = {**ON, "LORALEDGER_PROBE_DIR": str(tmp_path / "probe")}
    file = tmp_path / "key"
    file.write_text("from the file\n")
    assert settings.load({**base, "LORALEDGER_PROBE_KEY_FILE": str(file)}).key == "from the file"
    both = {**base, "LORALEDGER_PROBE_KEY_FILE": str(file), "LORALEDGER_PROBE_KEY": "from outside"}
    assert settings.load(both).key == "from outside"
    for bad in ({"LORALEDGER_PROBE_KEY": "short"}, {"LORALEDGER_PROBE_KEY_FILE": str(tmp_path / "none")}, {}):
        found = settings.load({**base, **bad})
        assert found.key is None
        assert found.key_problem


@pytest.mark.parametrize("value", ["", "-1", "999", "1e6", "٣٣٣٣", "10000001"])
def test_a_bound_that_is_no_number_in_range_is_refused_by_name(value: str, tmp_path: Path) -> None:
    environment = {**ON, "LORALEDGER_PROBE_DIR": str(tmp_path / "probe"), "LORALEDGER_PROBE_EVENTS": value}
    with pytest.raises(settings.SettingsError, match="LORALEDGER_PROBE_EVENTS"):
        settings.load(environment)


# Spool and reader


def test_events_come_back_in_order_and_read_files_are_removed(tmp_path: Path) -> None:
    spool, tail = Spool(tmp_path, segment_bytes=500), Tail(tmp_path)
    seen = []
    for i in range(50):
        spool.emit("worker", "x", i=i)
        if i % 3 == 0:
            spool.flush()
        if i % 7 == 0:
            seen += tail.poll()
    spool.flush()
    seen += tail.poll()
    assert [found["i"] for found in seen] == list(range(50))
    assert [found["n"] for found in seen] == list(range(1, 51))
    assert len(list(tmp_path.iterdir())) == 1
    assert next(tmp_path.iterdir()).stat().st_mode & 0o777 == 0o600


def test_without_a_reader_the_disk_is_bounded_and_the_loss_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=1000, segments=3)
    for i in range(200):
        spool.emit("worker", "x", i=i)
        spool.flush()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 4 * 1200
    lost, *rest = Tail(tmp_path).poll()
    assert lost["kind"] == "lost"
    assert lost["count"] + len(rest) == 200
    assert rest[-1]["i"] == 199


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    spool, tail = Spool(tmp_path), Tail(tmp_path)
    spool.emit("worker", "x")
    spool.flush()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    spool.emit("worker", "torn")
    spool.flush()
    file.write_bytes(file.read_bytes()[:-20])  # half of the second line; more comes later
    assert [found["kind"] for found in tail.poll()] == ["x"]
    with file.open("ab") as late:
        late.write(b"\n" + whole.replace(b'"n":1', b'"n":3'))
    assert [(found["kind"], found["n"], found.get("count")) for found in tail.poll()] == [
        ("lost", 2, 1),
        ("x", 3, None),
    ]


def test_a_full_disk_raises_nothing_later_and_shows_as_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, tail = Spool(tmp_path), Tail(tmp_path)
    spool.emit("worker", "x")
    spool.flush()
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))
    spool.emit("worker", "half")
    spool.flush()
    monkeypatch.setattr(os, "write", write)
    spool.emit("worker", "y")
    spool.flush()
    assert [found["kind"] for found in tail.poll()] == ["x", "lost", "y"]


def test_a_forked_child_starts_over_with_its_own_file(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from loraledger_probe.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1])); spool.emit('api', 'parent')\n"
        "child = os.fork()\n"
        "spool.emit('core', 'child' if not child else 'parent'); spool.flush()\n"
        "child and os.waitpid(child, 0)"
    )
    path = {"PYTHONPATH": str(ROOT / "probe/src")}
    subprocess.run([sys.executable, "-P", "-c", script, str(tmp_path)], env=path, check=True)
    by_pid: dict[int, list[tuple[int, str]]] = {}
    for found in Tail(tmp_path).poll():
        by_pid.setdefault(found["pid"], []).append((found["n"], found["kind"]))
    assert sorted(by_pid.values()) == [[(1, "child")], [(1, "parent"), (2, "parent")]]


def test_a_reader_takes_a_bounded_part_at_a_time(tmp_path: Path) -> None:
    spool, tail = Spool(tmp_path, segment_bytes=2000), Tail(tmp_path, limit_bytes=700)
    for i in range(60):
        spool.emit("worker", "x", i=i)
        spool.flush()
    seen: list[Json] = []
    for _ in range(100):
        part = tail.poll()
        assert len(part) < 10
        seen += part
    assert [found["i"] for found in seen] == list(range(60))


# Ring


def test_the_ring_tells_a_late_client_what_it_missed() -> None:
    ring = Ring(100, 1 << 20)
    ring.add([event(n) for n in range(1, 251)])
    assert (ring.first_seq, ring.last_seq) == (151, 250)
    page = ring.after(100, 10)
    assert (page.lost, page.next_seq, len(page.lines)) == (50, 160, 10)
    assert ring.after(245, 100).next_seq == 250
    assert ring.after(250, 100) == ([], 250, 0)
    assert [len(ring.after(seq, 1000).lines) for seq in (0, 150, 199, 200, 201, 249)] == [100, 100, 51, 50, 49, 1]


def test_the_ring_is_bounded_in_bytes_and_so_is_a_page() -> None:
    ring = Ring(1_000_000, 10 << 20)
    ring.add([event(n, text="x" * (1 << 20)) for n in range(1, 21)])
    assert ring.first_seq == 12
    assert len(ring.after(0, 1000).lines) == 3
    ring.add([event(21, text="x" * (5 << 20))])
    assert len(ring.after(20, 1000).lines) == 1, "an event larger than a page must still pass"


def test_a_snapshot_is_placed_before_the_first_event_that_it_does_not_contain() -> None:
    ring = Ring(100, 1 << 20)
    ring.add([event(1), event(1, pid=2), event(2), event(2, pid=2), event(3)])
    assert ring.seq_at({1: 3, 2: 2}) == 5
    assert ring.seq_at({1: 2, 2: 2}) == 4
    assert ring.seq_at({1: 2, 2: 1}) == 3
    assert ring.seq_at({3: 7}) == 5


def test_a_finished_request_is_joined_with_how_it_found_its_adapter() -> None:
    ring = Ring(100, 1 << 20)
    found: Json = {"state": "miss", "load_ns": 5, "activation_ns": 2, "stall_ns": 9}
    ring.add([event(1, "access", requests=["K"], **found), event(2, "request_finished", request="K")])
    ring.add([event(3, "request_finished", request="other")])
    joined, other = (line.decode() for line in ring.after(1, 10).lines)
    assert '"access":"miss","load_ns":5,"activation_ns":2,"stall_ns":9' in joined
    assert '"access":null,"load_ns":null' in other


def test_losses_in_a_spool_are_added_up() -> None:
    ring = Ring(100, 1 << 20)
    ring.add([event(4, "lost", count=4), event(9, "lost", count=2)])
    assert ring.spool_lost == 6


# Guard


class Engine:
    """A stand-in for a class of vLLM."""

    def work(self, amount: int) -> int:
        if amount < 0:
            raise ValueError("the engine's own")
        return amount + 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    made = type("Engine", (Engine,), {"work": Engine.work})
    module = types.ModuleType("fake_vllm")
    module.Engine = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_vllm", module)
    return made


def hook(before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None, **more: Any) -> Hook:
    named = {"owner": "Engine", "method": "work", "parameters": ("amount",), **more}
    return Hook("worker", "fake_vllm", gives="everything", before=before, after=after, **named)


def fail(*args: Any) -> None:
    raise RuntimeError("the probe's own")


def test_faults_of_the_probe_never_reach_the_engine_and_disable_the_hook(tmp_path: Path, fake: type[Engine]) -> None:
    calls = []

    def before(this: Engine, amount: int) -> None:
        calls.append(amount)
        fail()

    guard = Guard(Spool(tmp_path), "0.32.0")
    guard.install([hook(before, fail)])
    engine = fake()
    assert [engine.work(i) for i in range(30)] == list(range(1, 31))
    assert len(calls) == FAULT_LIMIT
    assert not guard.works("Engine.work")
    faults = [found for found in Tail(tmp_path).poll() if found["kind"] == "hook_fault"]
    assert [fault["count"] for fault in faults] == list(range(1, FAULT_LIMIT + 1))
    assert [fault["disabled"] for fault in faults].count(True) == 1
    assert faults[0]["error"] == "RuntimeError: the probe's own"


def test_the_engines_own_errors_pass_unchanged_and_are_seen(tmp_path: Path, fake: type[Engine]) -> None:
    seen: list[BaseException | None] = []
    guard = Guard(Spool(tmp_path), "0.32.0")
    guard.install([hook(lambda this, amount: "token", lambda this, token, result, error: seen.append(error))])
    with pytest.raises(ValueError, match="the engine's own"):
        fake().work(-1)
    fake().work(amount=1)
    assert [type(error) for error in seen] == [ValueError, type(None)]


def test_a_spool_that_cannot_be_written_is_no_concern_of_the_engine(tmp_path: Path, fake: type[Engine]) -> None:
    guard = Guard(Spool(tmp_path / "gone"), "0.32.0")
    guard.install([hook(lambda this, amount: guard.spool.emit("worker", "x"))])
    assert [fake().work(i) for i in range(100)] == list(range(1, 101))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"owner": "Gone"}, "has no Gone"),
        ({"method": "gone"}, "has no gone"),
        ({"parameters": ("size",)}, "parameters are"),
        ({"module": "fake_vllm_gone"}, "ModuleNotFoundError"),
    ],
)
def test_a_hook_that_does_not_fit_is_listed_with_what_it_loses(
    tmp_path: Path, fake: type[Engine], change: dict[str, Any], why: str
) -> None:
    spool = Spool(tmp_path)
    guard = Guard(spool, "0.33.0rc1")
    values = {"module": "fake_vllm", "owner": "Engine", "method": "work", "parameters": ("amount",), **change}
    guard.install([Hook("worker", gives="everything", before=fail, **values)])
    assert fake().work(1) == 2
    guard.run("worker", "x", guard.announce, "worker")
    (listed,) = Tail(tmp_path).poll()
    assert not listed["tested"]
    assert listed["installed"] == []
    assert why in listed["missing"][0]["why"]
    assert listed["missing"][0]["loses"] == "everything"


def test_events_of_a_call_leave_together_when_the_outermost_hook_ends(tmp_path: Path, fake: type[Engine]) -> None:
    def outer(self: Engine) -> list[int]:
        self.work(1)
        self.work(2)
        return [len(list(tmp_path.iterdir()))]

    fake.step = outer  # type: ignore[attr-defined]
    guard = Guard(Spool(tmp_path), "0.32.0")
    emit = guard.spool.emit
    guard.install(
        [hook(lambda this, amount: emit("worker", "x")), hook(lambda this: None, method="step", parameters=())]
    )
    assert fake().step() == [0]  # type: ignore[attr-defined]
    assert [found["kind"] for found in Tail(tmp_path).poll()] == ["hooks", "x", "x"]
    assert guard.spent_ns > 0


def test_installing_twice_wraps_once(tmp_path: Path, fake: type[Engine]) -> None:
    calls = []
    guard = Guard(Spool(tmp_path), "0.32.0")
    for _ in range(2):
        guard.install([hook(lambda this, amount: calls.append(amount))])
    fake().work(1)
    assert calls == [1]


# Pins, names, replay


class Order(OrderedDict[int, None]):
    def touch(self, key: int) -> None:
        if key in self:
            self.move_to_end(key)


def test_pinned_adapters_leave_after_all_others_and_before_those_of_the_batch() -> None:
    manager = types.SimpleNamespace(
        _registered_adapters=Order.fromkeys([1, 2, 3, 4, 5]), _active_adapters=Order.fromkeys([1, 2, 3])
    )
    pins = Pins()
    pins.add(2, "two")
    pins.add(1, "one")
    assert pins.arrange(manager, [1, 9]) == [2, 1]
    assert list(manager._registered_adapters) == [3, 4, 5, 2, 1]
    assert list(manager._active_adapters) == [3, 2, 1]
    assert pins.drop(2)
    assert not pins.drop(2)


@pytest.mark.parametrize(
    ("external", "sent"),
    [
        ("cmpl-K-0", "K"),
        ("cmpl-a-b-12", "a-b"),
        ("chatcmpl-K-7", "K-7"),
        ("3_cmpl-K-0", "K"),
        ("something", "something"),
        ("", ""),
        ("chatcmpl-" + "x" * 5000, "x" * 256),
    ],
)
def test_request_ids_come_back_as_the_client_sent_them(external: str, sent: str) -> None:
    assert client_id(external) == sent
    assert client_id_inside(f"{external}-0a1b2c3d") == sent


def test_replay_starts_from_a_snapshot_and_skips_what_it_contains() -> None:
    snapshot = {
        "host": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
        "workers": [{"rank": 0, "n": 10, "slots": [2, None], "slot_order": [2], "host": [1, 2]}],
    }
    state = Residency.from_snapshot(snapshot)
    for found in (
        event(10, "host_evict", id=1),
        event(11, "activation_start", id=1, slot=1),
        event(12, "touch", ids=[1, 2]),
        event(13, "host_evict", id=1),
        event(14, "slot_evict", id=1, slot=1),
        event(20, "lost", count=5),
    ):
        state.apply(found)
    assert (state.slots, list(state.slot_order), state.host, state.lost) == ([2, None], [2], {2: "b"}, 5)


# Endpoints without an engine


def serve(tmp_path: Path, key: str | None) -> tuple[Endpoints, httpx2.AsyncClient]:
    found = settings.Settings(tmp_path, "boot", key, "no key is set", 1000, 1 << 20)
    endpoints = Endpoints(found, Guard(Spool(tmp_path), "0.32.0"))
    app = Starlette()
    endpoints.attach_router(app)
    return endpoints, httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://probe")


async def test_without_a_configured_key_everything_is_closed(tmp_path: Path) -> None:
    _, client = serve(tmp_path, None)
    async with client:
        for method, path in (("GET", "residency"), ("GET", "events"), ("POST", "adapters/a/pin")):
            reply = await client.request(method, f"/loraledger/{path}", headers={"authorization": "Bearer "})
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "no_key_configured")


STATE = types.SimpleNamespace(openai_serving_models=types.SimpleNamespace(lora_requests={}))


def client_of(data_parallel: int, **more: Any) -> types.SimpleNamespace:
    """A stand-in for vLLM's EngineClient."""
    parallel = types.SimpleNamespace(data_parallel_size=data_parallel)
    return types.SimpleNamespace(vllm_config=types.SimpleNamespace(parallel_config=parallel), **more)


async def test_a_key_that_is_not_ascii_is_compared_by_its_bytes(tmp_path: Path) -> None:
    endpoints, client = serve(tmp_path, "schlüssel")
    await endpoints.init_state(client_of(1), STATE, None)
    async with client:
        for key, status in (("schlüssel".encode(), 200), (b"schlussel", 401), ("schlüssel".encode("latin-1"), 401)):
            reply = await client.get("/loraledger/events", headers={b"authorization": b"Bearer " + key})
            assert reply.status_code == status


async def test_without_an_engine_or_as_the_second_reader_it_says_so(tmp_path: Path) -> None:
    endpoints, client = serve(tmp_path, "a long key")
    async with client:
        client.headers["authorization"] = "Bearer a long key"
        assert (await client.get("/loraledger/events")).json()["error"]["code"] == "no_engine"
        others, second = serve(tmp_path, "a long key")
        await endpoints.init_state(client_of(2), STATE, None)
        assert (await client.get("/loraledger/events")).json()["error"]["code"] == "data_parallel"
        for each in (endpoints, others):
            await each.init_state(client_of(1), STATE, None)
        assert (await client.get("/loraledger/events")).status_code == 200
        async with second:
            reply = await second.get("/loraledger/events", headers=client.headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_the_reader")


async def test_an_engine_that_is_gone_is_an_answer(tmp_path: Path) -> None:
    async def gone(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the engine died")

    endpoints, client = serve(tmp_path, "a long key")
    await endpoints.init_state(client_of(1, collective_rpc=gone), STATE, None)
    async with client:
        reply = await client.get("/loraledger/residency", headers={"authorization": "Bearer a long key"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_a_long_poll_ends_with_the_first_event_or_with_its_time(tmp_path: Path) -> None:
    endpoints, client = serve(tmp_path, "a long key")
    await endpoints.init_state(client_of(1), STATE, None)
    writer = Spool(tmp_path)
    async with client:
        client.headers["authorization"] = "Bearer a long key"
        began = time.monotonic()
        empty = (await client.get("/loraledger/events?wait_s=0.2")).json()
        assert empty["events"] == []
        assert 0.2 <= time.monotonic() - began < 8.0
        waiting = asyncio.create_task(client.get("/loraledger/events?wait_s=10"))
        await asyncio.sleep(0.1)
        writer.emit("worker", "x")
        writer.flush()
        page = (await waiting).json()
        assert [found["kind"] for found in page["events"]] == ["x"]
        assert time.monotonic() - began < 9.0
