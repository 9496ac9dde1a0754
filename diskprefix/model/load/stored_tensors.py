"""The tensors in the weight files of a folder: known by their headers, read one at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from diskprefix.errors import ModelError
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
_MOST_HEADER_BYTES = 10**8
"""safetensors refuses longer headers."""


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


def stored_tensors(folder: Path, files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors that transformers would load of the weight `files` of a folder. Raises `ModelError` if a file
    is damaged."""
    found: dict[str, StoredTensor] = {}
    for file in _checkpoint(folder, files):
        try:
            found |= _of_safetensors(file) if file.suffix == ".safetensors" else _of_pickle(file)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{file} is damaged or cut short ({first_line(error)}); fetch or copy it again") from error
    return found


def _checkpoint(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Returns the files of one checkpoint: a folder may hold the same weights twice, under other names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if folder / name in files:
            return [folder / name]
        if index.is_file():
            shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            return [folder / shard for shard in sorted(shards)]
    return list(files)


def _of_safetensors(file: Path) -> dict[str, StoredTensor]:
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        if size > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has {size} bytes")
        header = json.loads(content.read(size))
    total = file.stat().st_size - 8 - size
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in _TYPES:
            raise ModelError(f"{file.name}: {name} is of the type {entry['dtype']}, which is not known")
        dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
        first, last = entry["data_offsets"]
        if not 0 <= first <= last <= total or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} lies outside of it")
        read = partial(_read, file, name, 8 + size + first, shape, dtype)
        found[name] = StoredTensor(name, shape, dtype, read)
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
