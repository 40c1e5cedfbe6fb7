"""The part of loraledger that runs inside vLLM: it observes LoRA residency where it happens, and commands it.

vLLM spreads one engine over three kinds of processes, and each knows a part:

- A **worker** (one per rank) holds the adapters. `worker.py` hooks the few methods through which every load, activation
  and eviction passes; `pins.py` keeps pinned adapters from being the least recently used.
- The **engine core** schedules. `scheduler.py` sees steps, requests that wait for a slot, preemptions and KV blocks.
- The **API server** knows requests and names. `stats.py` hears of finished requests, `endpoints.py` answers HTTP,
  `commands.py` decides what may be commanded.

Events flow one way: `spool.py` appends lines to a file per process, `tail.py` reads all files in the API server,
`ring.py` numbers and keeps the newest. Commands go the other way, by vLLM's own `collective_rpc`. `guard.py` holds the
one rule that matters most: nothing of the probe may raise into vLLM. `replay.py` turns events back into the slot map.
"""

__version__ = "0.1.0"
