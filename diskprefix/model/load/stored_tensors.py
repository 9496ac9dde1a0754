"""The tensors in the safetensors of a folder: known by their headers, and read one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from diskprefix.errors import ModelError
from diskprefix.model.load.safetensors_header import StoredShape, checkpoint_files, stored_shapes

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""By the names of safetensors."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as its header has it."""

    header: StoredShape
    file: Path

    def read(self) -> torch.Tensor:
        """Returns it in memory of its own. Raises `ModelError` if the file is cut short.

        The file is not mapped: a page of a mapped one that is cut short meanwhile would end the process.
        """
        found = torch.empty(self.header.shape, dtype=TYPES[self.header.kind])
        view, done = memoryview(found.view(-1).view(torch.uint8).numpy().data), 0
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.header.offset)
            while done < len(view) and (size := source.readinto(view[done:])):
                done += size
        if done < len(view):
            raise ModelError(f"{self.file} ends within {self.header.name}; fetch or copy it again")
        return found


def stored_tensors(folder: Path, files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors that transformers would load of the weight `files` of a folder. Raises `ModelError` if a file
    is damaged."""
    return {one.header.name: one for file in checkpoint_files(folder, files) for one in _of_safetensors(file)}


def _of_safetensors(file: Path) -> Iterator[StoredTensor]:
    for one in stored_shapes(file):
        if one.kind not in TYPES:
            raise ModelError(f"{file.name}: {one.name} is of the type {one.kind}, which is not known")
        yield StoredTensor(one, file)
