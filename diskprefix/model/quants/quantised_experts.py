"""Quantised experts of a mixture, in the place of transformers' modules: one call of the compiled operator a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from diskprefix.model.quants.expert_matrices import curves_of, is_mixture, matrices_of, routed
from diskprefix.model.quants.forms import compiled, matrix_of, weights_of
from diskprefix.model.quants.quant_form import QuantForm
from diskprefix.native.experts_operator import RoutedExperts
from diskprefix.native.matrix import Matrix, fills_blocks


class QuantisedMatrices(nn.Module):
    """A matrix of each expert: `packed` uint8 [experts, *form.packed_shape], `bias` [experts, rows] or None."""

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, form: QuantForm) -> None:
        """Of `weight` only the device is used. The quants come by `take_matrices`."""
        super().__init__()
        self.form = form
        packed = torch.empty(0, dtype=torch.uint8, device=weight.device)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.clone(memory_format=torch.contiguous_format))

    @property
    def weight(self) -> torch.Tensor:
        """The weights as they are computed with, [experts, rows, columns], made anew each time."""
        return torch.stack([weights_of(packed, self.form) for packed in self.packed])


class QuantisedExperts(nn.Module):
    """A replacement for the experts of a mixture: rows [n, hidden] → [n, hidden], in bfloat16. Its children are `gate`,
    `up` (unless there is none) and `down`, each with a matrix of every expert."""

    def __init__(self, experts: nn.Module, forms: Mapping[str, QuantForm]) -> None:
        super().__init__()
        found = curves_of(experts)
        assert found is not None
        self.curves = found
        for part, (weight, bias) in matrices_of(experts).items():
            self.add_module(part, QuantisedMatrices(weight, bias, forms[part]))
            self.num_experts = len(weight)
        self._routed: RoutedExperts | None = None
        self.matrices = dict[str, list[Matrix]]()

    def parts(self) -> dict[str, QuantisedMatrices]:
        return {name: part for name, part in self.named_children() if isinstance(part, QuantisedMatrices)}

    def prepare(self) -> None:
        """Prepares the matrices for the kernel, once the weights are there. They must not change afterwards."""
        self.matrices = {
            name: [
                matrix_of(packed, part.form, None if part.bias is None else part.bias[number])
                for number, packed in enumerate(part.packed)
            ]
            for name, part in self.parts().items()
        }
        self._routed = routed(self.curves, self.matrices)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        assert self._routed is not None, "the model was not prepared"
        return self._routed(compiled(), hidden_states, top_k_index, top_k_weights)


def may_be_quantised(experts: Any) -> bool:
    """Returns whether `QuantisedExperts` can replace a module."""
    is_plain = is_mixture(experts) and not experts.has_post_expert_norm
    fills = is_plain and all(fills_blocks(weight[0]) for weight, _ in matrices_of(experts).values())
    return fills and curves_of(experts) is not None
