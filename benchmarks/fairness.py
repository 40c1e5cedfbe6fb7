"""What one tenant's flood costs another: time to first token of a quiet tenant, alone and beside it.

Run: python -m benchmarks.fairness [--rounds 5] [--seconds 15] [--only NAME] [--quick] [--markdown] [--json FILE]

A gateway process in front of emulated replicas (an 8B model on one H100, vLLM's defaults but where a scenario says so). The quiet
tenant streams from its own adapter at random times, four requests a second; the flood keeps 50 requests of another adapter open,
each followed by the next at once. In each round the quiet tenant plays the same arrivals twice, alone and beside the flood, in
changing order, so that what else the machine does falls on both. Measured at the client, from a request's last byte to its first
event. All scenarios take 12 minutes; the exit code is 1 when the p99 ratio of one is above the aim, or
there is none (with ``--quick`` only then).

Ratios: beside the flood over alone. p50 and p99 of all rounds together, in brackets the lowest and highest of single rounds. The
flood asks for whole answers: on a machine with few cores, passing on its events would be what is measured.

A flood cannot cost nothing: an engine's step takes longer with more in it, and a request that comes within one waits for its end.
What a gateway can see to is that nobody waits behind more than about one step: for a seat, for KV, or for the prompts of others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import uvloop

from benchmarks.printed import show
from benchmarks.processes import ROOT, free_port, start, unwind_on_signals

sys.path.insert(0, str(ROOT / "tests"))  # the gateway process is that of the tests

from e2e.fleet import write_adapters
from support.gateway import GatewayProcess, replica, tenant

FLOOD: Final = 50
QUIET_PER_S: Final = 4.0
AIM: Final = 1.2
LIMIT_S: Final = 60.0
BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True)
class Scenario:
    """``quiet`` and ``flood``: tokens of a prompt and of an answer. ``seqs``: sequences that an engine runs at once."""

    name: str
    quiet: tuple[int, int]
    flood: tuple[int, int]
    replicas: int = 2
    seqs: int = 256


SCENARIOS: Final = (
    Scenario("chat", (1200, 64), (200, 64)),
    Scenario("four", (500, 100), (500, 100), replicas=4),
    Scenario("small", (300, 64), (200, 64), seqs=16),
    Scenario("long", (300, 64), (2000, 64)),
)


def request(model: str, shape: tuple[int, int], key: str, *, stream: bool) -> bytes:
    """The bytes of one completion. Prompts differ, so that no prefix is shared."""
    size = shape[0] * BYTES_PER_TOKEN
    prompt = (f"{random.random():.12f} " + "words " * (size // 6 + 1))[:size]
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": shape[1], "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Call(asyncio.Protocol):
    """One streamed request on a connection of its own. ``first``: seconds to its first event; ``None``: it had none."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._begun = self._end = b""
        self.first: float | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._data)
        self._sent = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        if self.first is None:
            self._begun += data
            if not self._begun.startswith(b"HTTP/1.1 200 "[: len(self._begun)]):
                self._transport.close()
            elif b"data: " in self._begun:  # the head may come before it
                self.first = time.perf_counter() - self._sent
        self._end = (self._end + data)[-5:]
        if self._end == b"0\r\n\r\n":
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Flooder(asyncio.Protocol):
    """One connection that always has a request open; ``lost``: it was closed by the gateway."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._got = b""
        self.answers = self.refused = 0
        self.left = self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(request("f0", self._shape, "key-flood", stream=False))

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        if not found:
            return
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if len(body) < int(length) if length else not body.endswith(b"0\r\n\r\n"):
            return
        self._got = b""
        if head.startswith(b"HTTP/1.1 200 "):
            self.answers += 1
            self._ask()
        else:
            self.refused += 1
            asyncio.get_running_loop().call_later(0.1, self._ask)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = not self.left

    def leave(self) -> None:
        """Hang up."""
        self.left = True
        self.transport.close()


async def quiet(port: int, scenario: Scenario, seconds: float, seed: int) -> list[float]:
    """Play one phase of the quiet tenant; seconds to each first token.

    Raises RuntimeError if a request had none, TimeoutError if one did not end.
    """
    loop, rng, calls, at = asyncio.get_running_loop(), random.Random(seed), [], 0.0
    began = loop.time()
    while (at := at + rng.expovariate(QUIET_PER_S)) < seconds:
        await asyncio.sleep(began + at - loop.time())
        call = Call(request("q0", scenario.quiet, "key-quiet", stream=True))
        await loop.create_connection(lambda call=call: call, "127.0.0.1", port)  # type: ignore[misc]
        calls.append(call)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(call.done for call in calls))
    found = [call.first for call in calls if call.first is not None]
    if len(found) < len(calls):
        raise RuntimeError(f"{len(calls) - len(found)} of {len(calls)} requests of the quiet tenant had no answer")
    return found


@dataclass
class Beside:
    """What was measured beside the flood: seconds to each first token, the flood's answers and refusals a second."""

    found: list[float]
    answers_per_s: float
    refused_per_s: float


async def beside_flood(port: int, scenario: Scenario, seconds: float, seed: int) -> Beside:
    """The same beside the flood. Raises RuntimeError when connections of it were closed or nothing was served: it was none."""
    loop = asyncio.get_running_loop()
    flood = [Flooder(scenario.flood) for _ in range(FLOOD)]
    for one in flood:
        await loop.create_connection(lambda one=one: one, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.sleep(2.0)
    answers, refused, began = sum(one.answers for one in flood), sum(one.refused for one in flood), loop.time()
    found = await quiet(port, scenario, seconds, seed)
    took, lost = loop.time() - began, sum(one.lost for one in flood)
    answers, refused = sum(one.answers for one in flood) - answers, sum(one.refused for one in flood) - refused
    for one in flood:
        one.leave()
    await asyncio.sleep(1.0)  # engines notice that the clients have left
    if lost:
        raise RuntimeError(f"{lost} of {FLOOD} connections of the flood were closed")
    if not answers:
        raise RuntimeError(f"none of the flood was answered, {refused} were refused")
    return Beside(found, answers / took, refused / took)


@dataclass
class Result:
    """A scenario's phases, in rounds."""

    scenario: str
    alone: list[list[float]]
    beside: list[Beside]

    def ratios(self, share: float) -> tuple[float, list[float]]:
        """Beside over alone: of all rounds together, and of each."""
        pairs = zip(self.alone, self.beside, strict=True)
        each = [quantile(beside.found, share) / quantile(alone, share) for alone, beside in pairs]
        return quantile(self._beside, share) / quantile(_flat(self.alone), share), each

    @property
    def _beside(self) -> list[float]:
        return _flat([one.found for one in self.beside])

    def row(self) -> list[str]:
        """Its cells, as ``HEADINGS`` names them."""
        cells = [self.scenario]
        cells += [f"{quantile(v, s) * 1000:.0f}" for v in (_flat(self.alone), self._beside) for s in (0.5, 0.99)]
        for share in (0.5, 0.99):
            ratio, each = self.ratios(share)
            cells.append(f"{ratio:.2f} [{min(each):.2f} to {max(each):.2f}]")
        cells.append(f"{sum(one.answers_per_s for one in self.beside) / len(self.beside):.1f}")
        cells.append(f"{sum(one.refused_per_s for one in self.beside) / len(self.beside):.1f}")
        return [*cells, "met" if self.met() else "missed"]

    def met(self) -> bool:
        """Whether the p99 beside the flood is within the aim."""
        return self.ratios(0.99)[0] <= AIM


async def rounds(port: int, scenario: Scenario, count: int, seconds: float) -> Result:
    """Play ``count`` rounds."""
    await quiet(port, scenario, 2.0, 0)  # loads the adapter
    result = Result(scenario.name, [], [])
    for number in range(count):
        say(f"{scenario.name}: round {number + 1} of {count}")
        for flooded in (False, True) if number % 2 else (True, False):
            if flooded:
                result.beside.append(await beside_flood(port, scenario, seconds, number + 1))
            else:
                result.alone.append(await quiet(port, scenario, seconds, number + 1))
    return result


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _flat(phases: list[list[float]]) -> list[float]:
    return [value for phase in phases for value in phase]


def say(text: str) -> None:
    """What is done now, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def play(scenario: Scenario, count: int, seconds: float) -> Result:
    """Start gateway and replicas for one scenario and play it."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ports = [free_port() for _ in range(scenario.replicas)]
        for port in ports:
            words = f"--port {port} --slots 8 --host-entries 32 --max-seqs {scenario.seqs}"
            start(stack, folder, "loraledger.engines.emulator", *words.split())
        sizes = {"slots": 8, "host_entries": 32, "max_seqs": scenario.seqs}
        paths = write_adapters(folder / "adapters", ("q0", "f0"))
        settings = {
            "base": {"names": ["base"]},
            "replicas": [replica(f"r{n}", f"http://127.0.0.1:{port}", **sizes) for n, port in enumerate(ports, 1)],
            "adapters": {"list": [{"name": adapter, "path": str(path)} for adapter, path in paths.items()]},
            "tenants": [tenant("quiet", ["q*"]), tenant("flood", ["f*"])],
        }
        gateway = stack.enter_context(GatewayProcess(folder, settings)).start(len(ports))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(rounds(gateway.port, scenario, count, seconds))


HEADINGS: Final = (
    "scenario",
    "alone p50 ms",
    "alone p99 ms",
    "beside p50 ms",
    "beside p99 ms",
    "p50 ratio [rounds]",
    "p99 ratio [rounds]",
    "flood answers/s",
    "refused/s",
    f"p99 <= {AIM}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of a round's two phases")
    parser.add_argument("--only", choices=[scenario.name for scenario in SCENARIOS])
    parser.add_argument("--quick", action="store_true", help="one round of 5 s: whether it works, not what it says")
    parser.add_argument("--markdown", action="store_true", help="for docs/performance.md")
    parser.add_argument("--json", type=Path, help="write every time to first token to this file, seconds")
    given = parser.parse_args()
    unwind_on_signals()
    count, seconds = (1, 5.0) if given.quick else (given.rounds, given.seconds)
    results, failed = [], []
    for scenario in SCENARIOS:
        if given.only in (None, scenario.name):
            try:
                results.append(play(scenario, count, seconds))
            except (RuntimeError, OSError, AssertionError) as error:  # the last is of the gateway's start
                failed.append(f"{scenario.name}: none: {str(error) or type(error).__name__}")
    print(
        f"{count} rounds of {seconds:.0f} s alone and {seconds:.0f} s beside {FLOOD} open requests of another tenant.\n"
    )
    show([HEADINGS, *(result.row() for result in results)], given.markdown)
    for reason in failed:
        print(reason)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")
    met = given.quick or all(result.met() for result in results)
    sys.exit(0 if met and not failed else 1)


if __name__ == "__main__":
    main()
