"""Of what in a `.gguf` file the parameters of a model are made, when it is loaded.

Matrices whose quants are computed with as they are stay matrices of the file (`file_matrix.py`). All others are made
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from torch import nn

from diskprefix.errors import ModelError
from diskprefix.model.gguf.architecture import Architecture, SourcedParameter
from diskprefix.model.load.gguf_header import FileTensor
from diskprefix.model.quants.expert_matrices import matrices_of, named_halves
from diskprefix.model.quants.file_matrix import FileMatrix, in_order
from diskprefix.model.quants.quantised import in_decoder, is_plain_embedding
from diskprefix.model.quants.quantised_experts import may_be_quantised

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FileParameters:
    """The parameters of `model`, which has no weights, in the type `dtype`. With the `weights` of `auto`, quants stay
    as they are where the operators take them, with `native` none do.

    Raises `ModelError` if the file lacks tensors, or has others, or matrices of other shapes than the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        tensors: Sequence[FileTensor],
        weights: str,
        dtype: torch.dtype,
    ) -> None:
        self.matrices: dict[str, FileMatrix] = {}
        """Those that stay in the file, by the names of modules. For experts these are of parts: `experts.gate`."""
        self.others: dict[str, Callable[[], torch.Tensor]] = {}
        """What makes each other parameter, by its name. Raises `ModelError` for another shape and a file cut short."""
        self._model, self._dtype = model, dtype
        tied = dict(model.all_tied_weights_keys)
        parameters = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        parts = architecture.parts_of(parameters, {tensor.name: tensor for tensor in tensors})
        self._taking: set[str] = set()
        """Parameters of modules that take quants."""
        for module_name, module in in_decoder(model) if weights != "native" else ():
            if type(module) is nn.Linear or is_plain_embedding(module):
                self._taking.add(f"{module_name}.weight")
            elif may_be_quantised(module):
                self._keep_experts(module_name, module, parameters, parts)
        for name, part in parts.items():
            users = [name, *(target for target, source in tied.items() if source == name)]
            self._add(users, parameters[name], part)

    def _keep_experts(
        self, owner: str, experts: Any, parameters: dict[str, torch.Tensor], parts: dict[str, SourcedParameter]
    ) -> None:
        """Takes the parameters of the experts of a mixture out of `parts`, if all their matrices stay in the file."""
        own = {name: part for name, part in parts.items() if name.rpartition(".")[0] == owner}
        matrices: dict[str, FileMatrix] = {}
        for name, part in own.items():
            if part.is_bias:
                continue
            if not part.is_matrix:
                return
            rows = torch.from_numpy(self._rows(part))
            halves = named_halves(experts, name.rpartition(".")[2], rows)
            matrices |= {
                f"{owner}.{half}": FileMatrix.of(half_rows.numpy(), part.tensors) for half, half_rows in halves.items()
            }
        if len(matrices) < len(matrices_of(experts)) or not all(one.is_packable for one in matrices.values()):
            return
        self.matrices |= matrices
        for name, part in own.items():
            del parts[name]
            if not part.is_bias:
                shape = (*self._rows(part).shape, part.tensors[0].shape[-1])
                _require_same(part, shape, _turned(parameters[name], experts.is_transposed).shape)
                continue
            bias = self._made(name, parameters[name], part)
            for half, values in named_halves(experts, name.rpartition(".")[2].removesuffix("_bias"), bias).items():
                self.others[f"{owner}.{half}.bias"] = values.contiguous

    def _add(self, users: list[str], parameter: torch.Tensor, part: SourcedParameter) -> None:
        """Adds a parameter that has several names, if it is shared."""
        left, is_turned = users, self._is_turned(users[0])
        read: Callable[[], torch.Tensor] = partial(self._made, users[0], parameter, part)
        if part.is_matrix and parameter.ndim > 1:
            matrix = FileMatrix.of(self._rows(part), part.tensors, part.columns(self._model.config))
            shape = _turned(parameter, is_turned).shape
            _require_same(part, matrix.shape, shape)
            if matrix.is_packable and len(matrix.shape) == 2:
                left = [user for user in users if user not in self._taking]
                kept = [user.removesuffix(".weight") for user in users if user in self._taking]
                self.matrices |= dict.fromkeys(kept, matrix)
            if self._dtype_of(users[0]) is torch.bfloat16:
                read = lambda: _turned(matrix.dequantised().view(shape), is_turned)  # noqa: E731
        if left:
            self.others[left[0]] = read

    def _is_turned(self, name: str) -> bool:
        """Returns whether a parameter is of experts whose matrices have rows and columns exchanged."""
        return bool(getattr(self._model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))

    def _rows(self, part: SourcedParameter) -> np.ndarray:
        """Returns the rows of a matrix, [rows] or [experts, rows], by numbers that count its tensors through."""
        numbers, first = [], 0
        for tensor in part.tensors:
            numbers.append(np.arange(first, first + tensor.num_rows).reshape(tensor.shape[:-1]))
            first += tensor.num_rows
        return part.rows(self._model.config, numbers)

    def _made(self, name: str, parameter: torch.Tensor, part: SourcedParameter) -> torch.Tensor:
        """Returns a parameter, computed in float32."""
        config, contents = self._model.config, [self._content(tensor) for tensor in part.tensors]
        with np.errstate(all="ignore"):
            found = part.rows(config, contents)
            if part.source.values is not None:
                found = part.source.values(part.part_of(config), found)
        made = torch.from_numpy(np.ascontiguousarray(found)).to(self._dtype_of(name))
        made = in_order(made, part.columns(config))
        made = _turned(made, self._is_turned(name))
        if parameter.ndim == 1 and made.numel() == len(parameter):
            return made.flatten()
        _require_same(part, made.shape, parameter.shape)
        return made.reshape(parameter.shape)

    def _content(self, tensor: FileTensor) -> np.ndarray:
        """Returns a tensor in float32. Of large ones whose numbers become bfloat16 rows are only moved."""
        matrix = FileMatrix.whole(tensor) if len(tensor.shape) > 1 else None
        if matrix is not None and matrix.is_packable and self._dtype is torch.bfloat16:
            moved: np.ndarray = matrix.dequantised().float().numpy()
            return moved
        found: np.ndarray = gguf.dequantize(tensor.content(), tensor.type).astype(np.float32)
        return found.reshape(tensor.shape)

    def _dtype_of(self, name: str) -> torch.dtype:
        is_float32 = any(part in name for part in self._model._keep_in_fp32_modules_strict or ())
        return torch.float32 if is_float32 else self._dtype


def _require_same(part: SourcedParameter, found: Sequence[int], expected: Sequence[int]) -> None:
    if [size for size in found if size > 1] != [size for size in expected if size > 1]:
        raise ModelError(f"the model takes {tuple(expected)} where the file has {tuple(found)}: {part.names}")


def _turned(weights: torch.Tensor, is_turned: bool) -> torch.Tensor:
    """Returns the matrices of a parameter, with rows and columns exchanged if they are of experts that way."""
    return weights.transpose(1, 2) if is_turned and weights.ndim == 3 else weights
