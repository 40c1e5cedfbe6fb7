from __future__ import annotations

from loraledger import events as ev
from loraledger.replay.traces.trace import Request
from loraledger.twin.profile import TwinProfile
from replay.fleets import MIB, adapters, settings_for, virtual

PROFILE = TwinProfile(slots=2, host_entries=4, kv_blocks=10, slot_bytes=30 * MIB)


def test_what_a_twin_cannot_serve_ends_with_its_reason_and_the_rest_is_served() -> None:
    large = ev.AdapterSpec("large", "f" * 64, 16, 40 * MIB)
    fleet = virtual(settings_for(1, (*adapters(1), large), profile=PROFILE), PROFILE)
    fleet.run(
        [
            Request(0, "acme", "a0", 20, 5),
            Request(1, "acme", None, 161, 1),  # all KV is 160 tokens
            Request(2, "acme", "a0", 150, 12),
            Request(3, "acme", "large", 20, 5),
            Request(4, "acme", None, 160, 1),
        ]
    )
    ended = {row["id"]: (row["status"], row["http_status"], row["reason"]) for row in fleet.rows["requests"]}
    assert ended == {
        "q1": ("ok", 200, None),
        "q2": ("client_error", 400, "too_long"),
        "q3": ("client_error", 400, "too_long"),
        "q4": ("rejected", 503, "adapter_load_failed"),
        "q5": ("ok", 200, None),
    }
    assert fleet.ended == {"ok": 2, "client_error: too_long": 2, "rejected: adapter_load_failed": 1}
