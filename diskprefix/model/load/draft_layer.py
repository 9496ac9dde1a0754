"""The layer of a checkpoint that predicts the token after the next one (MTP).

It becomes a part of the decoder, `model.get_decoder().draft_layer`: an `MtpLayer` of transformers, whose parameters are
loaded, quantised and identified like those of any other layer. Embeddings, logits and positions are the model's; copies
of them in the checkpoint are not loaded. Of several such layers the first is used, and none where no model is exact at
every token. A checkpoint that counts such a layer and has no tensor of it is served without; one that lacks some is
refused. Nothing here needs torch until a class is made.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HAVE_DRAFT_LAYER: Mapping[str, Mapping[str, str]] = {
    "qwen3_5_text": {"layer_types": "full_attention"},
    "qwen3_5_moe_text": {"layer_types": "full_attention"},
    "qwen3_next": {"layer_types": "full_attention"},
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {"mlp_layer_types": "sparse"},
    "mimo_v2_flash": {"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
}
"""The types of models whose layer is used, and what their configurations would say of it in lists by layer."""
_FURTHER = re.compile(r"(?:model\.)?(?:(mtp)\.(?:layers\.(\d{1,9})\.)?|layers\.(\d{1,9})\.)(.+)")
"""Names in layers of checkpoints, with those that predict further tokens: the layer, and the name within it."""
_OWN = {
    **{name: name for name in ("enorm", "hnorm", "eh_proj")},
    **dict.fromkeys(("norm", "shared_head.norm", "final_layernorm"), "post_norm"),
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "pre_mlp_layernorm": "mtp_block.post_attention_layernorm",
}
"""What is not called in the draft layer as in other layers of its model, without its ending."""
_COPIES = ("embed_tokens", "shared_head.head")
"""Tensors of a draft layer that the model has."""


def further_layers(names: Iterable[str], num_layers: int) -> dict[str, str | None]:
    """Returns the tensors of a checkpoint that are of layers behind the last of `num_layers`, which predict further
    tokens: what each is called in the draft layer, or None if it has no place there."""
    found = dict[str, str | None]()
    for name in names:
        match = _FURTHER.fullmatch(name)
        if match is None or (layer := int(match[2] or 0) if match[1] else int(match[3]) - num_layers) < 0:
            continue
        stem, _, end = match[4].rpartition(".")
        is_used = layer == 0 and stem not in _COPIES
        found[name] = (f"{_OWN[stem]}.{end}" if stem in _OWN else f"mtp_block.{match[4]}") if is_used else None
    return found


def with_draft_layer(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns the class of the models of a class that have a draft layer. Its configuration is that of the others."""

    def initialise(model: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        kind.__init__(model, config, *args, **kwargs)
        decoder = model.get_decoder()
        decoder.draft_layer = _make_layer(decoder)
        model.init_weights()

    # By its name and its module transformers finds what it knows of a class.
    return type(kind.__name__, (kind,), {"__init__": initialise, "__module__": kind.__module__})


def with_one_more(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of a decoder whose last layer is the draft layer."""
    extended = copy.deepcopy(config)
    extended.num_hidden_layers += 1
    for name, its_own in HAVE_DRAFT_LAYER[config.model_type].items():
        setattr(extended, name, [*getattr(config, name)[: config.num_hidden_layers], its_own])
    return extended


def _make_layer(decoder: Any) -> Any:
    """Returns the layer behind the last one of a decoder."""
    from transformers.modeling_layers import MtpLayer

    config = decoder.config
    extended = with_one_more(config)
    layer = MtpLayer(extended, type(decoder.layers[-1]), type(decoder.norm), config.num_hidden_layers)
    for module in layer.modules():
        if getattr(module, "config", None) is extended:
            # The kernels are switched in that of the model.
            module.config = config
    return layer
