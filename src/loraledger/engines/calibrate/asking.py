"""One measured request over the engine's own OpenAI API: when it left, and when each token came back.

Theory of operation. A prompt is a list of token ids, so that its length is exact whatever the tokenizer; the ids are drawn anew for
each request, so that no prefix cache ever helps. Answers are streamed with ``ignore_eos``, so their length is exact too. An engine
that is behind puts several tokens into one frame: a running count in each frame (``continuous_usage_stats``) says how many came,
and a frame without it counts as one.

Times are of ``perf_counter``, taken when a piece of the answer reached this process: what lies between the engine's step and that
moment (its own HTTP server, the wire) is part of what is measured, as it is part of what clients see.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import httpx2

from loraledger.engines.http import limited
from loraledger.engines.protocol import ReplicaTarget
from loraledger.errors import TargetError

LOWEST_ID: Final = 16
HIGHEST_ID: Final = 240
"""Token ids that every vocabulary has and that stand for plain bytes or signs in most."""
_EVENT: Final = b"data: "
_COUNT: Final = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass(slots=True)
class Answered:
    """One request, in seconds of ``perf_counter``. ``times[i]`` is when token ``i`` was here."""

    model: str
    prompt_tokens: int
    sent: float
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """From the request's departure to its first token."""
        return self.times[0] - self.sent

    @property
    def end(self) -> float:
        """When the last token was here."""
        return self.times[-1]


class Asker:
    """Sends measured requests to one engine. Raises ``TargetError`` where an answer is not what was asked for."""

    def __init__(self, target: ReplicaTarget, seed: int = 1) -> None:
        # Not the client that watches replicas: that one has four connections, and here each stream holds one.
        self._client = httpx2.AsyncClient(
            base_url=target.url,
            trust_env=False,
            timeout=httpx2.Timeout(None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            headers={} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"},
        )
        self._limit = target.load_timeout
        self._random = Random(seed)  # noqa: S311 - prompts of no meaning
        self.answered = 0

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self, model: str, prompt_tokens: int, output_tokens: int, into: Answered | None = None) -> Answered:
        """Stream one answer of exactly ``output_tokens`` tokens after ``prompt_tokens`` tokens.

        ``into`` is filled as they come, for whoever looks on or cancels.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": [self._random.randint(LOWEST_ID, HIGHEST_ID) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        path = "/v1/completions"
        answered = Answered(model, prompt_tokens, 0.0) if into is None else into
        answered.sent = time.perf_counter()
        async with (
            limited(self._limit, path),
            self._client.stream("POST", path, json=body) as reply,
        ):
            if reply.status_code != 200:
                said = (await reply.aread())[:300].decode(errors="replace")
                raise TargetError(f"{path} ({model}) answered HTTP {reply.status_code}: {said}")
            await _read(reply.aiter_raw(), answered)
        if len(answered.times) != output_tokens:
            raise TargetError(f"{path} ({model}): {len(answered.times)} tokens came, {output_tokens} were asked for")
        self.answered += 1
        return answered


async def _read(pieces: Any, answered: Answered) -> None:  # noqa: ANN401 - the client's own iterator of bytes
    """Note when each token of an event stream came."""
    times, rest = answered.times, b""
    async for piece in pieces:
        now = time.perf_counter()
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if not event.startswith(_EVENT) or b'"error"' in event[:32]:
                continue
            found = _COUNT.search(event)
            if found is not None:
                times += [now] * (int(found[1]) - len(times))
            elif b'"text"' in event or b'"content"' in event:
                times.append(now)
