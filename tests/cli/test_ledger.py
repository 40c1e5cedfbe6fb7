"""``ledger``: what it shows of a running gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.build_weights import SMALL, build, pairs
from e2e.fleet import Emulator, ask, settings_for
from support.gateway import GatewayProcess, replica

from .conftest import Cli


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    SMALL.write(tmp_path / "base")
    every = SMALL.projections()
    names = sorted(name.rpartition(".")[2] for name in every)
    for name in ("a", "b", "c"):
        config = {"r": 4, "lora_alpha": 16, "peft_type": "LORA", "target_modules": names, "revision": name}
        build(tmp_path / "adapters" / name, config, pairs(every, 4, SMALL.layers))
    return tmp_path


def test_the_ledger_of_a_replica_is_shown_and_given_as_json(cli: Cli, folders: Path) -> None:
    with Emulator(folders) as emulator:
        settings = settings_for(
            [emulator],
            {},
            adapters={"folder": "adapters"},
            base={"names": ["base"], "path": "base"},
            replicas=[replica("r1", emulator.url, engine="emulator", device_bytes="80GiB", overhead="1GiB")],
        )
        with GatewayProcess(folders, settings).start(replicas_up=1) as gateway:
            for name in ("a", "b", "c"):
                assert ask(gateway, name).error is None
            (item,) = cli("ledger", "--config", gateway.config, "--json").items("ledger")
            assert item["replica"] == "r1"
            parts = (item["floor"]["total"], item["adapters"]["pool"], item["kv"]["bytes"], item["headroom"])
            assert sum(part["value"] for part in parts) == item["device"]["value"] == 80 * 2**30
            assert item["adapters"]["used"] == {**item["adapters"]["used"], "value": 2, "source": "believed"}
            assert [a["tier"] for a in item["adapters"]["adapters"]] == ["gpu", "gpu", "host"]
            shown = cli("ledger", "--config", gateway.config, "--replica", "r1").out
            assert "r1: limited by adapters" in shown or "r1: no pool limits" in shown
            assert "~2 of =2 slots used" in shown
            assert "=80 GiB" in shown
            emulator.kill9()
            gateway.wait(lambda: not gateway.summary()["replicas_up"], "the loss to be noticed")
            lost = cli("ledger", "--config", gateway.config).out
            assert "r1: down" in lost
            assert "- of =2 slots used" in lost
            done = cli("ledger", "--config", gateway.config, "--replica", "r9")
            assert (done.code, "did you mean 'r1'" in done.err or "r9" in done.err) == (4, True)
    assert cli("ledger", "--config", gateway.config).code == 4
