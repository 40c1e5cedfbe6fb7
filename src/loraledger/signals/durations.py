"""One request: which of its durations are known, and how its time to the first token splits. SQL over ``Scope.picked``.

Theory of operation. **The split.** Its known parts are laid end to end from the arrival: gateway queue, load waited for at the
gateway, engine queue, stall (loads and activations in the engine), prefill. ``edge_1`` to ``edge_5`` are their ends, and ``cut_1``
to ``cut_5`` the same, cut at the first token. So no part is negative, with the rest they add up to the whole, and a part's sum over
requests is the difference of two sums of cuts, in whole ns. A load is waited for from the later of its start and the arrival,
and at most for what the time to dispatch leaves beside the queue: the same ns is never in both.

**A clock that went back** shows as an end before its beginning (``back``). Such a request keeps its counts and loses its durations,
and so does one with a part that is negative or longer than a year: no sum of parts leaves 64 bits.

**Judged** by an objective is who could have got a first token and would have told of it: not calls that were not streamed, nor
those that the client got wrong or gave up, nor those that a crash of the gateway forgot, nor those of a log that says when they
ended and not how. Who was refused, failed, or still waits
and has waited for longer than the objective, missed it.

Columns of ``parted``: ``ours`` is 0 for what the client got wrong, which has no figure but its status. Flags are 0 or 1.
"""

from __future__ import annotations

from typing import Final

from loraledger.signals.scope import Scope
from loraledger.units import NS_PER_S

_YEAR: Final = str(366 * 86_400 * NS_PER_S)
_CLOCKED: Final = """
SELECT replica, tenant, adapter, COALESCE(hit_class, 'undecided') AS class, COALESCE(status, 'open') AS status, stream,
       COALESCE(engine_access, 'undecided') AS access, arrived_ns, dispatched_ns, first_token_ns, finished_ns, load_start_ns,
       load_end_ns, CASE WHEN queued_ns BETWEEN 0 AND YEAR THEN queued_ns ELSE 0 END AS queued,
       CASE WHEN engine_queue_ns BETWEEN 0 AND YEAR THEN engine_queue_ns ELSE 0 END AS engine_queue,
       CASE WHEN engine_stall_ns BETWEEN 0 AND YEAR THEN engine_stall_ns WHEN engine_stall_ns IS NOT NULL THEN 0
            ELSE CASE WHEN engine_load_ns BETWEEN 0 AND YEAR THEN engine_load_ns ELSE 0 END
                 + CASE WHEN engine_activation_ns BETWEEN 0 AND YEAR THEN engine_activation_ns ELSE 0 END END AS stall,
       CASE WHEN engine_prefill_ns BETWEEN 0 AND YEAR THEN engine_prefill_ns ELSE 0 END AS prefill,
       CASE WHEN engine_queue_ns IS NOT NULL AND engine_prefill_ns IS NOT NULL THEN 1 ELSE 0 END AS probed,
       CASE WHEN engine_stall_ns IS NOT NULL OR engine_load_ns IS NOT NULL OR engine_activation_ns IS NOT NULL
                 OR hit_class IN ('gpu', 'base') THEN 1 ELSE 0 END AS prepared,
       CASE WHEN status = 'client_error' THEN 0 ELSE 1 END AS ours,
       CASE WHEN finished_ns < arrived_ns OR first_token_ns < arrived_ns OR dispatched_ns < arrived_ns
                 OR last_token_ns < first_token_ns OR finished_ns < first_token_ns OR finished_ns < dispatched_ns
                 OR load_end_ns < load_start_ns OR itl_mean_ns < 0 OR queued_ns NOT BETWEEN 0 AND YEAR
                 OR engine_queue_ns NOT BETWEEN 0 AND YEAR OR engine_prefill_ns NOT BETWEEN 0 AND YEAR
                 OR engine_stall_ns NOT BETWEEN 0 AND YEAR OR engine_load_ns NOT BETWEEN 0 AND YEAR
                 OR engine_activation_ns NOT BETWEEN 0 AND YEAR
            THEN 1 ELSE 0 END AS back,
       last_token_ns, prompt_tokens, generated_tokens, cached_tokens, preemptions, itl_mean_ns, itl_sketch
FROM picked
""".replace("YEAR", _YEAR)
_TIMED: Final = """
SELECT *,
       CASE WHEN ours = 1 AND back = 0 AND stream IS DISTINCT FROM FALSE THEN first_token_ns - arrived_ns END AS ttft,
       CASE WHEN load_start_ns IS NULL OR load_end_ns IS NULL OR load_end_ns < arrived_ns THEN 0
            WHEN load_start_ns > arrived_ns THEN load_end_ns - load_start_ns ELSE load_end_ns - arrived_ns END AS load_wait,
       CASE WHEN dispatched_ns - arrived_ns > queued THEN dispatched_ns - arrived_ns - queued
            WHEN dispatched_ns IS NOT NULL THEN 0 END AS load_room,
       CASE WHEN ours = 1 AND back = 0 AND finished_ns IS NOT NULL AND (prompt_tokens >= 0 OR generated_tokens >= 0)
            THEN (CAST(COALESCE(prompt_tokens, 0) AS DOUBLE) + COALESCE(generated_tokens, 0)) * (finished_ns - dispatched_ns)
            END AS active,
       CASE WHEN ours = 0 OR back = 1 OR stream = FALSE THEN NULL
            WHEN first_token_ns IS NOT NULL THEN first_token_ns - arrived_ns
            WHEN status = 'open' AND finished_ns IS NULL THEN $until - arrived_ns
            WHEN status NOT IN ('ok', 'gateway_crashed', 'open') THEN finished_ns - arrived_ns END AS wait
FROM clocked
"""
_QUEUED: Final = """
SELECT *, queued AS edge_1, queued + CASE WHEN load_room <= load_wait AND load_room <= YEAR THEN load_room
                                          WHEN load_wait <= YEAR THEN load_wait ELSE YEAR END AS edge_2
FROM timed
""".replace("YEAR", _YEAR)
_EDGED: Final = """
SELECT *, edge_2 + engine_queue AS edge_3, edge_2 + engine_queue + stall AS edge_4,
       edge_2 + engine_queue + stall + prefill AS edge_5
FROM queued
"""
_PARTED: Final = """
SELECT *,
       CASE WHEN ttft < edge_1 THEN ttft WHEN ttft IS NOT NULL THEN edge_1 END AS cut_1,
       CASE WHEN ttft < edge_2 THEN ttft WHEN ttft IS NOT NULL THEN edge_2 END AS cut_2,
       CASE WHEN ttft < edge_3 THEN ttft WHEN ttft IS NOT NULL THEN edge_3 END AS cut_3,
       CASE WHEN ttft < edge_4 THEN ttft WHEN ttft IS NOT NULL THEN edge_4 END AS cut_4,
       CASE WHEN ttft < edge_5 THEN ttft WHEN ttft IS NOT NULL THEN edge_5 END AS cut_5
FROM edged
"""


def parted(scope: Scope) -> list[tuple[str, str]]:
    """The CTEs up to ``parted``."""
    bodies = (scope.picked, _CLOCKED, _TIMED, _QUEUED, _EDGED, _PARTED)
    return list(zip(("picked", "clocked", "timed", "queued", "edged", "parted"), bodies, strict=True))


def timed(scope: Scope) -> list[tuple[str, str]]:
    """The CTEs up to ``timed``: what need not know the split."""
    return parted(scope)[:3]
