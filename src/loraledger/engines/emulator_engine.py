"""One emulated engine: a replica's twin on the wall clock, and the registry that an API server keeps in front of it.

Theory of operation. The twin owns all behaviour; this module only tells it what time it is. One task sleeps until the twin's
next happening, advances it, and hands tokens to those who wait for them. Sleeping is never exact (event loops round to about a
millisecond), so a late wake-up advances over several steps at once: rates stay right on average and tokens come in small bursts.
Each call from outside first brings the twin up to now, because the twin wants its calls in order of time.

Measured: 200 streams of 50 tokens begun each second (10,000 frames a second) take 29 % of one core, 300 take 44 %.

``speed`` divides the wall clock: at 20 everything, loads included, takes a twentieth of its time.

An adapter's rank and size are those of its files. Whether they are still there is looked up when a step must read them again;
if not, the engine core is dead, as in vLLM: all that is open fails, and gauges stay as they were.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

import msgspec

from loraledger.engines.emulator_frames import RefusedError, engine_dead
from loraledger.engines.emulator_metrics import Counters, exposition
from loraledger.twin.events import Died, LoadDone, LoadFailed, Rejected, TokenOut, TwinRequest
from loraledger.twin.profile import PS_PER_S, TwinProfile
from loraledger.twin.replica import ReplicaTwin

_WORKER_FAILED: Final = (
    "Call to add_lora method failed: Worker failed with error '{}', "
    "please check the stack trace above for the root cause"
)


class EmulatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an emulated engine is set up. Raises ``ValueError`` naming the field that cannot be.

    ``port`` 0 takes a free one. ``speed``: emulated seconds per second. ``load_delay_s``: emulated seconds added to each read
    from disk. ``keep_alive_on_death`` is vLLM's setting of that name, which is off there: whether the HTTP server goes on
    (``/health`` then says 503) or closes its port when the engine core has died.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "base"
    profile: TwinProfile = TwinProfile()
    max_model_len: int = 8192
    api_key: str | None = None
    runtime_updating: bool = True
    keep_alive_on_death: bool = True
    speed: float = 1.0
    load_delay_s: float = 0.0
    version: str = "0.32.0+emulator"

    def __post_init__(self) -> None:
        if self.speed <= 0:
            raise ValueError(f"speed is {self.speed}: must be above 0")
        if self.load_delay_s < 0:
            raise ValueError(f"load_delay_s is {self.load_delay_s}: must not be negative")
        if not 2 <= self.max_model_len <= self.profile.kv_tokens:
            raise ValueError(
                f"max_model_len is {self.max_model_len}: must be from 2 to what the KV cache holds "
                f"({self.profile.kv_tokens} tokens)"
            )


class Answer:
    """What one request has got so far. One reader; ``failure`` is set when no more will come than ``produced``."""

    __slots__ = ("_waiter", "adapter", "failure", "finished", "id", "produced", "prompt_tokens")

    def __init__(self, answer_id: str, adapter: str | None, prompt_tokens: int) -> None:
        self.id = answer_id
        self.adapter = adapter
        self.prompt_tokens = prompt_tokens
        self.produced = 0
        self.finished = False
        self.failure: RefusedError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.finished or self.failure is not None

    async def more_than(self, tokens: int) -> None:
        """Wait until there are more than ``tokens`` tokens, or there will never be."""
        while self.produced <= tokens and not self.over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        """Let the reader look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EmulatedEngine:
    """The engine behind one emulated address. ``run`` must be running for anything to happen."""

    def __init__(self, settings: EmulatorSettings) -> None:
        self.settings = settings
        self.adapters: dict[str, str] = {}  # registered name to path, in order of registration
        self.dead = False
        self.died = asyncio.Event()
        self._started = time.time()
        self._epoch_ns = time.monotonic_ns()
        profile = settings.profile
        delay = round(settings.load_delay_s * PS_PER_S)
        profile = msgspec.structs.replace(profile, load_overhead_ps=profile.load_overhead_ps + delay)
        self._twin = ReplicaTwin(profile, every_token=True, readable=self._readable)
        self._sample = self._twin.sample(0)
        self._paths: dict[str, str] = {}  # of every name ever registered: running requests outlive an unload
        self._answers: dict[str, Answer] = {}
        self._loads: dict[str, asyncio.Future[str | None]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._speaking: dict[str, int] = {}
        self._counters = Counters()
        self._submitted = 0
        self._wake = asyncio.Event()
        self._stopped = False

    # --- the clock ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive the twin until ``stop``. If this ends in any other way, all that is open fails."""
        loop = asyncio.get_running_loop()
        try:
            while not self._stopped:
                self._wake.clear()
                now = self._catch_up()
                at = self._twin.next_at()
                timer = None
                if at is not None:
                    timer = loop.call_later((at - now) / PS_PER_S / self.settings.speed, self._wake.set)
                await self._wake.wait()
                if timer is not None:
                    timer.cancel()
        finally:
            self._fail_all()

    def stop(self) -> None:
        """End ``run``; whatever is open fails as if the engine had died."""
        self._stopped = True
        self._wake.set()

    def _catch_up(self) -> int:
        """Advance the twin to now and hand out what happened; returns now in the twin's picoseconds."""
        now = int((time.monotonic_ns() - self._epoch_ns) * 1000 * self.settings.speed)
        spoke = False
        for event in self._twin.advance(now):
            if isinstance(event, TokenOut):
                spoke = True
                self._hand_out(event)
            elif isinstance(event, LoadDone):
                self._end_load(event.name, None)
            elif isinstance(event, LoadFailed):
                self._end_load(event.name, event.reason)
            elif isinstance(event, Rejected):
                self._end_answer(event.id, RefusedError(500, "InternalServerError", f"request refused: {event.reason}"))
            elif isinstance(event, Died):
                self._fail_all()
        if spoke:
            self._counters.combinations[",".join(self._speaking)] = time.time()
        if not self.dead:
            self._sample = self._twin.sample(now)
        return now

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, adapter: str | None, prompt_tokens: int, output_tokens: int) -> Answer:
        """Submit a request for a registered name, or the base. Raises ``RefusedError`` when the engine is dead."""
        now = self._catch_up()
        if self.dead:
            raise engine_dead()
        self._submitted += 1
        answer = Answer(str(self._submitted), adapter, prompt_tokens)
        self._answers[answer.id] = answer
        self._twin.submit(now, TwinRequest(answer.id, adapter, prompt_tokens, output_tokens))
        self._wake.set()
        return answer

    def abandon(self, answer: Answer) -> None:
        """The client went away: the engine stops working on it. Does nothing when the answer is over."""
        if answer.over:
            return
        now = self._catch_up()
        self._twin.cancel(now, answer.id)
        self._end_answer(answer.id, RefusedError(499, "ClientClosed", "client disconnected"))
        self._wake.set()

    def _hand_out(self, token: TokenOut) -> None:
        answer = self._answers[token.id]
        answer.produced = token.n_generated
        self._counters.generation_tokens += 1
        if token.first:
            self._counters.prompt_tokens += answer.prompt_tokens
            if answer.adapter is not None:
                self._speaking[answer.adapter] = self._speaking.get(answer.adapter, 0) + 1
        if token.finished:
            self._counters.finished += 1
            self._end_answer(token.id, None)
        else:
            answer.wake()

    def _end_answer(self, answer_id: str, failure: RefusedError | None) -> None:
        answer = self._answers.pop(answer_id, None)
        if answer is None:
            return
        answer.finished = failure is None
        answer.failure = failure
        answer.wake()
        if answer.produced and answer.adapter is not None:
            speaking = self._speaking[answer.adapter] - 1
            if speaking:
                self._speaking[answer.adapter] = speaking
            else:
                del self._speaking[answer.adapter]

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def load(self, name: str, path: str) -> None:
        """Register ``name`` with the adapter at ``path``. Raises ``RefusedError`` with vLLM's words."""
        async with self._locks[name]:
            if name == self.settings.model:
                message = f"The lora adapter '{name}' conflicts with a served base model."
                raise RefusedError(400, "InvalidUserInput", message)
            if name in self.adapters:
                message = (
                    f"The lora adapter '{name}' has already been loaded. "
                    "If you want to load the adapter in place, set 'load_inplace' to True."
                )
                raise RefusedError(400, "InvalidUserInput", message)
            now = self._catch_up()
            if self.dead:
                raise engine_dead()
            rank, size = read_adapter(name, Path(path))
            self._paths[name] = path
            done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            self._loads[name] = done
            self._twin.register(now, name, size, rank)
            self._wake.set()
            reason = await done
            if reason == "rank_too_high":
                most = self.settings.profile.max_rank
                message = _WORKER_FAILED.format(f"LoRA rank {rank} is greater than max_lora_rank {most}.")
                raise RefusedError(500, "InternalServerError", message)
            if reason is not None:
                raise engine_dead()

    def unload(self, name: str) -> None:
        """Forget ``name``; its bytes stay where they are. Raises ``RefusedError`` if it is unknown."""
        if name not in self.adapters:
            raise RefusedError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        now = self._catch_up()
        del self.adapters[name]
        self._twin.forget(now, name)
        self._wake.set()

    def _end_load(self, name: str, reason: str | None) -> None:
        """The name is registered with its load's end, even when the caller of ``load`` has gone."""
        if reason is None:
            self.adapters[name] = self._paths[name]
        done = self._loads.pop(name, None)
        if done is not None and not done.done():
            done.set_result(reason)

    def _readable(self, name: str) -> bool:
        return (Path(self._paths[name]) / "adapter_config.json").is_file()

    # --- state --------------------------------------------------------------------------------------------------------

    def metrics(self) -> str:
        """The page of ``/metrics``; frozen once the engine is dead."""
        self._catch_up()
        return exposition(self.settings.model, self._started, self._twin.profile, self._sample, self._counters)

    def _fail_all(self) -> None:
        self.dead = True
        for answer_id in list(self._answers):
            self._end_answer(answer_id, engine_dead())
        for name in list(self._loads):
            self._end_load(name, "engine_dead")
        self.died.set()


def read_adapter(name: str, path: Path) -> tuple[int, int]:
    """Rank and file size in bytes of the adapter at ``path``. Raises ``RefusedError`` as vLLM answers."""
    try:
        config = json.loads((path / "adapter_config.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        message = f"Loading lora {name} failed: No adapter found for {path}"
        raise RefusedError(404, "NotFoundError", message) from None
    except ValueError as error:
        raise RefusedError(500, "InternalServerError", _WORKER_FAILED.format(error)) from error
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int):
        raise RefusedError(500, "InternalServerError", _WORKER_FAILED.format("adapter_config.json has no rank 'r'"))
    try:
        size = (path / "adapter_model.safetensors").stat().st_size
    except FileNotFoundError:
        message = _WORKER_FAILED.format(f"{path} doesn't contain tensors")
        raise RefusedError(500, "InternalServerError", message) from None
    return rank, size
