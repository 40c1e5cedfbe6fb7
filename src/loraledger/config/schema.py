"""The settings of one gateway: what ``loraledger.yaml`` may say, with every default.

One frozen model per section. Sizes and times are written with their units and held as ints (bytes, nanoseconds); the
types below read and print them, so that ``config show`` gives back what a file could contain. Numbers and booleans are
strict: YAML makes ``yes`` a boolean and pydantic would make that a 1. Unknown fields are refused. Each field carries
the description that the JSON Schema and the documentation print: it says the unit, the meaning and what happens at the
limit.

What one field can say on its own is checked here. What takes several fields (names that collide, grants to nobody) is
checked by ``checks.py``, from the validator of the whole, so that no :class:`Settings` exists that breaks those rules
either.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    Strict,
    WithJsonSchema,
    model_validator,
)

from loraledger import units
from loraledger.config import checks
from loraledger.config.paths import LocalPath
from loraledger.config.pins import Ranking, ranking_of
from loraledger.config.secrets import SecretRef

MAX_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for ``max_lora_rank``."""


def _quantity(parse: Callable[[object], int], spell: Callable[[int], str], bare: bool, example: str) -> tuple[Any, ...]:
    text = {"type": "string", "pattern": r"^\d+(\.\d+)?\s*[A-Za-z]+(/s)?$", "examples": [example]}
    schema: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 0}, text]} if bare else text
    return BeforeValidator(parse), PlainSerializer(spell, when_used="json"), WithJsonSchema(schema)


_BYTES = _quantity(units.parse_bytes, units.spell_bytes, True, "64KiB")
_TIME = _quantity(units.parse_duration, units.spell_duration, False, "30s")
_RATE = _quantity(units.parse_rate, units.spell_rate, True, "200MB/s")

Count = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Port = Annotated[int, Strict(), Field(ge=0, le=65535)]
Bytes = Annotated[int, *_BYTES]
DurationNs = Annotated[int, *_TIME]
BytesPerS = Annotated[int, *_RATE]


def _setting(default: Any, description: str, **constraints: Any) -> Any:  # noqa: ANN401 - as pydantic's own Field
    """A field with a default, written as a file would write it and validated like one."""
    return Field(default=default, validate_default=True, description=description, **constraints)


def _url(value: str) -> str:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"is not a URL ({error}): write http://HOST:PORT") from error
    plain = parts.scheme == "http" and parts.hostname and port and parts.username is None
    if not plain or parts.path not in {"", "/"} or parts.query or parts.fragment or not re.fullmatch(r"[!-~]+", value):
        # Not echoed: a URL of this kind may hold a password.
        raise ValueError("must be http://HOST:PORT with a port, without path, query or user")
    return value.removesuffix("/")


def _key_hash(value: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        remedy = "store the SHA-256 of the key, 64 hex digits (printf %s KEY | sha256sum), never the key"
        raise ValueError(f"is not a hash: {remedy}")
    return value.lower()


def _max_rank(value: int) -> int:
    if value not in MAX_RANKS:
        enough = next((rank for rank in MAX_RANKS if rank >= value), MAX_RANKS[-1])
        accepted = ", ".join(str(rank) for rank in MAX_RANKS)
        raise ValueError(f"{value} is no max_lora_rank of the engine: use {enough} (it accepts {accepted})")
    return value


def _spread(value: object) -> object:
    if value is None or value == "all" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"{value!r} must be a number of replicas (1 or more), 'all', or null")


Url = Annotated[str, AfterValidator(_url)]
KeyHash = Annotated[str, AfterValidator(_key_hash)]
MaxRank = Annotated[int, Strict(), AfterValidator(_max_rank)]
Spread = Annotated[
    int | Literal["all"] | None,
    PlainValidator(_spread),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "all"}, {"type": "null"}]}),
]


class Section(BaseModel):
    """What all parts of the settings have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Base(Section):
    """The base model that all adapters sit on."""

    names: tuple[str, ...] = Field(
        description="Names under which the engines serve the base model; the first is the main one, the rest aliases."
    )
    path: LocalPath | None = _setting(
        None,
        "Folder with the base model's config.json. With it, adapters are judged by their shapes before any engine is asked.",
    )


class Listen(Section):
    """Address of the data plane."""

    host: str = _setting("127.0.0.1", "Address that the data plane listens on.", min_length=1)
    port: Port = _setting(8080, "Port of the data plane; 0 lets the system choose.")


class Control(Section):
    """Address and key of the control plane."""

    host: str = _setting("127.0.0.1", "Address of the control plane. Beyond loopback a key is required.", min_length=1)
    port: Port = _setting(8081, "Port of the control plane; 0 lets the system choose.")
    key: SecretRef | None = _setting(
        None, "Key of the control plane, as {env: NAME} or {file: PATH}; null: none asked."
    )


class PathMap(Section):
    """A rewriting of adapter paths from this host's view into a replica's."""

    from_: str = Field(alias="from", min_length=1, description="Prefix of the path as the gateway sees it.")
    to: str = Field(min_length=1, description="What the replica sees in its place.")


class Priors(Section):
    """What is believed of a replica before it was seen working; estimates move away from these as samples arrive."""

    load_bytes_per_s: BytesPerS = _setting(
        "200MB/s", "Bandwidth of reading an adapter into the engine's host cache.", ge=1
    )
    load_overhead: DurationNs = _setting("30ms", "Fixed time of a load, on top of its bytes.")
    activation: DurationNs = _setting("10ms", "Time to copy an adapter from the host cache into a slot.")
    prefill_tokens_per_s: Count = _setting(5000, "Prompt tokens that one replica prefills a second.", ge=1)
    itl: DurationNs = _setting("30ms", "Time between two output tokens of one stream.")


class Replica(Section):
    """One engine core behind one URL, as it was started. These figures must be the engine's own."""

    name: str = Field(description="Name of the replica in records, metrics and commands.")
    url: Url = Field(description="http://HOST:PORT of the engine.")
    engine: Literal["vllm", "emulator"] = _setting("vllm", "What runs there; the emulator speaks vLLM's API.")
    slots: Count = Field(ge=1, description="GPU places for adapters: the engine's max_loras.")
    host_entries: Count = Field(
        default_factory=lambda known: known.get("slots", 1),
        ge=1,
        description="Adapters in the engine's host cache: its max_cpu_loras. Default: slots; best twice that or more.",
    )
    max_rank: MaxRank = _setting(64, "The engine's max_lora_rank; adapters above it cannot be served.")
    tensor_parallel: Count = _setting(1, "Rank processes that share the model: its tensor_parallel_size.", ge=1)
    fully_sharded_loras: Flag = _setting(False, "The engine's fully_sharded_loras: both halves of an adapter are cut.")
    lora_target_modules: tuple[str, ...] | None = _setting(
        None, "The engine's lora_target_modules: other modules of an adapter are not applied. null: all are."
    )
    lora_dtype: Literal["auto", "float16", "bfloat16"] = _setting(
        "auto", "The engine's lora_dtype; auto: the base model's type."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _setting(
        "auto", "The engine's dtype; auto: the base model's, float32 halved."
    )
    max_seqs: Count = _setting(256, "Sequences that the engine runs at once: its max_num_seqs.", ge=1)
    max_in_flight: Count = Field(
        default_factory=lambda known: 2 * known.get("max_seqs", 1),
        ge=1,
        description="Requests sent there and unfinished at which further ones wait here. Default: 2 x max_seqs.",
    )
    kv_tokens: Count | None = _setting(
        None, "Tokens that fit the KV cache; null: learned from the engine's metrics.", ge=1
    )
    device_bytes: Bytes | None = _setting(
        None, "Memory of the device of one rank process; null: by the probe, else the ledger cannot close.", ge=1
    )
    overhead: Bytes | None = _setting(
        None, "What the engine takes beside weights, slots and KV, from its log; null: by the probe, else unknown."
    )
    headroom: Bytes = _setting("0B", "Device memory that should stay free; less than that is a limit of the floor.")
    key: SecretRef | None = _setting(None, "API key that the engine asks for, as {env: NAME} or {file: PATH}.")
    probe: SecretRef | None = _setting(
        None,
        "Key of the probe inside the engine, as {env: NAME} or {file: PATH}; null: there is none, tiers are believed.",
    )
    path_map: tuple[PathMap, ...] = _setting((), "Rewriting of adapter paths for this replica; the first match counts.")
    priors: Priors = _setting({}, "Costs believed before the first observation.")

    @property
    def host(self) -> str:
        """Host part of the URL, without the brackets of an IPv6 address."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """Port of the URL."""
        return urlsplit(self.url).port or 0

    def seen_path(self, path: str) -> str:
        """``path`` as this replica sees it: the first entry of ``path_map`` whose ``from`` it equals or lies below."""
        for entry in self.path_map:
            prefix = entry.from_.rstrip("/")
            if path == prefix or path.startswith(f"{prefix}/"):
                return entry.to.rstrip("/") + path[len(prefix) :]
        return path


class AdapterSpec(Section):
    """One adapter by name."""

    name: str = Field(description="Public name: what clients put into the field model.")
    path: LocalPath = Field(description="Folder with adapter_config.json and adapter_model.safetensors.")
    tenants: tuple[str, ...] = _setting(
        (), "Tenants that alone may call it; empty: all whose own adapters patterns match."
    )
    pin: Flag = _setting(False, "Keep it registered at all times: on every replica, or on `replicas` of them.")
    replicas: Spread = _setting(None, "On how many replicas to keep it: a number, 'all', or null for as traffic asks.")


class Adapters(Section):
    """Which adapters exist."""

    folder: LocalPath | None = _setting(
        None, "Each sub-folder with an adapter_config.json is an adapter with the sub-folder's name."
    )
    list: tuple[AdapterSpec, ...] = _setting(
        (), "Adapters by name; an entry may also refine one that the folder holds."
    )
    store: LocalPath = _setting(
        "store",
        "Folder of the gateway's own copies, by content. Engines read these and nothing else: they must see it (path_map).",
    )
    adapter_bytes: Bytes = _setting(
        "8GiB",
        "Largest adapter that is taken in, by the length of its files; a sparse one fills the store all the same.",
        ge=1,
    )
    store_bytes: Bytes | None = _setting(
        None, "Most bytes that the copies may take; an adapter that does not fit is not served. null: no limit.", ge=1
    )


class TenantLimits(Section):
    """How much of the gateway one tenant may hold."""

    concurrency: Count = _setting(64, "Requests in flight at once; further ones wait in the tenant's queue.", ge=1)
    queue: Count = _setting(256, "Requests waiting in the gateway; further ones are answered 429.", ge=0)
    queue_deadline: DurationNs = _setting("30s", "Longest wait in the gateway queue; then 503.")


class Tenant(Section):
    """Who may call, and what."""

    name: str = Field(description="Name of the tenant in records, metrics and limits.")
    key_hashes: tuple[KeyHash, ...] = _setting(
        (), "SHA-256 of each valid key, in hex. Several: old and new during a change."
    )
    adapters: tuple[str, ...] = Field(
        description="Names or shell globs of the adapters that it may call; '*' for all, [] for none. "
        "An adapter that lists its tenants goes to those and no others."
    )
    base: Flag = _setting(True, "Whether it may call the base model.")
    limits: TenantLimits = _setting({}, "Limits of this tenant.")


class Policy(Section):
    """How a replica is chosen."""

    name: str = _setting("bounded-affinity", "Name of the placement policy.")
    params: dict[str, Number] = _setting({}, "Parameters of the policy, by name.")
    residency: Literal["lru", "ranked"] = _setting(
        "lru",
        "What stays in the slots: lru, what the engines keep; ranked, the best adapters of pins, where a probe answers.",
    )
    pins: LocalPath | None = _setting(
        None, "Residency ranking that ranked goes by: a file as loraledger advise --pins writes it. Read at the start."
    )


class Limits(Section):
    """Limits of this gateway as a whole. Each holds for one gateway process."""

    header_bytes: Bytes = _setting("64KiB", "Largest request head; then 431.", ge=1)
    body_bytes: Bytes = _setting("8MiB", "Largest request body; then 413.", ge=1)
    body_bytes_total: Bytes = _setting(
        "512MiB",
        "Bytes of request bodies held at once, all clients together; a tenant may hold as much as is left. Then 503.",
        ge=1,
    )
    header_timeout: DurationNs = _setting("10s", "Time for a request head to arrive; then 408.", ge=1)
    body_timeout: DurationNs = _setting("30s", "Time for a request body to arrive; then 408.", ge=1)
    idle_timeout: DurationNs = _setting(
        "75s", "A kept-alive client connection without a request is closed after it.", ge=1
    )
    upstream_first_byte_timeout: DurationNs = _setting("300s", "Time for a replica's first byte; then 504.", ge=1)
    upstream_idle_timeout: DurationNs = _setting("60s", "Silence in a replica's answer that ends it.", ge=1)
    answer_bytes: Bytes = _setting(
        "64MiB", "Largest answer that is not a stream, and largest frame of one; then 502.", ge=1
    )
    connect_timeout: DurationNs = _setting("2s", "Time for a connection to a replica.", ge=1)
    upstream_lost_after: DurationNs = _setting(
        "10s",
        "Time that a replica must be down before its requests without a byte of answer are tried elsewhere.",
        ge=1,
    )
    connections: Count = _setting(
        10_000,
        "Client connections open at once; further ones get 503 and are closed. Each has one request at a time.",
        ge=1,
    )
    pipelined: Count = _setting(16, "Requests that one connection may send ahead of their answers.", ge=1)
    drain: DurationNs = _setting("30s", "Time for running answers after the order to stop.")
    queue_total: Count = _setting(4096, "Requests waiting in the gateway, all tenants together; then 503.", ge=0)
    retry_ratio: Number = _setting(0.1, "Retries earned by each arriving request.", ge=0, le=1)
    retry_burst: Count = _setting(64, "Retries that may be saved up.", ge=0)
    load_backoff: DurationNs = _setting(
        "1s", "First pause after a load that failed; doubles up to load_backoff_max.", ge=1
    )
    load_backoff_max: DurationNs = _setting("5m", "Longest pause between attempts to load an adapter.", ge=1)
    park: DurationNs = _setting("10m", "How long an adapter that took an engine down stays parked.")
    loads_per_minute: Count = _setting(120, "New placements that a policy may make on one replica in a minute.", ge=1)
    metrics_adapters: Count = _setting(1000, "Distinct adapters in metric labels; later ones count as 'other'.", ge=1)
    store_sweep: DurationNs = _setting(
        "1m", "Time between two looks for stored copies that nothing reads any more.", ge=1
    )
    scrape_interval: DurationNs = _setting("1s", "Time between two samples of a replica's metrics.", ge=1)


class Record(Section):
    """The journal and the tables made of it."""

    dir: LocalPath = _setting("record", "Folder of the record; made when it is missing.")
    segment_bytes: Bytes = _setting(
        "64MiB", "Size at which the journal begins a new segment; 1 MiB at least.", ge=2**20
    )
    fsync_interval: DurationNs = _setting("1s", "Longest time that a crash of the machine may lose.")
    compact: DurationNs = _setting("1h", "Time between two compactions of closed segments into tables.", ge=1)
    keep: DurationNs | None = _setting(None, "Age at which records are deleted; null: never.")


class Settings(Section):
    """Everything that ``loraledger.yaml`` may say."""

    base: Base = Field(description="The base model.")
    listen: Listen = _setting({}, "Where clients connect.")
    control: Control = _setting({}, "Where operators connect.")
    replicas: tuple[Replica, ...] = Field(description="The engines, one entry per engine core.")
    adapters: Adapters = _setting({}, "The adapters.")
    tenants: tuple[Tenant, ...] = _setting((), "Who may call. At least one is needed.")
    policy: Policy = _setting({}, "How a replica is chosen.")
    limits: Limits = _setting({}, "Limits of this gateway.")
    record: Record = _setting({}, "What is written down.")

    _ranking: Ranking = PrivateAttr(())

    @property
    def ranking(self) -> Ranking:
        """The content of ``policy.pins``; empty where it does not count."""
        return self._ranking

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._ranking, faults = ranking_of(self)
        problems = [*checks.problems(self), *faults]
        if problems:
            raise checks.InconsistentError(problems)
        return self


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of ``loraledger.yaml``, for editors and for the documentation."""
    schema = Settings.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
