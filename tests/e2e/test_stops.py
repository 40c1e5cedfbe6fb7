"""How a gateway ends when it is asked to, and that only one may write a record."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from support.gateway import GatewayProcess, free_port

from .conftest import Pair
from .fleet import LONG, Call, by_client, check_texts, command, eventually, play, settings_for


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Stopper:
    """Sends SIGTERM when so many answers have begun and all calls have arrived, and notes what a new client meets."""

    def __init__(self, gateway: GatewayProcess, calls: list[Call], after: int) -> None:
        self.gateway, self.calls, self.after = gateway, calls, after
        self.begun = 0
        self.refused_in_time: bool | None = None
        """Whether new connections were refused before the last answer had ended."""
        self._thread = threading.Thread(target=self._knock)

    def began(self, _: Call) -> None:
        self.begun += 1
        if self.begun == self.after:
            self._thread.start()

    def _knock(self) -> None:
        if self.after < len(self.calls):
            eventually(lambda: self.gateway.summary()["open_requests"] == len(self.calls), "all calls to arrive")
        process = self.gateway.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        eventually(lambda: refuses(self.gateway.port), "new connections to be refused")
        self.refused_in_time = not all(call.ended for call in self.calls)

    def exit_code(self) -> int:
        self._thread.join()
        process = self.gateway.process
        assert process is not None
        return process.wait(timeout=60)


def test_sigterm_lets_open_streams_end_and_takes_no_new_ones(
    tmp_path: Path, slow_pair: Pair, adapters: dict[str, Path]
) -> None:
    calls = [Call(f"s{n}", "acme", ("a0", "base")[n % 2], f"prompt {n}", "stream", tokens=450) for n in range(6)]
    with GatewayProcess(tmp_path, settings_for(slow_pair, adapters)).start(replicas_up=2) as gateway:
        stopper = Stopper(gateway, calls, len(calls))
        made = asyncio.run(play(gateway, calls, began=stopper.began))
        assert stopper.exit_code() == 0, gateway.log()
        rows = by_client(gateway.rows())
        assert "identical" in gateway.verify()
    check_texts(made, adapters)
    assert all(call.ended for call in made), "each stream came to its end"
    assert stopper.refused_in_time
    assert Counter(row["status"] for row in rows.values()) == {"ok": len(calls)}
    assert "Traceback" not in gateway.log()


def test_what_is_still_open_at_the_drain_limit_is_cut_and_has_a_row(
    tmp_path: Path, slow_pair: Pair, adapters: dict[str, Path]
) -> None:
    calls = [Call(f"s{n}", "acme", "base", f"prompt {n}", "stream", tokens=LONG) for n in range(4)]
    calls += [Call(f"p{n}", "acme", "base", f"prompt {n}", "plain", tokens=LONG) for n in range(2)]
    settings = settings_for(slow_pair, adapters, limits={"scrape_interval": "200ms", "drain": "500ms"})
    with GatewayProcess(tmp_path, settings).start(replicas_up=2) as gateway:
        stopper = Stopper(gateway, calls, 4)
        made = asyncio.run(play(gateway, calls, began=stopper.began))
        assert stopper.exit_code() == 0, gateway.log()
        rows = by_client(gateway.rows())
        assert "identical" in gateway.verify()
    check_texts([call for call in made if call.text], adapters)
    assert all(call.error is not None for call in made)
    assert {(row["status"], row["reason"]) for row in rows.values()} == {("gateway_crashed", "drain_timeout")}
    assert len(rows) == len(calls)
    eventually(lambda: sum(emulator.metrics()["running"] for emulator in slow_pair) == 0, "the engines to be told")
    assert "Traceback" not in gateway.log()


def test_a_second_gateway_on_one_record_refuses_and_names_the_first(
    tmp_path: Path, pair: Pair, adapters: dict[str, Path]
) -> None:
    with GatewayProcess(tmp_path, settings_for(pair, adapters)).start(replicas_up=2) as gateway:
        assert gateway.process is not None
        other = json.loads(gateway.config.read_text())
        other["listen"]["port"], other["control"]["port"] = free_port(), free_port()
        config = tmp_path / "other.yaml"
        config.write_text(json.dumps(other))
        done = command("serve", "--config", str(config))
        assert done.returncode == 3
        assert f"pid {gateway.process.pid}" in done.stderr
        assert "Traceback" not in done.stderr
        calls = [Call(f"c{n}", "acme", "a0", "Hello", "plain") for n in range(3)]
        made = asyncio.run(play(gateway, calls))
        assert gateway.stop() == 0
        rows = gateway.rows()
    check_texts(made, adapters)
    assert len(rows) == 3


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path, pair: Pair, adapters: dict[str, Path]) -> None:
    for section in ("listen", "control"):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            settings = {
                "listen": {"port": free_port()},
                "control": {"port": free_port()},
                "record": {"dir": str(tmp_path / section)},
                **settings_for(pair, adapters),
            }
            settings[section]["port"] = port
            config = tmp_path / "taken.yaml"
            config.write_text(json.dumps(settings))
            done = command("serve", "--config", str(config))
        assert done.returncode == 4, done.stderr
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
        assert "Traceback" not in done.stderr


def test_ctrl_c_and_sigterm_twice_end_it_cleanly(tmp_path: Path, pair: Pair, adapters: dict[str, Path]) -> None:
    gateway = GatewayProcess(tmp_path, settings_for(pair, adapters))
    for signals in ((signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)):
        gateway.start(replicas_up=2)
        assert gateway.process is not None
        for number in signals:
            gateway.process.send_signal(number)
        assert gateway.process.wait(timeout=60) == 0, gateway.log()
    assert "Traceback" not in gateway.log()


def test_a_stop_during_the_start_ends_it_too(tmp_path: Path, pair: Pair, adapters: dict[str, Path]) -> None:
    gateway = GatewayProcess(tmp_path, settings_for(pair, adapters))
    with gateway.start(replicas_up=2):
        gateway.stop()
    words = [sys.executable, "-m", "loraledger.cli.main", "serve", "--config", str(gateway.config)]
    for delay in (0.6, 0.9):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(delay)
        process.terminate()
        _, words_said = process.communicate(timeout=60)
        assert b"Traceback" not in words_said, words_said.decode()
        assert process.returncode in (0, -signal.SIGTERM)
