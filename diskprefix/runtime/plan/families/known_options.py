"""The options of configurations that no plan reads. A model that sets one to another value than its type's default has
no plan, because the option may change numbers."""

from __future__ import annotations

from typing import Any

from diskprefix.runtime.plan.families.type_table import options_of, unread_options
from diskprefix.runtime.plan.families.types.known_types import type_of

_OF_LAYERS = {"head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads"}
"""Options that may differ between layers, because the shapes of weights show them."""
_OF_ALL = {"chunk_size_feed_forward": 0, "is_encoder_decoder": False}
"""Options of all types."""


def unknown_option(config: Any) -> str:
    """Returns the first option of a decoder's configuration that no plan reads and that differs from its default, or
    ""."""
    if (config.per_layer_attributes or set()) - _OF_LAYERS:
        return "per_layer_config"
    usual = _OF_ALL | {name: options_of(config.model_type)[name][1] for name in unread_options(config.model_type)}
    return next((name for name, value in usual.items() if not _is_usual(config, name, value)), "")


def _is_usual(config: Any, name: str, usual: Any) -> bool:
    value = getattr(config, name, None)
    if name == "use_bidirectional_attention" and type_of(config).pictures_by_option:
        # It matters for pictures only.
        return value in (None, False, "vision")
    # False and None mean the same.
    return bool((value or None) == (usual or None))
