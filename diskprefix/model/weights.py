"""The weights of a decoder by the names of its parameters in transformers, within the decoder: `layers.0.mlp.up_proj`.

They come from a file (`load.gguf_weights`) or a folder (`load.folder_weights`). They stay where they are: a plan has
their addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from diskprefix.model.operands import RowRuns
from diskprefix.model.quants.quant_form import QuantForm
from diskprefix.native import ROWS


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


class ExpertsForm(Struct, frozen=True):
    """The form of the matrices of experts in parameters: with a matrix `up` or without, with biases, with rows and
    columns exchanged, and the rows of gate and up behind each other or turn about."""

    has_up: bool = True
    has_bias: bool = False
    is_turned: bool = False
    turns_about: bool = False

    @property
    def first(self) -> str:
        """The name of the parameter of gate and up."""
        return "gate_up_proj" if self.has_up else "up_proj"

    def halves(self, name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the parts of the parameter `name`, [experts, rows, ..], that is not turned."""
        if name == "down_proj" or not self.has_up:
            return {"down" if name == "down_proj" else "gate": rows}
        gate, up = (rows[:, ::2], rows[:, 1::2]) if self.turns_about else np.split(rows, 2, axis=1)
        return {"gate": gate, "up": up}


class Weights(ABC):
    """The weights of a decoder that computes in `dtype`. Not thread-safe."""

    turns_experts = True
    """False if the matrices of experts have rows and columns as all others have."""

    def __init__(self, dtype: str, *, has_draft_layer: bool = False) -> None:
        self.dtype, self.has_draft_layer = dtype, has_draft_layer
        self.asked = dict[str, tuple[int, ...]]()
        """The shapes of what a plan has asked for, in order."""
        self._tensors: dict[str, np.ndarray] = {}

    @abstractmethod
    def has(self, name: str) -> bool:
        """Returns whether there is a parameter."""

    @abstractmethod
    def _read(self, name: str) -> np.ndarray:
        """Returns a parameter. Raises `ModelError` if there is none."""

    def tensor(self, name: str, *, is_turned: bool = False) -> np.ndarray:
        """Returns a parameter in the type in which transformers keeps it (`kv.numbers`), with its dimensions exchanged
        if `is_turned`. It is read once. Raises `ModelError` if there is none, or if the file is cut short."""
        key = f"{name} turned" if is_turned else name
        if key not in self._tensors:
            found = self._read(name)
            self._tensors[key] = np.ascontiguousarray(found.T) if is_turned else found
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

    def misfit(self) -> str:
        """Returns the last weights that were asked for, with their shapes, for a message."""
        return ", ".join(f"{name} is {shape}" for name, shape in [*self.asked.items()][-8:])

    @abstractmethod
    def finish(self) -> None:
        """Returns when all weights are in memory that were asked for. Raises what reading raises."""

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields what was asked for: parameters, and packed quants by the names of their modules."""
        yield from self._tensors.items()
