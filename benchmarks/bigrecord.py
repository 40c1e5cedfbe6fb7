"""A record of many requests, made by DuckDB alone: what ``benchmarks.signals`` reads.

    python -m benchmarks.bigrecord --rows 100m --days 22 --adapters 5000 --replicas 64 --out DIR [--jobs 2] [--seed 1]

One COPY for each table and hour into the record's own layout, with the record's columns, types and compression. Chance is a hash
of (seed, row, purpose), so a seed gives the same record again under the same DuckDB. Rows lie by arrival.

What is drawn: popularity of adapters Zipf 1.0; an arrival rate with a daily peak (23 h UTC) 4 times its least; 200 tenants;
4 % base requests; an adapter lives on one to nine replicas and is missed the more often the rarer it is; 1.2 % rejected, 2 % ended
badly; every sixteenth replica has no probe. Parts of a time to first token add up; moments follow each other. The first day is of
another engine version. Times between tokens come from a pool of sketches, each of the gaps that its answer has, so a Parquet
dictionary holds them: a record from life has more distinct ones and is larger. Residency has the moves of every miss, seen by a
probe; samples are taken each ``--sample-s``. Decisions are not written.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import duckdb

from loraledger.record.duck import append_lines, connect, quote, run
from loraledger.record.parquet import HOUR_NS, partition_path, partitions
from loraledger.record.sketch import Sketch
from loraledger.record.tables import TABLES, Row, TableName

LABEL: Final = "made"
BEGIN_HOUR: Final = 496_944
"""2026-09-10T00:00:00Z, in hours since the epoch."""
SKETCHES: Final = 4096
SLOTS, HOST_ENTRIES, KV_TOKENS = 32, 64, 400_000
"""Of each replica."""
SWING: Final = 0.6
"""Of the daily rate about its mean."""
PURPOSES: Final = 32
"""Draws that a row may have."""


@dataclass(frozen=True)
class Made:
    """What a record is made of. It lies beside its tables as ``made.json``, written last."""

    rows: int
    days: int = 22
    adapters: int = 5_000
    replicas: int = 64
    sample_s: int = 10
    seed: int = 1

    @classmethod
    def of(cls, directory: Path) -> Made:
        """What the record there was made of. Raises OSError when it is none, or is not complete."""
        return cls(**json.loads((directory / "made.json").read_bytes()))

    @property
    def begin_ns(self) -> int:
        return BEGIN_HOUR * HOUR_NS

    @property
    def until_ns(self) -> int:
        return (BEGIN_HOUR + 24 * self.days) * HOUR_NS

    def hourly(self) -> list[int]:
        """Requests in each hour; they add up to ``rows``."""
        weights = [1 + SWING * math.cos(2 * math.pi * (hour + 1) / 24) for hour in range(24 * self.days)]
        edges, run_up = [0], 0.0
        for weight in weights:
            run_up += weight
            edges.append(round(self.rows * run_up / sum(weights)))
        return [high - low for low, high in pairwise(edges)]


def make(made: Made, directory: Path, jobs: int) -> None:
    """Write the record ``made`` into ``directory``. Raises OSError when the disk refuses."""
    counts = made.hourly()
    firsts = [sum(counts[:hour]) for hour in range(len(counts))]
    with tempfile.TemporaryDirectory() as name, connect(Path(name), threads=jobs, memory_limit="2GB") as database:
        for statement in _DRAWS:
            run(database, statement.format(seed=made.seed << 40))
        _pool(database, made.seed, Path(name))
        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(partial(_hour, database, made, directory), range(len(counts)), firsts, counts))
    (directory / "made.json").write_text(json.dumps(asdict(made)), encoding="utf-8")


def _pool(database: duckdb.DuckDBPyConnection, seed: int, scratch: Path) -> None:
    """Table ``pool``: the times between tokens of so many answers."""
    rng = random.Random(seed)
    answers: list[Row] = []
    for key in range(SKETCHES):
        pace = rng.lognormvariate(math.log(15e6), 0.35)
        sketch, total, longest = Sketch(), 0, 0
        gaps = max(1, min(1500, round(rng.lognormvariate(math.log(150), 0.8))))
        for _ in range(gaps):
            gap = round(pace * rng.lognormvariate(0, 0.12) * (rng.uniform(2, 12) if rng.random() < 0.03 else 1))
            sketch.add(gap)
            total, longest = total + gap, max(longest, gap)
        answers.append({"key": key, "gaps": gaps, "total": total, "longest": longest, "sketch": sketch.to_json()})
    append_lines(scratch / "pool", answers)
    columns = "{key: 'BIGINT', gaps: 'BIGINT', total: 'BIGINT', longest: 'BIGINT', sketch: 'VARCHAR'}"
    run(database, f"CREATE TABLE pool AS FROM read_json({quote(scratch / 'pool')}, columns = {columns})")


def _hour(database: duckdb.DuckDBPyConnection, made: Made, directory: Path, hour: int, first: int, count: int) -> None:
    """Write the tables of one hour."""
    at = BEGIN_HOUR + hour
    requests = partition_path(directory, "requests", at, LABEL)
    with database.cursor() as connection:
        if count:
            words: dict[str, object] = {
                "first": first,
                "end": first + count,
                "begin": at * HOUR_NS,
                "step": HOUR_NS // count,
            }
            words |= {"adapters": made.adapters, "replicas": made.replicas, "sketches": SKETCHES}
            words |= {"version": 31 if hour < 24 else 32, "common": _COMMON}
            _copy(connection, "requests", _REQUESTS.format(**words), requests)
            _copy(
                connection,
                "residency",
                _MOVES.format(file=quote(requests)),
                partition_path(directory, "residency", at, LABEL),
            )
        words = {"begin": at * HOUR_NS, "step": made.sample_s, "replicas": made.replicas, "hour": hour}
        words |= {"kv": KV_TOKENS, "slots": SLOTS, "start": made.begin_ns, "first": at * 1_000_000}
        _copy(connection, "samples", _SAMPLES.format(**words), partition_path(directory, "samples", at, LABEL))


def _copy(connection: duckdb.DuckDBPyConnection, name: TableName, select: str, path: Path) -> None:
    """Write what ``select`` gives, in the order of time; columns that it lacks are null."""
    table = TABLES[name]
    nulls = ", ".join(f"NULL::{column.type} AS {column.name}" for column in table.columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    run(
        connection,
        f"COPY (FROM (SELECT {nulls} WHERE false UNION ALL BY NAME FROM ({select})) ORDER BY {table.time}) "
        f"TO {quote(path)} (FORMAT parquet, COMPRESSION zstd)",
    )


_DRAWS: Final = (
    # A product of row and purpose, not hash(row, purpose): that is hash(row) XOR a constant, so draws would not be independent.
    "CREATE MACRO draw(i, purpose) AS hash({seed} + i * 32 + purpose)",
    "CREATE MACRO u(i, purpose) AS (draw(i, purpose) >> 11) / 9007199254740992.0",
    "CREATE MACRO waited(i, purpose, mean_ms) AS CAST(-1e6 * mean_ms * ln(1 - u(i, purpose)) AS BIGINT)",
    "CREATE MACRO normal(i, purpose) AS sqrt(-2 * ln(1 - u(i, purpose))) * cos(2 * pi() * u(i, purpose + 1))",
    "CREATE MACRO replica_name(r) AS printf('replica-%02d', r)",
    "CREATE MACRO adapter_name(a) AS printf('adapter-%04d', a)",
    "CREATE MACRO probed(r) AS r % 16 <> 15",
)

_REQUESTS: Final = """
WITH drawn AS (
    SELECT i, {begin} + (i - {first}) * {step} + CAST(u(i, 0) * {step} AS BIGINT) AS arrived, u(i, 1) AS fate,
        CASE WHEN u(i, 2) >= 0.04 THEN CAST(floor(pow({adapters} + 1, u(i, 3))) AS BIGINT) - 1 END AS a,
        CAST(draw(i, 4) % {sketches} AS BIGINT) AS key, CAST(draw(i, 5) % 720720 AS BIGINT) AS choice, u(i, 6) AS luck,
        CAST(greatest(1, least(16000, exp(6.3 + normal(i, 7)))) AS BIGINT) AS prompt
    FROM range({first}, {end}) AS r(i)
), ended AS (
    SELECT *, CASE WHEN fate < 0.012 THEN 'rejected' WHEN fate < 0.022 THEN 'client_gone' WHEN fate < 0.026 THEN 'client_error'
        WHEN fate < 0.03 THEN 'engine_error' ELSE 'ok' END AS status
    FROM drawn JOIN pool USING (key)
), placed AS (
    SELECT *, CAST(coalesce(draw(a * 16 + choice % (1 + 8 // (a + 1)), 9), choice) % {replicas} AS BIGINT) AS r,
        CASE WHEN a IS NULL THEN 'base' WHEN luck >= 0.005 + 0.4 * a / {adapters} THEN 'gpu'
            WHEN draw(i, 10) % 50 = 0 THEN 'remote' WHEN draw(i, 10) % 50 < 17 THEN 'disk' ELSE 'host' END AS tier,
        CASE WHEN u(i, 11) < 0.03 THEN waited(i, 12, 200) END AS queued
    FROM ended
), timed AS (
    SELECT *, probed(r) AS told,
        CASE WHEN tier = 'remote' THEN 150000000 + waited(i, 13, 100) END AS loading,
        CASE WHEN tier = 'disk' THEN 20000000 * (1 << (a % 4)) + waited(i, 14, 30) ELSE 0 END AS reading,
        CASE WHEN tier IN ('gpu', 'base') THEN 0 ELSE 2000000 * (1 << (a % 4)) + waited(i, 15, 2) END AS copying,
        CASE WHEN u(i, 16) < 0.05 THEN waited(i, 17, 30) ELSE 0 END AS of_others,
        waited(i, 18, 15) AS waiting, 8000000 + prompt * 25000 + waited(i, 19, 2) AS prefill, waited(i, 20, 3) AS rest
    FROM placed
), sent AS (
    SELECT *, reading + copying + of_others AS stall, arrived + coalesce(queued, 0) AS free,
        free + coalesce(loading, 0) + 200000 + waited(i, 21, 0.3) AS dispatched
    FROM timed WHERE status <> 'rejected'
), answered AS (
    SELECT *, CASE WHEN status IN ('ok', 'client_gone') THEN dispatched + waiting + stall + prefill + rest END AS token,
        token + total // CASE status WHEN 'ok' THEN 1 ELSE 2 END AS last FROM sent
)
SELECT {common}, 'bounded-affinity' AS policy, i AS decision_id, replica_name(r) AS replica, queued AS queued_ns,
    CASE WHEN NOT told AND draw(i, 23) % 10 = 0 AND a IS NOT NULL THEN 'unknown' ELSE tier END AS hit_class,
    CASE WHEN told THEN 'observed' ELSE 'believed' END AS hit_source, CASE WHEN told THEN tier END AS engine_access,
    CASE WHEN told THEN waiting END AS engine_queue_ns, CASE WHEN told THEN stall END AS engine_stall_ns,
    CASE WHEN told THEN reading END AS engine_load_ns, CASE WHEN told THEN copying END AS engine_activation_ns,
    CASE WHEN told THEN prefill END AS engine_prefill_ns, CASE WHEN told THEN last - token END AS engine_decode_ns,
    CASE WHEN told AND token IS NOT NULL THEN rest END AS unattributed_ns,
    CASE WHEN told THEN CAST(u(i, 24) < 0.001 AS BIGINT) END AS preemptions, dispatched AS dispatched_ns,
    CASE WHEN loading IS NOT NULL THEN free END AS load_start_ns, free + loading AS load_end_ns,
    token AS first_byte_ns, token AS first_token_ns, token AS first_answer_ns, last AS last_token_ns,
    coalesce(last + waited(i, 25, 1), dispatched + waiting) AS finished_ns,
    CASE WHEN status = 'ok' THEN total // gaps END AS itl_mean_ns, CASE WHEN status = 'ok' THEN longest END AS itl_max_ns,
    CASE WHEN status = 'ok' THEN sketch END AS itl_sketch, CASE WHEN status = 'ok' THEN prompt END AS prompt_tokens,
    CASE WHEN status = 'ok' THEN gaps + 1 END AS generated_tokens,
    CASE WHEN status = 'ok' THEN prompt * (choice % 3) // 4 END AS cached_tokens,
    CASE status WHEN 'client_error' THEN 400 WHEN 'engine_error' THEN 500 ELSE 200 END AS http_status,
    CASE WHEN status <> 'ok' THEN status END AS reason, '0.{version}.0' AS engine_version
FROM answered
UNION ALL BY NAME
SELECT {common}, 429 AS http_status, 'queue_full' AS reason, arrived + 1000000 AS finished_ns
FROM ended WHERE status = 'rejected'
"""

_COMMON: Final = """printf('5ca1ab1e-%d', i) AS id, 'tenant-' || coalesce(a, choice) % 200 AS tenant, adapter_name(a) AS adapter,
    md5(a::VARCHAR) || md5('of' || a) AS digest, 'llama-3.1-8b' AS base, arrived AS arrived_ns, true AS stream,
    prompt + CAST(8 * normal(i, 27) AS BIGINT) AS predicted_prompt_tokens, status, 0 AS retries,
    '/v1/chat/completions' AS path, 'c0ffee' AS config_digest, '0.1.0' AS gateway_version"""
"""Columns of every request, rejected or not."""

_MOVES: Final = """
WITH missed AS (
    SELECT *, dispatched_ns + coalesce(engine_queue_ns, 0) AS began,
        coalesce(load_end_ns, began + coalesce(engine_load_ns, 0)) AS held,
        CASE WHEN engine_access IS NULL THEN 'believed' ELSE 'observed' END AS source,
        adapter_name(CAST(substr(adapter, 9) AS BIGINT) * 7 % 911) AS victim
    FROM read_parquet({file}) WHERE hit_class IN ('host', 'disk', 'remote')
), moves AS (
    SELECT held AS at_ns, replica, adapter, digest, source, 'disk' AS tier_before, 'host' AS tier_after, 'load' AS cause,
        coalesce(load_end_ns - load_start_ns, engine_load_ns) AS took_ns
    FROM missed WHERE hit_class <> 'host'
    UNION ALL
    SELECT held + coalesce(engine_activation_ns, 0), replica, adapter, digest, source, 'host', 'gpu', 'activation',
        engine_activation_ns
    FROM missed
    UNION ALL
    SELECT held, replica, victim, NULL, source, 'gpu', 'host', 'evicted: lru', NULL FROM missed
    UNION ALL
    SELECT held, replica, victim, NULL, source, 'host', 'disk', 'evicted: lru', NULL FROM missed WHERE hit_class <> 'host'
)
SELECT *, adapter || '@1' AS engine_name, 'registered' AS from_state, 'registered' AS to_state FROM moves
"""

_SAMPLES: Final = """
WITH moments AS (
    SELECT {first} + t * 1024 + r AS i, {begin} + t * {step} * 1000000000 + r * 1000000 AS sampled, r, probed(r) AS told
    FROM range(3600 // {step}) AS times(t), range({replicas}) AS replicas(r)
), seen AS (
    SELECT *, 0.35 + 0.2 * cos(2 * pi() * ({hour} + 1) / 24) + 0.3 * u(i, 28) AS usage,
        CAST(4 + 20 * u(i, 29) AS BIGINT) AS running, CAST({step} * (50 + draw(i, 30) % 30) AS BIGINT) AS steps
    FROM moments
)
SELECT sampled AS at_ns, replica_name(r) AS replica, true AS up, running, CAST(draw(i, 31) % 4 AS BIGINT) AS waiting,
    usage AS kv_usage, {kv} AS kv_tokens, running AS own_in_flight, 0 AS foreign_in_flight, {slots} AS slots_used_believed,
    {start} - 86400000000000 AS process_start_ns, sampled - 5000000 AS scrape_start_ns, 5000000 AS age_ns,
    CASE WHEN told THEN steps END AS steps, CASE WHEN told THEN steps * (running + 20) END AS step_tokens,
    CASE WHEN told THEN steps * 12000000 END AS step_ns, CASE WHEN told THEN CAST(u(i, 27) < 0.01 AS BIGINT) END AS preempted,
    CASE WHEN told THEN 300 * CAST(u(i, 27) < 0.01 AS BIGINT) END AS recomputed_tokens, CASE WHEN told THEN 0 END AS blocked,
    CASE WHEN told THEN running // 2 END AS distinct_adapters,
    CASE WHEN told THEN CAST((1 - usage) * {kv} // 16 AS BIGINT) END AS kv_blocks_free
FROM seen
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=count, default=100_000_000, help="requests: 1m, 100m, 250000")
    parser.add_argument("--days", type=int, default=22)
    parser.add_argument("--adapters", type=int, default=5_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--sample-s", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    began = time.monotonic()
    make(
        Made(given.rows, given.days, given.adapters, given.replicas, given.sample_s, given.seed), given.out, given.jobs
    )
    for name in TABLES:
        size = sum(path.stat().st_size for path in partitions(given.out, name))
        print(f"{name:10} {size / 2**20:10,.1f} MiB")
    print(f"{given.rows:,} requests in {time.monotonic() - began:.0f} s")


def count(text: str) -> int:
    """``1m`` is a million, ``5k`` five thousand. Raises ValueError."""
    scale = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower())
    return int(text) if scale is None else int(text[:-1]) * scale


if __name__ == "__main__":
    main()
