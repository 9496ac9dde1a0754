"""The tensors in the safetensors of a folder: known by their headers, and read when they are needed.

transformers puts a model together of tensors that are not read yet. What it casts, stacks, joins and splits is noted,
so that a parameter is read straight into its place, and no tensor is in memory twice. Whatever else it does to a tensor
reads that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map

from diskprefix.errors import ModelError
from diskprefix.model.load.safetensors_header import StoredShape, checkpoint_files, stored_shapes

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
_PIECE_BYTES = 1 << 25
"""What a thread reads before it waits for Python's lock again."""
_CAST_AT_ONCE = 1 << 15
"""The numbers that are cast at a time: for more, torch would start threads of its own in each of ours."""

Place: TypeAlias = tuple[int | slice, ...]
"""An index of a whole: a number or a slice for each of its dimensions."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, which begins at `offset`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int

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

    def read(self) -> torch.Tensor:
        """Returns it in memory of its own. Raises `ModelError` if the file is cut short."""
        return self.unread().read()

    def unread(self) -> UnreadTensor:
        place = tuple(slice(0, size) for size in self.shape)
        return UnreadTensor(self.shape, self.dtype, (_Part(self, 0, self.shape, place),))

    def read_into(self, out: torch.Tensor, first: int) -> None:
        """Reads elements from `first` on into a flat tensor, whose type they get. Raises `ModelError` if the file is
        cut short."""
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.offset + first * self.dtype.itemsize)
            if out.dtype is self.dtype:
                self._fill(out, source)
                return
            content = torch.empty(min(len(out), _CAST_AT_ONCE), dtype=self.dtype)
            for piece in out.split(_CAST_AT_ONCE):  # type: ignore[no-untyped-call]
                self._fill(content[: len(piece)], source)
                piece.copy_(content[: len(piece)])

    def _fill(self, content: torch.Tensor, source: FileIO) -> None:
        # A page of a mapped file that is cut short would end the process.
        view, done = memoryview(content.view(torch.uint8).numpy().data), 0
        while done < len(view) and (size := source.readinto(view[done:])):
            done += size
        if done < len(view):
            raise ModelError(f"{self.file} ends within {self.name}; fetch or copy it again")


@dataclass(frozen=True)
class _Part:
    """Elements of a stored tensor from `first` on, and the `place` in a whole that has their `shape`."""

    stored: StoredTensor
    first: int
    shape: tuple[int, ...]
    place: Place

    def at(self, dim: int, place: int | slice) -> _Part:
        return replace(self, place=(*self.place[:dim], place, *self.place[dim + 1 :]))

    def cut(self, dim: int, first: int, last: int) -> list[_Part] | None:
        """Returns what lies within `first` and `last` of a dimension of the whole, which begins at `first` then. None
        if that is no run of elements."""
        at = self.place[dim]
        if isinstance(at, int):
            return [self.at(dim, at - first)] if first <= at < last else []
        start, stop = max(first, at.start), min(last, at.stop)
        if start >= stop:
            return []
        place = slice(start - first, stop - first)
        if (start, stop) == (at.start, at.stop):
            return [self.at(dim, place)]
        if any(isinstance(one, slice) for one in self.place[:dim]):
            return None
        row = math.prod(self.shape[1:])
        skipped = self.first + (start - at.start) * row
        return [replace(self.at(dim, place), first=skipped, shape=(stop - start, *self.shape[1:]))]


class UnreadTensor(torch.Tensor):
    """A tensor that is made of stored ones, and behaves as if it was read."""

    parts: tuple[_Part, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[_Part]) -> UnreadTensor:
        found: UnreadTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        found.parts = tuple(parts)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, noted = dict(kwargs or {}), _NOTED.get(operation)
        found = None if noted is None else noted(*args, **named)
        return operation(*tree_map(read_now, args), **tree_map(read_now, named)) if found is None else found

    def read(self) -> torch.Tensor:
        """Returns it in memory of its own. Raises `ModelError` if a file is cut short."""
        found = torch.empty(self.shape, dtype=self.dtype)
        for task in self.reading(found):
            task()
        return found

    def reading(self, out: torch.Tensor) -> Iterator[Callable[[], None]]:
        """Yields functions that each read a piece into `out`, on the calling thread. They raise `ModelError`."""
        step = max(1, _PIECE_BYTES // self.dtype.itemsize)
        for part in self.parts:
            to = out[part.place]
            if to.is_contiguous():
                flat = to.view(-1)
                for first in range(0, len(flat), step):
                    yield partial(part.stored.read_into, flat[first : first + step], part.first + first)
            else:
                yield partial(_read_apart, part, to)


def read_now(found: Any) -> Any:
    """Returns a tensor read if it is not, anything else as it is."""
    return found.read() if isinstance(found, UnreadTensor) else found


def _read_apart(part: _Part, to: torch.Tensor) -> None:
    row = to.numel() // max(1, len(to))
    for number, piece in enumerate(to):
        content = torch.empty(row, dtype=to.dtype)
        part.stored.read_into(content, part.first + number * row)
        piece.copy_(content.view(piece.shape))


def _same(tensor: UnreadTensor) -> UnreadTensor:
    return UnreadTensor(tensor.shape, tensor.dtype, tensor.parts)


def _cast(tensor: UnreadTensor, *, dtype: torch.dtype | None = None, **others: Any) -> UnreadTensor | None:
    # A second cast rounds what the first one has made.
    is_first = all(part.stored.dtype is tensor.dtype for part in tensor.parts)
    if dtype is None or not is_first or not set(others.values()) <= {None, False, torch.device("cpu")}:
        return None
    return UnreadTensor(tensor.shape, dtype, tensor.parts)


def _stacked(tensors: Sequence[Any], dim: int = 0) -> UnreadTensor | None:
    if not _are_alike(tensors) or len({tensor.shape for tensor in tensors}) > 1:
        return None
    shape = list(tensors[0].shape)
    dim %= len(shape) + 1
    parts = [
        replace(part, place=(*part.place[:dim], number, *part.place[dim:]))
        for number, tensor in enumerate(tensors)
        for part in tensor.parts
    ]
    return UnreadTensor([*shape[:dim], len(tensors), *shape[dim:]], tensors[0].dtype, parts)


def _joined(tensors: Sequence[Any], dim: int = 0) -> UnreadTensor | None:
    if not _are_alike(tensors) or not tensors[0].ndim:
        return None
    dim %= tensors[0].ndim
    parts, start = [], 0
    for tensor in tensors:
        for part in tensor.parts:
            at = part.place[dim]
            parts.append(part.at(dim, at + start if isinstance(at, int) else slice(at.start + start, at.stop + start)))
        start += tensor.shape[dim]
    shape = [*tensors[0].shape[:dim], start, *tensors[0].shape[dim + 1 :]]
    is_right = all(tensor.shape[i] == shape[i] for tensor in tensors for i in range(len(shape)) if i != dim)
    return UnreadTensor(shape, tensors[0].dtype, parts) if is_right else None


def _are_alike(tensors: Sequence[Any]) -> bool:
    is_unread = all(isinstance(tensor, UnreadTensor) for tensor in tensors)
    return is_unread and len({(tensor.dtype, tensor.ndim) for tensor in tensors}) == 1


def _split(tensor: UnreadTensor, size: int | Sequence[int], dim: int = 0) -> list[UnreadTensor] | None:
    dim %= tensor.ndim
    whole = tensor.shape[dim]
    sizes = [min(size, whole - first) for first in range(0, whole, size)] or [0] if isinstance(size, int) else size
    found, first = [], 0
    for one in sizes:
        cut = [part.cut(dim, first, first + one) for part in tensor.parts]
        if None in cut or sum(sizes) != whole:
            return None
        shape = [*tensor.shape[:dim], one, *tensor.shape[dim + 1 :]]
        found.append(UnreadTensor(shape, tensor.dtype, [part for parts in cut for part in parts or ()]))
        first += one
    return found


_aten = torch.ops.aten
_NOTED: Mapping[Any, Callable[..., Any]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten._to_copy.default: _cast,
    _aten.stack.default: _stacked,
    _aten.cat.default: _joined,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
}
"""The operations that read nothing. They return None where they have to."""


def stored_tensors(folder: Path, files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors that transformers would load of the weight `files` of a folder. Raises `ModelError` if a file
    is damaged."""
    return {one.name: one for file in checkpoint_files(folder, files) for one in _of_safetensors(file)}


def _of_safetensors(file: Path) -> Iterator[StoredTensor]:
    for one in stored_shapes(file):
        if one.kind not in _TYPES:
            raise ModelError(f"{file.name}: {one.name} is of the type {one.kind}, which is not known")
        yield StoredTensor(one.name, one.shape, _TYPES[one.kind], file, one.offset)
