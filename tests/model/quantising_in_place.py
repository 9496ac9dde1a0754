"""Quantises a loaded model in place: what a model is, which is quantised parameter by parameter into a folder."""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedModel

from diskprefix.model.quants.forms import Quants, quantised
from diskprefix.model.quants.quantised import QuantisedLinear, bits_for, quantisable, quantisable_experts, untie
from diskprefix.model.quants.quantised_experts import quantised_experts
from diskprefix.native.matrix import fills_blocks


def quantise(model: PreTrainedModel, weights: str) -> None:
    """Quantises the matrices of the decoder to `weights`: `int8` or `int4`."""

    def quants_of(name: str, weight: torch.Tensor) -> Quants:
        bits = bits_for(model, name, weights)
        assert bits is not None, weights
        return quantised(weight, bits)

    for name, linear in list(quantisable(model)):
        if fills_blocks(linear.weight):
            quants = quants_of(name, linear.weight.detach())
            module = QuantisedLinear(model.get_submodule(name), quants.form)
            module.packed = quants.packed()
            model.set_submodule(name, module)
    for name, experts in list(quantisable_experts(model)):
        model.set_submodule(name, quantised_experts(experts, partial(quants_of, name)))
    if isinstance(model.get_output_embeddings(), QuantisedLinear):
        untie(model.config)


def weights_of_quants(quants: Quants) -> torch.Tensor:
    """Returns the weights, bfloat16 [rows, columns]."""
    groups = quants.codes.view(*quants.scales.shape, -1).float() * quants.scales.unsqueeze(-1)
    groups += 0 if quants.zeros is None else quants.zeros.unsqueeze(-1)
    return groups.view(quants.codes.shape).bfloat16()
