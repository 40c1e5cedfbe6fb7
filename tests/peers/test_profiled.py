"""The sampling profiler: who burns the CPU is who it names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.profiled import Sampler, begin, end, room, shortened


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGPROF, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def burn() -> int:
    began, count = time.process_time(), 0
    while time.process_time() - began < 0.5:
        count += 1
    return count


@pytest.mark.usefixtures("handlers")
def test_the_function_that_burns_the_cpu_has_most_samples(tmp_path: Path) -> None:
    out = tmp_path / "samples"
    Sampler(out).install()
    burn()  # before it begins: counts for nothing
    begin(os.getpid())
    burn()
    seen = end(os.getpid(), out)
    (_, function), count = seen.most_common(1)[0]
    assert function == "burn"
    assert count > 0.8 * sum(seen.values())
    assert not out.exists()


def test_functions_belong_to_the_rooms_of_the_house() -> None:
    assert shortened("/x/loraledger/src/loraledger/gateway/exchange.py") == "gateway/exchange.py"
    assert room(("gateway/exchange.py", "Exchange.begin")) == "gateway"
    assert room((shortened("/usr/lib/python3.11/json/encoder.py"), "encode")) == "other"
    assert room((shortened("/x/site-packages/uvloop/loop.py"), "run")) == "other"
