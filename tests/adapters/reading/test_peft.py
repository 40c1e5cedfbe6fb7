"""``adapter_config.json``: what is read, what is refused, and each module's rank and scaling."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from loraledger.adapters.reading.peft import PeftConfig, read_config
from loraledger.errors import InputFileError

BASE: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"]}


def read(**changes: object) -> PeftConfig:
    return read_config(json.dumps({**BASE, **changes}).encode())


def refused(**changes: object) -> str:
    with pytest.raises(InputFileError) as caught:
        read(**changes)
    return caught.value.message


def test_three_fields_are_enough() -> None:
    config = read()
    assert (config.rank, config.alpha, config.target_modules, config.max_rank) == (8, 16.0, ("q_proj", "v_proj"), 8)
    assert (config.bias, config.init, config.peft_type, config.base_claim, config.unknown) == (
        "none",
        True,
        None,
        None,
        (),
    )
    assert not any((config.use_rslora, config.use_dora, config.lora_bias, config.activated, config.block_diagonal))
    assert not any((config.trainable_tokens, config.layer_replication, config.quantized))


def test_null_stands_for_any_optional_field() -> None:
    optional = (
        "rank_pattern alpha_pattern modules_to_save target_parameters bias init_lora_weights use_rslora use_dora lora_bias"
        " trainable_token_indices layer_replication alora_invocation_tokens use_bdlora use_qalora peft_type task_type"
        " base_model_name_or_path peft_version loftq_config"
    )
    assert read(**dict.fromkeys(optional.split())) == read()


def test_every_variant_is_seen() -> None:
    config = read(
        use_rslora=True, use_dora=True, lora_bias=True, use_qalora=True, use_bdlora={"nblocks": 2}, bias="lora_only",
        trainable_token_indices=[1, 2], layer_replication=[[0, 4]], alora_invocation_tokens=[1], init_lora_weights="pissa",
        peft_type="LoRA", modules_to_save=["lm_head", "embed_tokens"], target_parameters=["mlp.experts.down_proj"],
    )  # fmt: skip
    assert all((config.use_rslora, config.use_dora, config.lora_bias, config.quantized, config.block_diagonal))
    assert all((config.trainable_tokens, config.layer_replication, config.activated))
    assert (config.bias, config.init, config.peft_type) == ("lora_only", "pissa", "LORA")
    assert config.modules_to_save == ("embed_tokens", "lm_head")
    assert config.target_parameters == ("mlp.experts.down_proj",)
    assert read(trainable_token_indices={"embed_tokens": [1]}).trainable_tokens


def test_unknown_fields_are_listed_when_they_are_set_to_something() -> None:
    config = read(
        field_of_2027={"x": 1}, zero=0, a=None, b=False, c="", d=[], e={}, enable_lora=None, merge_weights=False
    )
    assert config.unknown == ("field_of_2027", "zero")
    assert read(**{"\x1b[2J": 1}).unknown == (ascii("\x1b[2J"),)
    assert (
        read(enable_lora=[True], fan_in_fan_out=True, lora_dropout=0.1, qalora_group_size=16, revision="x").unknown
        == ()
    )


def test_only_targets_elsewhere_make_an_empty_list_of_modules_right() -> None:
    assert read(target_modules=[], target_parameters=["mlp.experts.down_proj"]).target_modules == ()
    assert "target_modules is empty" in refused(target_modules=[])
    assert read(target_modules=None).target_modules is None
    assert read(target_modules="all-linear").target_modules == "all-linear"


def test_missing_fields_are_named_and_another_method_is_named_instead() -> None:
    with pytest.raises(InputFileError, match="lacks r, target_modules: the engine needs them"):
        read_config(b'{"peft_type": "LORA", "lora_alpha": 16}')
    with pytest.raises(InputFileError, match="is an adapter of type 'IA3', not LoRA"):
        read_config(b'{"peft_type": "ia3", "target_modules": ["k_proj"]}')
    assert read(peft_type="ADALORA").peft_type == "ADALORA"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r is 0 and must be a whole number of 1 or more"),
        ({"r": True}, "r is True"),
        ({"r": 8.0}, "r is 8.0"),
        ({"r": 10**400}, "r is 1000"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] is 0"),
        ({"rank_pattern": {"q_proj": 8.0}}, "rank_pattern['q_proj'] is 8.0"),
        ({"rank_pattern": [8]}, "rank_pattern must map"),
        ({"rank_pattern": {"(": 8}}, "rank_pattern: '(' is not accepted"),
        ({"alpha_pattern": {"(": 8}}, "alpha_pattern: '(' is not accepted"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj'] is None"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"target_modules": [""]}, "target_modules must be a list"),
        ({"target_modules": ["a\n"]}, "target_modules must be a list"),
        ({"target_modules": True}, "target_modules must be a list"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list"),
        ({"target_parameters": {"a": 1}}, "target_parameters must be a list"),
        ({"bias": False}, "bias is False"),
        ({"init_lora_weights": 1}, "init_lora_weights is 1"),
        ({"use_rslora": "true"}, "use_rslora is 'true'"),
        ({"use_dora": 1}, "use_dora is 1"),
        ({"lora_bias": []}, "lora_bias is []"),
        ({"use_qalora": {}}, "use_qalora is {}"),
        ({"use_bdlora": "yes"}, "use_bdlora is 'yes' and must be null, or an object"),
        ({"layer_replication": 3}, "layer_replication is 3 and must be null, or a list"),
        ({"alora_invocation_tokens": "x"}, "alora_invocation_tokens is 'x'"),
        ({"trainable_token_indices": 3}, "trainable_token_indices is 3 and must be null, or a list or an object"),
        ({"peft_type": ["LORA"]}, "peft_type is ['LORA']"),
        ({"base_model_name_or_path": "a\x00"}, "base_model_name_or_path is 'a\\x00' and must be printable text"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(changes: dict[str, object], message: str) -> None:
    assert message in refused(**changes)


def test_rank_and_scaling_follow_the_patterns() -> None:
    config = read(lora_alpha=16, rank_pattern={"q_proj": 32, r".*\.mlp\.down_proj": 4}, alpha_pattern={"q_proj": 128})
    assert config.max_rank == 32
    names = ("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj", "layers.0.mlp.up_proj", "down_proj")
    assert [config.rank_of(name) for name in names] == [32, 4, 8, 8]
    assert [config.scaling_of(name) for name in names] == [4.0, 4.0, 2.0, 2.0]


def test_rslora_divides_by_the_root_of_each_rank() -> None:
    config = read(r=64, lora_alpha=64, use_rslora=True, rank_pattern={"q_proj": 16})
    assert config.scaling_of("v_proj") == 8.0
    assert config.scaling_of("q_proj") == 16.0
    assert math.isclose(read(r=2, lora_alpha=3.5, use_rslora=True).scaling_of("x"), 3.5 / math.sqrt(2))


def test_pairs_on_experts_are_matched_by_the_names_of_their_parameters() -> None:
    config = read(rank_pattern={"gate_up_proj": 4, "down_proj": 2})
    assert config.rank_of("layers.0.mlp.experts.base_layer") == 4
    assert config.rank_of("layers.0.mlp.experts") == 2
    assert config.rank_of("layers.0.mlp.experts.3.down_proj") == 2
