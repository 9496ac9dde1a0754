"""Quantises a loaded model in place: what a model is, which is quantised parameter by parameter into a folder."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from diskprefix.model.exact.mixtures import matrices_of
from diskprefix.model.quants.forms import Quants, quantised
from diskprefix.model.quants.quant_form import FILE_FORMS, QuantForm
from diskprefix.model.quants.quantised import QuantisedLinear, bits_for, quantisable, quantisable_experts, untie
from diskprefix.model.quants.quantised_experts import QuantisedExperts
from diskprefix.native.matrix import fills_blocks

FORMS = (FILE_FORMS["Q4_1"], FILE_FORMS["Q8_0"])
"""Those of matrices that are quantised here."""


def form_in(quants: Quants) -> QuantForm:
    return FILE_FORMS[quants.kind]


def quantise(model: PreTrainedModel, weights: str) -> None:
    """Quantises the matrices of the decoder to `weights`: `int8` or `int4`."""

    def quants_of(name: str, weight: torch.Tensor) -> Quants:
        bits = bits_for(model, name, weights)
        assert bits is not None, weights
        return quantised(weight, bits)

    for name, linear in list(quantisable(model)):
        if fills_blocks(linear.weight):
            quants = quants_of(name, linear.weight.detach())
            module = QuantisedLinear(model.get_submodule(name), form_in(quants))
            module.packed = quants.packed()
            model.set_submodule(name, module)
    for name, experts in list(quantisable_experts(model)):
        parts = {part: weight for part, (weight, _) in matrices_of(experts).items()}
        of_parts = {part: quants_of(name, weight.reshape(-1, weight.shape[2])) for part, weight in parts.items()}
        made = QuantisedExperts(experts, {part: form_in(one) for part, one in of_parts.items()})
        for part, matrices in made.parts().items():
            matrices.packed = of_parts[part].packed().view(matrices.packed.shape)
        model.set_submodule(name, made)
    if isinstance(model.get_output_embeddings(), QuantisedLinear):
        untie(model.config)


def weights_of_quants(quants: Quants) -> torch.Tensor:
    """Returns the weights, bfloat16 [rows, columns]."""
    groups = quants.codes.view(*quants.scales.shape, -1).float() * quants.scales.unsqueeze(-1)
    groups += 0 if quants.zeros is None else quants.zeros.unsqueeze(-1)
    return groups.view(quants.codes.shape).bfloat16()
