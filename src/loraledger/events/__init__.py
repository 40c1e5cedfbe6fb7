"""The words that kernel, record and conductor share: what happened (events) and what to do about it (commands).

Theory of operation. An event carries its own time ``at`` and nothing else does; the kernel answers it with commands. Both are
frozen msgspec structs in array form: a field may be appended with a default, never moved, so that an old journal stays readable.
``encode`` gives the one canonical byte form, which is what "the same commands, byte for byte" compares.
Times are integer ns since the Unix epoch, durations integer ns, tokens and bytes plain integers. ``None`` is "unknown", never
zero. ``adapter`` is the public name, ``None`` the base model; ``engine_name`` the versioned name under which a replica knows it.
"""

from __future__ import annotations

from loraledger.events.commands import Check, Command, Dispatch, Evict, Load, Queue, Reject
from loraledger.events.engine_names import engine_name, parse_engine_name
from loraledger.events.happened import (
    ActivationObserved,
    AdapterDeclared,
    AdapterRetired,
    AttemptFailed,
    CommandDone,
    CommandFailed,
    DrainAsked,
    Event,
    EvictionObserved,
    GatewayStarted,
    LoadAsked,
    LoadObserved,
    ReplicaDown,
    ReplicaSampled,
    ReplicaUp,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFinished,
    RequestFirstToken,
    ScrapeStarted,
    UnloadAsked,
    Wake,
)
from loraledger.events.wire import decode_changes, decode_commands, decode_event, encode
from loraledger.events.words import (
    AdapterSpec,
    Candidate,
    Decision,
    HitClass,
    Measured,
    ResidencyChange,
    Source,
    Status,
    Tier,
)

__all__ = [
    "ActivationObserved",
    "AdapterDeclared",
    "AdapterRetired",
    "AdapterSpec",
    "AttemptFailed",
    "Candidate",
    "Check",
    "Command",
    "CommandDone",
    "CommandFailed",
    "Decision",
    "Dispatch",
    "DrainAsked",
    "Event",
    "Evict",
    "EvictionObserved",
    "GatewayStarted",
    "HitClass",
    "Load",
    "LoadAsked",
    "LoadObserved",
    "Measured",
    "Queue",
    "Reject",
    "ReplicaDown",
    "ReplicaSampled",
    "ReplicaUp",
    "RequestArrived",
    "RequestCancelled",
    "RequestDispatched",
    "RequestFinished",
    "RequestFirstToken",
    "ResidencyChange",
    "ScrapeStarted",
    "Source",
    "Status",
    "Tier",
    "UnloadAsked",
    "Wake",
    "decode_changes",
    "decode_commands",
    "decode_event",
    "encode",
    "engine_name",
    "parse_engine_name",
]
