"""All types of models that have a plan, by transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diskprefix.runtime.plan.families.types import (
    allenai,
    china,
    cohere,
    deepseek,
    google,
    ibm,
    korea,
    meta,
    microsoft,
    mistral,
    nvidia,
    open_ai,
    others,
    qwen,
    tencent,
    zhipu,
)
from diskprefix.runtime.plan.families.types.model_type import ModelType, WholeType

TYPES: Mapping[str, ModelType] = {
    **allenai.TYPES,
    **china.TYPES,
    **cohere.TYPES,
    **deepseek.TYPES,
    **google.TYPES,
    **ibm.TYPES,
    **korea.TYPES,
    **meta.TYPES,
    **microsoft.TYPES,
    **mistral.TYPES,
    **nvidia.TYPES,
    **open_ai.TYPES,
    **others.TYPES,
    **qwen.TYPES,
    **tencent.TYPES,
    **zhipu.TYPES,
}
"""The records of text decoders by type."""
_WHOLES = {**google.WHOLES, **allenai.WHOLES, **qwen.WHOLES}
_PLAIN = WholeType()


def type_of(config: Any) -> ModelType:
    """Returns the record of a text decoder, from its configuration."""
    return TYPES[config.model_type]


def whole_of(config: Any) -> WholeType:
    """Returns the record of a whole model with its encoders, from its configuration."""
    return _WHOLES.get(config.model_type, _PLAIN)
