"""A configuration of ours is that of transformers' class, in all that plans read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING, GenerationMixin

from diskprefix.errors import ModelError
from diskprefix.runtime.files.checkpoint import read_config
from diskprefix.runtime.plan.families.decoder_options import padded_tokens, sees_pictures_whole, without_plan
from diskprefix.runtime.plan.families.type_table import TABLE, class_of, is_declared, options_of, unread_options
from diskprefix.runtime.plan.families.types.known_types import TYPES
from diskprefix.runtime.plan.model_config import ModelConfig
from tests.exactness.architectures import ARCHITECTURES
from tests.runtime.plan.option_table import KNOWN, WHOLES, WITHOUT_CLASS, text

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "n_embd": 64, "n_head": 4, "n_layer": 4}
OF_LAYERS = ("head_dim", "num_attention_heads", "num_key_value_heads")
LINEAR: dict[str, Any] = {"type": "linear", "factor": 2.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BY_KIND: dict[str, Any] = {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}}
NOT_COMPARED = {
    *("first_k_dense_replace", "full_attn_idxs", "gating", "layers_block_type", "rope_scaling", "rope_theta"),
    "sliding_window_pattern",
}
"""What only other options are made of."""
OLDER: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, {"rope_scaling": one, "rope_theta": 5e5})
        for name in ("llama", "qwen2", "deepseek_v3", "gpt_oss", "gpt_neox", "gemma3_text", "olmo3", "minimax_m2")
        for one in (None, LINEAR, YARN, LLAMA_3)
    ),
    *((name, {"rope_parameters": BY_KIND}) for name in ("gemma3_text", "olmo3", "mellum", "cohere_compass_text")),
    *((name, {"partial_rotary_factor": 0.75}) for name in ("glm", "phi", "stablelm", "bamba", "phi3", "qwen3_5_text")),
    *((name, {"sliding_window_pattern": 2}) for name in ("cohere2", "gemma3_text", "exaone4")),
    *((name, {"full_attention_interval": 2}) for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")),
    *((name, {"first_k_dense_replace": 2}) for name in ("axk1", "cohere2_moe", "exaone_moe", "kimi_linear")),
    *((name, {"use_sliding_window": True, "max_window_layers": 2}) for name in ("qwen2", "qwen3", "qwen2_moe")),
    ("axk1", {"moe_layer_freq": 2}),
    ("bamba", {"attn_layer_indices": [1, 3], "mamba_d_head": "auto", "mamba_n_heads": 8}),
    ("deepseek_v3", {"num_local_experts": 4}),
    ("gemma", {"hidden_act": "gelu"}),
    ("gemma4_text", {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 32}}}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 5e4}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": "auto"}),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 8, "full_attn_layers": [2, 4], "kda_layers": [1, 3]}}),
    ("lfm2", {"block_ff_dim": 48, "tie_embedding": False, "full_attn_idxs": [1]}),
    ("llama", {"layer_types": ["full_attention"] * 4}),
    ("mimo_v2_flash", {"sliding_window_size": 7, "routed_scaling_factor": None}),
    ("minimax_m2", {"rotary_dim": 8}),
    ("mistral", {"sliding_window": None, "head_dim": None}),
    ("nemotron_h", {"hybrid_override_pattern": "M*-E", "mamba_n_groups": 2, "mamba_conv_bias": False}),
    ("qwen2_vl_text", {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}),
    ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8}),
    ("step3p5", {"moe_layers_enum": "1,2", "attention_other_setting": {"num_attention_heads": 8}}),
    (
        "step3p5",
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "rope_theta": [1e4, 1e5] * 2, "sliding_window": 8},
    ),
]
"""What older configurations say, and what follows from it."""


def _said(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _said(one) for name, one in value.items() if name not in ("type", "max_position_embeddings")}
    return [_said(one) for one in value] if isinstance(value, list | tuple) else value


def assert_same(kind: str, given: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(given))
    require_same(ModelConfig.of({**given, "model_type": kind}), theirs)


def require_same(ours: ModelConfig, theirs: Any) -> None:
    theirs.allow_global_per_layer_attribute_access, missing = True, object()
    # Theirs keeps what no module of its type reads.
    named = KNOWN - NOT_COMPARED - ours._undeclared.keys()
    expected = {name: _said(getattr(theirs, name, missing)) for name in named}
    if "num_attention_heads" in expected and expected["num_attention_heads"] is not missing:
        # Where nothing says them.
        expected["head_dim"] = expected["head_dim"] or theirs.hidden_size // theirs.num_attention_heads
        if expected["num_key_value_heads"] is None:
            expected["num_key_value_heads"] = theirs.num_attention_heads
    found = {name: _said(getattr(ours, name, missing)) for name in expected}
    for name in ("mlp_only_layers", "rope_parameters"):
        expected[name], found[name] = (one[name] or None for one in (expected, found))
    assert found == expected
    assert without_plan(ours) == without_plan(theirs)
    for number in range(theirs.num_hidden_layers if theirs.is_heterogeneous else 0):
        for name in OF_LAYERS:
            its_own = (getattr(one.per_layer_config[number], name) for one in (ours, theirs))
            assert len({*its_own}) == 1


def test_the_table_is_that_of_the_classes() -> None:
    assert TABLE.read_text(encoding="utf-8") == text(), "python -m tests.runtime.plan.option_table"


@pytest.mark.parametrize("kind", sorted(TYPES.keys() - WITHOUT_CLASS))
def test_defaults_are_those_of_the_class(kind: str) -> None:
    assert_same(kind, {})


@pytest.mark.cases(55)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiny_configurations_are_the_same_as_they_are_saved_and_with_less_said(name: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[name].build().get_text_config(decoder=True)
    kind = config.model_type
    if kind not in TYPES:
        return
    config.save_pretrained(tmp_path)
    assert_same(kind, read_config(tmp_path))
    if kind != "mamba2":
        # Its sizes go together.
        assert_same(kind, {key: value for key, value in config.to_dict().items() if key in SIZES})


@pytest.mark.parametrize(("kind", "given"), OLDER, ids=[f"{kind}-{'-'.join(given)}" for kind, given in OLDER])
def test_older_names_mean_the_same_as_in_the_class(kind: str, given: dict[str, Any]) -> None:
    assert_same(kind, {**{name: size for name, size in SIZES.items() if is_declared(kind, name)}, **given})


@pytest.mark.parametrize("kind", WHOLES.split())
def test_a_model_with_encoders_has_the_tokens_of_the_class(kind: str) -> None:
    theirs = CONFIG_MAPPING[kind]()
    ours: Any = ModelConfig.of({"model_type": kind, "text_config": {}})
    assert getattr(transformers, class_of(kind)).generate is GenerationMixin.generate
    for name in ("image_token_id", "video_token_id", "audio_token_id", "tie_word_embeddings"):
        assert getattr(ours, name, None) == getattr(theirs, name, None)
    levels = [getattr(one.vision_config, "deepstack_visual_indexes", None) or () for one in (ours, theirs)]
    assert [*levels[0]] == [*levels[1]]
    assert ours.get_text_config().model_type == theirs.get_text_config().model_type
    readers: list[Callable[[Any], object]] = [without_plan, padded_tokens, sees_pictures_whole]
    for read in readers:
        assert read(ours) == read(theirs)


@pytest.mark.parametrize(("kind", "text"), [("qwen2_vl", ""), ("llava", "llama"), ("aya_vision", "cohere2")])
def test_the_text_of_a_model_with_encoders_may_tie_the_embeddings(kind: str, text: str) -> None:
    for is_tied in (True, False):
        given = {"text_config": {"tie_word_embeddings": is_tied} | ({"model_type": text} if text else {})}
        theirs = CONFIG_MAPPING[kind](**copy.deepcopy(given))
        assert ModelConfig.of({**given, "model_type": kind}).tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_the_options_of_the_text_may_stand_among_those_of_the_whole(kind: str) -> None:
    """As most checkpoints on the hub have them."""
    given: dict[str, Any] = {name: SIZES[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")}
    given |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}, "rope_theta": 5e5, "vocab_size": 99}
    given |= {"tie_word_embeddings": True, "vision_config": {"depth": 1}, "torch_dtype": "bfloat16"}
    ours, theirs = ModelConfig.of({**given, "model_type": kind}), CONFIG_MAPPING[kind].from_dict(copy.deepcopy(given))
    assert (ours.tie_word_embeddings, theirs.tie_word_embeddings) == (True, True)
    require_same(ours.get_text_config(), theirs.get_text_config(decoder=True))


@pytest.mark.parametrize(
    ("kind", "given", "problem"),
    [
        ("llama", {"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is None, not a number"),
        ("llama", {"attention_bias": 1}, "attention_bias is 1, not true or false"),
        ("llama", {"num_attention_heads": 7}, "not a multiple of its 7 heads"),
        ("llama", {"num_attention_heads": 0}, "do not fit together"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "lack factor"),
        ("qwen2", {"layer_types": ["full_attention"]}, "has 32 layers, and layer_types has 1"),
        ("qwen2", {"layer_types": ["none"] * 32}, "of a kind that is not known: none"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 32}, "a sliding_window of None"),
        ("gemma3_text", {"rope_parameters": 3}, "not an object or null"),
        ("nemotron_h", {"hybrid_override_pattern": "M?"}, "do not fit together"),
        ("nemotron_h", {"time_step_limit": [0.1]}, r"time_step_limit is \[0.1\], not a least and a largest step"),
        ("mamba2", {"time_step_limit": [0.0, "inf"]}, "not a least and a largest step"),
        ("bamba", {"time_step_limit": [0.1, 0.01]}, "not a least and a largest step"),
        ("falcon_h1", {"time_step_limit": [float("nan"), 1.0]}, "not a least and a largest step"),
        ("phi3", {"rope_scaling": LINEAR}, "scales positions so: linear"),
    ],
)
def test_invalid_options_are_refused(kind: str, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        ModelConfig.of({**given, "model_type": kind})


# No option that changes numbers is passed over.

UNKNOWN = {"enable_moe_fp32_combine", "moe_apply_router_weight_on_input", "use_bidirectional_attention"}
"""Options that no plan has."""


def test_options_without_a_plan_are_listed_here() -> None:
    assert {option for name in TYPES for option in unread_options(name)} == UNKNOWN


def test_listed_names_are_options() -> None:
    # A token ends the n-grams of one type; elsewhere it says nothing of the numbers.
    assert {option for name in TYPES for option in options_of(name)} - UNKNOWN - {"eos_token_id"} <= KNOWN


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("gemma", "use_bidirectional_attention", True),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma4_text", "use_bidirectional_attention", "all"),
        ("hy_v3", "enable_moe_fp32_combine", False),
        ("laguna", "moe_apply_router_weight_on_input", True),
        ("llama", "chunk_size_feed_forward", 4),
        ("llama", "per_layer_config", {1: {"mlp_bias": True}}),
        ("llama", "per_layer_config", {1: {"skip": ["mlp"]}}),
    ],
)
def test_an_option_that_no_plan_has_means_the_grid(name: str, option: str, value: Any) -> None:
    config = ModelConfig.of({"model_type": name, option: value})
    assert without_plan(config) == f"no plan has this {option}"


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("llama", "seq_aux", True),
        ("llama", "attention_dropout", 0.5),
        ("gemma", "use_bidirectional_attention", False),
        ("llama", "per_layer_config", {1: {"head_dim": 64}}),
        ("gemma4_text", "use_bidirectional_attention", "vision"),
        ("gemma4_unified_text", "use_bidirectional_attention", None),
    ],
)
def test_an_option_without_effect_is_passed_over(name: str, option: str, value: Any) -> None:
    config = ModelConfig.of({"model_type": name, option: value})
    assert without_plan(config) == ""
