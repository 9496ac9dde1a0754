"""The weights of a loaded model by the names of its parameters in transformers, as a plan takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.pytorch_utils import Conv1D

from diskprefix.model.config import NormKind
from diskprefix.model.operands import DenseExperts, DenseMatrix, HeadMatrices, PackedExperts, Weight, WeightedNorm
from diskprefix.model.quants.expert_matrices import is_mixture, matrices, matrices_of
from diskprefix.model.quants.quantised import QuantisedLinear
from diskprefix.model.quants.quantised_experts import QuantisedExperts
from diskprefix.native import calls
from diskprefix.native.matrix import Matrix, fills_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NORMS: Mapping[NormKind, int] = {
    "rms": calls.ROUNDED,
    "rms_unrounded": calls.UNROUNDED,
    "rms_plus_one": calls.ONE_MORE,
    "layer": calls.LAYER,
    "layer_plus_one": calls.LAYER,
}


def decoder_of(model: PreTrainedModel) -> Any:
    """Returns the module whose layers decode text."""
    found: Any = model.get_decoder()
    return getattr(found, "model", found)


class Slots:
    """The weights below one module of a model. `norm_kind` and `epsilon` are those of its norms. `names`: the model's
    own names within a layer, by the usual ones."""

    def __init__(
        self, model: PreTrainedModel, norm_kind: NormKind, epsilon: float, names: Mapping[str, str], within: str = ""
    ) -> None:
        self._model, self._norm, self._names, self._within = model, (norm_kind, epsilon), names, within
        self._width = model.config.get_text_config(decoder=True).hidden_size

    def within(self, name: str) -> Slots:
        """Returns the slots of a module in this one."""
        return Slots(self._model, *self._norm, self._names, f"{self._within}.{name}".lstrip("."))

    def _found(self, name: str) -> Any:
        """Returns a module or tensor by its usual name, None if there is none."""
        path = f"{self._within}.{name}".lstrip(".")
        layer, rest = re.fullmatch(r"(layers\.\d+\.|draft_layer\.mtp_block\.)?(.*)", path).groups(default="")  # type: ignore[union-attr]
        layer = layer.replace("layers", self._names.get("layers", "layers"))
        parts = rest.split(".")
        for count in range(len(parts), 0, -1):
            own = self._names.get(".".join(parts[:count]))
            if own is not None:
                parts[:count] = own.split(".")
                break
        found: Any = decoder_of(self._model)
        for part in (layer + ".".join(parts)).split("."):
            found = getattr(found, part, None)
        return found

    def matrix(self, name: str, *, is_float: bool = False) -> Matrix | DenseMatrix:
        """Returns the matrix of a product, if it is so in float32."""
        return _matrix(self._found(name), torch.float32 if is_float else self._model.dtype)

    def regrouped(self, name: str) -> tuple[Matrix | DenseMatrix, tuple[int, int, int] | None]:
        """Returns the matrix of a product, and by which sizes its columns are in another order (see `FileMatrix`)."""
        module = self._found(name)
        if isinstance(module, QuantisedLinear) and module.in_file is not None and self._model.dtype is torch.bfloat16:
            return module.in_file, module.columns
        return self.matrix(name), None

    def numbers(self, name: str) -> Weight | None:
        """Returns a vector in float32, None if there is none."""
        found: torch.Tensor | None = self._found(name)
        return None if found is None else _weight(found.flatten(), torch.float32)

    def has(self, name: str) -> bool:
        """Returns whether there is a module or tensor."""
        return self._found(name) is not None

    def vector(self, name: str) -> Weight:
        """Returns a vector in the type of the plan."""
        return _weight(self._found(name).flatten(), self._model.dtype)

    def convolution(self, name: str) -> tuple[Weight, Weight | None]:
        """Returns the weights [channels, kernel] of a convolution of each channel alone, and its bias."""
        module = self._found(name)
        weight, bias = module.weight.squeeze(1), module.bias
        return _weight(weight, self._model.dtype), None if bias is None else _weight(bias, self._model.dtype)

    def decays(self, name: str, each: int = 1) -> Weight:
        """Returns -exp(numbers) in float32, `each` times each number."""
        return _weight(-self._found(name).float().exp().flatten().repeat_interleave(each), torch.float32)

    def factor(self, name: str) -> float:
        """Returns a number."""
        return float(self._found(name))

    def experts(self, name: str) -> PackedExperts | DenseExperts:
        """Returns the experts of a mixture."""
        module = self._found(name)
        if isinstance(module, QuantisedExperts):
            return PackedExperts(*(module.matrices.get(part, []) for part in ("gate", "up", "down")))
        if is_mixture(module):
            found = matrices_of(module)
            if all(_fills(weight) for weight, _ in found.values()):
                parts = (found.get(part) for part in ("gate", "up", "down"))
                return PackedExperts(*([] if part is None else matrices(*part) for part in parts))
        # Those of some models are in no interface.
        has_up, has_bias = getattr(module, "has_gate", True), getattr(module, "has_bias", False)
        names = "gate_up_proj" if has_up else "up_proj", "down_proj"
        first, last = (_weight(getattr(module, one), self._model.dtype) for one in names)
        return DenseExperts(
            first,
            last,
            [_weight(getattr(module, f"{one}_bias"), torch.float32) for one in names] if has_bias else None,
            has_up=has_up,
            is_turned=getattr(module, "is_transposed", (first.shape[2], last.shape[1]) != (self._width, self._width)),
            turns_about=not getattr(module, "is_concatenated", True),
        )

    def head(self) -> Matrix | DenseMatrix:
        """Returns the matrix of the logits."""
        return _matrix(self._model.get_output_embeddings(), self._model.dtype)

    def table(self, name: str) -> Matrix | DenseMatrix:
        """Returns a matrix whose rows are looked up."""
        module = self._found(name)
        packed: Matrix | None = getattr(module, "matrix", None)
        return DenseMatrix(_weight(module.weight, self._model.dtype)) if packed is None else packed

    def expansion(self, name: str, heads: int, *dims: int) -> list[HeadMatrices]:
        """Returns the matrices [dim, columns] of each head for each of `dims`, whose rows a matrix has by heads. Raises
        `ValueError` if it has other rows."""
        kept = _weight(self._found(name).weight, self._model.dtype).kept
        rows, columns = sum(dims), kept.shape[1]
        if len(kept) != heads * rows:
            raise ValueError(f"{name} has {len(kept)} rows, {heads} times {rows} expected")
        found, first = [], 0
        for dim in dims:
            address = kept.data_ptr() + first * columns * kept.itemsize
            found.append(HeadMatrices(address, heads, dim, columns, rows * columns, kept))
            first += dim
        return found

    def norm(self, name: str) -> WeightedNorm:
        """Returns a norm."""
        module = self._found(name)
        kind, epsilon = self._norm
        weights = [_of_norm(one, kind, self._width) for one in getattr(module, "norms", [module])]
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", epsilon))
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return WeightedNorm(_weight(weight, self._model.dtype), _NORMS[kind], epsilon)

    def float_norm(self, name: str) -> WeightedNorm | None:
        """Returns a norm whose weights are float32, as they are, None if there is none."""
        module = self._found(name)
        if not hasattr(module, "weight"):
            return None
        return WeightedNorm(_weight(module.weight, torch.float32), calls.ROUNDED, module.variance_epsilon)

    def unweighted_norm(self, width: int) -> WeightedNorm:
        """Returns a norm without weights."""
        kind, epsilon = self._norm
        return WeightedNorm(_weight(torch.ones(width), self._model.dtype), _NORMS[kind], epsilon)


def _of_norm(module: Any, kind: NormKind, width: int) -> torch.Tensor:
    """Returns the weights of a norm, with biases behind those of a layer norm, of each of its heads. Some norms of
    hidden states have none."""
    found: torch.Tensor | None = module if isinstance(module, torch.Tensor) else getattr(module, "weight", None)
    weight = torch.ones(width) if found is None else found.detach()
    if not kind.startswith("layer"):
        return weight
    if kind == "layer_plus_one":
        weight = weight + 1
    bias: torch.Tensor | None = getattr(module, "bias", None)
    return torch.cat([weight, torch.zeros_like(weight) if bias is None else bias.detach()], dim=-1).flatten()


def _matrix_of(module: Any) -> Matrix | None:
    """Returns the matrix of a linear module, None if the compiled product does not take it."""
    found: Matrix | None = getattr(module, "matrix", None)
    if found is not None or type(module) is not torch.nn.Linear:
        return found
    weight = module.weight
    if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    return (
        Matrix(weight.detach(), (weight.shape[0], weight.shape[1]), bias=module.bias) if fills_blocks(weight) else None
    )


def _matrix(module: Any, dtype: torch.dtype) -> Matrix | DenseMatrix:
    """Returns the matrix of a module, packed only for rows in bfloat16."""
    found = _matrix_of(module) if dtype is torch.bfloat16 else None
    if found is not None:
        return found
    bias: torch.Tensor | None = getattr(module, "bias", None)
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    return DenseMatrix(_weight(weight, dtype), None if bias is None else _weight(bias, torch.float32))


def _fills(weight: torch.Tensor) -> bool:
    """Returns whether the matrices of experts are of whole blocks, one behind the other."""
    return weight.dtype is torch.bfloat16 and weight[0].is_contiguous() and fills_blocks(weight[0])


def _weight(tensor: torch.Tensor, dtype: torch.dtype) -> Weight:
    """Returns a tensor in the type that an operator reads: some models keep others in float32."""
    kept = tensor.detach().to(dtype).contiguous()
    return Weight(kept.data_ptr(), tuple(kept.shape), kept)
