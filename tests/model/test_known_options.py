"""No option of a configuration that changes numbers is passed over."""

from __future__ import annotations

from typing import Any

import pytest

from diskprefix.model.families.model_types import OPTIONS, without_plan
from diskprefix.model.families.type_table import options_of, unread_options
from diskprefix.model.model_config import ModelConfig
from tests.model.option_table import KNOWN

UNKNOWN = {"enable_moe_fp32_combine", "moe_apply_router_weight_on_input", "use_bidirectional_attention"}
"""Options that no plan has."""


def test_what_no_plan_has_is_listed_here() -> None:
    assert {option for name in OPTIONS for option in unread_options(name)} == UNKNOWN


def test_what_is_listed_is_an_option() -> None:
    assert {option for name in OPTIONS for option in options_of(name)} - UNKNOWN <= KNOWN


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
