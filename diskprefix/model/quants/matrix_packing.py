"""The packing of the matrices of a `.gguf` file, which goes on beside the rest of a start.

A file that is not converted yet does not say which rows make which matrix. Its tensors are then packed as they stand,
which is right for most.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from math import prod

import torch

from diskprefix.kv.transfer import give_back
from diskprefix.model.load.beside import Task, WorkBeside
from diskprefix.model.load.gguf_file import FileTensor
from diskprefix.model.load.memory import LINE_BYTES, large_pages
from diskprefix.model.load.served_tensors import quants_of_gguf
from diskprefix.model.quants.file_matrix import FileMatrix
from diskprefix.native.library import Operators


class MatrixPacking:
    """Packs matrices side by side in large pages. Not thread-safe."""

    def __init__(self, operators: Operators, matrices: Iterable[FileMatrix]) -> None:
        """Begins. Raises `MemoryError`."""
        self._operators = operators
        self._packed: dict[Hashable, torch.Tensor] = {}
        self.work = WorkBeside()
        """Also for what else is read beside it."""
        self._unwanted: set[Hashable] = set()
        self._add({matrix.key: matrix for matrix in matrices})

    def _add(self, matrices: dict[Hashable, FileMatrix]) -> None:
        memory, used, tasks = large_pages(packed_bytes(matrices.values())), 0, list[Task]()
        for key, matrix in matrices.items():
            shape = matrix.packed_shape
            self._packed[key] = memory[used : used + prod(shape)].view(shape)
            each = matrix.tasks(self._operators, self._packed[key].flatten(0, -3))
            tasks += (partial(self._if_wanted, key, task) for task in each)
            used += _room(matrix)
        self.work.begin(tasks)

    def _if_wanted(self, key: Hashable, task: Task) -> None:
        if key not in self._unwanted:
            task()

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
        self.work.finish()
        for key in self._unwanted:
            give_back(self._packed.pop(key))
        self._unwanted = set()
        return self._packed

    def stop(self) -> None:
        """Ends the work. What is not packed yet is left out."""
        self.work.stop()


def as_they_stand(tensors: Sequence[FileTensor], weights: str) -> list[FileMatrix]:
    """Returns the matrices that the form `weights` probably keeps in a `.gguf` file with these tensors."""
    kinds = quants_of_gguf(tensors, weights)
    return [FileMatrix((tensor,), tensor.shape, None) for tensor in tensors if kinds.get(tensor.name) == tensor.kind]


def packed_bytes(matrices: Iterable[FileMatrix]) -> int:
    """Returns the memory that different matrices take."""
    return sum(map(_room, matrices))


def _room(matrix: FileMatrix) -> int:
    return -(-prod(matrix.packed_shape) // LINE_BYTES) * LINE_BYTES
