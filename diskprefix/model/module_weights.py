"""The weights of a model of transformers' modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from diskprefix.model.families.slot_names import SlotNames
from diskprefix.model.quants.quantised import QuantisedEmbedding, QuantisedLinear
from diskprefix.model.quants.quantised_experts import QuantisedExperts
from diskprefix.model.slots import HEAD
from diskprefix.model.weights import Quants, TensorWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> Any:
    """Returns the module whose layers decode text."""
    found: Any = model.get_decoder()
    return getattr(found, "model", found)


def weights_of_model(model: PreTrainedModel) -> TensorWeights:
    """Returns the weights of a model, which stay where they are."""
    decoder, head = decoder_of(model), model.get_output_embeddings()
    form = SlotNames.of(model.config.get_text_config(decoder=True)).experts
    tensors, quants = dict(decoder.state_dict()), dict[str, Quants]()
    for name, module in [*decoder.named_modules(), (HEAD, head)]:
        if isinstance(module, QuantisedLinear):
            quants[name] = Quants(module.packed, module.form, module.columns)
        elif isinstance(module, QuantisedEmbedding):
            quants[name] = Quants(module.packed, module.form)
        elif isinstance(module, QuantisedExperts):
            parts = module.parts()
            quants |= {f"{name}.{part}": Quants(one.packed, one.form) for part, one in parts.items()}
            if form.has_bias:
                both = parts["gate"].bias, parts["up"].bias
                joined = torch.stack(both, 2).flatten(1) if form.turns_about else torch.cat(both, 1)  # type: ignore[arg-type]
                tensors |= {f"{name}.{form.first}_bias": joined, f"{name}.down_proj_bias": parts["down"].bias}
    weight, embedded = getattr(head, "weight", None), model.get_input_embeddings()
    if not isinstance(head, QuantisedLinear) and weight is not getattr(embedded, "weight", None):
        tensors[f"{HEAD}.weight"] = weight
    if getattr(head, "bias", None) is not None:
        tensors[f"{HEAD}.bias"] = head.bias
    return TensorWeights(tensors, model.dtype, quants)
