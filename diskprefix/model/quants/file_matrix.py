"""Matrices that stay in a `.gguf` file: the rows of its tensors that each is made of, in their order.

They are packed beside the rest of a start: reading and packing hold no lock of Python's, so threads do them while
another one makes the plan and reads the tokenizer."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from math import prod
from threading import Thread

import numpy as np
from msgspec import Struct

from diskprefix.errors import ModelError
from diskprefix.kv.numbers import converted
from diskprefix.model.load.gguf_header import FileTensor, cut_short
from diskprefix.model.load.memory import LargePages
from diskprefix.model.quants.forms import weights_of
from diskprefix.model.quants.quant_form import FILE_FORMS, QuantForm
from diskprefix.native import ROWS
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import Operators, operators
from diskprefix.native.packing import pack, pack_file

_PIECE_BYTES = 1 << 24
"""What is read of a file at a time."""
_FLOATING = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_TASK_BYTES = 1 << 26
"""What a thread packs before it waits for Python's lock again, which an import may hold for milliseconds."""


class FileMatrix(Struct, frozen=True, eq=False):
    """A matrix: row i is row `order[i]` of `tensors`, which are counted one after the other. Without an order all rows
    are taken as they stand. `shape` is that of the parameter, whose last dimension is the columns. `columns` has the
    sizes by which the file has them in another order (`gguf.sources.Columns`)."""

    tensors: tuple[FileTensor, ...]
    shape: tuple[int, ...]
    order: np.ndarray | None
    columns: tuple[int, int, int] | None = None

    @classmethod
    def whole(cls, tensor: FileTensor) -> FileMatrix:
        """Returns a tensor as it is."""
        return cls((tensor,), tensor.shape, None)

    @classmethod
    def of(
        cls, rows: np.ndarray, tensors: Sequence[FileTensor], columns: tuple[int, int, int] | None = None
    ) -> FileMatrix:
        """Returns the matrix of `rows`, counted through `tensors`. Raises `ModelError` for rows of several lengths."""
        flat, found, starts, first = rows.reshape(-1), list[FileTensor](), [0], 0
        order = np.empty(len(flat), np.int32)
        for tensor in tensors:
            own = (flat >= first) & (flat < first + tensor.num_rows)
            if own.any():
                order[own] = flat[own] - first + starts[-1]
                found.append(tensor)
                starts.append(starts[-1] + tensor.num_rows)
            first += tensor.num_rows
        if len({tensor.shape[-1] for tensor in found}) != 1:
            raise ModelError("matrices of several widths cannot be joined")
        is_same = len(flat) == starts[-1] and bool((np.diff(order) == 1).all())
        return cls(tuple(found), (*rows.shape, found[0].shape[-1]), None if is_same else order, columns)

    @property
    def kind(self) -> str:
        """The type of its tensors, or several types."""
        return " and ".join({tensor.kind for tensor in self.tensors})

    @property
    def key(self) -> Hashable:
        """A value that matrices with the same weights have in common."""
        order = None if self.order is None else self.order.tobytes()
        return self.shape, tuple(tensor.name for tensor in self.tensors), order

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def is_packable(self) -> bool:
        """True if the operators take its quants, or those of each expert."""
        return self.kind in FILE_FORMS and len(self.shape) > 1 and self.shape[-2] % ROWS == 0

    @property
    def form(self) -> QuantForm:
        """The form in which its quants are kept, if it is packable."""
        return FILE_FORMS[self.kind]

    @property
    def packed_shape(self) -> tuple[int, ...]:
        *experts, rows, columns = self.shape
        return *experts, *self.form.packed_shape(rows, columns)

    def pieces(self, multiple: int = 1) -> Iterator[tuple[int, int, list[FileRows]]]:
        """Yields first and last row of pieces of `multiple` rows or several times that, and what the file has of them.
        Raises `ModelError` if the file is cut short."""
        step = max(1, _PIECE_BYTES // max(tensor.row_bytes for tensor in self.tensors) // multiple) * multiple
        for first in range(0, self.num_rows, step):
            last = min(first + step, self.num_rows)
            yield first, last, self._read(np.arange(first, last) if self.order is None else self.order[first:last])

    def _read(self, rows: np.ndarray) -> list[FileRows]:
        found, start = [], 0
        for tensor in self.tensors:
            places = np.flatnonzero((rows >= start) & (rows < start + tensor.num_rows))
            if len(places):
                own = rows[places] - start
                lowest = int(own.min())
                content = tensor.rows(lowest, int(own.max()) + 1)
                found.append(FileRows(tensor, lowest, places, content, (own - lowest).astype(np.int32)))
            start += tensor.num_rows
        return found

    def tasks(self, operators: Operators, out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Yields functions that each pack a part of the quants into `out`, uint8 [strips, ..], on the calling thread.
        They raise `ModelError` if the file is cut short, `OSError`, `MemoryError`."""
        if len(self.tensors) > 1:
            yield partial(self._pack_joined, operators, out)
            return
        strips = max(1, _TASK_BYTES // (self.tensors[0].row_bytes * ROWS))
        for first in range(0, len(out), strips):
            yield partial(self._pack_part, operators, first, out[first : first + strips])

    def _pack_part(self, operators: Operators, first: int, out: np.ndarray) -> None:
        (tensor,) = self.tensors
        rows = slice(first * ROWS, (first + len(out)) * ROWS)
        start = tensor.offset + (rows.start * tensor.row_bytes if self.order is None else 0)
        order = None if self.order is None else self.order[rows]
        factors = self._factors(rows.start, rows.stop)
        with tensor.file.open("rb", buffering=0) as file:
            if self.order is None and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), start, len(out) * ROWS * tensor.row_bytes, os.POSIX_FADV_WILLNEED)
            try:
                pack_file(operators, tensor.kind, file.fileno(), start, tensor.row_bytes, order, out, factors)
            except EOFError as error:
                raise cut_short(tensor) from error

    def _pack_joined(self, operators: Operators, out: np.ndarray) -> None:
        for first, last, parts in self.pieces(ROWS):
            content = np.concatenate([part.content for part in parts])
            order, at = np.empty(last - first, np.int32), 0
            for part in parts:
                order[part.places] = part.order + at
                at += len(part.content)
            to = out[first // ROWS : last // ROWS]
            pack(operators, self.kind, content, order, to, self._factors(first, last))

    def _factors(self, first: int, last: int) -> np.ndarray | None:
        """Returns the factors of rows `first` to before `last`, float32, None if no tensor has any."""
        if all(tensor.factors is None for tensor in self.tensors):
            return None
        of_all = [tensor.row_factors(0, tensor.num_rows) for tensor in self.tensors]
        ones = [
            np.ones(tensor.num_rows, np.float32) if found is None else found
            for tensor, found in zip(self.tensors, of_all, strict=True)
        ]
        joined = np.concatenate(ones)
        return np.ascontiguousarray(joined[first:last] if self.order is None else joined[self.order[first:last]])

    def dequantised(self) -> np.ndarray:
        """Returns the weights, bfloat16 of `shape`. Raises `ModelError` if the file is cut short, `OSError`."""
        return in_order(self._dequantised(), self.columns)

    def _dequantised(self) -> np.ndarray:
        compiled = operators() if self.is_packable else None
        if compiled is not None:
            packed = _strips(np.empty(self.packed_shape, np.uint8))
            for task in self.tasks(compiled, packed):
                task()
            return weights_of(packed, self.form).reshape(self.shape)
        found = np.empty((self.num_rows, self.shape[-1]), np.uint16)
        for first, last, parts in self.pieces():
            for part in parts:
                dtype = _FLOATING.get(part.tensor.kind)
                weights = part.numbers() if dtype is None else part.content.view(dtype)
                found[first:last][part.places] = converted(weights, "bfloat16")[part.order]
        return found.reshape(self.shape)


def _strips(packed: np.ndarray) -> np.ndarray:
    """Returns the strips of one packed matrix or of several."""
    return packed.reshape(-1, *packed.shape[-2:])


def in_order(weights: np.ndarray, columns: tuple[int, int, int] | None) -> np.ndarray:
    """Returns weights [.., columns] of a file with their columns in the parameter's order."""
    if columns is None:
        return weights
    first, second, width = columns
    return regrouped(weights, second, first, width)


def regrouped(numbers: np.ndarray, first: int, second: int, width: int) -> np.ndarray:
    """Returns numbers [.., first × second × width] as [.., second × first × width]."""
    parts = numbers.reshape(*numbers.shape[:-1], first, second, width)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(numbers.shape)


class FileRows(Struct, frozen=True, eq=False):
    """Rows of a tensor from row `first` on as bytes, uint8 [n, bytes of a row]. Row `order[i]` belongs to `places[i]`
    of a piece."""

    tensor: FileTensor
    first: int
    places: np.ndarray
    content: np.ndarray
    order: np.ndarray

    def numbers(self) -> np.ndarray:
        """Returns the numbers of the rows, float32."""
        return self.tensor.numbers(self.content, self.first)


class MatrixPacking:
    """Packs different matrices side by side in large pages, on all compute threads but one: that of the caller, which
    joins them in `finish`. Not thread-safe."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._packed: dict[Hashable, np.ndarray] = {}
        self._tasks: deque[Callable[[], None]] = deque()
        self._failures: list[Exception] = []
        self._threads: list[Thread] = []
        self._places = LargePages()

    def take(self, matrix: FileMatrix) -> np.ndarray:
        """Returns the memory of a matrix, whose packing begins if it has not: `finish` waits for its end. Raises
        `MemoryError`."""
        key = matrix.key
        if key not in self._packed:
            self._packed[key] = packed = self._places.take(matrix.packed_shape, np.uint8)
            self._tasks += matrix.tasks(self._operators, _strips(packed))
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while len(self._threads) < num_threads() - 1:
                self._threads.append(Thread(target=self._work, name="weights", daemon=True))
                self._threads[-1].start()
        return self._packed[key]

    def finish(self) -> dict[Hashable, np.ndarray]:
        """Returns all packed matrices by their keys. Raises `ModelError` for a cut file, `OSError`, `MemoryError`."""
        self._work()
        self._wait()
        for failure in self._failures:
            raise failure
        return self._packed

    def stop(self) -> None:
        """Ends the work. What is not packed yet is left out."""
        self._tasks.clear()
        self._wait()

    def _wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while self._tasks:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return  # Another thread was faster.
            try:
                task()
            except Exception as error:  # noqa: BLE001 - `finish` raises it
                self._failures.append(error)
                self._tasks.clear()
