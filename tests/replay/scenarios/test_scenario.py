from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

from e2e.fleet import write_adapters
from loraledger.adapters import Catalog
from loraledger.adapters.sizing.base import read_base
from loraledger.adapters.sizing.engine import EngineSettings
from loraledger.adapters.survey import kv_bytes_of, slots_of
from loraledger.config import load
from loraledger.errors import ConfigError, InputFileError
from loraledger.events import AdapterSpec
from loraledger.gateway.assemble import fleet_settings
from loraledger.kernel.policies import policy_names
from loraledger.replay.fleet.observation import Observation
from loraledger.replay.fleet.scenario import Scenario
from loraledger.replay.scenarios.axes import MAX_COMBINATIONS, Changes, combinations, keys, parse_axes
from loraledger.replay.scenarios.building import Ground, scenario, traded_blocks
from loraledger.replay.scenarios.parties import adapters_of, may_call, survey, tenants_of
from loraledger.replay.scenarios.profiles import DEFAULT, MAX_BYTES, parse_profile, read_profile, shipped
from loraledger.replay.scenarios.unfit import Unfit, unfit_of
from loraledger.replay.traces.trace import Adapter, Header, Request, Trace, write_trace
from loraledger.twin.calibrated import Calibrated
from loraledger.twin.profile import TwinProfile

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "head_dim": 128,
}
SLOT, BLOCK = 369_426_432, 2_097_152
MEASURED = Calibrated(
    name="lab",
    engine="vllm",
    engine_version="0.32.0",
    model="m",
    device="d",
    date="2026-11-01",
    source="a test",
    profile=TwinProfile(slots=4, host_entries=12, max_rank=16, max_seqs=64, kv_blocks=1_000),
    block_bytes=1_000,
    slot_bytes=7_777,
)


def replica(name: str = "r1", **fields: Any) -> dict[str, Any]:
    return {"name": name, "url": f"http://127.0.0.1:{1000 + int(name[1:])}", "slots": 4, **fields}


def ground(
    tmp_path: Path,
    *replicas: dict[str, Any],
    profile: Calibrated | None = None,
    specs: tuple[AdapterSpec, ...] = (),
    keep_kv: bool = False,
    engine_version: str | None = None,
    **sections: Any,
) -> Ground:
    data = {
        "base": {"names": ["base"]},
        "replicas": list(replicas) or [replica()],
        "tenants": [{"name": "acme", "key_hashes": ["0" * 64], "adapters": ["*"]}],
    }
    path = tmp_path / "loraledger.yaml"
    path.write_text(json.dumps(data | sections), encoding="utf-8")
    loaded = load(path, env={})
    fleet = fleet_settings(loaded.settings, Catalog((), (), ()))
    return Ground(
        settings=loaded.settings,
        fleet=msgspec.structs.replace(fleet, adapters=specs),
        written=lambda index, name: loaded.tree.origin_of(("replicas", index, name)).kind != "default",
        profile=profile or read_profile(DEFAULT),
        chosen=profile is not None,
        read=read_profile,
        observation=Observation(),
        keep_kv=keep_kv,
        engine_version=engine_version,
    )


def changed(*texts: str, policies: tuple[str, ...] = ()) -> Changes:
    (found,) = combinations(parse_axes(policies, texts), "bounded-affinity")
    return found


def ranking(folder: Path, *pins: tuple[str, str]) -> Path:
    """A file that ranks ``pins``."""
    path = folder / f"{'-'.join(adapter for _, adapter in pins)}.json"
    listed = [{"replica": where, "adapter": adapter} for where, adapter in pins]
    path.write_text(json.dumps({"schema_version": 1, "kind": "pins", "pins": listed}), encoding="utf-8")
    return path


def only(built: Scenario) -> TwinProfile:
    (profile,) = built.profiles.values()
    return profile


# --- what is varied ---------------------------------------------------------------------------------------------------


def test_every_combination_is_there_once_with_the_last_axis_fastest() -> None:
    axes = parse_axes(["round-robin", "bounded-affinity"], ["slots=16,32", "speed=2"])
    assert [changes.label for changes in combinations(axes, "bounded-affinity")] == [
        "policy=round-robin slots=16 speed=2",
        "policy=round-robin slots=32 speed=2",
        "policy=bounded-affinity slots=16 speed=2",
        "policy=bounded-affinity slots=32 speed=2",
    ]


def test_nothing_varied_is_one_run_as_configured() -> None:
    (found,) = combinations(parse_axes([], []), "bounded-affinity")
    assert (found.label, found.values) == ("as configured", {})


def test_a_parameter_is_left_out_of_policies_that_lack_it() -> None:
    axes = parse_axes(["round-robin", "bounded-affinity"], ["policy.tie_ms=1,2"])
    labels = [changes.label for changes in combinations(axes, "round-robin")]
    assert labels == [
        "policy=round-robin",
        "policy=bounded-affinity policy.tie_ms=1",
        "policy=bounded-affinity policy.tie_ms=2",
    ]
    with pytest.raises(
        ValueError,
        match=r"^--set policy\.tie_ms: no policy that runs has this parameter: give --policy one of .*bounded-affinity",
    ):
        combinations(parse_axes([], ["policy.tie_ms=1"]), "round-robin")


def test_more_combinations_than_the_limit_are_refused() -> None:
    counts = ",".join(str(n) for n in range(1, 18))
    with pytest.raises(
        ValueError, match=r"^--policy and --set span 17 x 17 = 289 combinations, limit 256: sweep fewer"
    ):
        combinations(parse_axes([], [f"slots={counts}", f"max_seqs={counts}"]), "round-robin")
    assert MAX_COMBINATIONS == 256


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("slots", r"^--set slots is not KEY=VALUE\[,VALUE\.\.\.\], such as slots=4,8$"),
        ("slots=", "is not KEY=VALUE"),
        ("slots=0", "^--set slots=0: a whole number from 1 to 1,000,000,000 is wanted$"),
        ("slots=-3", "--set slots=-3: a whole number from 1"),
        ("slots=--3", "a whole number"),
        ("slots=1.5", "a whole number"),
        ("slots=9999999999999999999", "a whole number"),
        ("slots=4,4", "^--set slots=4 is there twice: list each value once$"),
        ("slot=4", "did you mean 'slots'"),
        ("kv_block=4", "did you mean 'kv_blocks'"),
        ("policy=round_robin", "did you mean 'round-robin'"),
        ("policy.tie_sm=1", "did you mean 'policy.tie_ms'"),
        ("policy.tie_ms=nan", r"^--set policy\.tie_ms=nan: a finite number is wanted, such as"),
        (
            "foo=1",
            r"^--set foo: no such key; known: policy, profile, .*, slots, .*, tenants\.\*, limits\.\*, policy\.\*$",
        ),
        ("tenants.zzzzzzzzzzzz=1", r"; known: tenants\.concurrency, tenants\.queue, tenants\.queue_deadline$"),
        ("limits.loads_per_minut=1", "did you mean 'limits.loads_per_minute'"),
        ("limits.park=10", "has no unit"),
        ("limits.retry_ratio=2", "from 0 to 1"),
        ("limits.retry_ratio=x", "from 0 to 1"),
        ("max_rank=24", "takes 1, 8, 16"),
        ("max_rank=x", "takes 1, 8, 16"),
        ("speed=0", "a number or a fraction from 1/10000 to 10,000"),
        ("speed=1/0", "a number or a fraction"),
        ("speed=1e999999999", "a number or a fraction"),
        ("replicas=5000", "from 1 to 1,024"),
        ("profile=", "is not KEY=VALUE"),
        ("\u0663=1", "no such key"),
        ("slots=\u0663", "a whole number"),
    ],
)
def test_a_bad_change_is_refused_with_its_key_and_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_axes([], [text])


def test_an_axis_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="slots is given twice"):
        parse_axes([], ["slots=1", "slots=2"])
    with pytest.raises(ValueError, match="policy is given twice"):
        parse_axes(["round-robin"], ["policy=least-loaded"])


def test_speeds_are_exact() -> None:
    assert changed("speed=1.5").speed == Fraction(3, 2)
    assert changed("speed=4/3").speed == Fraction(4, 3)
    assert changed().speed == 1


# --- the fleet --------------------------------------------------------------------------------------------------------


def test_without_changes_the_kernel_is_told_what_a_gateway_would_be(tmp_path: Path) -> None:
    priors = {"load_bytes_per_s": "1GB/s", "itl": "12ms"}
    one = replica(host_entries=9, max_rank=32, max_seqs=77, kv_tokens=160_000, priors=priors)
    base = ground(tmp_path, one, replica("r2"), policy={"name": "least-loaded"}, limits={"park": "3m"})
    built = scenario(base, Changes())
    assert built.settings == base.fleet
    assert built.settings.replicas[0].load_bytes_per_s == 10**9
    profile = built.profiles["r1"]
    assert (profile.slots, profile.host_entries, profile.max_rank, profile.max_seqs) == (4, 9, 32, 77)
    assert profile.kv_tokens == 160_000


def test_sizes_that_the_settings_leave_out_are_those_of_the_chosen_profile_and_this_is_said(tmp_path: Path) -> None:
    built = scenario(ground(tmp_path, replica(), replica("r2"), profile=MEASURED), Changes())
    (profile, _), spec = built.profiles.values(), built.settings.replicas[0]
    assert (profile.slots, profile.host_entries, profile.max_rank, profile.max_seqs) == (4, 12, 16, 64)
    assert (spec.slots, spec.host_entries, spec.max_rank, spec.max_seqs, spec.max_in_flight) == (4, 12, 16, 64, 128)
    assert profile.kv_blocks == 1_000
    assert "host_entries is not in the settings: 12, from profile lab (replicas r1, r2)" in built.warnings
    assert any("kv_tokens is not in the settings" in text and "1,000 blocks (rep" in text for text in built.warnings)
    assert not any("no profile was given" in text for text in built.warnings)


def test_the_default_profile_is_called_a_guess(tmp_path: Path) -> None:
    built = scenario(ground(tmp_path), Changes())
    assert only(built).step_base_ps == TwinProfile().step_base_ps
    assert (only(built).max_seqs, only(built).host_entries) == (256, 4)
    assert any("no profile was given" in text for text in built.warnings)
    assert any("24,576 blocks, a guess" in text for text in built.warnings)


@pytest.mark.parametrize(
    ("version", "said"), [("0.32.0", None), ("0.33.1", "is of vllm 0.32.0, the fleet runs 0.33.1"), (None, None)]
)
def test_a_profile_of_another_engine_version_is_a_warning(
    tmp_path: Path, version: str | None, said: str | None
) -> None:
    built = scenario(ground(tmp_path, profile=MEASURED, engine_version=version), Changes())
    assert [text for text in built.warnings if "fleet runs" in text] == (
        [] if said is None else [f"profile lab {said}: calibrate again"]
    )


def test_replicas_are_the_first_ones_then_clones_of_the_first(tmp_path: Path) -> None:
    base = ground(tmp_path, replica("r1", slots=3), replica("r2"), replica("r3"))
    assert [spec.name for spec in scenario(base, changed("replicas=2")).settings.replicas] == ["r1", "r2"]
    grown = scenario(base, changed("replicas=5"))
    assert [spec.name for spec in grown.settings.replicas] == ["r1", "r2", "r3", "r1+2", "r1+3"]
    assert grown.profiles["r1+3"] == grown.profiles["r1"] != grown.profiles["r2"]
    assert grown.settings.replicas[4].slots == 3


def test_sizes_are_changed_in_the_twin_and_in_what_the_kernel_is_told(tmp_path: Path) -> None:
    built = scenario(
        ground(tmp_path), changed("slots=6", "host_entries=50", "max_seqs=40", "token_budget=512", "kv_blocks=99")
    )
    profile, spec = only(built), built.settings.replicas[0]
    assert (profile.slots, profile.host_entries, profile.max_seqs, profile.token_budget) == (6, 50, 40, 512)
    assert profile.kv_blocks == 99
    assert (spec.slots, spec.host_entries, spec.max_seqs, spec.max_in_flight) == (6, 50, 40, 80)


def test_host_entries_follow_slots_only_where_nobody_set_them(tmp_path: Path) -> None:
    assert only(scenario(ground(tmp_path), changed("slots=20"))).host_entries == 20
    with pytest.raises(ConfigError, match=r"slots=20: replica r1: host_entries is 8: must be at least slots \(20\)"):
        scenario(ground(tmp_path, replica(host_entries=8)), changed("slots=20"))


def test_a_policy_that_is_tried_has_its_own_parameters(tmp_path: Path) -> None:
    base = ground(tmp_path, policy={"name": "bounded-affinity", "params": {"tie_ms": 7.0}})
    assert scenario(base, Changes()).settings.params == {"tie_ms": 7.0}
    assert scenario(base, changed("policy.growth_share=0.1")).settings.params == {"tie_ms": 7.0, "growth_share": 0.1}
    other = scenario(base, changed(policies=("round-robin",))).settings
    assert (other.policy, other.params) == ("round-robin", {})


def test_limits_of_gateway_and_tenants_can_be_tried(tmp_path: Path) -> None:
    changes = changed(
        "limits.loads_per_minute=7", "limits.park=2s", "tenants.concurrency=3", "tenants.queue_deadline=1s"
    )
    settings = scenario(ground(tmp_path), changes).settings
    assert (settings.limits.loads_per_minute, settings.limits.park) == (7, 2 * 10**9)
    assert [(t.name, t.concurrency, t.queue, t.queue_deadline) for t in settings.tenants] == [("acme", 3, 256, 10**9)]


@pytest.mark.parametrize("key", [key for key in keys() if not key.startswith("policy.")])
def test_every_key_changes_something(tmp_path: Path, key: str) -> None:
    values = {"policy": "least-loaded", "profile": DEFAULT, "max_rank": "32", "limits.retry_ratio": "0.5"}
    times = ("queue_deadline", "load_backoff", "load_backoff_max", "park")
    text = values.get(key, "3s" if key.rpartition(".")[2] in times else "65")
    first, second = (ranking(tmp_path, ("r1", name)) for name in "ab")
    text, *more = {"residency": ("ranked", f"pins={first}"), "pins": (str(second), "residency=ranked")}.get(
        key, (text,)
    )
    before = ["residency=ranked", f"pins={first}"] if key == "pins" else []
    base = ground(tmp_path, replica(), replica("r2"), profile=MEASURED)
    plain, built = (
        msgspec.structs.replace(scenario(base, changes), label="", warnings=())
        for changes in (changed(*before), changed(f"{key}={text}", *more))
    )
    assert built != plain


def test_a_ranking_is_that_of_the_settings_unless_another_is_tried(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "policy": {"residency": "ranked", "pins": str(ranking(tmp_path, ("r1", "a")))},
        "adapters": {"folder": "adapters"},
    }
    base = ground(tmp_path, replica(), replica("r2"), **sections)
    own = scenario(base, Changes()).settings
    assert (own.residency, own.pins) == ("ranked", (("r1", "a"),))
    lru = scenario(base, changed("residency=lru")).settings
    assert (lru.residency, lru.pins) == ("lru", ())
    other = ranking(tmp_path, ("r2", "b"), ("r1", "c"))
    assert scenario(base, changed(f"pins={other}")).settings.pins == (("r2", "b"), ("r1", "c"))
    assert scenario(base, changed(f"pins={other}", "replicas=1")).settings.pins == (("r2", "b"), ("r1", "c"))


def test_a_ranking_that_the_settings_do_not_use_is_read_when_ranked_is_tried(tmp_path: Path) -> None:
    base = ground(tmp_path, policy={"pins": str(ranking(tmp_path, ("r1", "a")))})
    assert scenario(base, Changes()).settings.residency == "lru"
    assert scenario(base, changed("residency=ranked")).settings.pins == (("r1", "a"),)


def test_ranked_without_a_ranking_that_fits_is_refused(tmp_path: Path) -> None:
    base = ground(tmp_path)
    with pytest.raises(ConfigError, match=r"^residency=ranked: residency=ranked takes a ranking: give --set pins=FILE"):
        scenario(base, changed("residency=ranked"))
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        scenario(base, changed("residency=ranked", f"pins={tmp_path / 'nowhere.json'}"))
    strange = ranking(tmp_path, ("r7", "a"))
    with pytest.raises(ConfigError, match=r"pins\[0\]: 'r7' is no replica; known: r1"):
        scenario(base, changed("residency=ranked", f"pins={strange}"))
    with pytest.raises(ValueError, match=r"^--set residency=best: lru or ranked is wanted$"):
        changed("residency=best")


def test_where_a_ranking_comes_to_nothing_a_warning_says_so(tmp_path: Path) -> None:
    changes = changed("residency=ranked", f"pins={ranking(tmp_path, ('r1', 'a'))}", "replicas=2")
    base = ground(tmp_path)
    assert "residency=ranked pins nothing where no probe is seen: give --probe to replay it" in (
        scenario(base, changes).warnings
    )
    probed = scenario(replace(base, observation=Observation(probe=True)), changes)
    assert "the ranking says nothing of r1+2: LRU stays there" in probed.warnings
    assert not any("no probe" in text for text in probed.warnings)


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_can_be_tried(tmp_path: Path, policy: str) -> None:
    assert scenario(ground(tmp_path), changed(policies=(policy,))).settings.policy == policy


def test_what_lies_between_gateway_and_engine_is_the_profiles(tmp_path: Path) -> None:
    far = msgspec.structs.replace(MEASURED, boundary_ps=7_000_999, boundary_per_seq_ps=2_000, load_call_ps=5_000)
    base = ground(tmp_path, profile=far)
    seen = scenario(base, Changes()).observation
    assert (seen.boundary, seen.boundary_per_seq, seen.load_call) == (7_000, 2, 5)
    assert seen.scrape_interval == base.observation.scrape_interval


# --- slots are paid in KV ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3, 4, 5, 17, 100])
def test_slots_are_paid_in_kv_to_the_byte_by_the_profile(tmp_path: Path, slots: int) -> None:
    base = ground(tmp_path, replica(slots=4, max_rank=16), profile=MEASURED)
    blocks = only(scenario(base, changed(f"slots={slots}"))).kv_blocks
    before, after = 1_000 * 1_000 + 4 * 7_777, slots * 7_777
    assert blocks * 1_000 + after <= before < (blocks + 1) * 1_000 + after


@pytest.mark.parametrize("slots", [1, 8, 33])
def test_slots_are_paid_in_kv_to_the_byte_by_the_base_model(tmp_path: Path, slots: int) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    one = replica(slots=8, kv_tokens=16 * 20_000)
    base = ground(tmp_path, one, profile=MEASURED, base={"names": ["base"], "path": str(tmp_path / "base")})
    engine = EngineSettings(max_loras=8, max_lora_rank=64)
    model = read_base(tmp_path / "base")
    cost, block = slots_of(model, engine), 16 * kv_bytes_of(model, engine)
    assert cost is not None
    assert (cost.one.total, block) == (SLOT, BLOCK)
    built = scenario(base, changed(f"slots={slots}", "max_rank=64"))
    assert only(built).kv_blocks == 20_000 + (8 - slots) * SLOT // BLOCK
    assert built.settings.replicas[0].kv_tokens == only(built).kv_tokens
    assert built.slot_bytes == {"r1": SLOT}


def test_a_smaller_max_rank_gives_kv_back(tmp_path: Path) -> None:
    base = ground(tmp_path, replica(max_rank=16), profile=MEASURED)
    assert only(scenario(base, changed("max_rank=8"))).kv_blocks == (1_000_000 + 4 * 7_777 - 4 * 7_777 // 2) // 1_000


def test_kv_of_a_profile_is_that_beside_its_own_slots(tmp_path: Path) -> None:
    built = scenario(ground(tmp_path, replica(slots=10, max_rank=16), profile=MEASURED), Changes())
    assert only(built).kv_blocks == (1_000_000 - 6 * 7_777) // 1_000


def test_kv_can_be_kept_or_given(tmp_path: Path) -> None:
    kept = ground(tmp_path, replica(), profile=MEASURED, keep_kv=True)
    assert only(scenario(kept, changed("slots=64"))).kv_blocks == 1_000
    assert only(scenario(ground(tmp_path, profile=MEASURED), changed("slots=64", "kv_blocks=5"))).kv_blocks == 5


def test_slots_of_unknown_cost_are_refused_with_the_remedy(tmp_path: Path) -> None:
    unknown = msgspec.structs.replace(MEASURED, slot_bytes=None)
    with pytest.raises(
        ConfigError, match=r"slots=5: replica r1: what slots cost in KV is not known: set base\.path.*--keep-kv"
    ):
        scenario(ground(tmp_path, profile=unknown), changed("slots=5"))
    beside = scenario(ground(tmp_path, replica(slots=9), profile=unknown), Changes())
    assert only(beside).kv_blocks == 1_000
    assert any("counted beside 4 of rank 16 and is taken as it is" in text for text in beside.warnings)


def test_slots_that_leave_no_kv_are_refused_with_how_many_would(tmp_path: Path) -> None:
    base = ground(tmp_path, replica(max_rank=16), profile=MEASURED)
    with pytest.raises(
        ConfigError, match=r"slots=133: replica r1: 133 slots of rank 16 leave no KV: 132 leave one block"
    ):
        scenario(base, changed("slots=133"))
    assert only(scenario(base, changed("slots=132"))).kv_blocks == 4


def test_a_pool_without_slots_has_none_to_change(tmp_path: Path) -> None:
    unified = msgspec.structs.replace(MEASURED, profile=TwinProfile(layout="unified", kv_blocks=500))
    assert only(scenario(ground(tmp_path, profile=unified), Changes())).kv_blocks == 500
    with pytest.raises(ConfigError, match="has one pool and no slots to change"):
        scenario(ground(tmp_path, profile=unified), changed("slots=8"))


def test_traded_blocks_keep_the_memory_and_round_down() -> None:
    assert traded_blocks(100, 16, (4, Fraction(10)), (4, Fraction(10))) == 100
    assert traded_blocks(100, 16, (4, Fraction(10)), (5, Fraction(10))) == 99
    assert traded_blocks(100, 16, (4, Fraction(10)), (0, Fraction(10))) == 102
    assert traded_blocks(1, 16, (0, Fraction(10)), (2, Fraction(10))) < 1


def test_what_an_engine_would_not_start_with_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"max_seqs=5000: replica r1: token_budget is 2048: must be at least max_seqs"
    ):
        scenario(ground(tmp_path), changed("max_seqs=5000"))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (("slots=9",), "that is from the settings: give --set host_entries=N as well"),
        (("slots=9", "host_entries=8"), "give --set host_entries another value"),
        (("max_seqs=5000",), "that is from profile lab: give --set token_budget=N as well"),
        (("max_seqs=99", "token_budget=99", "kv_blocks=1"), "profile lab does not go so far: take another one, or a smaller value"),
    ],
)  # fmt: skip
def test_the_remedy_is_where_the_size_came_from(tmp_path: Path, changes: tuple[str, ...], remedy: str) -> None:
    measured = msgspec.structs.replace(MEASURED.profile, decode_table=((1, 9, 9), (64, 9, 9)))
    lab = msgspec.structs.replace(MEASURED, profile=measured)
    with pytest.raises(ConfigError) as caught:
        scenario(ground(tmp_path, replica(host_entries=6, max_seqs=64), profile=lab), changed(*changes))
    assert caught.value.message.endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("config", "reason"),
    [(None, "config.json: No such file or directory"), ({**LLAMA, "architectures": ["Odd"]}, "Odd"), (LLAMA, None)],
)
def test_a_base_model_that_cannot_be_read_is_said_with_whose_bytes_are_used(
    tmp_path: Path, config: dict[str, object] | None, reason: str | None
) -> None:
    (tmp_path / "base").mkdir()
    if config is not None:
        (tmp_path / "base" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    unsized = msgspec.structs.replace(MEASURED, slot_bytes=None)
    for profile, instead in ((MEASURED, "are those of profile lab (m)"), (unsized, "are not known")):
        base = ground(
            tmp_path, replica(), replica("r2"), profile=profile, base={"names": ["b"], "path": str(tmp_path / "base")}
        )
        said = [text for text in scenario(base, Changes()).warnings if "base.path" in text]
        assert len(said) == (reason is not None)
        assert all(
            reason in text and text.endswith(f"; bytes of slots and KV blocks {instead}") for text in said if reason
        )


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_the_shipped_default_is_the_twins_own(tmp_path: Path) -> None:
    assert DEFAULT in shipped()
    assert read_profile(DEFAULT).profile == TwinProfile()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    engine = EngineSettings(max_lora_rank=TwinProfile().max_rank)
    model = read_base(tmp_path)
    found, slots = read_profile(DEFAULT), slots_of(model, engine)
    assert slots is not None
    assert (found.slot_bytes, found.block_bytes) == (slots.one.total, 16 * kv_bytes_of(model, engine))


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_profile_can_be_read_and_says_where_it_comes_from(name: str) -> None:
    found = read_profile(name)
    assert found.name == name
    assert found.source
    assert found.date


def _edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    document = msgspec.to_builtins(MEASURED)
    edit(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"[]", "object"),
        (b"\xff", "."),
        (b"[" * 100_000, "."),
        (_edited(lambda d: d.pop("profile")), "missing required field `profile`"),
        (_edited(lambda d: d.update(extra=1)), "unknown field `extra`"),
        (_edited(lambda d: d["profile"].update(slotz=1)), r"profile\.slotz: no such field; did you mean 'slots'"),
        (_edited(lambda d: d["profile"]["unified"].update(ordr="lifo")), r"profile\.unified\.ordr: no such field"),
        (_edited(lambda d: d["profile"].update(step_per_kv_token_ps=-3)), "step_per_kv_token_ps is -3: must not be negative"),
        (_edited(lambda d: d["profile"].update(slots=0)), "slots is 0: must be at least 1"),
        (_edited(lambda d: d["profile"].update(prefill_table=[[1, 9], [4096, 8]])), "negative slope between 1 and 4096"),
        (_edited(lambda d: d["profile"].update(kv_blocks=1.5)), "expected `int`"),
        (_edited(lambda d: d.update(loraledger_profile=2)), "loraledger_profile"),
    ],
)  # fmt: skip
def test_a_bad_profile_is_refused_with_the_term(data: bytes, reason: str) -> None:
    with pytest.raises(InputFileError, match=r"(?i)^profile x: .*" + reason):
        parse_profile("x", data)


def test_a_profile_that_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"did you mean 'llama-3\.1-8b-h100'"):
        read_profile("llama-3.1-8b-h10")
    for text in ("../../etc/passwd", str(tmp_path), "a\0b", "..", ""):
        with pytest.raises(InputFileError):
            read_profile(text)
    (tmp_path / "large.json").write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(InputFileError, match="over 4 MiB"):
        read_profile(str(tmp_path / "large.json"))


# --- who takes part ---------------------------------------------------------------------------------------------------


def trace_of(tmp_path: Path, requests: list[Request], *adapters: Adapter) -> Trace:
    path = tmp_path / "t.jsonl"
    header = Header(name="t", source="a test", licence="", adapters=adapters)
    write_trace(path, header, enumerate(requests, 2))
    return Trace(path)


def unfit(trace: Trace, scenarios: list[Scenario], *, skip: bool = False) -> Unfit:
    seen = survey(trace)
    return unfit_of(trace, seen.adapters, seen.most_tokens, scenarios, skip=skip)[0]


def asking(*adapters: str | None, tenant: str = "acme", prompt: int = 10) -> list[Request]:
    return [Request(n, tenant, adapter, prompt, 5) for n, adapter in enumerate(adapters)]


def test_only_adapters_that_are_asked_for_take_part(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, asking("b", None, "a"), Adapter("a", 8, 100), Adapter("b", 16, 200), Adapter("idle"))
    specs, warnings = adapters_of(trace, survey(trace), ground(tmp_path).settings)
    assert [(spec.name, spec.rank, spec.bytes, spec.replicas) for spec in specs] == [
        ("a", 8, 100, 0),
        ("b", 16, 200, 0),
    ]
    assert warnings == []
    assert len({spec.digest[:12] for spec in specs}) == 2


def test_an_adapter_of_unknown_size_is_refused_by_name_or_filled_in(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, asking("a", "b"), Adapter("a", 8, 100), Adapter("b", bytes=7))
    seen, settings = survey(trace), ground(tmp_path).settings
    with pytest.raises(InputFileError, match=r"t\.jsonl: row 1: rank of adapter 'b' .*: give --adapter-rank$"):
        adapters_of(trace, seen, settings)
    specs, warnings = adapters_of(trace, seen, settings, rank=32, size=999)
    assert [(spec.rank, spec.bytes) for spec in specs] == [(8, 100), (32, 7)]
    assert warnings == ["rank or bytes of 1 adapters are those of the options ('b')"]


def test_what_the_header_lacks_is_read_from_the_adapters_files(tmp_path: Path) -> None:
    paths = write_adapters(tmp_path / "adapters", ["a", "b"])
    trace = trace_of(
        tmp_path, asking("a", "b", "../adapters/b"), Adapter("a"), Adapter("b"), Adapter("../adapters/b", 1, 1)
    )
    listed = [{"name": "a", "path": str(paths["a"]), "pin": True}]
    settings = ground(tmp_path, adapters={"folder": str(tmp_path / "adapters"), "list": listed}).settings
    specs, warnings = adapters_of(trace, survey(trace), settings)
    size = (paths["b"] / "adapter_model.safetensors").stat().st_size
    assert [(spec.name, spec.bytes, spec.replicas) for spec in specs[:2]] == [("a", size, -1), ("b", size, 0)]
    assert warnings == []


def test_files_outside_of_the_adapter_folder_are_not_read(tmp_path: Path) -> None:
    paths = write_adapters(tmp_path / "elsewhere", ["a"])
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "a").symlink_to(paths["a"])
    trace = trace_of(tmp_path, asking("a"), Adapter("a"))
    settings = ground(tmp_path, adapters={"folder": str(tmp_path / "adapters")}).settings
    with pytest.raises(InputFileError, match="rank and bytes of adapter 'a' are neither"):
        adapters_of(trace, survey(trace), settings)


def test_a_pinned_adapter_takes_its_place_without_being_asked_for(tmp_path: Path) -> None:
    paths = write_adapters(tmp_path / "adapters", ["held"])
    listed = [
        {"name": "held", "path": str(paths["held"]), "replicas": 1},
        {"name": "gone", "path": str(tmp_path / "gone"), "pin": True},
    ]
    trace = trace_of(tmp_path, asking(None))
    specs, warnings = adapters_of(trace, survey(trace), ground(tmp_path, adapters={"list": listed}).settings)
    assert [(spec.name, spec.replicas) for spec in specs] == [("held", 1)]
    assert warnings == ["pinned adapter 'gone' takes no place: its files cannot be read here"]


def test_tenants_of_the_trace_alone_get_the_default_limits_and_this_is_said(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [*asking(None), *asking(None, tenant="zoo")])
    tenants, warnings = tenants_of(survey(trace), ground(tmp_path).fleet.tenants)
    assert [(spec.name, spec.concurrency) for spec in tenants] == [("acme", 64), ("zoo", 64)]
    (said,) = warnings
    assert said.startswith("1 of 2 tenants of the trace are not in the settings ('zoo')")


def test_requests_that_the_settings_would_not_let_in_are_counted_and_this_is_said(tmp_path: Path) -> None:
    paths = write_adapters(tmp_path / "adapters", ["own", "b"])
    settings = ground(
        tmp_path,
        tenants=[
            {"name": "acme", "key_hashes": ["0" * 64], "adapters": ["a*", "own"], "base": False},
            {"name": "bolt", "key_hashes": ["1" * 64], "adapters": []},
        ],
        adapters={"list": [{"name": "own", "path": str(paths["own"]), "tenants": ["bolt"]}]},
    ).settings
    may = may_call(settings)
    names = ("a1", "b", "own", None)
    assert [may("acme", name) for name in names] == [True, False, False, False]
    assert [may("bolt", name) for name in names] == [False, False, True, True]
    assert [may("stranger", name) for name in names] == [True] * 4
    trace = trace_of(tmp_path, asking(*names), *(Adapter(name, 8, 1) for name in names if name))
    seen = survey(trace, may=may)
    assert (seen.requests, seen.refused) == (4, 3)
    _, warnings = tenants_of(seen, ground(tmp_path).fleet.tenants)
    assert [text.partition(" are for")[0] for text in warnings] == ["3 of 4 requests"]
    assert tenants_of(survey(trace), ground(tmp_path).fleet.tenants)[1] == []


def test_skipping_what_is_unfit_says_how_much_and_for_which_run_and_refuses_to_play_nothing(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path, [*asking("wide", None, prompt=50), Request(9, "acme", None, 1_600, 2)], Adapter("wide", 128, 1)
    )
    seen = survey(trace)
    specs, _ = adapters_of(trace, seen, ground(tmp_path).settings)
    base = ground(tmp_path, replica(max_rank=64), specs=specs)
    sizes = ("kv_blocks=200", "kv_blocks=100", "kv_blocks=1")
    roomy, tight, none = (scenario(base, changed(size)) for size in sizes)
    found, (said,) = unfit_of(trace, seen.adapters, seen.most_tokens, [roomy, tight], skip=True)
    assert found == Unfit(frozenset({"wide"}), 1_601)
    assert said == (
        "--skip-unfit leaves out of every run, beside 1 requests that are played: 1 adapter larger than a slot ('wide': its "
        "rank 128 is above max_rank 64 of every replica in the run kv_blocks=200); 1 larger than all KV (all KV of a replica "
        "takes 1,601 in the run kv_blocks=100)"
    )
    with pytest.raises(
        InputFileError, match=r"t\.jsonl: --skip-unfit would leave no request: .*; 2 larger than all KV \(all"
    ):
        unfit_of(trace, seen.adapters, seen.most_tokens, [roomy, none], skip=True)
    assert unfit_of(trace, (), 5, [roomy], skip=True) == (Unfit(), [])


def test_a_request_larger_than_all_kv_is_refused_with_its_row_or_left_out(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path, [*asking(None, None), Request(5, "acme", None, 1_600, 2), Request(6, "acme", None, 1_600, 1)]
    )
    built = scenario(ground(tmp_path), changed("kv_blocks=100"))
    with pytest.raises(InputFileError, match=r"t\.jsonl: row 4: 1,602 tokens, all KV of a replica takes 1,601"):
        unfit(trace, [built])
    found = unfit(trace, [built, scenario(ground(tmp_path), changed("kv_blocks=200"))], skip=True)
    assert [found.reason(request) for request in trace] == [None, None, "larger than all KV", None]


def test_an_adapter_that_no_replica_takes_is_refused_with_its_row_or_left_out(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path, asking("ok", "wide", "fat"), Adapter("ok", 64, 1), Adapter("wide", 128, 1), Adapter("fat", 8, 10**9)
    )
    seen = survey(trace)
    specs, _ = adapters_of(trace, seen, ground(tmp_path).settings)
    built = scenario(ground(tmp_path, replica(max_rank=64), replica("r2", max_rank=8), specs=specs), Changes())
    with pytest.raises(
        InputFileError, match=r"t\.jsonl: row 3: adapter 'wide': its rank 128 is above max_rank 64 of every"
    ):
        unfit(trace, [built])
    assert unfit(trace, [built], skip=True).adapters == {"wide", "fat"}
    lean = trace_of(tmp_path, asking("ok", "fat"), Adapter("ok", 64, 1), Adapter("fat", 8, 10**9))
    with pytest.raises(
        InputFileError, match=r"row 3: adapter 'fat': its 954 MiB are more than a slot takes \(705 MiB\)"
    ):
        unfit(lean, [built])
