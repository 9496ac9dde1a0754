"""The draft layer as modules of transformers: `model.get_decoder().draft_layer`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpLayer

from diskprefix.model.load.draft_layer import with_one_more


def with_draft_layer(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of the models of a class that have a draft layer. Its configuration is that of the others."""

    def initialise(model: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        kind.__init__(model, config, *args, **kwargs)
        decoder = model.get_decoder()
        decoder.draft_layer = _make_layer(decoder)
        model.init_weights()

    # By its name and its module transformers finds what it knows of a class.
    return type(kind.__name__, (kind,), {"__init__": initialise, "__module__": kind.__module__})


def _make_layer(decoder: Any) -> Any:
    config = decoder.config
    extended = with_one_more(config)
    layer = MtpLayer(extended, type(decoder.layers[-1]), type(decoder.norm), config.num_hidden_layers)
    for module in layer.modules():
        if getattr(module, "config", None) is extended:
            # The kernels are switched in that of the model.
            module.config = config
    return layer
