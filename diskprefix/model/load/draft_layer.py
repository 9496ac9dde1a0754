"""The layer of a checkpoint that predicts the token after the next one (MTP). It becomes a part of the decoder:
`model.get_decoder().draft_layer`, an `MtpLayer` of transformers. Embeddings, logits and positions are the model's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_OF_LAYER: Mapping[str, Mapping[str, str]] = {
    "qwen3_5_text": {"layer_types": "full_attention"},
    "qwen3_5_moe_text": {"layer_types": "full_attention"},
    "qwen3_next": {"layer_types": "full_attention"},
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {"mlp_layer_types": "sparse"},
    "mimo_v2_flash": {"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
}
"""The types of models whose layer is used, and what their configurations would say of it in lists by layer."""


def with_draft_layer(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns the class of the models of a class that have a draft layer. Its configuration is that of the others."""

    def initialise(model: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        kind.__init__(model, config, *args, **kwargs)
        decoder = model.get_decoder()
        decoder.draft_layer = _make_layer(decoder)
        model.init_weights()

    # By its name and its module transformers finds what it knows of a class.
    return type(kind.__name__, (kind,), {"__init__": initialise, "__module__": kind.__module__})


def _make_layer(decoder: Any) -> Any:
    """Returns the layer behind the last one of a decoder."""
    from transformers.modeling_layers import MtpLayer

    config = decoder.config
    extended = copy.deepcopy(config)
    extended.num_hidden_layers += 1
    for name, its_own in _OF_LAYER[config.model_type].items():
        setattr(extended, name, [*getattr(config, name)[: config.num_hidden_layers], its_own])
    layer = MtpLayer(extended, type(decoder.layers[-1]), type(decoder.norm), config.num_hidden_layers)
    for module in layer.modules():
        if getattr(module, "config", None) is extended:
            # The kernels are switched in that of the model.
            module.config = config
    return layer
