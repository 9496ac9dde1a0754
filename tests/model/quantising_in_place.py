"""Gives a model the quants of a file in place: what it is when it was loaded from such a file."""

from __future__ import annotations

import gguf
import torch
from torch import nn
from transformers import PreTrainedModel

from diskprefix.model.quants.expert_matrices import matrices_of
from diskprefix.model.quants.forms import compiled
from diskprefix.model.quants.quant_form import FILE_FORMS
from diskprefix.model.quants.quantised import QuantisedLinear, in_decoder, untie
from diskprefix.model.quants.quantised_experts import QuantisedExperts, may_be_quantised
from diskprefix.native.matrix import fills_blocks
from diskprefix.native.packing import pack


def quantise(model: PreTrainedModel, kind: str) -> None:
    form = FILE_FORMS[kind]
    for name, module in list(in_decoder(model)):
        if type(module) is nn.Linear and fills_blocks(module.weight):
            linear = QuantisedLinear(module, form)
            linear.packed = _packed(module.weight, kind)
            model.set_submodule(name, linear)
        elif may_be_quantised(module):
            weights = {part: weight for part, (weight, _) in matrices_of(module).items()}
            experts = QuantisedExperts(module, dict.fromkeys(weights, form))
            for part, matrices in experts.parts().items():
                matrices.packed = torch.stack([_packed(weight, kind) for weight in weights[part]])
            model.set_submodule(name, experts)
    if isinstance(model.get_output_embeddings(), QuantisedLinear):
        untie(model.config)


def _packed(weight: torch.Tensor, kind: str) -> torch.Tensor:
    content = gguf.quantize(weight.detach().float().numpy(), gguf.GGMLQuantizationType[kind])
    out = torch.empty(FILE_FORMS[kind].packed_shape(*weight.shape), dtype=torch.uint8)
    pack(compiled(), kind, torch.from_numpy(content), None, out)
    return out
