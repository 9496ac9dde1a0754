"""The weights of a loaded model by the names of its parameters in transformers, as a plan takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from diskprefix.model.exact.fused import matrix_of
from diskprefix.model.exact.mixtures import matrices, matrices_of
from diskprefix.model.plan import DenseExperts, DenseMatrix, PackedExperts, Weight, WeightedNorm
from diskprefix.model.quants.quantised_experts import QuantisedExperts
from diskprefix.native.matrix import Matrix, fills_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Slots:
    """The weights below one module of a model. `norm_kind` and `epsilon` are those of its norms, `names` what the model
    calls them."""

    def __init__(
        self, model: PreTrainedModel, norm_kind: int, epsilon: float, names: Mapping[str, str], within: str = ""
    ) -> None:
        self._model, self._norm, self._names, self._within = model, (norm_kind, epsilon), names, within
        self._module = model.get_decoder().get_submodule(within)

    def within(self, name: str) -> Slots:
        """Returns the slots of a module in this one."""
        return Slots(self._model, *self._norm, self._names, f"{self._within}.{self._named(name)}".lstrip("."))

    def _named(self, name: str) -> str:
        return self._names.get(name, name)

    def convolution(self, name: str) -> tuple[Weight, Weight | None]:
        """Returns the weight of a convolution, [channels, kernel], and its bias."""
        module: Any = self._module.get_submodule(name)
        return _weight(module.weight.squeeze(1)), None if module.bias is None else _weight(module.bias)

    def matrix(self, name: str, *, is_float: bool = False) -> Matrix | DenseMatrix:
        """Returns the matrix of a product, if it is so in float32."""
        return _matrix(self._module.get_submodule(self._named(name)), is_float=is_float)

    def numbers(self, name: str) -> Weight | None:
        """Returns a vector in float32, None if there is none."""
        found: torch.Tensor | None = getattr(self._module, name, None)
        return None if found is None else _weight(found.float().flatten())

    def experts(self, name: str) -> PackedExperts | DenseExperts:
        """Returns the experts of a mixture."""
        module: Any = self._module.get_submodule(name)
        if isinstance(module, QuantisedExperts):
            return PackedExperts(*(module.matrices.get(part, []) for part in ("gate", "up", "down")))
        found = matrices_of(module)
        if all(
            one.dtype is torch.bfloat16 and one[0].is_contiguous() and fills_blocks(one[0]) for one, _ in found.values()
        ):
            return PackedExperts(*(matrices(*found[part]) if part in found else [] for part in ("gate", "up", "down")))
        names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        first, last = (_weight(getattr(module, one)) for one in names)
        biases = [_weight(getattr(module, f"{one}_bias").float()) for one in names] if module.has_bias else None
        return DenseExperts(
            *(first, last, biases),
            has_up=module.has_gate,
            is_turned=module.is_transposed,
            turns_about=not module.is_concatenated,
        )

    def head(self) -> Matrix | DenseMatrix:
        """Returns the matrix of the logits."""
        return _matrix(self._model.get_output_embeddings())

    def table(self, name: str) -> Matrix | DenseMatrix:
        """Returns a matrix whose rows are looked up."""
        module: Any = self._module.get_submodule(name)
        packed: Matrix | None = getattr(module, "matrix", None)
        return DenseMatrix(_weight(module.weight)) if packed is None else packed

    def norm(self, name: str) -> WeightedNorm:
        """Returns a norm."""
        weight: Any = self._module.get_submodule(self._named(name)).weight
        return WeightedNorm(_weight(weight), *self._norm)


def _matrix(module: Any, *, is_float: bool = False) -> Matrix | DenseMatrix:
    found = None if is_float else matrix_of(module)
    if found is not None:
        return found
    bias: torch.Tensor | None = getattr(module, "bias", None)
    weight = module.weight.float() if is_float else module.weight
    return DenseMatrix(_weight(weight), None if bias is None else _weight(bias.float()))


def _weight(tensor: torch.Tensor) -> Weight:
    kept = tensor.detach().contiguous()
    return Weight(kept.data_ptr(), tuple(kept.shape), kept)
