"""The weights of a decoder by the names of its parameters in transformers, within the decoder: `layers.0.mlp.up_proj`.

They come from a file (`load.gguf_weights`) or a folder (`load.folder_weights`). They stay where they are: a plan has
their addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from diskprefix.native import ROWS
from diskprefix.prefixstore.kv.numbers import dtype_of
from diskprefix.runtime.plan.operands import RowRuns
from diskprefix.runtime.plan.part_options import ExpertsForm
from diskprefix.runtime.plan.quants.quant_form import QuantForm


class Quants(Struct, frozen=True, eq=False):
    """A matrix in quants, `packed` as `quant_form` describes, or one of each expert. `columns`: by which sizes its
    columns are in another order (see `FileMatrix`)."""

    packed: np.ndarray
    form: QuantForm
    columns: tuple[int, int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        *experts, strips, units, _ = self.packed.shape
        return *experts, strips * ROWS, units * self.form.unit_columns


class MatrixPart(Struct, frozen=True, eq=False):
    """The rows `runs` of a matrix: quants, or bfloat16 numbers [rows, columns] that no operator takes as quants."""

    runs: RowRuns
    weights: Quants | np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape

    @property
    def places(self) -> np.ndarray:
        """The numbers of the rows."""
        starts = self.runs.first + self.runs.stride * np.arange(self.runs.count)
        return (starts[:, None] + np.arange(self.runs.width)).reshape(-1)


class TablePart(Struct, frozen=True, eq=False):
    """Rows of a table of `dtype`, [rows, width]: an array, or the bytes from `offset` on of the open file `file`, a
    descriptor that `kept` keeps open."""

    shape: tuple[int, int]
    dtype: str
    content: np.ndarray | None = None
    file: int = -1
    offset: int = 0
    kept: Any = None


class Weights(ABC):
    """The weights of a decoder that computes in `dtype`. Not thread-safe."""

    transposes_experts = True
    """False if the matrices of experts are not transposed, like all others."""

    def __init__(self, dtype: str, *, has_draft_layer: bool = False) -> None:
        self.dtype, self.has_draft_layer = dtype, has_draft_layer
        self.asked = dict[str, tuple[int, ...]]()
        """The shapes of the weights that a plan has asked for, in order."""
        self._tensors: dict[str, np.ndarray] = {}

    @property
    def keeps_quants(self) -> bool:
        """Some of the weights in memory are the quants of the files."""
        return False

    @abstractmethod
    def has_parameter(self, name: str) -> bool:
        """Returns whether there is a parameter."""

    @abstractmethod
    def _read_tensor(self, name: str) -> np.ndarray:
        """Returns a parameter. Raises `ModelError` if there is none."""

    def tensor(self, name: str, *, is_transposed: bool = False) -> np.ndarray:
        """Returns a parameter in transformers' dtype for it (`kv.numbers`), transposed if `is_transposed`. It is read
        once. Raises `ModelError` if there is none, or if the file is cut short."""
        key = f"{name} transposed" if is_transposed else name
        if key not in self._tensors:
            tensor = self._read_tensor(name)
            self._tensors[key] = np.ascontiguousarray(tensor.T) if is_transposed else tensor
        self.asked[name] = self._tensors[key].shape
        return self._tensors[key]

    def quants(self, _name: str) -> Quants | None:
        """Returns the quants of a matrix, None if it has none that operators take."""
        return None

    def parts(self, _name: str) -> Sequence[MatrixPart]:
        """Returns the parts of a matrix whose rows are in several forms, nothing if all are in one."""
        return ()

    def head_quants(self, _name: str) -> Sequence[Quants]:
        """Returns the quants of the matrices of heads that are there instead of a parameter, nothing if there are
        none."""
        return ()

    def expert_quants(self, _name: str, _form: ExpertsForm) -> Mapping[str, Quants]:
        """Returns the quants of the matrices of experts, `gate`, `up` (unless there is none) and `down`; nothing if not
        all of them have some."""
        return {}

    def table(self, name: str) -> Sequence[TablePart]:
        """Returns the parts of a table whose single rows steps read. A table in files is not read into memory."""
        tensor = self.tensor(name)
        return [TablePart((tensor.shape[0], tensor.shape[1]), dtype_of(tensor), tensor)]

    def integers(self, _name: str) -> np.ndarray | None:
        """Returns whole numbers that a checkpoint has beside its weights, int64, None if it has none."""
        return None

    def misfit(self) -> str:
        """Returns the last weights that were asked for, with their shapes, for a message."""
        return ", ".join(f"{name} is {shape}" for name, shape in [*self.asked.items()][-8:])

    @abstractmethod
    def finish_reading(self) -> None:
        """Waits until all weights that were asked for are in memory. Raises the errors of reading."""

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the weights that were asked for: parameters, and packed quants by the names of their modules."""
        yield from self._tensors.items()
