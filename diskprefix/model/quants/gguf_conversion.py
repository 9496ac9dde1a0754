"""Makes a model's folder of a GGUF file, parameter by parameter. The model itself stays on torch's meta device.

Matrices whose quants are computed with as they are stay in the file; the folder says which rows make which matrix
(`file_matrix.py`). Of the others one is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from diskprefix.errors import ModelError
from diskprefix.model.exact.mixtures import matrices_of, named_halves
from diskprefix.model.gguf.architecture import Architecture, SourcedParameter
from diskprefix.model.load.gguf_header import FileTensor
from diskprefix.model.load.memory import one_thread
from diskprefix.model.quants.file_matrix import FileMatrix, save_matrices
from diskprefix.model.quants.forms import quantised
from diskprefix.model.quants.quant_form import form_of
from diskprefix.model.quants.quantised import (
    FILE,
    bits_for,
    is_plain_embedding,
    is_untied,
    metadata_of,
    quantisable,
    quantisable_experts,
    untie,
)
from diskprefix.model.quants.tensor_writer import TensorWriter
from diskprefix.native import ROWS
from diskprefix.native.matrix import fills_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ENTRY_BYTES = 512
"""The greatest length of a tensor's entry in the header, with its form."""


class GgufConversion:
    """The conversion of `tensors` to the form `weights`, into the folder `made`. `model` has no weights. `advance`
    takes the elements done."""

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        tensors: Sequence[FileTensor],
        weights: str,
        made: Path,
        advance: Callable[[int], None],
    ) -> None:
        self._model, self._architecture, self._tensors = model, architecture, tensors
        self._weights, self._made, self._advance = weights, made, advance
        firsts = [0, *accumulate(tensor.num_rows for tensor in tensors)][:-1]
        self._first_of = {tensor.name: first for tensor, first in zip(tensors, firsts, strict=True)}
        """The numbers of the tensors' first rows."""
        self._done = 0
        self._forms: dict[str, str] = {}
        self._linears = {f"{name}.weight" for name, _ in quantisable(model)} if weights != "native" else set()
        self._experts: dict[str, Any] = {} if weights == "native" else dict(quantisable_experts(model))
        """Mixtures, by the names of their modules."""
        embedding = model.get_input_embeddings()
        self._embeddings = {
            f"{name}.weight" for name, one in model.named_modules() if one is embedding and is_plain_embedding(one)
        }

    def run(self) -> None:
        """Converts. Raises `ModelError` if the file lacks tensors or has others or of other shapes, or the model has no
        matrix that can be quantised; `OSError` if the disk is full."""
        model, tied = self._model, dict(self._model.all_tied_weights_keys)
        parameters = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        parts = self._architecture.parts_of(parameters, {tensor.name: tensor for tensor in self._tensors})
        writer = self._writer = TensorWriter(self._made / FILE, _ENTRY_BYTES * (len(parameters) + 1))
        kept: dict[str, FileMatrix] = {}
        try:
            with torch.no_grad(), one_thread():
                for owner, experts in self._experts.items():
                    kept |= self._kept_experts(owner, experts, parameters, parts)
                for name, part in parts.items():
                    users = [name, *(target for target, source in tied.items() if source == name)]
                    kept |= self._convert(users, parameters[name], part)
                if self._weights in ("int8", "int4") and not self._forms and not kept:
                    raise ModelError("--weights: the model has no matrix that can be quantised; add --weights native")
                metadata = {"format": "pt"}
                if self._weights != "native":
                    metadata = metadata_of(model, self._forms, kept)
                writer.finish(metadata)
        finally:
            writer.close()
        if kept:
            save_matrices(kept, list(dict.fromkeys(tensor.file for tensor in self._tensors)), self._made)
        if is_untied(metadata):
            untie(model.config)
        if self._weights == "native":
            # As `save_pretrained` does. Quantised models keep what they were loaded with.
            model.config.dtype = str(model.dtype).removeprefix("torch.")
            model.config.architectures = [type(model).__name__]

    def _kept_experts(
        self, owner: str, experts: Any, parameters: dict[str, torch.Tensor], parts: dict[str, SourcedParameter]
    ) -> dict[str, FileMatrix]:
        """Returns the matrices of the experts that stay in the file, by their modules: those of a mixture all stay, or
        none does. Takes their parameters out of `parts`, and writes their biases."""
        own = [name for name in parts if name.rpartition(".")[0] == owner]
        matrices: dict[str, FileMatrix] = {}
        for name in own:
            part = parts[name]
            if part.is_bias:
                continue
            if not part.is_matrix:
                return {}
            rows = torch.from_numpy(self._numbers(part))
            halves = named_halves(experts, name.rpartition(".")[2], rows)
            matrices |= {f"{owner}.{half}": self._matrix(half_rows.numpy()) for half, half_rows in halves.items()}
        if len(matrices) < len(matrices_of(experts)) or not all(map(_has_form, matrices.values())):
            return {}
        for name in own:
            part = parts.pop(name)
            if part.is_bias:
                bias = self._values(name, parameters[name], part).to(_dtype_of(self._model, name))
                of = name.rpartition(".")[2].removesuffix("_bias")
                for half, values in named_halves(experts, of, bias).items():
                    self._writer.add(f"{owner}.{half}.bias", values.contiguous())
            else:
                self._require_shape(part, self._numbers(part).shape, _turned(parameters[name], experts))
        self._advanced(sum(prod(matrix.shape) for matrix in matrices.values()))
        return matrices

    def _convert(self, users: list[str], parameter: torch.Tensor, part: SourcedParameter) -> dict[str, FileMatrix]:
        """Writes a parameter, quantised where `weights` wants it. Returns the matrices that stay in the file, by the
        modules among its `users`."""
        name = users[0]
        if part.is_matrix and parameter.ndim > 1 and _dtype_of(self._model, name) is torch.bfloat16:
            experts = self._experts_at(name)
            matrix = self._matrix(self._numbers(part))
            self._require_shape(part, matrix.shape[:-1], _turned(parameter, experts))
            staying = [user for user in users if self._stays(user, matrix)]
            if len(staying) < len(users):
                found = _turned(matrix.dequantised().view(_turned(parameter, experts).shape), experts)
                self._put([user for user in users if user not in staying], found)
            self._advanced(parameter.numel())
            return {user.removesuffix(".weight"): matrix for user in staying}
        self._put(users, self._values(name, parameter, part).to(_dtype_of(self._model, name)))
        self._advanced(parameter.numel())
        return {}

    def _experts_at(self, name: str) -> Any:
        owner = self._model.get_submodule(name.rpartition(".")[0])
        return owner if getattr(owner, "is_transposed", False) else None

    def _numbers(self, part: SourcedParameter) -> np.ndarray:
        """Returns the numbers of the rows of a matrix, [rows] or [experts, rows]."""
        numbers = []
        for tensor in part.tensors:
            first = self._first_of[tensor.name]
            numbers.append(np.arange(first, first + tensor.num_rows).reshape(tensor.shape[:-1]))
        return part.rows(self._model.config, numbers)

    def _matrix(self, rows: np.ndarray) -> FileMatrix:
        found = FileMatrix.of(rows, self._tensors, [*self._first_of.values()])
        if found is None:
            raise ModelError("matrices of several widths cannot be joined")
        return found

    def _values(self, name: str, parameter: torch.Tensor, part: SourcedParameter) -> torch.Tensor:
        """Returns a parameter in float32. Raises `ModelError` if its shape is not that of the model."""
        config, turned = self._model.config, self._experts_at(name)
        contents = [
            gguf.dequantize(tensor.content(), tensor.type).astype(np.float32).reshape(tensor.shape)
            for tensor in part.tensors
        ]
        with np.errstate(all="ignore"):
            found = part.rows(config, contents)
            if part.source.values is not None:
                found = part.source.values(config, found)
        made = torch.from_numpy(np.ascontiguousarray(found))
        if turned is not None and made.ndim == 3:
            made = made.transpose(1, 2)
        if parameter.ndim == 1 and made.numel() == len(parameter):
            return made.flatten()
        if [size for size in made.shape if size > 1] != [size for size in parameter.shape if size > 1]:
            raise _mismatch(part, tuple(made.shape), tuple(parameter.shape))
        return made.reshape(parameter.shape)

    def _require_shape(self, part: SourcedParameter, rows: Sequence[int], parameter: torch.Tensor) -> None:
        shape = (*rows, part.tensors[0].shape[-1])
        if [size for size in shape if size > 1] != [size for size in parameter.shape if size > 1]:
            raise _mismatch(part, shape, tuple(parameter.shape))

    def _put(self, users: list[str], tensor: torch.Tensor) -> None:
        plain = []
        for user in users:
            linear = user.removesuffix(".weight")
            bits = bits_for(self._model, linear, self._weights) if user in self._linears else None
            if bits is None or not fills_blocks(tensor):
                plain.append(user)
            else:
                quants = quantised(tensor, bits)
                self._writer.add(f"{linear}.packed", quants.packed())
                self._forms[linear] = str(quants.form)
        if plain:
            self._writer.add(plain[0], tensor)

    def _stays(self, user: str, matrix: FileMatrix) -> bool:
        form = None if matrix.kind is None else form_of(matrix.kind)
        if form is None or len(matrix.shape) != 2 or not _has_form(matrix):
            return False
        bits = bits_for(self._model, user.removesuffix(".weight"), self._weights)
        is_embedding = self._weights != "native" and user in self._embeddings
        return is_embedding or (user in self._linears and (bits is None or form.bits <= bits))

    def _advanced(self, num_elements: int) -> None:
        self._done += num_elements
        self._advance(self._done)


def _mismatch(part: SourcedParameter, found: tuple[int, ...], expected: tuple[int, ...]) -> ModelError:
    return ModelError(f"the model takes {expected} where the file has {found}: {part.names}")


def _has_form(matrix: FileMatrix) -> bool:
    """Returns whether the operators take the quants of a matrix, or of those of several experts."""
    return matrix.kind is not None and form_of(matrix.kind) is not None and matrix.shape[-2] % ROWS == 0


def _turned(weights: torch.Tensor, experts: Any) -> torch.Tensor:
    """Returns the matrices of a parameter with rows and columns exchanged, if its module has experts that way."""
    return weights.transpose(1, 2) if experts is not None and experts.is_transposed and weights.ndim == 3 else weights


def _dtype_of(model: PreTrainedModel, name: str) -> torch.dtype:
    """Returns the type of a parameter in a model in bfloat16."""
    is_float32 = any(part in name for part in model._keep_in_fp32_modules_strict or ())
    return torch.float32 if is_float32 else torch.bfloat16
