"""Generated workloads are what they are named after: published sequences exactly, laws in their figures."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from loraledger.errors import InputFileError
from loraledger.replay.traces.trace import Request
from loraledger.replay.workloads.draws import parse_arrivals, parse_lengths, stream
from loraledger.replay.workloads.generate import Mix, laid_over, named_adapters, punica, slora, workload
from loraledger.replay.workloads.legacy_random import LegacyRandom
from loraledger.replay.workloads.popularity import concentration, punica_counts, sampler, shares
from loraledger.replay.workloads.roster import Every, Roster, parse_every
from loraledger.replay.workloads.servegen import Client, Lengths, Window, read_clients, servegen

DATA = Path(__file__).parents[1] / "data"
S = 10**9
M = 60 * S


def index_of(request: Request) -> int:
    assert request.adapter is not None
    return int(request.adapter.removeprefix("a"))


# --- S-LoRA -------------------------------------------------------------------------------------------------------------------

SLORA = {
    # adapters, alpha, rate, cv, duration: requests, last arrival, sums of prompt, output and adapter index, distinct adapters,
    # and the first four of each; by numpy 2.4.6 (numpy.random.seed(42), power, randint, randint, gamma), called as the authors do
    (200, 1.0, 2.0, 1.0, 300): (
        600, 301.004853, 153_447, 155_474, 60_076, 187,
        [74, 190, 146, 119], [12, 473, 99, 177], [410, 43, 292, 195], [0.159846, 3.085610, 3.363331, 3.663512],
    ),
    (400, 1.0, 6.0, 1.0, 300): (
        1800, 293.717115, 466_980, 469_301, 357_312, 396,
        [149, 380, 292, 239], [140, 155, 284, 239], [491, 468, 142, 235], [0.027489, 0.129670, 0.201780, 0.218191],
    ),
    (200, 0.3, 2.0, 4.0, 300): (
        600, 353.755217, 153_447, 155_474, 28_720, 163,
        [7, 168, 70, 36], [12, 473, 99, 177], [410, 43, 292, 195], [0.0, 0.000009, 0.000009, 0.023006],
    ),
    (50, 0.1, 1.5, 0.5, 120): (
        180, 120.294548, 47_944, 47_369, 711, 26,
        [0, 30, 2, 0], [483, 448, 480, 441], [415, 20, 323, 398], [0.764893, 1.815081, 2.236591, 2.610416],
    ),
}  # fmt: skip


@pytest.mark.parametrize("setting", SLORA)
def test_the_slora_sequence_is_the_published_one(setting: tuple[int, float, float, float, int]) -> None:
    adapters, alpha, rate, cv, duration = setting
    made = list(slora(adapters=adapters, alpha=alpha, rate=rate, cv=cv, duration_s=duration))
    indices = [index_of(request) for request in made]
    found = (
        len(made),
        made[-1].at / S,
        sum(request.prompt_tokens for request in made),
        sum(request.output_tokens for request in made),
        sum(indices),
        len(set(indices)),
        indices[:4],
        [request.prompt_tokens for request in made[:4]],
        [request.output_tokens for request in made[:4]],
        [request.at / S for request in made[:4]],
    )
    assert found == SLORA[setting]


def test_slora_results_count_as_many_requests_as_the_sequence_has() -> None:
    rows = [
        json.loads(line) for line in (DATA / "slora_cv_a10g_S2_abort.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == 5
    for row in rows:
        config, result = row["config"], row["result"]
        made = slora(
            adapters=config["num_adapters"],
            alpha=config["alpha"],
            rate=config["req_rate"],
            cv=config["cv"],
            duration_s=config["duration"],
        )
        served = result["throughput"] * result["total_time"]
        assert sum(1 for _ in made) == round(served, 6) + result["num_abort"]


@pytest.mark.parametrize(("alpha", "share"), [(1.0, 0.005), (0.6, 0.042), (0.3, 0.204), (0.1, 0.589)])
def test_slora_alpha_is_the_exponent_of_the_power_law_and_not_of_zipf(alpha: float, share: float) -> None:
    weights = shares(f"power:{alpha}", 200)
    assert weights[0] / math.fsum(weights) == pytest.approx(share, abs=0.001)
    numbers = LegacyRandom(1)
    drawn = Counter(int(numbers.power(alpha) * 200) for _ in range(20_000))
    assert drawn[0] / 20_000 == pytest.approx(share, abs=0.01)


def test_slora_ranks_cycle_so_that_each_has_as_many_adapters() -> None:
    adapters = named_adapters(8, (64, 32, 16, 8), 1000)
    assert [adapter.rank for adapter in adapters] == [64, 32, 16, 8] * 2
    assert adapters[1].bytes == 32_000


def test_the_legacy_generator_wants_a_seed_of_32_bits_and_draws_gammas_of_the_right_moments() -> None:
    with pytest.raises(ValueError, match="seed"):
        LegacyRandom(2**32)
    for shape in (0.0625, 0.5, 1.0, 4.0):
        numbers = LegacyRandom(3)
        drawn = [numbers.gamma(shape) for _ in range(30_000)]
        assert fmean(drawn) == pytest.approx(shape, rel=0.05)
        assert pstdev(drawn) == pytest.approx(math.sqrt(shape), rel=0.05)


# --- popularity ---------------------------------------------------------------------------------------------------------------


def test_punica_counts_are_those_of_its_benchmark() -> None:
    assert punica_counts("distinct", 5) == [1] * 5
    assert punica_counts("identical", 5) == [5]
    assert punica_counts("uniform", 1024) == [32] * 32
    assert punica_counts("uniform", 10) == [3, 3, 2, 2]
    skewed = punica_counts("skewed", 1024)
    geometric = [math.floor(1.5**k) for k in range(15)]
    assert geometric == [1, 1, 2, 3, 5, 7, 11, 17, 25, 38, 57, 86, 129, 194, 291]
    assert skewed == sorted([*geometric, 1024 - sum(geometric)], reverse=True)
    for kind in ("distinct", "uniform", "skewed", "identical"):
        for requests in (1, 2, 3, 7, 100, 333):
            assert sum(punica_counts(kind, requests)) == requests
            assert min(punica_counts(kind, requests)) >= 1
    with pytest.raises(ValueError, match="one of"):
        punica_counts("zipf", 10)


def test_a_punica_run_holds_its_counts_exactly_and_its_lengths_below_2048() -> None:
    made = list(punica("skewed", requests=1024, gap=parse_arrivals("at-once"), rate=1.0, seed=1))
    assert sorted(Counter(map(index_of, made)).values(), reverse=True) == punica_counts("skewed", 1024)
    assert {request.at for request in made} == {0}
    totals = [request.prompt_tokens + request.output_tokens for request in made]
    assert max(totals) < 2048
    assert min(request.output_tokens for request in made) == 2
    assert fmean(totals) == pytest.approx(1024, rel=0.06)
    assert fmean(request.prompt_tokens for request in made) == pytest.approx(18 * math.exp(0.32) - 1.5, rel=0.1)


def test_shares_follow_their_formulas() -> None:
    assert shares("uniform", 3) == [1, 1, 1]
    assert shares("identical", 3) == [1, 0, 0]
    assert shares("zipf:2", 3) == [1, 1 / 4, 1 / 9]
    assert shares("exponential:0.5", 2) == [1, math.exp(-0.5)]
    assert shares("power:1", 4) == pytest.approx([1 / 4] * 4)


@pytest.mark.parametrize(
    "spec", ["", "zipf", "zipf:", "zipf:0", "zipf:-1", "zipf:nan", "zipf:1e9", "uniform:1", "pareto:1", "zipf:1:2"]
)
def test_another_spelling_of_a_popularity_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"popularity|parameter"):
        shares(spec, 3)


def test_concentration_is_n_for_uniform_and_one_for_identical() -> None:
    even = concentration([5] * 20)
    assert even is not None
    assert even == pytest.approx((0.05, 0.5, 20, 20))
    one = concentration([7, 0, 0])
    assert one is not None
    assert one == pytest.approx((1, 1, 1, 1))
    two = concentration([3, 1])
    assert two is not None
    assert two.entropy_number == pytest.approx(math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))
    assert two.simpson_number == pytest.approx(1 / (0.75**2 + 0.25**2))
    assert concentration([0, 0]) is None


def test_ranks_are_drawn_in_proportion_to_their_weights() -> None:
    draw = sampler([4.0, 0.0, 1.0], stream(1, "x"))
    drawn = Counter(draw() for _ in range(10_000))
    assert drawn[1] == 0
    assert drawn[0] / 10_000 == pytest.approx(0.8, abs=0.02)


# --- arrivals and lengths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "cv"),
    [
        ("constant", 0),
        ("poisson", 1),
        ("gamma:0.5", 0.5),
        ("gamma:3", 3),
        ("weibull:1", 1),
        ("weibull:0.5", math.sqrt(5)),
    ],
)
def test_gaps_have_mean_1_and_the_coefficient_of_variation_that_was_asked_for(spec: str, cv: float) -> None:
    gap, rng = parse_arrivals(spec), stream(4, "gaps")
    drawn = [gap(rng) for _ in range(60_000)]
    assert fmean(drawn) == pytest.approx(1, abs=0.05)
    assert pstdev(drawn) == pytest.approx(cv, rel=0.08)


@pytest.mark.parametrize(
    "spec", ["gamma", "gamma:0", "gamma:nan", "gamma:1e9", "poisson:2", "weibull:-1", "uniform", ""]
)
def test_another_spelling_of_arrivals_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"arrival|shape"):
        parse_arrivals(spec)


def test_lengths_are_fixed_uniform_with_both_ends_or_weighted(tmp_path: Path) -> None:
    rng = stream(1, "lengths")
    assert {parse_lengths("128")(rng) for _ in range(9)} == {128}
    assert {parse_lengths("2-4")(rng) for _ in range(99)} == {2, 3, 4}
    (tmp_path / "pmf.json").write_text('{"7": 3, "9": 1, "11": 0}', encoding="utf-8")
    draw = parse_lengths(f"pmf:{tmp_path / 'pmf.json'}")
    drawn = Counter(draw(rng) for _ in range(8000))
    assert drawn.keys() == {7, 9}
    assert drawn[7] / 8000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("spec", ["", "0", "4-2", "-4", "1.5", "1-", "99999999", "a-b", "²"])
def test_another_spelling_of_lengths_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="tokens"):
        parse_lengths(spec)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"0": 1}', '{"5": -1}', '{"5": 0}', "{}", '{"5": 1e999}', "[" * 9999]
)
def test_a_bad_file_of_weights_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pmf").write_text(text, encoding="utf-8")
    with pytest.raises(InputFileError, match="pmf"):
        parse_lengths(f"pmf:{tmp_path / 'pmf'}")


# --- a workload ---------------------------------------------------------------------------------------------------------------


def made(
    mix: Mix,
    *,
    seed: int = 1,
    rate: float = 100.0,
    prompt: str = "8-511",
    arrivals: str = "poisson",
    duration: int = 100 * S,
) -> list[Request]:
    return list(
        workload(
            mix,
            parse_arrivals(arrivals),
            parse_lengths(prompt),
            parse_lengths("4"),
            rate=rate,
            duration=duration,
            seed=seed,
        )
    )


ZIPF = Mix(adapters=20, popularity="zipf:1", tenants=3, base_share=0.25)


def test_a_workload_is_what_was_asked_for() -> None:
    requests = made(ZIPF)
    assert len(requests) == pytest.approx(10_000, rel=0.03)
    assert all(a.at <= b.at for a, b in pairwise(requests))
    assert requests[-1].at < 100 * S
    assert all(request.at % 1000 == 0 for request in requests)
    named = Counter(request.adapter for request in requests)
    assert named.pop(None) / len(requests) == pytest.approx(0.25, abs=0.02)
    harmonic = sum(1 / k for k in range(1, 21))
    assert named["a0"] / named.total() == pytest.approx(1 / harmonic, abs=0.02)
    assert named["a0"] / named["a4"] == pytest.approx(5, rel=0.15)
    assert {request.tenant for request in requests if request.adapter == "a4"} == {"t1"}
    assert {request.tenant for request in requests if request.adapter is None} == {"t0", "t1", "t2"}


def test_same_seed_same_requests_in_another_process_too() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from replay.workloads.test_generate import ZIPF, made\n"
        "print(made(ZIPF, duration=10**9)[-5:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        env={"PYTHONHASHSEED": "9"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(made(ZIPF, duration=S)[-5:])
    assert made(ZIPF, seed=2) != made(ZIPF)


def test_each_part_draws_from_its_own_stream() -> None:
    plain, longer = made(ZIPF), made(ZIPF, prompt="600-700")
    assert [(r.at, r.adapter, r.output_tokens) for r in plain] == [(r.at, r.adapter, r.output_tokens) for r in longer]
    burst = made(ZIPF, arrivals="gamma:3")
    assert [r.adapter for r in burst[:500]] == [r.adapter for r in plain[:500]]


def test_a_number_of_requests_ends_it_as_well() -> None:
    gap, tokens = parse_arrivals("constant"), parse_lengths("4")
    requests = list(workload(ZIPF, gap, tokens, tokens, rate=4.0, requests=9, seed=1))
    assert [request.at for request in requests] == [n * S // 4 for n in range(1, 10)]


def test_a_duration_ends_before_it_is_full() -> None:
    requests = made(ZIPF, arrivals="constant", rate=1.0, duration=3 * S)
    assert [request.at for request in requests] == [1 * S, 2 * S]


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        (Mix(adapters=0, popularity="uniform"), "0 adapters"),
        (Mix(adapters=3, popularity="uniform", tenants=0), "tenants"),
        (Mix(adapters=3, popularity="uniform", base_share=1.5), "base share"),
        (Mix(adapters=3, popularity="uniform", active=4), "4 active of 3"),
        (Mix(adapters=3, popularity="uniform", churn=Every(S, 1)), "churn needs adapters that wait"),
        (Mix(adapters=3, popularity="pareto"), "popularity"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(mix: Mix, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(mix)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        made(ZIPF, rate=rate)


def test_drift_makes_another_adapter_the_hot_one() -> None:
    requests = made(Mix(adapters=10, popularity="zipf:2", drift=Every(20 * S, 3)))
    hot = [
        Counter(r.adapter for r in requests if start <= r.at < start + 20 * S).most_common(1)[0][0]
        for start in range(0, 100 * S, 20 * S)
    ]
    assert hot == ["a0", "a7", "a4", "a1", "a8"]


def test_drift_over_several_periods_at_once_is_the_same_as_one_by_one() -> None:
    every = Every(10, 3)
    one, leap = (Roster(7, 7, every, None, stream(1, "r")) for _ in range(2))
    for at in range(0, 1000, 7):
        stepped = [one.adapter(at, rank) for rank in range(7)]
    assert [leap.adapter(at, rank) for rank in range(7)] == stepped


def test_churn_replaces_active_adapters_and_keeps_their_number() -> None:
    roster = Roster(12, 4, None, Every(10, 1), stream(1, "churn"))
    before = [roster.adapter(9, rank) for rank in range(4)]
    assert before == [0, 1, 2, 3]
    seen: set[int] = set()
    for at in range(10, 400, 10):
        now = [roster.adapter(at, rank) for rank in range(4)]
        assert len(set(now)) == 4
        assert len(set(before) - set(now)) == 1
        seen |= set(now)
        before = now
    assert seen == set(range(12))


def test_churn_over_several_periods_at_once_is_the_same_as_one_by_one() -> None:
    one, leap = (Roster(12, 4, None, Every(10, 2), stream(1, "churn")) for _ in range(2))
    for at in range(0, 500, 10):
        stepped = [one.adapter(at, rank) for rank in range(4)]
    assert [leap.adapter(490, rank) for rank in range(4)] == stepped


def test_churn_of_more_than_are_active_replaces_them_all() -> None:
    roster = Roster(9, 4, None, Every(10, 7), stream(1, "churn"))
    assert {roster.adapter(10, rank) for rank in range(4)} == {4, 5, 6, 7}


def test_churn_shows_in_the_working_set_of_a_day_and_not_of_a_minute() -> None:
    mix = Mix(adapters=100, popularity="uniform", active=10, churn=Every(10 * S, 2))
    requests = made(mix)
    assert len({r.adapter for r in requests if r.at < 10 * S}) == 10
    assert len({r.adapter for r in requests}) == 10 + 9 * 2


@pytest.mark.parametrize(("text", "every"), [("10m", (600 * S, 1)), ("1h:5", (3600 * S, 5))])
def test_a_period_is_written_with_how_many(text: str, every: tuple[int, int]) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize("text", ["", "10x", "10m:", "10m:0", "10m:x", "0s", "10m:-1", "1m:9999999"])
def test_another_spelling_of_a_period_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|period"):
        parse_every(text)


def test_adapters_are_laid_over_requests_that_have_none() -> None:
    bare = [(n + 2, Request(n * S, "t0", None, 5, 6, (n,))) for n in range(2000)]
    laid = list(laid_over(iter(bare), Mix(adapters=4, popularity="zipf:1", tenants=2), 3))
    assert [(n, r.at, r.prompt_tokens, r.output_tokens, r.blocks) for n, r in laid] == [
        (n, r.at, r.prompt_tokens, r.output_tokens, r.blocks) for n, r in bare
    ]
    assert Counter(r.adapter for _, r in laid)["a0"] / 2000 == pytest.approx(12 / 25, abs=0.04)
    assert {r.tenant for _, r in laid if r.adapter == "a3"} == {"t1"}


# --- ServeGen -----------------------------------------------------------------------------------------------------------------


def client(number: int, rates: list[float], gap: Callable[..., float] | None = None, lengths: int = 0) -> Client:
    process = gap or parse_arrivals("poisson")
    windows = tuple(Window(600.0 * n, rate, process if rate else None) for n, rate in enumerate(rates))
    fixed = Lengths(0.0, lambda _: lengths, lambda _: 1, 99)
    return Client(number, 600.0, windows, (fixed,) if lengths else ())


@pytest.mark.parametrize("arrivals", ["poisson", "gamma:6", "weibull:0.3"])
def test_a_window_has_its_rate_whatever_the_shape(arrivals: str) -> None:
    clients = [client(n, [1.0, 0.0, 0.25, 1.0], parse_arrivals(arrivals), lengths=9) for n in range(40)]
    requests = list(servegen(clients, duration_s=2400, seed=3))
    windows = Counter(request.at // (600 * S) for request in requests)
    assert windows[1] == 0
    counts = [windows[n] / (40 * 600) for n in (0, 2, 3)]
    assert counts == pytest.approx(
        [1.0, 0.25, 1.0], rel=0.1
    )  # a fresh start in each window would add 17 requests to each of 40 x 3


def test_clients_are_tenants_with_an_adapter_each_and_in_order_of_time() -> None:
    clients = [client(3, [0.2, 0.2], lengths=7), client(12, [0.1, 0.1])]
    requests = list(servegen(clients, start_s=300, duration_s=600, rate_scale=2.0, seed=1))
    assert {(request.tenant, request.adapter) for request in requests} == {("client-3", "a3"), ("client-12", "a12")}
    assert all(a.at <= b.at for a, b in pairwise(requests))
    assert requests[0].at >= 0
    assert requests[-1].at < 600 * S
    assert len(requests) == pytest.approx(600 * 0.3 * 2, rel=0.2)
    assert {request.prompt_tokens for request in requests} == {7}


def test_lengths_change_with_their_window() -> None:
    parts = tuple(
        Lengths(start, parse_lengths(str(tokens)), parse_lengths("1"), 99)
        for start, tokens in ((0.0, 5), (600.0, 6), (1200.0, 7))
    )
    changing = client(1, [1.0, 1.0, 0.0, 1.0])._replace(lengths=parts)
    found = {(r.at // (600 * S), r.prompt_tokens) for r in servegen([changing], duration_s=2400, seed=1)}
    assert found == {(0, 5), (1, 6), (3, 7)}


def test_the_published_clients_give_their_published_counts() -> None:
    clients = read_clients(DATA / "servegen")
    assert [(c.number, len(c.windows), len(c.lengths)) for c in clients] == [(20, 40, 0), (57, 40, 2), (116, 40, 0)]
    requests = list(servegen(clients, duration_s=40 * 600, seed=1))
    counted = Counter(request.tenant for request in requests)
    assert counted.keys() == {"client-20", "client-57"}
    assert counted["client-20"] == pytest.approx(6584, rel=0.05)
    assert counted["client-57"] == pytest.approx(5145, rel=0.05)


def test_a_client_without_lengths_borrows_them_and_given_ones_replace_all() -> None:
    clients = read_clients(DATA / "servegen")
    own = {r.prompt_tokens for r in servegen(clients, duration_s=6000, seed=1) if r.tenant == "client-57"}
    borrowed = {r.prompt_tokens for r in servegen(clients, duration_s=6000, seed=1) if r.tenant == "client-20"}
    assert len(own & borrowed) > 10
    fixed = (parse_lengths("5"), parse_lengths("6"))
    given = list(islice(servegen(clients, duration_s=6000, seed=1, lengths=fixed), 50))
    assert {(r.prompt_tokens, r.output_tokens) for r in given} == {(5, 6)}
    with pytest.raises(ValueError, match="no client here has published lengths"):
        list(servegen([client(1, [1.0, 1.0])], duration_s=60, seed=1))


def test_lengths_are_borrowed_of_a_window_that_was_seen_with_many() -> None:
    idle = client(1, [0.0, 0.0], lengths=7)
    idle = idle._replace(lengths=(idle.lengths[0]._replace(values=19),))
    seen = client(2, [0.0, 0.0], lengths=9)
    seen = seen._replace(lengths=(seen.lengths[0]._replace(values=20),))
    for seed in range(5):
        found = {r.prompt_tokens for r in servegen([client(3, [1.0, 1.0]), idle, seen], duration_s=60, seed=seed)}
        assert found == {9}
    assert {r.prompt_tokens for r in servegen([client(3, [1.0, 1.0]), idle], duration_s=60, seed=1)} == {7}


def test_a_published_length_of_nothing_is_one_token(tmp_path: Path) -> None:
    (tmp_path / "chunk-5-trace.csv").write_text("0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n", encoding="utf-8")
    parts = '{"0": {"input_tokens": "{0: 0.5, 3: 0.5}", "output_tokens": "{2: 1.0}"}}'
    (tmp_path / "chunk-5-dataset.json").write_text(parts, encoding="utf-8")
    assert {r.prompt_tokens for r in servegen(read_clients(tmp_path), duration_s=60, seed=1)} == {1, 3}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "needs two windows"),
        ("0,1,1,Gamma,1,1\n", "needs two windows"),
        ("0,1,1,Gamma,1,1\n600,1,1\n", "row 2: not start"),
        ("0,1,1,Gamma,1,1\n600,-1,1,Gamma,1,1\n", "row 2: .*-1 requests/s"),
        ("0,1,1,Gamma,1,1\n600,nan,1,Gamma,1,1\n", "row 2: .*nan requests/s"),
        ("0,1,1,Gamma,1,1\n600,1,1,,0,0\n", "row 2: .*neither Gamma nor Weibull"),
        ("0,1,1,Gamma,1,1\n600,1,1,Gamma,nan,1\n", "row 2: .*shape nan"),
        ("0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n1800,1,1,Gamma,1,1\n", "row 3: begins at 1800 s"),
        ("600,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", "needs two windows or more, in order"),
        ("0,1,1,Gamma,1,1\n600,1,1,\xe9,1,1\n", "row 2"),
    ],
)
def test_a_bad_client_is_refused_with_file_and_row(tmp_path: Path, rows: str, said: str) -> None:
    (tmp_path / "chunk-5-trace.csv").write_text(rows, encoding="utf-8")
    with pytest.raises(InputFileError, match=f"chunk-5-trace.csv: {said}"):
        read_clients(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"0": {"input_tokens": "{1: 1.0}"}}',
        '{"x": {"input_tokens": "{1: 1.0}", "output_tokens": "{1: 1.0}"}}',
        '{"nan": {"input_tokens": "{1: 1.0}", "output_tokens": "{1: 1.0}"}}',
        '{"0": {"input_tokens": "__import__(\'os\')", "output_tokens": "{1: 1.0}"}}',
        '{"0": {"input_tokens": "{1: -1.0}", "output_tokens": "{1: 1.0}"}}',
        '{"0": {"input_tokens": "{1: 0.0}", "output_tokens": "{1: 1.0}"}}',
        '{"0": {"input_tokens": "{1: 1.0.0}", "output_tokens": "{1: 1.0}"}}',
    ],
)
def test_bad_lengths_are_refused_and_never_evaluated(tmp_path: Path, text: str) -> None:
    (tmp_path / "chunk-5-trace.csv").write_text("0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n", encoding="utf-8")
    (tmp_path / "chunk-5-dataset.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputFileError, match=r"chunk-5-dataset\.json"):
        read_clients(tmp_path)


def test_a_folder_without_clients_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputFileError, match=r"chunk-N|cannot be read"):
            read_clients(folder)
