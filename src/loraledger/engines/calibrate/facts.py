"""What an engine is, as it says itself: sizes that a twin needs and that must not be guessed.

Stock vLLM shows its KV blocks and their bytes, its version and, after the first adapter request, its slots. Its host cache, rank
limit and batch limits it shows only to a probe inside it, or not at all: those are flags of whoever calibrates. What neither told
is taken from vLLM's defaults, named in ``guessed``, and said in the profile. A flag above what the engine shows of itself, and
sizes that no vLLM starts with, are refused: they would be measured as something else, and load an engine with what it cannot hold.
"""

from __future__ import annotations

import re
from typing import Any, Final

import httpx2
import msgspec

from loraledger.engines.http import limited
from loraledger.engines.probe_api import ProbeApi
from loraledger.engines.protocol import ReplicaTarget
from loraledger.engines.scrape import EngineSample, parse_metrics
from loraledger.engines.vllm_api import read_models
from loraledger.errors import ConfigError, TargetError

DEFAULTS: Final = {"slots": 1, "max_rank": 16, "max_seqs": 256, "token_budget": 2048}
"""vLLM 0.32 where no flag says otherwise; ``host_entries`` is ``slots`` then. Larger GPUs get larger batch limits."""
_CACHE: Final = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(r'([a-z_]+)="(\d+)"')


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's flags, as far as whoever calibrates knows them; they win over what the engine says, up to that."""

    slots: int | None = None
    host_entries: int | None = None
    max_rank: int | None = None
    max_seqs: int | None = None
    token_budget: int | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one engine. Bytes are of one rank process and ``None`` where unknown."""

    version: str | None
    model: str
    slots: int
    host_entries: int
    max_rank: int
    max_seqs: int
    token_budget: int
    max_model_len: int
    kv_blocks: int
    block_size: int
    block_bytes: int | None
    slot_bytes: int | None
    guessed: tuple[str, ...] = ()
    """Names of the sizes that nobody told, each with words where it is not vLLM's default."""


class Reader:
    """Asks one engine about itself. Raises ``TargetError`` when it does not answer or is not what was asked for."""

    def __init__(self, target: ReplicaTarget) -> None:
        self._target = target
        key = target.api_key
        self._client = httpx2.AsyncClient(
            base_url=target.url,
            trust_env=False,
            timeout=httpx2.Timeout(None),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def sample(self) -> EngineSample:
        """One scrape."""
        return parse_metrics((await self._get("/metrics")).text)

    async def read(self, base: str | None, given: Given) -> Facts:
        """All of it. ``base``: the base model's name; ``None``: the only one that is served.

        Raises ``ConfigError`` for flags that cannot be this engine's.
        """
        models = await self._json("/v1/models")
        served = read_models(models).base
        if base is None and len(served) != 1:
            raise TargetError(f"serves {', '.join(served) or 'nothing'}: name the base model with --model")
        if base is not None and base not in served:
            raise TargetError(f"serves {', '.join(served) or 'nothing'}, not {base}: correct --model")
        model = base or served[0]
        page = (await self._get("/metrics")).text
        sample, cache = parse_metrics(page), _cache_labels(page)
        if sample.kv_tokens is None or not sample.block_tokens:
            raise TargetError("its metrics do not show vllm:cache_config_info: only engines that do can be calibrated")
        found = await self._probed() | ({} if sample.max_lora is None else {"slots": sample.max_lora})
        sizes, guessed = _sizes(found, given)
        blocks = sample.kv_tokens // sample.block_tokens
        pool = cache.get("kv_cache_memory_bytes") or found.get("kv_bytes")
        return Facts(
            version=await self._version(),
            model=model,
            **sizes,
            max_model_len=_longest(models, model) or sample.kv_tokens,
            kv_blocks=blocks,
            block_size=sample.block_tokens,
            block_bytes=None if not pool else pool // blocks,
            slot_bytes=found.get("slot_bytes"),
            guessed=guessed,
        )

    async def _version(self) -> str | None:
        try:
            body = await self._json("/version")
        except TargetError:
            return None  # not every engine says
        version = body.get("version") if isinstance(body, dict) else None
        return version if isinstance(version, str) else None

    async def _probed(self) -> dict[str, int]:
        """What the probe inside the engine tells of its LoRA memory; nothing without a key for one."""
        if self._target.probe_key is None:
            return {}
        api = ProbeApi(self._target)
        try:
            snapshot = await api.residency()
        finally:
            await api.close()
        allocated: dict[str, Any] = snapshot.get("allocated") or {}
        floors: list[dict[str, Any]] = snapshot.get("floor") or []
        names = {
            "slots": "slots",
            "host_entries": "host_entries",
            "max_rank": "max_lora_rank",
            "slot_bytes": "bytes_per_slot",
        }
        found = {ours: allocated.get(theirs) for ours, theirs in names.items()}
        found["kv_bytes"] = floors[0].get("kv_bytes") if floors else None
        return {name: value for name, value in found.items() if isinstance(value, int)}

    async def _get(self, path: str) -> httpx2.Response:
        async with limited(self._target.probe_timeout, path):
            reply = await self._client.get(path)
        if reply.status_code != 200:
            raise TargetError(f"{path} answered HTTP {reply.status_code}")
        return reply

    async def _json(self, path: str) -> Any:  # noqa: ANN401 - whatever the engine answered
        try:
            return (await self._get(path)).json()
        except ValueError as error:
            raise TargetError(f"{path} did not answer with JSON: is this an engine?", code="bad_reply") from error


def with_loaded_rank(facts: Facts, rank: int) -> Facts:
    """``facts`` with a rank limit that allows ``rank``, which the engine has loaded, where its limit was only guessed."""
    if "max_rank" not in facts.guessed or rank <= facts.max_rank:
        return facts
    words = f"max_rank ({rank}, as it loaded an adapter of that rank; vLLM's default is {facts.max_rank})"
    guessed = tuple(words if name == "max_rank" else name for name in facts.guessed)
    return msgspec.structs.replace(facts, max_rank=rank, guessed=guessed)


def _sizes(found: dict[str, int], given: Given) -> tuple[dict[str, int], tuple[str, ...]]:
    """Flags first, then what the engine says, then defaults; the names of the last kind."""
    sizes: dict[str, int] = {}
    guessed: list[str] = []
    for name in ("slots", "host_entries", "max_rank", "max_seqs", "token_budget"):
        flag, shown = getattr(given, name), found.get(name)
        if flag and shown and flag > shown:
            raise ConfigError(
                f"{_flag(name)} {flag} is above the {shown} that the engine shows: correct it or leave it out"
            )
        value = flag or shown
        if not value:
            guessed.append(name)
            value = _default(name, sizes)
        sizes[name] = value
    for name, least in (("host_entries", "slots"), ("token_budget", "max_seqs")):
        if sizes[name] < sizes[least]:
            whose = " (vLLM's default)" if least in guessed else ""
            raise ConfigError(
                f"{_flag(name)} {sizes[name]} is below {_flag(least)} {sizes[least]}{whose}: no vLLM runs like that, "
                "give both as the engine has them"
            )
    return sizes, tuple(guessed)


def _default(name: str, sizes: dict[str, int]) -> int:
    """vLLM's, and no less than the size that it may not be below."""
    if name == "host_entries":
        return sizes["slots"]
    return max(DEFAULTS[name], sizes["max_seqs"]) if name == "token_budget" else DEFAULTS[name]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _cache_labels(page: str) -> dict[str, int]:
    """Whole numbers among the labels of ``vllm:cache_config_info``."""
    line = _CACHE.search(page)
    return {} if line is None else {name: int(value) for name, value in _LABEL.findall(line[1])}


def _longest(models: object, model: str) -> int | None:
    """``max_model_len`` on the card of ``model``."""
    cards = models.get("data") if isinstance(models, dict) else None
    for card in cards if isinstance(cards, list) else ():
        if isinstance(card, dict) and card.get("id") == model and isinstance(card.get("max_model_len"), int):
            longest: int = card["max_model_len"]
            return longest
    return None
