"""Weights that only some decoders have, by their usual names within a layer: biases, sinks, corrections of routers.

The type and the configuration decide which ones a decoder has, so a file that lacks one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from diskprefix.runtime.plan.families.declared import option
from diskprefix.runtime.plan.families.type_table import options_of
from diskprefix.runtime.plan.families.types.known_types import type_of
from diskprefix.runtime.plan.families.types.model_type import ATTENTION, CORRECTION, FEED_FORWARD, OUT, QUERIES

_BY_OPTION: Mapping[str, str] = {
    "attention_bias": ATTENTION,
    "attention_out_bias": OUT,
    "qkv_bias": QUERIES,
    "use_qkv_bias": QUERIES,
    "enable_bias": f"{ATTENTION}|{FEED_FORWARD}",
    "use_bias": f"{ATTENTION}|{FEED_FORWARD}",
    "mlp_bias": FEED_FORWARD,
    "conv_bias": r"conv\.(conv|in_proj|out_proj)",
    "mamba_conv_bias": r"mamba\.conv1d",
    "use_conv_bias": r"mamba\.conv1d",
    "mamba_proj_bias": r"mamba\.(in|out)_proj",
    "projectors_bias": r"mamba\.out_proj",
    "lm_head_bias": "lm_head",
}
"""The modules that have biases if an option is true. A type may have other modules for an option."""


def modules_with_bias(config: Any) -> re.Pattern[str]:
    """Returns the pattern of the names of the modules of a decoder that have biases."""
    record = type_of(config)
    # An option that the type does not declare belongs to another type.
    declared = options_of(config.model_type)
    options = {**_BY_OPTION, **record.biases_by_option}
    patterns = [modules for name, modules in options.items() if name in declared and getattr(config, name)]
    return re.compile("|".join([record.biases, *patterns]))


def has_tensor(config: Any, layer: str, name: str) -> bool:
    """Returns whether a decoder has a tensor in a layer. `layer` is a prefix like `layers.0.`."""
    record = type_of(config)
    if name == CORRECTION:
        has_correction = record.experts is not None and record.experts.correction
        return has_correction and bool(option(config, "use_expert_bias", True))
    if name != "self_attn.sinks":
        return True
    if record.sinks != "windowed":
        return record.sinks == "all"
    # The draft layer, which has no number, has sinks.
    number = re.search(r"\d+", layer)
    return number is None or bool(config.layer_types[int(number[0])] == "sliding_attention")
