"""The packing of the matrices of a `.gguf` file, which goes on beside the rest of a start.

Reading and packing hold no lock of Python's, so a thread does them while another one imports libraries. A file that is
not converted yet does not say which rows make which matrix. Its tensors are then packed as they stand, which is right
for most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from threading import Thread

import torch

from diskprefix.kv.transfer import give_back
from diskprefix.model.load.gguf_file import FileTensor
from diskprefix.model.load.memory import LINE_BYTES, large_pages
from diskprefix.model.load.served_tensors import of_gguf
from diskprefix.model.quants.file_matrix import FileMatrix
from diskprefix.native.library import Operators


class MatrixPacking:
    """Packs matrices side by side in large pages, on all threads that torch has but one: that of the caller, which
    joins them in `finish`. Not thread-safe."""

    def __init__(self, operators: Operators, matrices: Iterable[FileMatrix]) -> None:
        """Begins. Raises `MemoryError`."""
        self._operators = operators
        self._packed: dict[Hashable, torch.Tensor] = {}
        self._tasks: deque[tuple[Hashable, Callable[[], None]]] = deque()
        self._failures: list[Exception] = []
        self._threads: list[Thread] = []
        self._unwanted: set[Hashable] = set()
        self._add({matrix.key: matrix for matrix in matrices})

    def _add(self, matrices: dict[Hashable, FileMatrix]) -> None:
        memory, used = large_pages(packed_bytes(matrices.values())), 0
        for key, matrix in matrices.items():
            shape = matrix.packed_shape
            self._packed[key] = memory[used : used + prod(shape)].view(shape)
            self._tasks += ((key, task) for task in matrix.tasks(self._operators, self._packed[key].flatten(0, -3)))
            used += _room(matrix)
        helpers = [Thread(target=self._work, name="weights-packing", daemon=True) for _ in range(_num_helpers())]
        for thread in helpers:
            thread.start()
        self._threads += helpers

    def want(self, matrices: Iterable[FileMatrix]) -> None:
        """Begins with those of these matrices that are not begun, and leaves out all others. Raises `MemoryError`."""
        wanted = {matrix.key: matrix for matrix in matrices}
        self._unwanted = self._packed.keys() - wanted.keys()
        missing = {key: matrix for key, matrix in wanted.items() if key not in self._packed}
        if missing:
            self._add(missing)

    def finish(self) -> dict[Hashable, torch.Tensor]:
        """Returns the packed matrices by their keys once all are there. Raises `ModelError` if the file is cut short,
        `OSError`, `MemoryError`."""
        self._work()
        self._wait()
        for failure in self._failures:
            raise failure
        for key in self._unwanted:
            give_back(self._packed.pop(key))
        self._unwanted = set()
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
                key, task = self._tasks.popleft()
            except IndexError:
                return  # Another thread was faster.
            if key in self._unwanted:
                continue
            try:
                task()
            except Exception as error:  # noqa: BLE001 - `finish` raises it
                self._failures.append(error)
                self._tasks.clear()


def as_they_stand(tensors: Sequence[FileTensor], weights: str) -> list[FileMatrix]:
    """Returns the matrices that the form `weights` probably keeps in a `.gguf` file with these tensors."""
    kept = {served.name for served in of_gguf(tensors, weights) if served.is_in_file}
    return [FileMatrix((tensor,), tensor.shape, None) for tensor in tensors if tensor.name in kept]


def packed_bytes(matrices: Iterable[FileMatrix]) -> int:
    """Returns the memory that different matrices take."""
    return sum(map(_room, matrices))


def _room(matrix: FileMatrix) -> int:
    return -(-prod(matrix.packed_shape) // LINE_BYTES) * LINE_BYTES


def _num_helpers() -> int:
    return torch.get_num_threads() - 1
