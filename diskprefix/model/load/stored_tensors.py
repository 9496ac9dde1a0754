"""The tensors in the weight files of a folder: known by their headers, read one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from diskprefix.errors import ModelError
from diskprefix.model.load.safetensors_header import StoredShape, checkpoint_files, stored_shapes
from diskprefix.printable import first_line

_TYPES = {
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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `read` returns it in memory of its own, and raises `ModelError` if the file is cut short."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def stored_shape(self) -> StoredShape:
        """The entry that a header has for it."""
        kind = next((kind for kind, dtype in _TYPES.items() if dtype is self.dtype), str(self.dtype))
        return StoredShape(self.name, kind, self.shape, 0, self.num_bytes)


def stored_tensors(folder: Path, files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors that transformers would load of the weight `files` of a folder. Raises `ModelError` if a file
    is damaged."""
    found: dict[str, StoredTensor] = {}
    for file in checkpoint_files(folder, files):
        try:
            found |= _of_safetensors(file) if file.suffix == ".safetensors" else _of_pickle(file)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{file} is damaged or cut short ({first_line(error)}); fetch or copy it again") from error
    return found


def _of_safetensors(file: Path) -> dict[str, StoredTensor]:
    found = {}
    for one in stored_shapes(file):
        if one.kind not in _TYPES:
            raise ModelError(f"{file.name}: {one.name} is of the type {one.kind}, which is not known")
        dtype = _TYPES[one.kind]
        read = partial(_read, file, one.name, one.offset, one.shape, dtype)
        found[one.name] = StoredTensor(one.name, one.shape, dtype, read)
    return found


def _read(file: Path, name: str, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Reads instead of mapping the file: a page of a mapped file that is cut short ends the process."""
    content = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    with file.open("rb", buffering=0) as source:
        source.seek(offset)
        view, done = memoryview(content.numpy().data), 0
        while done < len(view) and (size := source.readinto(view[done:])):
            done += size
    if done < len(view):
        raise ModelError(f"{file} ends within {name}; fetch or copy it again")
    return content.view(dtype).view(shape)


def _of_pickle(file: Path) -> dict[str, StoredTensor]:
    with file.open("rb") as content:
        is_mapped = content.read(4) == b"PK\3\4"
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    return {
        name: StoredTensor(name, tuple(tensor.shape), tensor.dtype, partial(torch.clone, tensor))
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }
