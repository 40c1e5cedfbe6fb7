"""Adapters that come, change and go while a gateway serves."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx2

from support.gateway import GatewayProcess, digest_of

from .conftest import Pair
from .fleet import Call, ask, by_client, check_texts, eventually, expected_text, play, post, settings_for, write_adapter


def folder_settings(pair: Pair) -> dict[str, object]:
    return settings_for(pair, {}, adapters={"folder": "adapters"})


def new_files(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "revision": "second"}))


def listed(gateway: GatewayProcess) -> set[str]:
    reply = httpx2.get(f"{gateway.url}/v1/models", headers={"authorization": "Bearer key-acme"}, timeout=20.0)
    return {model["id"] for model in reply.json()["data"]}


def test_a_new_adapter_is_served_and_one_that_is_gone_is_a_404(tmp_path: Path, pair: Pair) -> None:
    scan = tmp_path / "adapters"
    paths = {name: write_adapter(scan, name) for name in ("old", "stays")}
    with GatewayProcess(tmp_path, folder_settings(pair)).start(replicas_up=2) as gateway:
        assert ask(gateway, "old").error is None
        paths["new"] = write_adapter(scan, "new")
        assert "new" not in listed(gateway)
        shutil.rmtree(scan / "old")
        assert ask(gateway, "old").error is None, "nothing changes before the reread"
        assert 'adapter="old"' in httpx2.get(f"{gateway.control}/metrics", timeout=20.0).text
        found = post(gateway, "/api/rescan")
        assert found == {"added": ["new"], "changed": [], "removed": ["old"], "problems": [], "warnings": []}
        assert listed(gateway) == {"base", "stays", "new"}
        assert 'adapter="old"' not in httpx2.get(f"{gateway.control}/metrics", timeout=20.0).text
        call = ask(gateway, "new")
        check_texts([call], paths)
        refused = ask(gateway, "old")
        assert refused.error is not None
        assert "does not exist" in refused.error
        eventually(lambda: all(not e.registered() or "old" not in str(e.registered()) for e in pair), "the unload")
        gateway.stop()
        assert "identical" in gateway.verify()


def test_new_files_get_a_new_name_and_a_stream_in_flight_ends_on_the_old_ones(tmp_path: Path, slow_pair: Pair) -> None:
    scan = tmp_path / "adapters"
    folder = write_adapter(scan, "sql")
    before = expected_text({"sql": folder}, "sql", "Hello", 300)
    first = digest_of(folder)
    with GatewayProcess(tmp_path, folder_settings(slow_pair)).start(replicas_up=2) as gateway:

        async def scene() -> list[Call]:
            begun = asyncio.Event()
            calls = [Call("long", "acme", "sql", "Hello", "stream", tokens=300)]
            long = asyncio.create_task(play(gateway, calls, began=lambda _: begun.set()))
            await asyncio.wait_for(begun.wait(), 30)
            new_files(folder)
            found = await asyncio.to_thread(post, gateway, "/api/rescan")
            assert found["changed"] == ["sql"]
            after = await play(gateway, [Call("after", "acme", "sql", "Hello", "plain")])
            return [*await long, *after]

        long, after = asyncio.run(scene())
        gateway.stop()
        rows = by_client(gateway.rows())
    assert (long.error, long.text) == (None, before)
    check_texts([after], {"sql": folder})
    assert rows["long"]["digest"] == first
    assert rows["after"]["digest"] == digest_of(folder)


def test_a_broken_upload_keeps_the_last_good_version_and_is_named(tmp_path: Path, pair: Pair) -> None:
    scan = tmp_path / "adapters"
    folder = write_adapter(scan, "sql")
    good = shutil.copytree(folder, tmp_path / "good")
    with GatewayProcess(tmp_path, folder_settings(pair)).start(replicas_up=2) as gateway:
        (folder / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0half")
        found = post(gateway, "/api/rescan")
        assert (found["changed"], found["removed"], len(found["problems"])) == ([], [], 1)
        assert found["problems"][0].startswith("sql ")
        check_texts([ask(gateway, "sql")], {"sql": good})


def test_the_copy_of_an_old_version_goes_when_no_replica_can_read_it(tmp_path: Path, pair: Pair) -> None:
    scan = tmp_path / "adapters"
    folder = write_adapter(scan, "sql")
    old = tmp_path / "store" / digest_of(folder)
    settings = {**folder_settings(pair), "limits": {"scrape_interval": "100ms", "store_sweep": "200ms"}}
    with GatewayProcess(tmp_path, settings).start(replicas_up=2) as gateway:
        assert ask(gateway, "sql").error is None
        new_files(folder)
        post(gateway, "/api/rescan")
        assert ask(gateway, "sql").error is None
        eventually(lambda: not old.exists(), "the old copy to be removed")
        assert (tmp_path / "store" / digest_of(folder)).is_dir()


def test_an_adapter_that_went_while_the_gateway_was_down_is_unloaded_and_its_copy_removed(
    tmp_path: Path, pair: Pair
) -> None:
    scan = tmp_path / "adapters"
    folder = write_adapter(scan, "gone")
    write_adapter(scan, "stays")
    copy = tmp_path / "store" / digest_of(folder)
    settings = {**folder_settings(pair), "limits": {"scrape_interval": "100ms", "store_sweep": "200ms"}}
    with GatewayProcess(tmp_path, settings).start(replicas_up=2) as gateway:
        assert ask(gateway, "gone").error is None
        assert any("gone" in str(emulator.registered()) for emulator in pair)
    shutil.rmtree(folder)
    with GatewayProcess(tmp_path, settings).start(replicas_up=2) as gateway:
        eventually(lambda: not any("gone" in str(emulator.registered()) for emulator in pair), "the unload")
        eventually(lambda: not copy.exists(), "the copy to be removed")
        gateway.stop()
        assert "identical" in gateway.verify()


def test_a_rescan_without_the_folder_says_so_and_changes_nothing(tmp_path: Path, pair: Pair) -> None:
    scan = tmp_path / "adapters"
    write_adapter(scan, "sql")
    with GatewayProcess(tmp_path, folder_settings(pair)).start(replicas_up=2) as gateway:
        scan.rename(tmp_path / "away")
        reply = httpx2.post(f"{gateway.control}/api/rescan", timeout=20.0)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "adapters_unreadable")
        assert ask(gateway, "sql").error is None
