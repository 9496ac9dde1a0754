"""The weights of a decoder by the names of their slots, in the form that a plan takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from itertools import accumulate, count, takewhile

import numpy as np

from diskprefix.native import address_of, calls
from diskprefix.native.matrix import Matrix, fills_blocks
from diskprefix.prefixstore.kv.numbers import converted, dtype_of
from diskprefix.runtime.plan.families.slot_names import SlotNames
from diskprefix.runtime.plan.operands import (
    AnyMatrix,
    DenseExperts,
    DenseMatrix,
    HeadMatrices,
    JoinedMatrix,
    PackedExperts,
    TableRows,
    Weight,
    WeightedNorm,
)
from diskprefix.runtime.plan.part_options import NormKind, Norms
from diskprefix.runtime.plan.quants.forms import matrix_of
from diskprefix.runtime.plan.weights import MatrixPart, Quants, Weights

_NORMS: Mapping[NormKind, int] = {
    "rms": calls.ROUNDED,
    "rms_unrounded": calls.UNROUNDED,
    "rms_plus_one": calls.ONE_MORE,
    "layer": calls.LAYER,
    "layer_plus_one": calls.LAYER,
}
_STORED: Mapping[str, int] = {"float32": calls.FLOAT32, "bfloat16": calls.BFLOAT16, "float16": calls.FLOAT16}
_IN_LAYER = re.compile(r"(layers\.\d+\.|draft_layer\.mtp_block\.)?(.*)")
HEAD = "lm_head"
"""The matrix of the logits, outside of the decoder. Without one, the matrix of the embeddings is used."""


class Slots:
    """The weights within one module of a decoder. `names` maps the names of slots to the names of weights."""

    def __init__(self, weights: Weights, norms: Norms, names: SlotNames, within: str = "") -> None:
        self._weights, self._norms, self._names, self._within = weights, norms, names, within

    def within(self, name: str) -> Slots:
        """Returns the slots of a module in this one."""
        return Slots(self._weights, self._norms, self._names, f"{self._within}.{name}".lstrip("."))

    def _path(self, name: str) -> str:
        """Returns the model's name of a module or tensor, from its usual name."""
        (layer, rest), own = self._parted(name), self._names.own
        layer = layer.replace("layers", own.get("layers", "layers"))
        parts = rest.split(".")
        for number in range(len(parts), 0, -1):
            if own_name := own.get(".".join(parts[:number]), ""):
                parts[:number] = own_name.split(".")
                break
        return layer + ".".join(parts)

    def _parted(self, name: str) -> tuple[str, str]:
        """Returns the prefix of the layer, "" outside of layers, and the name within the layer."""
        matched = _IN_LAYER.fullmatch(f"{self._within}.{name}".lstrip("."))
        assert matched is not None, "the pattern matches everything"
        return matched[1] or "", matched[2]

    def _tensor(self, name: str) -> np.ndarray | None:
        """Returns a tensor by its usual name, None if there is none."""
        path, has = self._path(name), self._names.has(*self._parted(name))
        return self._weights.tensor(path) if (self._weights.has_parameter(path) if has is None else has) else None

    def _bias(self, name: str, path: str = "") -> np.ndarray | None:
        """Returns the bias of a module by its usual name, in float32. `path` is the model's name of a part of it."""
        bias, modules = f"{path or self._path(name)}.bias", self._names.with_bias
        has_bias = self._weights.has_parameter(bias) if modules is None else modules.fullmatch(self._parted(name)[1])
        return converted(self._weights.tensor(bias), "float32") if has_bias else None

    def has_module(self, name: str) -> bool:
        """Returns whether there is a module or tensor."""
        path = self._path(name)
        return self._weights.has_parameter(f"{path}.weight") or self._weights.has_parameter(path)

    def matrix(self, name: str, *, is_float: bool = False) -> AnyMatrix:
        """Returns a matrix for products, with `is_float` in float32. Raises `ValueError` for an unequal bias."""
        dtype = "float32" if is_float else self._weights.dtype
        path, bias = self._path(name), self._bias(name)
        if dtype == "bfloat16" and (parts := self._weights.parts(f"{path}.weight")):
            return self._joined(path, parts, bias)
        return self._matrix(path, bias, dtype, is_transposed=self._names.has_transposed_matrices)

    def _joined(self, path: str, parts: Sequence[MatrixPart], bias: np.ndarray | None) -> JoinedMatrix:
        rows = sum(part.shape[0] for part in parts)
        self._weights.asked[f"{path}.weight"] = (rows, parts[0].shape[1])
        if bias is not None and len(bias) != rows:
            raise ValueError("a bias of other rows")
        biases = [None if bias is None else np.ascontiguousarray(bias[part.places]) for part in parts]
        made = [_of_part(part.weights, of_part) for part, of_part in zip(parts, biases, strict=True)]
        return JoinedMatrix(made, [part.runs for part in parts])

    def _matrix(
        self, path: str, bias: np.ndarray | None, dtype: str, *, is_transposed: bool = False
    ) -> Matrix | DenseMatrix:
        weights = self._weights
        quants = self._quants(path) if dtype == "bfloat16" else None
        if quants is not None and quants.columns is None:
            return matrix_of(quants.packed, quants.form, bias)
        # In files, a matrix of one row is a vector.
        weight = np.atleast_2d(weights.tensor(f"{path}.weight", is_transposed=is_transposed))
        if dtype == dtype_of(weight) == "bfloat16" and fills_blocks(weight):
            return Matrix(weight, (weight.shape[0], weight.shape[1]), bias=bias)
        if bias is not None and len(bias) != len(weight):
            raise ValueError("a bias of other rows")
        return DenseMatrix(_weight(weight, dtype), None if bias is None else _weight(bias, "float32"))

    def regrouped(self, name: str) -> tuple[AnyMatrix, tuple[int, int, int] | None]:
        """Returns the matrix of a product, and `columns` of `FileMatrix`: None if its columns are in order."""
        path = self._path(name)
        if (quants := self._quants(path)) is not None:
            return matrix_of(quants.packed, quants.form, self._bias(name)), quants.columns
        return self.matrix(name), None

    def _quants(self, path: str) -> Quants | None:
        """Returns the quants of a module for products, None if it has none."""
        weights, name = self._weights, f"{path}.weight"
        quants = weights.quants(name) if weights.dtype == "bfloat16" else None
        if quants is not None:
            weights.asked[name] = quants.shape
        return quants

    def numbers(self, name: str) -> Weight | None:
        """Returns a vector in float32, None if there is none."""
        tensor = self._tensor(name)
        return None if tensor is None else _weight(tensor.reshape(-1), "float32")

    def vector(self, name: str) -> Weight:
        """Returns a vector in the type of the plan."""
        return _weight(self._weights.tensor(self._path(name)).reshape(-1), self._weights.dtype)

    def convolution(self, name: str, dilation: int = 1) -> tuple[Weight, Weight | None]:
        """Returns the weights [channels, kernel] and the bias of a depthwise convolution. With a `dilation`, zeros are
        put between its weights."""
        path, dtype = self._path(name), self._weights.dtype
        weight, bias = self._weights.tensor(f"{path}.weight"), self._bias(name)
        weight = weight.reshape(len(weight), -1)
        if dilation > 1:
            spread = np.zeros((len(weight), (weight.shape[1] - 1) * dilation + 1), weight.dtype)
            spread[:, ::dilation] = weight
            weight = spread
        return _weight(weight, dtype), None if bias is None else _weight(bias, dtype)

    def decays(self, name: str, each: int = 1) -> Weight:
        """Returns -exp(numbers) in float32, with each number repeated `each` times."""
        numbers = converted(self._weights.tensor(self._path(name)), "float32").reshape(-1)
        return _weight(np.repeat(-np.exp(numbers.astype(np.float64)), each), "float32")

    def spread(self, numbers: Sequence[float], widths: Sequence[int]) -> Weight:
        """Returns each number repeated by its width, in the type of the plan."""
        return _weight(np.repeat(np.array(numbers, np.float32), widths), self._weights.dtype)

    def factor(self, name: str) -> float:
        """Returns a number."""
        return float(converted(self._weights.tensor(self._path(name)), "float32").item())

    def experts(self, name: str) -> PackedExperts | DenseExperts:
        """Returns the experts of a mixture. Raises `ValueError` if the configuration has another number of experts."""
        path, weights, form = self._path(name), self._weights, self._names.experts
        names = form.first, "down_proj"
        biases = (
            [converted(weights.tensor(f"{path}.{part}_bias"), "float32") for part in names] if form.has_bias else []
        )
        of_parts = [form.halves(part, bias) for part, bias in zip(names, biases, strict=False)]
        of_experts = {part: bias for halves in of_parts for part, bias in halves.items()}
        is_short = weights.dtype == "bfloat16"
        if quants_of := weights.expert_quants(path, form) if is_short else {}:
            weights.asked |= {f"{path}.{part}": quants.shape for part, quants in quants_of.items()}
            packed = {
                part: [
                    matrix_of(packed, quants.form, of_experts[part][number] if of_experts else None)
                    for number, packed in enumerate(quants.packed)
                ]
                for part, quants in quants_of.items()
            }
            self._require_all(*packed.values(), *of_experts.values())
            return PackedExperts(packed["gate"], packed.get("up", []), packed["down"])
        first, last = (weights.tensor(f"{path}.{part}") for part in names)
        self._require_all(first, last, *biases)
        is_transposed = form.is_transposed and weights.transposes_experts
        if is_short and not is_transposed and dtype_of(first) == dtype_of(last) == "bfloat16":
            halves = form.halves(form.first, first) | {"down": last}
            if all(half[0].flags.c_contiguous and fills_blocks(half[0]) for half in halves.values()):
                plain = {part: _matrices(half, of_experts.get(part)) for part, half in halves.items()}
                return PackedExperts(plain["gate"], plain.get("up", []), plain["down"])
        return DenseExperts(
            _weight(first, weights.dtype),
            _weight(last, weights.dtype),
            [_weight(bias, "float32") for bias in biases] or None,
            has_up=form.has_up,
            is_transposed=is_transposed,
            is_interleaved=form.is_interleaved,
        )

    def _require_all(self, *of_experts: Sized) -> None:
        expected = self._names.num_experts
        if expected is not None and any(len(matrices) != expected for matrices in of_experts):
            raise ValueError("other experts")

    def head(self) -> Matrix | DenseMatrix:
        """Returns the matrix of the logits."""
        path = HEAD if self._weights.has_parameter(f"{HEAD}.weight") else self._path("embed_tokens")
        return self._matrix(path, self._bias(HEAD), self._weights.dtype)

    def table(self, name: str) -> Matrix | DenseMatrix:
        """Returns a matrix whose rows are looked up."""
        path = self._path(name)
        if (quants := self._quants(path)) is not None:
            return matrix_of(quants.packed, quants.form, None)
        return DenseMatrix(_weight(self._weights.tensor(f"{path}.weight"), self._weights.dtype))

    def table_rows(self, name: str) -> TableRows:
        """Returns a table whose single rows steps read. Raises `ValueError` if its parts are of several forms."""
        parts = self._weights.table(f"{self._path(name)}.weight")
        width, dtype = parts[0].shape[1], parts[0].dtype
        if any((part.shape[1], part.dtype) != (width, dtype) for part in parts) or dtype not in _STORED:
            raise ValueError(f"{name} has rows of several widths or types, or of one that is not read")
        ends = [*accumulate(part.shape[0] for part in parts)]
        self._weights.asked[f"{self._path(name)}.weight"] = (ends[-1], width)
        listed = (calls.TablePartCall * len(parts))()
        for number, (part, end) in enumerate(zip(parts, ends, strict=True)):
            listed[number] = calls.TablePartCall(end - part.shape[0], part.file, part.offset, address_of(part.content))
        return TableRows(ends[-1], width, _STORED[dtype], listed, parts)

    def require_integers(self, name: str, expected: Sequence[int]) -> None:
        """Raises `ValueError` if the checkpoint has other whole numbers of this name than the options say."""
        numbers = self._weights.integers(self._path(name))
        if numbers is not None and numbers.reshape(-1).tolist() != [*expected]:
            raise ValueError(f"{self._path(name)} has other numbers than the options say")

    def expansions(
        self, name: str, heads: int, key_dim: int, value_dim: int
    ) -> Sequence[HeadMatrices | Sequence[Matrix]]:
        """Returns the matrices of each head from its key to latents, and from latents to its values. The parameter has
        key_dim + value_dim rows for each head. Raises `ValueError` if it has other rows."""
        path, dtype = f"{self._path(name)}.weight", self._weights.dtype
        if head_quants := self._weights.head_quants(path) if dtype == "bfloat16" else ():
            if {len(quants.packed) for quants in head_quants} != {heads}:
                raise ValueError(f"{name} has matrices of other heads than {heads}")
            return [[matrix_of(packed, quants.form, None) for packed in quants.packed] for quants in head_quants]
        kept = _weight(self._weights.tensor(path), dtype).kept
        rows, latents = key_dim + value_dim, kept.shape[1]
        if len(kept) != heads * rows:
            raise ValueError(f"{name} has {len(kept)} rows, {heads} times {rows} expected")
        start, stride = address_of(kept), rows * latents
        return (
            HeadMatrices(start, heads, key_dim, latents, False, stride, kept),
            HeadMatrices(start + key_dim * latents * kept.itemsize, heads, latents, value_dim, True, stride, kept),
        )

    def norm(self, name: str) -> WeightedNorm:
        """Returns a norm."""
        path, kind = self._path(name), self._norms.kind
        weights = [_of_norm(weight, bias, kind) for weight, bias in self._of_norms(name, path)]
        weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
        return WeightedNorm(_weight(weight, self._weights.dtype), _NORMS[kind], self._epsilon(name))

    def _of_norms(self, name: str, path: str) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Returns the weights and biases of a norm, or of each of its heads. A norm without weights gets ones."""
        weights = self._weights
        if self._names.has_plain_norms:
            return [(np.ones(self._names.hidden_size, np.float32), None)]
        if not weights.has_parameter(f"{path}.weight") and weights.has_parameter(path):
            return [(weights.tensor(path), None)]
        paths = takewhile(lambda head: weights.has_parameter(f"{head}.weight"), (f"{path}.norms.{i}" for i in count()))
        return [(weights.tensor(f"{part}.weight"), self._bias(name, part)) for part in [*paths] or [path]]

    def _epsilon(self, name: str) -> float:
        """Returns the epsilon of a norm. In some models, a norm has its own."""
        return self._names.epsilons.get(self._parted(name)[1], self._norms.epsilon)

    def float_norm(self, name: str) -> WeightedNorm | None:
        """Returns a norm with float32 weights, None if there is none."""
        if not self.has_module(name):
            return None
        weight = _weight(self._weights.tensor(f"{self._path(name)}.weight").reshape(-1), "float32")
        return WeightedNorm(weight, calls.ROUNDED, self._epsilon(name))

    def unweighted_norm(self, width: int) -> WeightedNorm:
        """Returns a norm without weights."""
        weight = _weight(np.ones(width, np.float32), self._weights.dtype)
        return WeightedNorm(weight, _NORMS[self._norms.kind], self._norms.epsilon)


def _of_norm(weight: np.ndarray, bias: np.ndarray | None, kind: NormKind) -> np.ndarray:
    """Returns the weights of a norm. In a layer norm, the biases follow the weights."""
    if not kind.startswith("layer"):
        return weight
    weight = converted(weight, "float32") + (1 if kind == "layer_plus_one" else 0)
    return np.concatenate([weight, np.zeros_like(weight) if bias is None else bias], axis=-1).reshape(-1)


def _of_part(weights: Quants | np.ndarray, bias: np.ndarray | None) -> Matrix | DenseMatrix:
    """Returns a matrix of quants or of bfloat16 numbers."""
    if isinstance(weights, Quants):
        return matrix_of(weights.packed, weights.form, bias)
    if fills_blocks(weights):
        return Matrix(weights, (weights.shape[0], weights.shape[1]), bias=bias)
    return DenseMatrix(_weight(weights, "bfloat16"), None if bias is None else _weight(bias, "float32"))


def _matrices(weight: np.ndarray, bias: np.ndarray | None) -> list[Matrix]:
    """Returns the matrices of experts, [experts, rows, columns], with their biases."""
    biases = [None] * len(weight) if bias is None else [*bias]
    return [Matrix(part, part.shape, bias=own) for part, own in zip(weight, biases, strict=True)]


def _weight(array: np.ndarray, dtype: str) -> Weight:
    """Returns an array in the type that an operator reads. Some models store weights in another one."""
    kept = np.ascontiguousarray(converted(array, dtype))
    return Weight(address_of(kept), kept.shape, kept)
