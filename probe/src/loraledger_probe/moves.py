"""What a worker remembers: its resident adapters, the ones that a step is adding, and what the probe has cost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Known:
    """What is known of one resident adapter."""

    name: str
    path: str = ""
    rank: int | None = None
    bytes: int | None = None


@dataclass(slots=True)
class Move:
    """One adapter being added: what it took so far."""

    id: int
    state: str
    load_ns: int = 0
    activation_ns: int = 0
    read_ns: int | None = None
    began: int = 0
    requests: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Cost:
    """Sums since the last ``worker_cost`` event."""

    steps: int = 0
    step_ns: int = 0
    spent_before: int = 0
    since: int = 0
