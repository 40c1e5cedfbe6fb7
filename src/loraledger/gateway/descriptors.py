"""Open files: as many as the limits of the gateway ask for, known at the start instead of at the worst moment.

Theory of operation. A client's connection takes one file, and while its request is with a replica one more. An event loop that
runs out of them stops to accept for a second at a time, the record cannot rotate, and the control plane does not answer: so
the soft limit of the process is raised to the hard one, and limits that the hard one cannot keep are refused with what to do.
"""

from __future__ import annotations

import resource
from typing import Final

from loraledger.config import Settings
from loraledger.errors import ConfigError
from loraledger.gateway.listener import TOLD

OWN: Final = 256
"""Files of the process itself, with room: listeners, journal, control plane, engine drivers, a compaction."""


def files_needed(settings: Settings) -> int:
    """Files that a gateway with these settings may come to have open."""
    clients = settings.limits.connections
    in_flight = sum(replica.max_in_flight for replica in settings.replicas)
    return clients + TOLD + min(clients, in_flight) + OWN


def allow_files(settings: Settings) -> None:
    """Raise the soft limit of open files to the hard one. Raises ConfigError when that does not suffice."""
    needed = files_needed(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if not unlimited and hard < needed:
        raise ConfigError(
            f"limits.connections: {settings.limits.connections} connections and their requests to replicas take {needed} open "
            f"files, and this process may have {hard}: raise its limit (ulimit -n {needed}; LimitNOFILE={needed} in a unit), "
            "or lower limits.connections"
        )
    wanted = needed if unlimited else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
