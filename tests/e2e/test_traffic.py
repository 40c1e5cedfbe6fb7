"""Two hundred mixed requests of three tenants through one gateway, and everything that must agree about them afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from loraledger.record.tables import Row
from support.gateway import GatewayProcess

from .fleet import (
    LONG,
    TOKENS,
    Call,
    Emulator,
    Series,
    by_client,
    check_texts,
    errors,
    eventually,
    in_flight,
    mixed,
    parse_metrics,
    play,
    settings_for,
    write_adapters,
)

COUNT = 200


@dataclass
class Played:
    """What was seen: while it ran, just after the last answer, and in the record of the stopped gateway."""

    adapters: dict[str, Path]
    calls: list[Call]
    open_after: dict[str, int]
    engines: list[dict[str, float]]
    metrics: Series
    rows: list[Row]
    exit_code: int
    verified: list[str]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("traffic")
    adapters = write_adapters(folder / "adapters", [f"a{number}" for number in range(8)])
    calls = mixed([*adapters, "base"], COUNT, seed=200, kinds="plain plain stream stream chat cancelled")
    for call in calls:
        if call.kind == "cancelled":
            call.tokens = LONG
    with ExitStack() as stack:
        pair = [stack.enter_context(Emulator(folder)) for _ in range(2)]
        gateway = stack.enter_context(GatewayProcess(folder, settings_for(pair, adapters))).start(replicas_up=2)
        asyncio.run(play(gateway, calls))
        eventually(lambda: gateway.summary()["open_requests"] == 0, "the last cancelled request to be noticed")
        eventually(lambda: not any(e.metrics()["running"] + e.metrics()["waiting"] for e in pair), "the engines")
        open_after = in_flight(gateway)
        engines = [emulator.metrics() for emulator in pair]
        metrics = parse_metrics(httpx2.get(f"{gateway.control}/metrics", timeout=20.0).text)
        exit_code = gateway.stop()
        verified = [gateway.verify("1"), gateway.verify("31337")]
        yield Played(adapters, calls, open_after, engines, metrics, gateway.rows(), exit_code, verified)


def total(series: list[tuple[dict[str, str], float]]) -> float:
    return sum(value for _, value in series)


def test_every_request_has_one_row_under_the_id_that_its_client_gave(played: Played) -> None:
    assert len(played.rows) == COUNT
    assert len({row["id"] for row in played.rows}) == COUNT
    assert set(by_client(played.rows)) == {call.key for call in played.calls}


def test_the_id_that_the_client_gave_comes_back_in_the_answer(played: Played) -> None:
    plain = [call for call in played.calls if call.kind == "plain"]
    assert len(plain) > 30
    assert [call.echoed for call in plain] == [call.key for call in plain]


def test_every_answer_is_the_right_adapters(played: Played) -> None:
    assert errors(played.calls) == []
    assert {call.kind for call in played.calls} == {"plain", "stream", "chat", "cancelled"}
    check_texts(played.calls, played.adapters)
    assert all(call.text for call in played.calls)


def test_rows_say_how_each_request_ended_and_for_whom(played: Played) -> None:
    rows = by_client(played.rows)
    for call in played.calls:
        row = rows[call.key]
        assert row["status"] == ("client_gone" if call.kind == "cancelled" else "ok"), call
        assert row["tenant"] == call.tenant
        assert row["adapter"] == (None if call.model == "base" else call.model)
        assert (row["digest"] is None) == (call.model == "base")
        assert row["stream"] == (call.kind != "plain")
        assert row["replica"] in ("r1", "r2")
        assert (row["hit_class"] == "base") == (call.model == "base")
    assert {row["replica"] for row in played.rows} == {"r1", "r2"}
    assert {row["hit_class"] for row in played.rows} >= {"base", "gpu", "disk"}


def test_rows_count_what_the_engine_counted(played: Played) -> None:
    rows = by_client(played.rows)
    for call in played.calls:
        if call.ended:
            assert rows[call.key]["generated_tokens"] == TOKENS
            prompt = f"user: {call.prompt}\n" if call.kind == "chat" else call.prompt
            assert rows[call.key]["prompt_tokens"] == len(prompt) // 4 + 1
    assert total(played.metrics["loraledger_generated_tokens_total"]) <= sum(e["generated"] for e in played.engines)


def test_the_times_of_a_row_are_in_order(played: Played) -> None:
    columns = ["arrived_ns", "dispatched_ns", "first_byte_ns", "first_token_ns", "last_token_ns", "finished_ns"]
    for row in played.rows:
        times = [row[column] for column in columns]
        if row["status"] == "ok" and row["stream"]:
            assert None not in times
        known = [time for time in times if isinstance(time, int)]
        assert known == sorted(known), row


def test_the_journal_replays_to_the_same_commands_under_other_hash_seeds(played: Played) -> None:
    assert all("identical" in words for words in played.verified)
    assert played.verified[0] == played.verified[1]


def test_nothing_is_left_in_flight_anywhere(played: Played) -> None:
    assert set(played.open_after.values()) == {0}, played.open_after
    assert len(played.open_after) == 2 + 2 * 3 + 2
    assert played.exit_code == 0


def test_the_metrics_page_agrees_with_the_rows(played: Played) -> None:
    labels = ("tenant", "adapter", "replica", "status")
    counted = {tuple(at[label] for label in labels): n for at, n in played.metrics["loraledger_requests_total"]}
    assert counted == Counter(tuple(row[label] or "" for label in labels) for row in played.rows)
    first_tokens = {at["hit_class"]: n for at, n in played.metrics["loraledger_time_to_first_token_seconds_count"]}
    assert first_tokens == Counter(row["hit_class"] for row in played.rows if row["first_token_ns"] is not None)
    tokens = sum(row["generated_tokens"] for row in played.rows if isinstance(row["generated_tokens"], int))
    assert total(played.metrics["loraledger_generated_tokens_total"]) == tokens
    answered = {at["status"]: n for at, n in played.metrics["http_requests_total"]}
    assert answered == {"2xx": sum(row["http_status"] == 200 for row in played.rows)}
    assert total(played.metrics["loraledger_open_requests"]) == 0
    assert total(played.metrics["loraledger_replica_in_flight"]) == 0
    assert total(played.metrics["loraledger_journal_dropped_frames_total"]) == 0
