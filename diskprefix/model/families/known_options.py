"""The options of configurations that plans do not know. One that changes numbers must not be passed over: a model with
another value than its type's is not computed by a plan."""

from __future__ import annotations

from typing import Any

from diskprefix.model.families.type_table import options_of, unread_options

_OF_LAYERS = {"head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads"}
"""Those that a layer may have of its own: shapes say them."""
_OF_ALL = {"chunk_size_feed_forward": 0, "is_encoder_decoder": False}
"""Options of all types."""
_GEMMA_4 = ("gemma4_text", "gemma4_unified_text")


def unknown_option(config: Any) -> str:
    """Returns the name of an option of a decoder's configuration that plans do not know and that has another value than
    its type gives it, "" if there is none."""
    if (config.per_layer_attributes or set()) - _OF_LAYERS:
        return "per_layer_config"
    usual = _OF_ALL | {name: options_of(config.model_type)[name][1] for name in unread_options(config.model_type)}
    return next((name for name, value in usual.items() if not _is_usual(config, name, value)), "")


def _is_usual(config: Any, name: str, usual: Any) -> bool:
    value = getattr(config, name, None)
    if name == "use_bidirectional_attention" and config.model_type in _GEMMA_4:
        # About pictures alone.
        return value in (None, False, "vision")
    # False says what None says.
    return bool((value or None) == (usual or None))
