"""The weights of a loaded model by the names of its parameters in transformers, as a plan takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from diskprefix.model.exact.fused import matrix_of
from diskprefix.model.plan import DenseMatrix, Weight, WeightedNorm
from diskprefix.native.matrix import Matrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Slots:
    """The weights below one module of a model. `norm_kind` and `epsilon` are those of its norms."""

    def __init__(self, model: PreTrainedModel, norm_kind: int, epsilon: float, within: str = "") -> None:
        self._model, self._norm, self._within = model, (norm_kind, epsilon), within
        self._module = model.get_decoder().get_submodule(within)

    def within(self, name: str) -> Slots:
        """Returns the slots of a module in this one."""
        return Slots(self._model, *self._norm, f"{self._within}.{name}".lstrip("."))

    def matrix(self, name: str) -> Matrix | DenseMatrix:
        """Returns the matrix of a product."""
        return _matrix(self._module.get_submodule(name))

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
        weight: Any = self._module.get_submodule(name).weight
        return WeightedNorm(_weight(weight), *self._norm)

    def sinks(self) -> Weight | None:
        """Returns the sinks of attention, float32; None if it has none."""
        sinks: torch.Tensor | None = getattr(self._module, "sinks", None)
        return None if sinks is None else _weight(sinks.float())


def _matrix(module: Any) -> Matrix | DenseMatrix:
    found = matrix_of(module)
    if found is not None:
        return found
    bias = None if module.bias is None else _weight(module.bias.float())
    return DenseMatrix(_weight(module.weight), bias)


def _weight(tensor: torch.Tensor) -> Weight:
    kept = tensor.detach().contiguous()
    return Weight(kept.data_ptr(), tuple(kept.shape), kept)
