"""The values that a plan is made of: weights and buffers at fixed addresses, places in memory, and options."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.native import calls
from diskprefix.native.matrix import Matrix
from diskprefix.runtime.plan.curves import curve, limited_curve


class Weight(Struct, frozen=True, eq=False):
    """A tensor at a fixed address, in the type of the plan. `kept` keeps its memory."""

    address: int
    shape: tuple[int, ...]
    kept: Any

    def part(self, first: int, end: int) -> Weight:
        """Returns rows `first` to `end - 1`."""
        return Weight(self.address + first * self.kept[0].nbytes, (end - first, *self.shape[1:]), self.kept)


class DenseMatrix(Struct, frozen=True, eq=False):
    """A matrix [rows, columns], row after row in the type of the plan. `bias` is float32 [rows]."""

    weight: Weight
    bias: Weight | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[1]

    def part(self, first: int, end: int) -> DenseMatrix:
        """Returns the matrix of rows `first` to `end - 1`, in the same memory."""
        return DenseMatrix(self.weight.part(first, end), None if self.bias is None else self.bias.part(first, end))


class RowRuns(Struct, frozen=True):
    """Rows of a matrix, or numbers of its results: `count` runs of `width`, `stride` apart. The first begins at
    `first`."""

    first: int
    count: int
    width: int
    stride: int

    @classmethod
    def of(cls, places: np.ndarray) -> RowRuns | None:
        """Returns ascending row numbers as runs, None if these are not equally long and equally far apart."""
        ends = np.flatnonzero(np.diff(places) != 1) + 1
        width = int(ends[0]) if len(ends) else len(places)
        if len(places) % width:
            return None
        runs = places.reshape(-1, width)
        count, first = len(runs), int(runs[0, 0])
        stride = int(runs[1, 0]) - first if count > 1 else width
        expected = first + stride * np.arange(count)[:, None] + np.arange(width)
        return cls(first, count, width, stride) if np.array_equal(runs, expected) else None


class TableRows(Struct, frozen=True, eq=False):
    """A table [rows, width] of numbers of the type `stored`, in `parts` one after the other. A step reads single rows
    of it, in memory or in files. `kept` keeps both."""

    rows: int
    width: int
    stored: int
    parts: ctypes.Array[calls.TablePartCall]
    kept: Any


class JoinedMatrix(Struct, frozen=True, eq=False):
    """A matrix that consists of the rows of several `parts`, at the places `runs`. Each part has its own form."""

    parts: Sequence[Matrix | DenseMatrix]
    runs: Sequence[RowRuns]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].columns


AnyMatrix: TypeAlias = Matrix | DenseMatrix | JoinedMatrix


class PackedExperts(Struct, frozen=True, eq=False):
    """The matrices of each expert of a mixture. `up` is empty if there is none."""

    gate: Sequence[Matrix]
    up: Sequence[Matrix]
    down: Sequence[Matrix]


class DenseExperts(Struct, frozen=True, eq=False):
    """Experts with contiguous matrices: `first` [experts, inner or 2 × inner, width], and `last` [experts, width,
    inner]. With `is_transposed` the last two dimensions are swapped. The rows of up follow the rows of gate, or
    alternate with them (`is_interleaved`). Biases are float32 [experts, rows of the matrix]."""

    first: Weight
    last: Weight
    biases: Sequence[Weight] | None = None
    has_up: bool = True
    is_transposed: bool = False
    is_interleaved: bool = False


class HeadMatrices(Struct, frozen=True, eq=False):
    """A matrix [inner, outer] for each head, with `is_transposed` [outer, inner], in the type of the plan. Matrices are
    `stride` numbers apart."""

    address: int
    heads: int
    inner: int
    outer: int
    is_transposed: bool
    stride: int
    kept: Any


class Buffer(Struct, frozen=True):
    """A buffer, [rows of a step, width], in the type of the plan or in float32. `stride` counts numbers from row to
    row. `is_of_logits`: it has only the rows that get logits."""

    address: int
    width: int
    stride: int
    item_bytes: int
    is_of_logits: bool = False

    def part(self, first: int, width: int) -> Buffer:
        """Returns `width` numbers of each row, from number `first` on."""
        return replace(self, address=self.address + first * self.item_bytes, width=width)


class Router(Struct, frozen=True):
    """The way to the `num_chosen` experts of a row. `scores` are of all experts, or of the chosen ones. With `groups`,
    experts are chosen in the best `groups_chosen` of them, and a group counts its `of_group` best ones. Weights are
    divided by their sum, or `floor` if that is larger, if they are normed, and multiplied by `factor`. A softcap is one
    of logits. A sparse mixer weighs each expert among those left that are nearer to it than `threshold`."""

    num_chosen: int
    scores: str = "softmax"
    is_normed: bool = False
    floor: float = 1e-20
    factor: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    of_group: int = 2
    softcap: float = 0.0
    threshold: float = 0.0


class Gating(Struct, frozen=True):
    """The numbers between the products of experts, function(gate) × up_function(up). Limited functions have a slope and
    a limit. With `weighs_rows` the rows of experts are multiplied by their weights, instead of what they compute."""

    function: str = "silu"
    up_function: str = "identity"
    slope: float = 1.0
    limit: float = 0.0
    weighs_rows: bool = False

    def table(self, function: str) -> np.ndarray | None:
        """Returns the table of a function for bfloat16 numbers, None for the identity."""
        if function == "identity":
            return None
        return limited_curve(function, self.slope, self.limit) if function.startswith("limited") else curve(function)


class ExpertRoutes(NamedTuple):
    """The experts of each row, and their weights, [rows, num_chosen]."""

    chosen: int
    weights: int
    num_chosen: int


class ChosenBlocks(NamedTuple):
    """The blocks of `block` tokens that rows attend to, int32 [rows, num_chosen]. `is_of_logits`: only rows that get
    logits have some."""

    chosen: int
    block: int
    num_chosen: int
    is_of_logits: bool

    @property
    def operands(self) -> dict[str, int]:
        """The fields of a call."""
        return {"chosen": self.chosen, "block": self.block, "num_chosen": self.num_chosen}


class RotaryAngles(NamedTuple):
    """The cosines and sines of the step's positions, [rows, half]."""

    cosines: Buffer
    sines: Buffer
    pairing: calls.Pairing
    first: int


class Rotary(Struct, frozen=True, eq=False):
    """The rotary embedding of heads, with `frequencies`, float32 [half].

    By its `pairing`, frequency i rotates elements `first + i` and `first + half + i` of a head (`HALVES`),
    or elements `first + 2i` and `first + 2i + 1` (`INTERLEAVED`), which may be moved into halves afterwards
    (`INTERLEAVED_TO_HALVES`). `axes` has the dimension of positions that each frequency uses, int64 [half]; None if all
    use the first.
    """

    frequencies: np.ndarray
    factor: float = 1.0
    pairing: calls.Pairing = calls.Pairing.HALVES
    first: int = 0
    axes: np.ndarray | None = None


class WeightedNorm(Struct, frozen=True):
    """A norm of rows or heads. `kind` is one of `calls`. `weight` is [width], in a layer norm [2 × width], with biases
    after the weights. The weights of heads, if each has its own, are concatenated."""

    weight: Weight
    kind: int
    epsilon: float

    def fits(self, heads: int, width: int) -> bool:
        """Returns whether these are the weights of `heads` heads of `width` numbers."""
        return self.weight.shape == (heads * width * (2 if self.kind == calls.LAYER else 1),)


class Location(Struct, frozen=True):
    """The rows of one layer in the pages of a table: `heads` heads of `dim` numbers for each token. They begin at byte
    `offset` of a page. Strides count items of `item_bytes` bytes. An item is a number, or `of_item` numbers of 8
    bits."""

    table: int
    offset: int
    heads: int
    dim: int
    item_bytes: int
    head_stride: int
    token_stride: int
    of_item: int = 1

    def after(self, count: int) -> Location:
        """Returns the rows without the first `count` numbers of each head."""
        return replace(self, offset=self.offset + count // self.of_item * self.item_bytes, dim=self.dim - count)

    def has_room(self, heads: int, dim: int, item_bytes: int) -> bool:
        """Returns whether its rows have these heads, with at least `dim` numbers. Operators do not check it."""
        return self.heads == heads and (self.of_item > 1 or self.item_bytes == item_bytes) and dim <= self.dim

    @property
    def call(self) -> calls.PagedRowsCall:
        return calls.PagedRowsCall(0, self.offset, self.head_stride, self.token_stride, self.of_item > 1)


class StateLocation(Struct, frozen=True):
    """A state of one layer in the pages of a group of states: its offset in bytes, and its form."""

    group: int
    offset: int
    shape: tuple[int, ...]
    item_bytes: int

    def is_of(self, shape: tuple[int, ...], item_bytes: int) -> bool:
        """Returns whether it has this form. Operators do not check it."""
        return (self.shape, self.item_bytes) == (shape, item_bytes)

    @property
    def call(self) -> calls.StatePlace:
        return calls.StatePlace(self.group, self.offset, math.prod(self.shape) * self.item_bytes)


class PlannedRun(Struct, frozen=True):
    """Consecutive tokens of one sequence. `start` is the position of the first one. The last `num_logits` of
    `num_rows` rows get logits. `tables` has the address of each table's page addresses, `spans` the pictures. `befores`
    and `states` are the addresses of the pages of states before and after the step. `kept` has room for what `replay`
    needs, `kept_bytes` for each row."""

    start: int
    num_rows: int
    num_logits: int
    tables: Sequence[int]
    spans: array[int]
    befores: Sequence[int] = ()
    states: Sequence[int] = ()
    kept: np.ndarray | None = None


class EncodedRows(Struct, frozen=True, eq=False):
    """Rows of pictures in a step: their numbers, int64 [count], and the encoder's output for them, [levels, count,
    width] in the type of the plan, at the address `first`. `kept` keeps its memory."""

    numbers: np.ndarray
    first: int
    level_bytes: int
    kept: Any

    def level(self, number: int) -> int:
        """Returns the address of a level."""
        return self.first + number * self.level_bytes
