"""What the demo found, from its record: hits and time to first token by hit class, loads, evictions, three decisions explained."""

from __future__ import annotations

from pathlib import Path

from loraledger.cli.explain import print_decision, print_request
from loraledger.cli.output import print_table
from loraledger.conductor.reading import open_record
from loraledger.record.reader import RecordReader

_BY_CLASS = """
SELECT hit_class, count(*) AS requests,
       quantile_cont(first_token_ns - arrived_ns, 0.5) / 1e9 AS p50,
       quantile_cont(first_token_ns - arrived_ns, 0.9) / 1e9 AS p90,
       quantile_cont(first_token_ns - arrived_ns, 0.99) / 1e9 AS p99,
       sum(first_token_ns - arrived_ns) / sum(sum(first_token_ns - arrived_ns)) OVER () AS share
FROM requests WHERE first_token_ns IS NOT NULL GROUP BY hit_class
ORDER BY CASE hit_class WHEN 'base' THEN 0 WHEN 'gpu' THEN 1 WHEN 'host' THEN 2 ELSE 3 END
"""
_MOVES = """
SELECT replica,
       SUM(CASE WHEN to_state = 'registered' AND from_state = 'loading' THEN 1 ELSE 0 END) AS loads,
       SUM(CASE WHEN tier_before = 'disk' AND tier_after = 'gpu' AND cause = 'request' THEN 1 ELSE 0 END) AS reloads,
       SUM(CASE WHEN tier_before = 'host' AND tier_after = 'gpu' THEN 1 ELSE 0 END) AS activations,
       SUM(CASE WHEN tier_before = 'gpu' AND tier_after <> 'gpu' THEN 1 ELSE 0 END) AS slot_evictions,
       SUM(CASE WHEN tier_before IN ('gpu', 'host') AND tier_after = 'disk' THEN 1 ELSE 0 END) AS host_evictions
FROM residency GROUP BY replica ORDER BY replica
"""
_INTERESTING = """
SELECT d.request_id FROM decisions d JOIN requests r ON r.id = d.request_id
WHERE r.adapter IS NOT NULL AND d.reason LIKE ? ORDER BY d.decision_id DESC LIMIT 1
"""


def report(record: Path, kept: bool) -> None:
    """Print the findings of the record in ``record``."""
    with open_record(record) as reader:
        ended = reader.query("SELECT status, count(*) AS n FROM requests GROUP BY status ORDER BY n DESC")
        print("\nrequests by status: " + ", ".join(f"{row['status']} {row['n']}" for row in ended))
        classes = reader.query(_BY_CLASS)
        adapters = sum(_count(row["requests"]) for row in classes if row["hit_class"] != "base")
        hits = sum(_count(row["requests"]) for row in classes if row["hit_class"] == "gpu")
        print(f"adapter hit rate (in a slot when decided): {hits / max(1, adapters):.1%} of {adapters}\n")
        figures = ["requests", "ttft p50 s", "p90 s", "p99 s", "share of all waiting"]
        lines = [
            [
                r["hit_class"],
                r["requests"],
                f"{r['p50']:.3f}",
                f"{r['p90']:.3f}",
                f"{r['p99']:.3f}",
                f"{r['share']:.0%}",
            ]
            for r in classes
        ]
        print_table(["hit class", *figures], lines, right=figures)
        moves = reader.query(_MOVES)
        print()
        columns = list(moves[0]) if moves else []
        print_table(
            [c.replace("_", " ") for c in columns],
            [list(row.values()) for row in moves],
            [c.replace("_", " ") for c in columns[1:]],
        )
        print("\nthree decisions, each cost term in seconds:")
        for pattern in ("set grows%", "affinity: host%", "affinity: gpu%"):
            _explain_one(reader, pattern)
    if kept:
        print(f"\nmore: loraledger get requests --record {record}; loraledger explain ID --record {record}")
    else:
        print("\nthe record was temporary: `loraledger demo --keep DIR` keeps it for `get requests` and `explain`")


def _explain_one(reader: RecordReader, pattern: str) -> None:
    found = reader.query(_INTERESTING, [pattern])
    if not found:
        return
    request_id = str(found[0]["request_id"])
    row = reader.request(request_id)
    assert row is not None
    print()
    print_request(row)
    print_decision(reader.decisions_of(request_id)[-1])


def _count(value: object) -> int:
    assert isinstance(value, int)
    return value
