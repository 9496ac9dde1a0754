"""No option of a configuration that changes numbers is passed over."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from diskprefix.model.families.known_options import _KNOWN, unknown_option
from diskprefix.model.families.model_types import OPTIONS, without_plan

UNKNOWN = {"chunk_size_feed_forward", "enable_moe_fp32_combine", "is_encoder_decoder", "use_bidirectional_attention"}
"""Options that no plan has."""


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_known_or_its_other_values_are_refused(name: str) -> None:
    config = CONFIG_MAPPING[name]()
    assert {option for option in vars(config) if not option.startswith("_")} - _KNOWN <= UNKNOWN
    assert unknown_option(config) == ""


def test_what_is_listed_is_an_option() -> None:
    assert not _KNOWN - {option for name in OPTIONS for option in dir(CONFIG_MAPPING[name]())}


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("gemma", "use_bidirectional_attention", True),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma4_text", "use_bidirectional_attention", "all"),
        ("hy_v3", "enable_moe_fp32_combine", False),
        ("llama", "chunk_size_feed_forward", 4),
        ("llama", "per_layer_config", {1: {"mlp_bias": True}}),
        ("llama", "per_layer_config", {1: {"skip": ["mlp"]}}),
    ],
)
def test_an_option_that_no_plan_has_means_the_grid(name: str, option: str, value: object) -> None:
    config = CONFIG_MAPPING[name]()
    setattr(config, option, value)
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
def test_an_option_without_effect_is_passed_over(name: str, option: str, value: object) -> None:
    config = CONFIG_MAPPING[name]()
    setattr(config, option, value)
    assert without_plan(config) == ""
