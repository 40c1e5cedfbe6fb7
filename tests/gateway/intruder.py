"""Generated attempts of one tenant at what belongs to another.

An attempt is bytes for one connection, with what is known of each request in them: its marker (a word of its prompt, by which an
engine's log is matched to it) and whose key it carries, None when it must reach no engine at all. Everything is drawn from one
``random.Random``, so a seed is a run. A ``Target`` is what the intruder knows of a foreign adapter: its name, digest and path, all
but the key. ``ghost`` is a target of the same shape that does not exist: the answers to both must be alike.
"""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import quote

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = (
    *(CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"),
    *("/tokenize", "/detokenize"),
)
LOOK_ALIKE = str.maketrans("aceiopsxh", "аϲеіорѕхһ")
FULL_WIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
TWISTED = str.maketrans("brlntd", "dtnlrb")
TENANT_HEADERS = (
    *("X-Tenant", "X-Tenant-Id", "X-Loraledger-Tenant", "X-Forwarded-User", "X-Api-Key", "Api-Key", "X-Key-Id"),
    *("OpenAI-Organization", "OpenAI-Project", "Cookie", "Proxy-Authorization", "X-Authorization", "X-Original-Authorization"),
)  # fmt: skip
MODEL_HEADERS = (
    *("X-Model", "X-Adapter", "X-Lora-Adapter", "Lora-Id", "X-Lora-Path", "Adapter-Id", "X-Adapter-Id"),
    *("X-Original-URL", "X-Rewrite-URL", "X-HTTP-Method-Override", "X-Session-ID", "X-Vllm-Model"),
)
SECOND_NAMES = (
    *(b'"model"', b'"\\u006dodel"', b'"mode\\u006c"', b'"MODEL"', b'"Model"', b'" model"', b'"model "'),
    *(b'"model\\u0000"', b'"models"', b'"model_name"', b'"model[]"', b'"model.id"', b'"engine"', b'"deployment"'),
)
FIELDS = (
    *("lora", "lora_path", "lora_name", "lora_id", "lora_int_id", "lora_adapter", "lora_request", "lora_modules"),
    *("adapter_id", "adapter_source", "rid", "session_id", "vllm_xargs", "kv_transfer_params"),
)


@dataclass(frozen=True)
class Target:
    """A foreign adapter, as an intruder may know it."""

    name: str
    digest: str
    path: str

    @property
    def ghost(self) -> Target:
        """One of the same shape that nobody has."""
        name = self.name.translate(TWISTED)
        return Target(name, hashlib.sha256(name.encode()).hexdigest(), f"{self.path[:-1]}_")


@dataclass(frozen=True)
class Sent:
    """One request of an attempt. ``model``: the JSON of the model that it asks for, as it was written."""

    marker: str
    tenant: str | None
    path: str
    stream: bool = False
    model: bytes = b'""'

    @property
    def said(self) -> str:
        """What its model decodes to; nothing if it is no string."""
        try:
            said = json.loads(self.model)
        except ValueError:
            return ""
        return said if isinstance(said, str) else ""


@dataclass(frozen=True)
class Attempt:
    """``writes`` go out one after the other on a new connection. ``twin``: the same against a ghost."""

    kind: str
    writes: tuple[bytes, ...]
    requests: tuple[Sent, ...]
    twin: Attempt | None = None


class Draw:
    """One draw: who tries, at what, with which chance. The same one can be made against a ghost."""

    def __init__(self, seed: str, tenant: str, own: str, target: Target, key: str, foreign_key: str) -> None:
        self.rng = random.Random(seed)
        self.seed, self.tenant, self.own, self.target = seed, tenant, own, target
        self.key, self.foreign_key = key, foreign_key
        self._markers = 0

    def marker(self) -> str:
        """A new one."""
        self._markers += 1
        return f"marker {self.seed} {self._markers} end"

    def sent(self, model: bytes, path: str | None = None, tenant: str | None = "", stream: bool | None = None) -> Sent:
        """A request by the intruder, or by ``tenant``; path and stream are drawn unless given."""
        rng = self.rng
        path = rng.choice(PATHS) if path is None else path
        stream = rng.random() < 0.3 if stream is None else stream
        return Sent(self.marker(), self.tenant if tenant == "" else tenant, path, stream, model)

    def body(self, sent: Sent, *more: tuple[bytes, bytes]) -> bytes:
        """Its JSON: what any path wants, the model in any place, then ``more`` pairs of JSON in any place."""
        said = json.dumps(sent.marker).encode()
        pairs = [
            (b'"model"', sent.model),
            (b'"prompt"', said),
            (b'"input"', said),
            (b'"messages"', b'[{"role":"user","content":%b}]' % said),
            (b'"max_tokens"', b"4"),
        ]
        if sent.stream:
            pairs.append((b'"stream"', b"true"))
        for pair in more:
            pairs.insert(self.rng.randrange(len(pairs) + 1), pair)
        return b"{" + b",".join(b"%b:%b" % pair for pair in pairs) + b"}"

    def raw(self, sent: Sent, body: bytes, *headers: bytes, key: str = "", query: str = "") -> bytes:
        """The bytes of a request, its body of stated length or in chunks."""
        lines = [f"POST {sent.path}{query} HTTP/1.1".encode(), b"Host: gateway"]
        lines += [f"Authorization: Bearer {key or self.key}".encode()] if key != "none" else []
        lines += headers
        if self.rng.random() < 0.8:
            return b"\r\n".join([*lines, b"Content-Length: %d" % len(body)]) + b"\r\n\r\n" + body
        at = self.rng.randrange(1, len(body))
        chunks = b"%x\r\n%b\r\n%x;ext=1\r\n%b\r\n0\r\n\r\n" % (at, body[:at], len(body) - at, body[at:])
        return b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n" + chunks

    def cut(self, data: bytes) -> tuple[bytes, ...]:
        """In up to four pieces."""
        cuts = sorted(self.rng.sample(range(1, len(data)), min(len(data) - 1, self.rng.randrange(4))))
        return tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))

    def one(self, kind: str, model: bytes, *more: tuple[bytes, bytes], **how: str) -> Attempt:
        """An attempt of one request."""
        sent = self.sent(model)
        return Attempt(kind, self.cut(self.raw(sent, self.body(sent, *more), **how)), (sent,))


def text(words: str) -> bytes:
    """``words`` as JSON, in UTF-8."""
    return json.dumps(words, ensure_ascii=False).encode()


def escaped(words: str) -> bytes:
    """``words`` as JSON with every character escaped."""
    return b'"' + "".join(f"\\u{unit:04x}" for unit in map(ord, words)).encode() + b'"'


def spellings(target: Target) -> Iterator[bytes]:
    """The model, as JSON, by every name that somewhere stands for this adapter or is taken for its name."""
    name, digest = target.name, target.digest
    short = digest[:12]
    yield from map(
        text, (name, f"{name}@{short}", f"{name}@{short}~2", f"{name}@{digest}", f"{name}~2", f"{name}:{digest}")
    )
    yield from map(text, (short, digest, f"@{short}", f"sha256:{digest}", target.path, f"file://{target.path}"))
    yield from map(
        text, (f"{target.path}/adapter_model.safetensors", f"../{name}", f"./{name}", f"/{name}", f"{name}/")
    )
    for joint in (":", "/", "+", "@", ",", "|", " ", "::", "-lora-", "#", "\n"):
        yield text(f"base{joint}{name}")
    yield from map(
        text, (f"lora:{name}", f"adapter:{name}", f"loraledger/{name}", f"{name}:latest", f"{name},base", "*")
    )
    yield from map(
        text, (name[:-1], name + name[-1], name[:3] + "?" + name[4:], f"{name[0]}*", f"[{name[0]}]{name[1:]}")
    )
    yield from map(text, (name.upper(), name.title(), name.swapcase(), name.translate(LOOK_ALIKE)))
    yield from map(text, (name.translate(FULL_WIDTH), name[:2] + "\u200b" + name[2:], name + "\u200d", "\ufeff" + name))
    yield from map(
        text, (f"\u202e{name[::-1]}", name[:1] + "\u0301" + name[1:], name.replace("i", "ı"), f"{name}\u00ad")
    )
    yield from map(
        text, (unicodedata.normalize("NFD", name.replace("e", "é")), name.replace("-", "\u2011"), name + "\u00a0")
    )
    yield from map(
        text, (f"{name} ", f" {name}", f"{name}\t", f"{name}\n", f"{name}\r\n", f"{name}\0", f"\0{name}", f"{name}\0x")
    )
    yield from map(text, (quote(name, safe=""), f"%{ord(name[0]):02x}{name[1:]}", f"%25{ord(name[0]):02x}{name[1:]}"))
    yield from map(
        text, (f"&#{ord(name[0])};{name[1:]}", f"\\x{ord(name[0]):02x}{name[1:]}", f"{name}%00", f"{name}%20")
    )
    yield from map(text, (f"${{{name}}}", f"{name}'--", f'{name}"', f"`{name}`", f'"{name}"', f"['{name}']"))
    yield escaped(name)
    yield escaped(f"{name}@{short}")
    yield b'"\\u%04x%b' % (ord(name[0]), text(name[1:])[1:])


def no_strings(target: Target) -> Iterator[bytes]:
    """The name inside of something that is no string."""
    said = text(target.name)
    yield from (b"[%b]" % said, b'["base",%b]' % said, b'{"id":%b}' % said, b'{"name":%b}' % said, b"[[%b]]" % said)
    yield from (b"null", b"0", b"-1", b"1.5", b"true", b"1e400", b"%d" % int(target.digest[:8], 16))


def named_twice(draw: Draw) -> Attempt:
    """Own name and foreign one under names that some reader may take for ``model``, in either order."""
    first, second = text(draw.own), text(draw.target.name)
    if draw.rng.random() < 0.5:
        first, second = second, first
    name = draw.rng.choice(SECOND_NAMES)
    sent = draw.sent(first)
    body = draw.body(sent)[:-1] + b",%b:%b}" % (name, second)
    if json.loads(name) == "model":  # readers of JSON take the last
        sent = replace(sent, model=second)
    return Attempt("named twice", draw.cut(draw.raw(sent, body)), (sent,))


def steering_field(draw: Draw) -> Attempt:
    """A model of one's own, and a field that an engine may take an adapter from."""
    name = draw.rng.choice(FIELDS)
    values = (text(draw.target.name), text(draw.target.path), b'{"lora_path":%b}' % text(draw.target.path))
    key = draw.rng.choice([text(name), escaped(name)])
    sent = draw.sent(text(draw.own), draw.rng.choice((CHAT, COMPLETIONS)))
    return Attempt("steering field", draw.cut(draw.raw(sent, draw.body(sent, (key, draw.rng.choice(values))))), (sent,))


def no_string(draw: Draw) -> Attempt:
    """A model that is no string."""
    return draw.one("no string", draw.rng.choice(list(no_strings(draw.target))))


def strange_header(draw: Draw) -> Attempt:
    """The foreign name in the body, a header that claims to be its tenant or to choose its model."""
    victim = draw.target.name
    header = draw.rng.choice(
        [f"{name}: {draw.rng.choice((victim, 'birch', 'acme'))}" for name in (*TENANT_HEADERS, *MODEL_HEADERS)]
    )
    sent = draw.sent(text(draw.rng.choice((victim, victim, draw.own))))
    return Attempt("strange header", draw.cut(draw.raw(sent, draw.body(sent), header.encode())), (sent,))


def strange_key(draw: Draw) -> Attempt:
    """Keys that are not one: two of them, joined, hashed, in another scheme, with something around."""
    own, foreign = draw.key, draw.foreign_key
    digest = hashlib.sha256(foreign.encode()).hexdigest()
    bearer = "authorization: Bearer"
    lines: list[tuple[str, ...]] = [
        *((f"{bearer} {own}", f"{bearer} {foreign}"), (f"{bearer} {foreign}", f"{bearer} {own}")),
        *((f"{bearer} {own}", f"x-api-key: {foreign}"), (f"x-api-key: {own}", f"{bearer} {foreign}")),
        *((f"x-api-key: {own}", f"X-Api-Key: {foreign}"), (f"x-api-key: {own}, {foreign}",), (f"x-api-key: {digest}",)),
        *((f"{bearer} {own}, Bearer {foreign}",), (f"{bearer} {digest}",), (f"{bearer} {foreign}\0",)),
        *((f"{bearer}\t{foreign}",), (f"{bearer} {foreign} {own}",), (f"authorization: Basic {foreign}",)),
        *((f"authorization: {foreign}",), (f"{bearer} {foreign.upper()}",), (f"{bearer} {foreign[:-1]}",)),
        *(
            (f"{bearer} *",),
            (bearer,),
            ("x-api-key:",),
            (f"authorization: Token {foreign}",),
            (f"cookie: key={foreign}",),
        ),
    ]
    chosen = [line.encode() for line in draw.rng.choice(lines)]
    sent = draw.sent(text(draw.target.name), tenant=None)
    return Attempt("strange key", draw.cut(draw.raw(sent, draw.body(sent), *chosen, key="none")), (sent,))


def own_key_spelt_otherwise(draw: Draw) -> Attempt:
    """One's own key in the spellings that are accepted opens no more than it does otherwise."""
    lines = (f"authorization: bearer {draw.key}", f"AUTHORIZATION:BEARER  {draw.key} ", f"x-api-key: {draw.key}")
    line = draw.rng.choice(lines)
    sent = draw.sent(text(draw.target.name))
    return Attempt("own key", draw.cut(draw.raw(sent, draw.body(sent), line.encode(), key="none")), (sent,))


def query(draw: Draw) -> Attempt:
    """The foreign name or tenant in the query string or behind the path."""
    victim = quote(draw.target.name, safe="")
    ends = (
        *(f"?model={victim}", f"?model={victim}&model={victim}", f"?tenant=birch&adapter={victim}", f";model={victim}"),
        *(f"?lora_path={quote(draw.target.path)}", f"/{victim}", f"%3Fmodel={victim}", f"?api_key={draw.foreign_key}"),
    )
    end = draw.rng.choice(ends)
    return draw.one("query", text(draw.rng.choice((draw.own, draw.target.name))), query=end)


def smuggled(draw: Draw) -> Attempt:
    """Framing that two readers understand differently, with a request of the other tenant inside: it must never be one."""
    inner = draw.sent(text(draw.target.name), COMPLETIONS, tenant=None)
    hidden = draw.raw(inner, draw.body(inner), key=draw.foreign_key)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {draw.key}\r\n".encode()
    length = b"Content-Length: %d\r\n" % (5 + len(hidden))
    chunked = b"Transfer-Encoding: chunked\r\n"
    data = draw.rng.choice(
        [
            head + length + chunked + b"\r\n0\r\n\r\n" + hidden,
            head + chunked + length + b"\r\n0\r\n\r\n" + hidden,
            head + b"Content-Length: 0\r\n" + length + b"\r\n0\r\n\r\n" + hidden,
            head + b"Content-Length: 0, %d\r\n\r\n" % len(hidden) + hidden,
            head + b"Content-Length: +0\r\n\r\n" + hidden,
            head + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + hidden,
            head + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + hidden,
            head + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + hidden,
            head + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + hidden,
            head + b"X: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden,
            head + chunked + b"\r\n0\r\n" + b"X: y\n\n" + hidden,
            head + chunked + b"\r\n0\n\r\n" + hidden,
            head + b"Content-Length: %d\r\n\r\n" % len(hidden) + hidden,
            head + b"X: a\rb\r\n\r\n" + hidden,
            head.replace(b"\r\n", b"\n") + b"\n" + hidden,
            head.replace(b"HTTP/1.1", b"HTTP/1.0") + chunked + b"\r\n0\r\n\r\n" + hidden,
        ]
    )
    return Attempt("smuggled", draw.cut(data), (inner,))


def pipelined(draw: Draw) -> Attempt:
    """Two tenants' requests on one connection, as behind a proxy: each is judged by its own key."""
    requests, data = [], b""
    for _ in range(draw.rng.randrange(2, 7)):
        mine = draw.rng.random() < 0.5
        model = draw.rng.choice((draw.own, draw.target.name))
        owner = draw.tenant if mine else "the other"
        sent = draw.sent(text(model), draw.rng.choice((CHAT, COMPLETIONS)), tenant=owner)
        body = draw.body(sent)
        key = draw.key if mine else draw.foreign_key
        head = f"POST {sent.path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        data += head.encode() + body
        requests.append(sent)
    return Attempt("pipelined", draw.cut(data), tuple(requests))


def listing(draw: Draw) -> Attempt:
    """What the list of models, an entry of it, or a path of the operator's says."""
    victim, encoded = draw.target.name, quote(draw.target.name, safe="")
    targets = (
        *("/v1/models", "/v1/models?tenant=birch", "/v1/models?all=true", f"/v1/models?model={encoded}", "/v1/models/"),
        *(f"/v1/models/{encoded}", f"/v1/models/{victim}", f"/v1/models/{victim}@{draw.target.digest[:12]}"),
        *("/v1/models/*", f"/api/adapters/{encoded}", "/api/adapters", "/metrics", f"/ready?adapter={encoded}"),
        *(f"/v1/responses/resp_{draw.target.digest[:16]}", "/v1/lora", "/openapi.json", "/health", "/version"),
    )
    target = draw.rng.choice(targets)
    method = draw.rng.choice(("GET", "GET", "GET", "HEAD", "POST", "DELETE", "OPTIONS"))
    header = draw.rng.choice(("Accept: */*", "X-Tenant: birch", f"X-Model: {victim}", "Sec-Fetch-Site: same-origin"))
    data = f"{method} {target} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {draw.key}\r\n{header}\r\nConnection: close\r\n\r\n"
    return Attempt("listing", draw.cut(data.encode()), (Sent("", draw.tenant, target, model=text(victim)),))


KINDS = (
    *(named_twice, steering_field, no_string, strange_header, strange_key, own_key_spelt_otherwise),
    *(query, smuggled, pipelined, listing),
)
WITH_TWIN = (no_string, own_key_spelt_otherwise, query, listing)
"""Where the answer must be the same whether the foreign adapter exists or not."""


def spelt(number: int) -> Callable[[Draw], Attempt]:
    """The attempt with spelling ``number``."""
    return lambda draw: draw.one("spelling", list(spellings(draw.target))[number])


def attempts(make: Callable[[str], Draw], each: int) -> Iterator[Attempt]:
    """All spellings once and ``each`` attempts of every other kind. ``make`` gives the draw of a seed, the same each time."""
    spelled = range(len(list(spellings(make("").target))))
    kinds = [(f"s{number}", spelt(number)) for number in spelled]
    kinds += [(f"{kind.__name__}{number}", kind) for kind in KINDS for number in range(each)]
    for seed, kind in kinds:
        attempt = kind(make(seed))
        if attempt.kind == "spelling" or kind in WITH_TWIN:
            draw = make(seed)
            draw.target = draw.target.ghost
            attempt = replace(attempt, twin=kind(draw))
        yield attempt
