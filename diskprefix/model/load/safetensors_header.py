"""The tensors of safetensors files, read one by one. Every offset in a header is compared with the size of the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diskprefix.errors import ModelError
from diskprefix.printable import first_line

if TYPE_CHECKING:
    import torch

SAFETENSORS, INDEX = "*.safetensors", "model.safetensors.index.json"
_MOST_HEADER_BYTES = 10**8
"""safetensors refuses longer headers."""
_BITS = {"F4": 4, "BOOL": 8, "C64": 64}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of type `kind` (`BF16`, `F32`, …). `offset` counts from the begin of its file, `num_bytes` is what it
    takes there. Of one on the hub only the header is known."""

    name: str
    kind: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int = 0
    file: Path = Path()

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def read(self) -> torch.Tensor:
        """Returns it in memory of its own. Raises `ModelError` if the file is cut short.

        The file is not mapped: a page of a mapped one that is cut short meanwhile would end the process.
        """
        import torch
        from transformers.modeling_utils import str_to_torch_dtype

        if self.kind not in str_to_torch_dtype:
            raise ModelError(f"{self.file.name}: {self.name} is of the type {self.kind}, which is not known")
        found = torch.empty(self.shape, dtype=str_to_torch_dtype[self.kind])
        view, done = memoryview(found.view(-1).view(torch.uint8).numpy().data), 0
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.offset)
            while done < len(view) and (size := source.readinto(view[done:])):
                done += size
        if done < len(view):
            raise ModelError(f"{self.file} ends within {self.name}; fetch or copy it again")
        return found


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors of a folder. The same weights in another format (`consolidated.safetensors`), which
    nothing reads, are left out."""
    files = sorted(folder.glob(SAFETENSORS))
    read = [file for file in files if not file.match("consolidated*.safetensors")]
    return read if any(file.match("model*.safetensors") for file in read) else files


def require_weights(folder: Path, hint: str = "") -> list[Path]:
    """Returns the safetensors of a folder. Raises `ModelError` if there are none; `hint` ends its message."""
    if files := weight_files(folder):
        return files
    if any(folder.glob("pytorch_model*.bin")):
        hint = "; pickled weights are not read: convert them to safetensors (`save_pretrained` of transformers does)"
    raise ModelError(f"{folder} holds no weights: there is no {SAFETENSORS}{hint}")


def checkpoint_files(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Returns the files of one checkpoint: a folder may hold the same weights twice, under other names. Raises
    `ModelError` if its index is damaged."""
    if folder / "model.safetensors" in files:
        return [folder / "model.safetensors"]
    index = folder / INDEX
    return [folder / shard for shard in shards_of(index)] if index.is_file() else list(files)


def shards_of(index: Path) -> list[str]:
    """Returns the names of the files that an index names. Raises `ModelError` if it is damaged."""
    try:
        return sorted(map(str, set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is damaged; fetch or copy it again") from error


def stored_tensors(folder: Path, files: Sequence[Path]) -> list[StoredTensor]:
    """Returns the tensors that transformers would load of the weight `files` of a folder. Raises `ModelError` if a file
    is damaged or cut short."""
    return [tensor for file in checkpoint_files(folder, files) for tensor in tensors_in(file)]


def tensors_in(file: Path) -> list[StoredTensor]:
    """Returns the tensors of a safetensors file. Raises `ModelError` if it is damaged or cut short."""
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            if size > _MOST_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header = json.loads(content.read(size))
        total = file.stat().st_size - 8 - size
        return [_stored(file, name, entry, 8 + size, total) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is damaged or cut short ({first_line(error)}); fetch or copy it again") from error


def _stored(file: Path, name: str, entry: Mapping[str, Any], begin: int, total: int) -> StoredTensor:
    kind, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
    first, last = entry["data_offsets"]
    if not 0 <= first <= last <= total or min(shape, default=0) < 0 or last - first != _num_bytes(kind, shape):
        raise ValueError(f"{name} lies outside of it")
    return StoredTensor(name, kind, shape, last - first, begin + first, file)


def _num_bytes(kind: str, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor. Raises `ValueError` for a type whose name does not say its bits."""
    digits = "".join(letter for letter in kind.partition("_")[0] if letter.isdigit())
    bits = _BITS.get(kind) or int(digits)
    return prod(shape) * bits // 8
