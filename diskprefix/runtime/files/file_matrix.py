"""Matrices that stay in a `.gguf` file: which rows of its tensors each consists of, in which order.

They are packed during the rest of a start. Reading and packing do not hold Python's lock, so threads do them while the
main thread makes the plan and reads the tokenizer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

import numpy as np
from msgspec import Struct

from diskprefix.errors import ModelError
from diskprefix.native import ROWS
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import Operators, operators
from diskprefix.native.packing import pack, pack_file
from diskprefix.prefixstore.kv.numbers import converted
from diskprefix.runtime.files.gguf.gguf_header import FileTensor, cut_short
from diskprefix.runtime.files.packed_file import Packable, PackedFile, PackedMatrix
from diskprefix.runtime.memory import LargePages
from diskprefix.runtime.plan.quants.forms import weights_of
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS, QuantForm
from diskprefix.tokens import content_digest as digest_of

log = logging.getLogger("diskprefix")

_PIECE_BYTES = 1 << 24
"""Bytes that are read from a file at a time."""
_IDLE_S = 1.0
"""Seconds that a thread waits for another matrix."""
_FLOATING = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_TASK_BYTES = 1 << 26
"""Bytes that a thread packs before it needs Python's lock again, which an import may hold for milliseconds."""


class FileMatrix(Struct, frozen=True, eq=False):
    """A matrix. Row i is row `order[i]` of the concatenated `tensors`, or row i without an order. `shape` is the shape
    of the parameter; the last dimension is the columns. `columns` has sizes if the columns are in another order in the
    file (`gguf.sources.Columns`)."""

    tensors: tuple[FileTensor, ...]
    shape: tuple[int, ...]
    order: np.ndarray | None
    columns: tuple[int, int, int] | None = None

    @classmethod
    def whole(cls, tensor: FileTensor) -> FileMatrix:
        """Returns the matrix of all rows of a tensor, in order."""
        return cls((tensor,), tensor.shape, None)

    @classmethod
    def of(
        cls, rows: np.ndarray, tensors: Sequence[FileTensor], columns: tuple[int, int, int] | None = None
    ) -> FileMatrix:
        """Returns the matrix of `rows` of the concatenated `tensors`. Raises `ModelError` for rows of several
        lengths."""
        flat, taken, starts, first = rows.reshape(-1), list[FileTensor](), [0], 0
        order = np.empty(len(flat), np.int32)
        for tensor in tensors:
            own = (flat >= first) & (flat < first + tensor.num_rows)
            if own.any():
                order[own] = flat[own] - first + starts[-1]
                taken.append(tensor)
                starts.append(starts[-1] + tensor.num_rows)
            first += tensor.num_rows
        if len({tensor.shape[-1] for tensor in taken}) != 1:
            raise ModelError("matrices of several widths cannot be joined")
        is_same = len(flat) == starts[-1] and bool((np.diff(order) == 1).all())
        return cls(tuple(taken), (*rows.shape, taken[0].shape[-1]), None if is_same else order, columns)

    @property
    def kind(self) -> str:
        """The type of its tensors, or their types, joined by "and"."""
        return " and ".join({tensor.kind for tensor in self.tensors})

    @property
    def content_digest(self) -> bytes:
        """A digest that is equal for matrices with the same weights, of one model."""
        of_rows = b"" if self.order is None else self.order.tobytes()
        named = repr((self.shape, *((tensor.name, tensor.kind, tensor.shape) for tensor in self.tensors)))
        return digest_of(named.encode() + of_rows)

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def is_packable(self) -> bool:
        """True if the operators take its quants, or the quants of each expert."""
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
        """Yields pieces: the first row, the row after the last, and the file's rows. The number of rows is a multiple
        of `multiple`. Raises `ModelError` if the file is cut short."""
        step = max(1, _PIECE_BYTES // max(tensor.row_bytes for tensor in self.tensors) // multiple) * multiple
        for first in range(0, self.num_rows, step):
            last = min(first + step, self.num_rows)
            yield first, last, self._read_rows(np.arange(first, last) if self.order is None else self.order[first:last])

    def _read_rows(self, rows: np.ndarray) -> list[FileRows]:
        parts, start = [], 0
        for tensor in self.tensors:
            places = np.flatnonzero((rows >= start) & (rows < start + tensor.num_rows))
            if len(places):
                own = rows[places] - start
                lowest = int(own.min())
                content = tensor.rows(lowest, int(own.max()) + 1)
                parts.append(FileRows(tensor, lowest, places, content, (own - lowest).astype(np.int32)))
            start += tensor.num_rows
        return parts

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
        if len(self.tensors) == 1 and self.order is None:
            return self.tensors[0].row_factors(first, last)
        of_all = [tensor.row_factors(0, tensor.num_rows) for tensor in self.tensors]
        ones = [
            np.ones(tensor.num_rows, np.float32) if factors is None else factors
            for tensor, factors in zip(self.tensors, of_all, strict=True)
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
        matrix = np.empty((self.num_rows, self.shape[-1]), np.uint16)
        for first, last, parts in self.pieces():
            for part in parts:
                dtype = _FLOATING.get(part.tensor.kind)
                weights = part.numbers() if dtype is None else part.content.view(dtype)
                matrix[first:last][part.places] = converted(weights, "bfloat16")[part.order]
        return matrix.reshape(self.shape)


def _strips(packed: np.ndarray) -> np.ndarray:
    """Returns the strips of one packed matrix or of several."""
    return packed.reshape(-1, *packed.shape[-2:])


def in_order(weights: np.ndarray, columns: tuple[int, int, int] | None) -> np.ndarray:
    """Returns weights [.., columns] of a file, with the columns in the order of the parameter."""
    if columns is None:
        return weights
    first, second, width = columns
    return regrouped(weights, second, first, width)


def regrouped(numbers: np.ndarray, first: int, second: int, width: int) -> np.ndarray:
    """Returns numbers [.., first × second × width] as [.., second × first × width]."""
    parts = numbers.reshape(*numbers.shape[:-1], first, second, width)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(numbers.shape)


class FileRows(Struct, frozen=True, eq=False):
    """Rows of a tensor from row `first` on, `content`: uint8 [n, bytes of a row]. Row `order[i]` is row `places[i]` of
    a piece."""

    tensor: FileTensor
    first: int
    places: np.ndarray
    content: np.ndarray
    order: np.ndarray

    def numbers(self) -> np.ndarray:
        """Returns the numbers of the rows, float32."""
        return self.tensor.numbers(self.content, self.first)


class PackableMatrix(Packable, Protocol):
    """A matrix whose parts can be packed at a time."""

    def tasks(self, operators: Operators, out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Yields functions that each pack a part of the quants into `out`, uint8 [strips, ..], on the calling thread.
        They raise `ModelError` if the file is cut short, `OSError`, `MemoryError`."""


class MatrixPacking:
    """Packs matrices into large pages, on all compute threads except the caller's, which joins the work in
    `finish_packing`. What an earlier start has `stored` is compared with its digest instead. Not thread-safe."""

    def __init__(self, operators: Operators, stored: PackedFile | None = None) -> None:
        self.operators, self.stored = operators, stored
        self.matrices: dict[bytes, PackedMatrix] = {}
        """The matrices that were taken, by their digests."""
        self.has_packed = False
        """Whether a matrix was packed, so that the next start could map it."""
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """None ends a thread."""
        self._failures: list[Exception] = []
        self._threads: list[Thread] = []
        self._places = LargePages()

    def take(self, matrix: PackableMatrix) -> np.ndarray:
        """Returns the memory of a matrix, and starts packing or comparing it if that has not started. `finish_packing`
        waits for its end. Raises `MemoryError`."""
        digest = matrix.content_digest
        if digest not in self.matrices:
            packed = None if self.stored is None else self.stored.matrix(matrix)
            if packed is not None:
                self._tasks.put(partial(self._compare, matrix, packed))
            else:
                packed, self.has_packed = self._places.take(matrix.packed_shape, np.uint8), True
                for task in matrix.tasks(self.operators, _strips(packed)):
                    self._tasks.put(task)
            self.matrices[digest] = PackedMatrix(digest, matrix.kind, packed)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while len(self._threads) < num_threads() - 1:
                self._threads.append(Thread(target=self._work, name="weights", daemon=True))
                self._threads[-1].start()
        return self.matrices[digest].packed

    def finish_packing(self) -> None:
        """Returns when all matrices are in memory. Raises `ModelError` for a cut file, `OSError`, `MemoryError`."""
        self._end_threads()
        self._work()
        self._wait()
        for failure in self._failures:
            raise failure

    def stop(self) -> None:
        """Stops packing. Matrices that are not packed yet stay without content."""
        self._clear()
        self._end_threads()
        self._wait()

    def drop(self) -> None:
        """Stops packing, and lets go of all matrices: their model computes otherwise."""
        self.stop()
        self.matrices, self.stored, self.has_packed = {}, None, False
        self._places = LargePages()

    def _end_threads(self) -> None:
        """Ends each thread, and the caller's own work, after the tasks."""
        for _ in range(len(self._threads) + 1):
            self._tasks.put(None)

    def _clear(self) -> None:
        """Drops the tasks, but no sign that ends a thread."""
        dropped = list[Callable[[], None] | None]()
        with suppress(Empty):
            # Bound: nothing is added meanwhile but by `take`, which has its end.
            while True:
                dropped.append(self._tasks.get_nowait())
        for _ in range(dropped.count(None)):
            self._tasks.put(None)

    def _compare(self, matrix: PackableMatrix, packed: np.ndarray) -> None:
        """Packs a matrix in its place if what was stored is damaged."""
        assert self.stored is not None, "it has the matrix"
        if not self.stored.is_intact(matrix.content_digest):
            log.warning("[model] a packed matrix in %s is damaged: it is packed anew", self.stored.path)
            self.has_packed = True
            for task in matrix.tasks(self.operators, _strips(packed)):
                task()

    def _wait(self) -> None:
        for thread in self._threads:
            thread.join()
        # Without the signs for threads that had ended before.
        self._threads, self._tasks = [], SimpleQueue()

    def _work(self) -> None:
        # A thread that was forgotten, as its model is not served, ends too.
        with suppress(Empty):
            # Bound: `_end_threads` ends it.
            while (task := self._tasks.get(timeout=_IDLE_S)) is not None:
                try:
                    task()
                except Exception as error:  # noqa: BLE001 - `finish_packing` raises it
                    self._failures.append(error)
                    self._clear()
