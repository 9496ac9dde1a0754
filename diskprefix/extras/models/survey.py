"""The layers of a model from its configuration alone, and their description in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers.cache_utils import DynamicCache

from diskprefix.kv.layout import LayerSpec
from diskprefix.model.exact.rehearsal import KINDS, moving_ropes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def survey(config: PreTrainedConfig) -> tuple[tuple[LayerSpec, ...], tuple[str, ...]]:
    """Returns the layers of transformers' own cache for a configuration, and the names of unknown classes of layers. A
    model may leave some of its layers empty. Raises what transformers raises if it can make no cache."""
    layers = DynamicCache(config=config).layers
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in KINDS})
    specs = (
        LayerSpec(KINDS[type(layer)], layer.sliding_window if KINDS[type(layer)].endswith("sliding") else None)
        for layer in layers
        if type(layer) in KINDS
    )
    return tuple(specs), tuple(unknown)


def describe_layers(layers: Sequence[LayerSpec], config: PreTrainedConfig) -> str:
    """Returns a text such as `6× linear, 2× sliding(512)`: the count of each kind, in the order of the first."""
    text_config = config.get_text_config(decoder=True)
    # A layer without state of its own uses another's, or is no attention at all.
    none = "shared" if getattr(text_config, "num_kv_shared_layers", 0) else "stateless"
    counted = Counter((none if spec.kind == "none" else spec.kind, spec.window) for spec in layers)
    return ", ".join(
        f"{count}× {kind}" + (f"({window})" if window else "") for (kind, window), count in counted.items()
    )


def moving_ropes_of(config: PreTrainedConfig) -> list[str]:
    """Returns the kinds of RoPE in a configuration that keep its models from being cached."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    each = [parameters, *(found for found in parameters.values() if isinstance(found, dict))]
    return moving_ropes(str(found.get("rope_type")) for found in each)
