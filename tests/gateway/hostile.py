"""What the suite of hostile clients stands on: a gateway process, an emulated replica, and what is written between them.

Answers are read by h11, so each of them is also checked to be HTTP by somebody else's grammar. Between gateway and replica stands
a ``Tap``: it passes everything on, and keeps each request for a generation that the replica was given.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11

from e2e.fleet import Emulator, write_adapters
from support.gateway import GatewayProcess, replica, tenant

HEADER_BYTES = 16 * 1024
BODY_BYTES = 256 * 1024
PIPELINED = 4
WAIT_S = 10.0


@dataclass
class Answer:
    """One answer, 1xx ones included."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def reason(self) -> str | None:
        """The gateway's word for what was wrong."""
        return self.headers.get("x-loraledger-reason")

    def json(self) -> Any:
        return json.loads(self.body)


class Peer:
    """A client that sends exactly what it is given, and reads by the book."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self._left = b""

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, *parts: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # who is refused early may find the door shut while still speaking
            for part in parts:
                self.sock.sendall(part)

    def answer(self) -> Answer:
        """The next answer. h11 raises RemoteProtocolError when it is none, or breaks off."""
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method="POST", target="/", headers=[("Host", "gateway")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(self._left) if self._left else None
        answer: Answer | None = None
        while True:
            event = reader.next_event()
            if event is h11.NEED_DATA:
                reader.receive_data(self.sock.recv(1 << 16))
            elif isinstance(event, h11.InformationalResponse | h11.Response):
                headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                answer = Answer(event.status_code, headers)
                if event.status_code < 200:
                    self._left = reader.trailing_data[0]
                    return answer
            elif isinstance(event, h11.Data):
                assert answer is not None
                answer.body += bytes(event.data)
            else:
                assert isinstance(event, h11.EndOfMessage), event
                assert answer is not None
                self._left = reader.trailing_data[0]
                return answer

    def ended(self) -> bool:
        """Whether the gateway closes now, without a byte more."""
        if self._left:
            return False
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


@dataclass
class Reached:
    """One request for a generation as the replica was given it."""

    line: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Tap:
    """Passes bytes between the gateway and one replica, and notes the generations in them."""

    upstream: int
    requests: list[Reached] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.upstream))
            except OSError:
                near.close()  # not there yet, or gone
                continue
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # without it, 40 ms an answer
            threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, noting: bool) -> None:
        seen = b""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if noting:
                    seen = self._note(seen + data)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _note(self, seen: bytes) -> bytes:
        """Take the whole requests off ``seen``; returns what is left."""
        while (end := seen.find(b"\r\n\r\n")) >= 0:
            line, *lines = seen[:end].decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (entry.partition(": ") for entry in lines)}
            size = end + 4 + int(headers.get("content-length", "0"))
            if len(seen) < size:
                break
            if re.match("POST (?!/v1/(un)?load_lora_adapter)", line):
                self.requests.append(Reached(line, headers, seen[end + 4 : size]))
            seen = seen[size:]
        return seen


@dataclass
class Site:
    """A gateway with an emulated replica behind a tap. ``mallory`` may call ``mine``, ``bystander`` ``theirs``."""

    gateway: GatewayProcess
    tap: Tap

    def peer(self) -> Peer:
        return Peer(self.gateway.port)


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Everything, as processes of their own but for the tap."""
    paths = write_adapters(folder / "adapters", ["mine", "theirs"])
    with Emulator(folder, speed=500.0) as emulator, contextlib.closing(Tap(emulator.port)) as tap:
        settings = {
            "base": {"names": ["base"]},
            "replicas": [replica("r1", f"http://127.0.0.1:{tap.port}", engine="emulator")],
            "adapters": {"list": [{"name": name, "path": str(path)} for name, path in paths.items()]},
            "tenants": [
                tenant("mallory", ["mine"], base=False),
                tenant("bystander", ["theirs"]),
            ],
            "limits": {"header_bytes": HEADER_BYTES, "body_bytes": BODY_BYTES, "pipelined": PIPELINED},
        }
        with GatewayProcess(folder, settings).start(1) as gateway:
            yield Site(gateway, tap)
