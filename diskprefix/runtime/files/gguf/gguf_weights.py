"""The weights of a `.gguf` file, for a plan or for modules of transformers.

Matrices whose quants are computed with as they are stay matrices of the file (`quants.file_matrix`), and are packed on
other threads. All others, and the parameters of modules, are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from diskprefix.errors import ModelError
from diskprefix.prefixstore.kv.numbers import array_dtype, converted
from diskprefix.runtime.files.file_matrix import FileMatrix, MatrixPacking, in_order
from diskprefix.runtime.files.gguf.architecture import Architecture, SourcedParameter
from diskprefix.runtime.files.gguf.gguf_file import within_block
from diskprefix.runtime.files.gguf.gguf_header import FileTensor
from diskprefix.runtime.memory import LargePages
from diskprefix.runtime.plan.families.slot_names import kept_in_float32
from diskprefix.runtime.plan.operands import RowRuns
from diskprefix.runtime.plan.part_options import ExpertsForm
from diskprefix.runtime.plan.weights import MatrixPart, Quants, Weights


class GgufWeights(Weights):
    """The weights of the decoder in a file, whose configuration `config` is. With a `packing`, quants stay as they are
    where the operators take them. `is_unread`: memory has any numbers, nothing is read."""

    transposes_experts = False

    def __init__(
        self,
        architecture: Architecture,
        config: Any,
        tensors: Sequence[FileTensor],
        dtype: str,
        packing: MatrixPacking | None = None,
        *,
        has_draft_layer: bool = False,
        is_unread: bool = False,
    ) -> None:
        super().__init__(dtype, has_draft_layer=has_draft_layer)
        self._architecture, self._config, self._packing, self._is_unread = architecture, config, packing, is_unread
        self._found = {tensor.name: tensor for tensor in tensors}
        self._prefix = "model." if architecture.encoder is None else architecture.encoder.text
        self._in_float32 = kept_in_float32(config)
        self._used: set[str] = set()
        self._quants: dict[str, Quants] = {}
        self._places = LargePages()

    @property
    def keeps_quants(self) -> bool:
        return bool(self._quants)

    def has_parameter(self, name: str) -> bool:
        if name == "lm_head.weight":
            return not self._config.tie_word_embeddings
        try:
            self._part(name)
        except ModelError:
            return False
        return True

    def quants(self, name: str) -> Quants | None:
        if self._packing is None:
            return None
        part = self._part(name)
        if not part.is_matrix:
            return None
        matrix = FileMatrix.of(self._rows(part), part.tensors, part.columns(self._config))
        return self._kept(name.removesuffix(".weight"), matrix) if _stays(matrix, 2) else None

    def parts(self, name: str) -> Sequence[MatrixPart]:
        matrices = self._matrices_of(name)
        if not any(_stays(matrix, 2) for _, matrix in matrices):
            return ()
        stem = name.removesuffix(".weight")
        return [MatrixPart(runs, self._part_of(stem, matrix)) for runs, matrix in matrices]

    def _matrices_of(self, name: str) -> list[tuple[RowRuns, FileMatrix]]:
        """Returns the matrix of each tensor whose rows a matrix has; nothing if all have one type, or if the rows of
        two tensors are interleaved irregularly."""
        part = None if self._packing is None else self._part(name)
        if part is None or not part.is_matrix or len({tensor.kind for tensor in part.tensors}) < 2:
            return []
        rows, matrices = self._rows(part), []
        if rows.ndim != 1 or part.columns(self._config) is not None:
            return []
        owners = np.searchsorted(np.cumsum([tensor.num_rows for tensor in part.tensors]), rows, side="right")
        for owner in np.unique(owners):
            places = np.flatnonzero(owners == owner)
            if (runs := RowRuns.of(places)) is None:
                return []
            matrices.append((runs, FileMatrix.of(rows[places], part.tensors)))
        return matrices

    def _part_of(self, stem: str, matrix: FileMatrix) -> Quants | np.ndarray:
        """Returns the rows of the matrix `stem` that one tensor has."""
        name = f"{stem}.{within_block(matrix.tensors[0].name)}"
        if _stays(matrix, 2):
            return self._kept(name, matrix)
        self._used |= {tensor.name for tensor in matrix.tensors}
        if name not in self._tensors:
            tensor = np.empty(matrix.shape, np.uint16) if self._is_unread else matrix.dequantised()
            self._tensors[name] = tensor if self._is_unread else self._places.put(tensor)
        return self._tensors[name]

    def head_quants(self, name: str) -> Sequence[Quants]:
        part = self._part(name)
        matrices = [FileMatrix.whole(tensor) for tensor in part.tensors]
        if self._packing is None or not part.source.is_of_heads or not all(_stays(matrix, 3) for matrix in matrices):
            return ()
        stem = name.removesuffix(".weight")
        return [self._kept(f"{stem}.{of}", matrix) for of, matrix in zip(("keys", "values"), matrices, strict=True)]

    def expert_quants(self, name: str, form: ExpertsForm) -> Mapping[str, Quants]:
        if self._packing is None:
            return {}
        matrices: dict[str, FileMatrix] = {}
        for parameter in (form.first, "down_proj"):
            part = self._part(f"{name}.{parameter}")
            if not part.is_matrix:
                return {}
            halves = form.halves(parameter, self._rows(part))
            matrices |= {half: FileMatrix.of(rows, part.tensors) for half, rows in halves.items()}
        if not all(_stays(matrix, 3) for matrix in matrices.values()):
            return {}
        return {half: self._kept(f"{name}.{half}", matrix) for half, matrix in matrices.items()}

    def finish_reading(self) -> None:
        """Raises `ModelError` if nothing has taken a tensor of the file, or for one that is cut short, `OSError`."""
        self._architecture.require_used(self._found, self._used)
        if self._packing is not None:
            self._packing.finish_packing()

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from super().named()
        yield from ((name, quants.packed) for name, quants in self._quants.items())

    def _part(self, name: str) -> SourcedParameter:
        prefix = "" if name.startswith("lm_head.") else self._prefix
        return self._architecture.part_of(f"{prefix}{name}", self._found)

    def _kept(self, name: str, matrix: FileMatrix) -> Quants:
        assert self._packing is not None, "it was looked at before"
        self._used |= {tensor.name for tensor in matrix.tensors}
        if name not in self._quants:
            packed = np.empty(matrix.packed_shape, np.uint8) if self._is_unread else self._packing.take(matrix)
            self._quants[name] = Quants(packed, matrix.form, matrix.columns)
        return self._quants[name]

    def _rows(self, part: SourcedParameter) -> np.ndarray:
        """Returns the rows of a matrix, [rows] or [experts, rows], by numbers that count its tensors through."""
        numbers, first = [], 0
        for tensor in part.tensors:
            numbers.append(np.arange(first, first + tensor.num_rows).reshape(tensor.shape[:-1]))
            first += tensor.num_rows
        return part.rows(self._config, numbers)

    def _read_tensor(self, name: str) -> np.ndarray:
        part = self._part(name)
        self._used |= {tensor.name for tensor in part.tensors}
        if self._is_unread:
            shape = self._made(part, [_nothing(tensor) for tensor in part.tensors]).shape
            return np.empty(shape, array_dtype(self._dtype_of(name)))
        return self._places.put(self.parameter(name, part))

    def parameter(self, name: str, part: SourcedParameter) -> np.ndarray:
        """Returns a parameter. Raises `ModelError` if the file is cut short, `OSError`."""
        columns, dtype = part.columns(self._config), self._dtype_of(name)
        if part.is_matrix and dtype == "bfloat16":
            return FileMatrix.of(self._rows(part), part.tensors, columns).dequantised()
        tensor = self._made(part, [self._content(tensor) for tensor in part.tensors])
        with np.errstate(over="ignore"):
            return in_order(converted(tensor, dtype), columns)

    def _made(self, part: SourcedParameter, contents: Sequence[np.ndarray]) -> np.ndarray:
        """Returns a parameter in float32."""
        with np.errstate(all="ignore"):
            rows: np.ndarray = part.rows(self._config, contents)
            return rows if part.source.values is None else part.source.values(part.part_of(self._config), rows)

    def _content(self, tensor: FileTensor) -> np.ndarray:
        """Returns a tensor in float32. Of large ones whose numbers become bfloat16 rows are only moved."""
        matrix = FileMatrix.whole(tensor) if len(tensor.shape) > 1 else None
        if matrix is not None and matrix.is_packable and self.dtype == "bfloat16":
            return converted(matrix.dequantised(), "float32")
        return tensor.numbers(tensor.content()).astype(np.float32, copy=False).reshape(tensor.shape)

    def _dtype_of(self, name: str) -> str:
        return "float32" if any(part in name for part in self._in_float32) else self.dtype


def _stays(matrix: FileMatrix, dims: int) -> bool:
    """Returns whether the quants of a matrix stay as they are."""
    return len(matrix.shape) == dims and matrix.is_packable


def _nothing(tensor: FileTensor) -> np.ndarray:
    """Returns numbers of the shape of a tensor that take no memory."""
    return np.broadcast_to(np.float32(0), tensor.shape)
