"""The packing of the matrices of a `.gguf` file, which goes on beside the rest of a start. Reading and packing hold no
lock of Python's, so threads do them while another one imports libraries and reads the tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from math import prod
from threading import Thread

import torch

from diskprefix.model.load.memory import LINE_BYTES, large_pages
from diskprefix.model.quants.file_matrix import FileMatrix
from diskprefix.native.library import Operators


class MatrixPacking:
    """Packs different matrices side by side in large pages, on all threads that torch has but one: that of the caller,
    which joins them in `finish`. Not thread-safe."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._packed: dict[Hashable, torch.Tensor] = {}
        self._tasks: deque[Callable[[], None]] = deque()
        self._failures: list[Exception] = []
        self._threads: list[Thread] = []

    def add(self, matrices: Iterable[FileMatrix]) -> None:
        """Begins to pack what is not among those that were added before. Raises `MemoryError`."""
        distinct = {matrix.key: matrix for matrix in matrices if matrix.key not in self._packed}
        memory, used = large_pages(packed_bytes(distinct.values())), 0
        for key, matrix in distinct.items():
            shape = matrix.packed_shape
            self._packed[key] = memory[used : used + prod(shape)].view(shape)
            self._tasks += matrix.tasks(self._operators, self._packed[key].flatten(0, -3))
            used += _room(matrix)
        begun = [Thread(target=self._work, name="weights", daemon=True) for _ in range(_num_helpers())]
        self._threads += begun
        for thread in begun:
            thread.start()

    def finish(self) -> dict[Hashable, torch.Tensor]:
        """Returns the packed matrices by their keys once all are there. Raises `ModelError` if the file is cut short,
        `OSError`, `MemoryError`."""
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


def _num_helpers() -> int:
    return torch.get_num_threads() - 1


def packed_bytes(matrices: Iterable[FileMatrix]) -> int:
    """Returns the memory that different matrices take."""
    return sum(map(_room, matrices))


def _room(matrix: FileMatrix) -> int:
    return -(-prod(matrix.packed_shape) // LINE_BYTES) * LINE_BYTES
