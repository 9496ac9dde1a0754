"""The header of a GGUF file, read strictly: every length is compared with the size of the file before it is used."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import ModelError
from diskprefix.gguf_types import GGUF_TYPES
from diskprefix.printable import first_line
from diskprefix.runtime.files.gguf.gguf_strings import PIECE_BYTES, StringPiece, decoded
from diskprefix.runtime.files.lfs_pointer import fault_or_pointer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_HEADER_BYTES = 1 << 28
"""Ten times the largest vocabulary. It bounds the time and memory that a damaged header takes."""
_MOST_VALUES, _MOST_TENSORS = 1 << 16, 1 << 17
"""Several times the counts of the largest models. Larger counts would make many objects from few bytes."""
_MOST_NAME_BYTES, _MOST_DIMENSIONS = 65535, 4
_MOST_DEPTH = 8
"""Of arrays within arrays, which the format allows and no key needs."""
FLOAT32 = 6
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", FLOAT32: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Formats of `struct`, by the number of the type in the file."""
_UINT32 = 4
TYPES = {kind.number: kind for kind in GGUF_TYPES}
_BLOCK_BYTES = {kind.name: kind.num_bytes for kind in GGUF_TYPES}
_CODES: dict[str, tuple[int, tuple[int, ...]]] = {"Q1_0": (1, (-1, 1)), "Q2_0": (2, (-1, 0, 1, 2))}
"""The bits of a code and the numbers of the codes, in blocks that begin with a float16, of types that the library
`gguf` cannot read."""
_PLAIN = {"F64": "f8", "F32": "f4", "F16": "f2"} | {f"I{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)}
"""Types of numpy. The content of other types is bytes."""
_MOST_STRINGS = 1 << 21
"""Several times the merges of the largest models."""
_FEW, _FEW_NUMBERS = 16, 1024
"""The most strings and numbers of an array that is kept. Architectures have a number for each layer."""


class FileTensor(Struct, frozen=True):
    """A tensor of type `kind`, and where its content is. `shape` is in torch's order; `stored_shape` and `dtype` are of
    the content, where the last dimension of a quantised tensor counts bytes. `factors` is the float32 tensor whose
    number, or whose number for each expert, its numbers are multiplied with (`gguf_file.with_factors`)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    dtype: np.dtype[Any]
    stored_shape: tuple[int, ...]
    factors: FileTensor | None = None

    def numbers(self, content: np.ndarray[Any, Any], first: int = 0) -> np.ndarray[Any, Any]:
        """Returns the numbers in rows of its content from row `first` on, float32. Raises `ModelError` for a type that
        no file has weights of, or if the file is cut short."""
        if self.kind in _PLAIN:
            return content.view(self.dtype).astype("f4")
        values = self._dequantised(content)
        rows = values.reshape(-1, values.shape[-1])
        factors = self.row_factors(first, first + len(rows))
        return values if factors is None else (rows * factors[:, None]).reshape(values.shape)

    def _dequantised(self, content: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        import numpy as np

        if self.kind in _CODES:
            bits, numbers = _CODES[self.kind]
            blocks = content.reshape(*content.shape[:-1], -1, _BLOCK_BYTES[self.kind])
            shifts = np.arange(0, 8, bits, dtype=np.uint8)
            codes = blocks[..., 2:, None] >> shifts & ((1 << bits) - 1)
            of_codes = np.array(numbers, np.float32)[codes].reshape(*blocks.shape[:-1], -1)
            scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
            weights: np.ndarray[Any, Any] = (of_codes * scales).reshape(*content.shape[:-1], -1)
            return weights
        from gguf import GGMLQuantizationType, dequantize

        try:
            values: np.ndarray[Any, Any] = dequantize(content, GGMLQuantizationType[self.kind])
        except NotImplementedError:
            raise ModelError(
                f"{self.file}: the tensor {self.name} has the type {self.kind}, which is none of weights"
            ) from None
        return values

    def row_factors(self, first: int, last: int) -> np.ndarray[Any, Any] | None:
        """Returns the factors of rows `first` to before `last`, float32, None without. Raises `ModelError` as
        `content`."""
        import numpy as np

        if self.factors is None:
            return None
        factors = self.factors.content().reshape(-1)
        of_rows = np.arange(first, last) // (self.num_rows // len(factors))
        return np.ascontiguousarray(factors[of_rows], np.float32)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return prod(self.stored_shape) * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """The number of rows along the last dimension, of all experts."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.stored_shape[-1] * self.dtype.itemsize

    def rows(self, first: int, last: int) -> np.ndarray[Any, Any]:
        """Reads rows `first` to before `last`, uint8 [rows, bytes of a row]. Raises `ModelError` as `content`."""
        content = self._read_numbers("u1", (last - first) * self.row_bytes, first * self.row_bytes)
        return content.reshape(last - first, self.row_bytes)

    def content(self) -> np.ndarray[Any, Any]:
        """Reads the content. Raises `ModelError` if it is not all there.

        The file is not mapped: whatever happens to it meanwhile, the process goes on.
        """
        return self._read_numbers(self.dtype, prod(self.stored_shape)).reshape(self.stored_shape)

    def _read_numbers(self, dtype: Any, count: int, begin: int = 0) -> np.ndarray[Any, Any]:
        import numpy as np

        numbers = np.fromfile(self.file, dtype, count=count, offset=self.offset + begin)
        if numbers.size < count:
            raise cut_short(self)
        return numbers


def cut_short(tensor: FileTensor) -> ModelError:
    """Returns the error of a file that ends within a tensor."""
    return ModelError(f"{tensor.file} is cut short: it does not hold all of {tensor.name}")


class FileArray(Struct, frozen=True, dict=True):
    """The array `key` of `count` elements of the type `kind`, which are the bytes from `begin` to before `end` of a
    file. `undecoded` is the number of the first string that is not UTF-8, None without. `ends` has the byte after each
    string, counted from `begin`, int64 [count]; None for anything else."""

    file: Path
    key: str
    kind: int
    count: int
    begin: int
    end: int
    undecoded: int | None = None
    ends: NDArray[np.int64] | None = None

    @cached_property
    def content(self) -> list[str] | np.ndarray[Any, Any]:
        """The strings, or the numbers, read once. Raises `ModelError` for strings that are not UTF-8, for arrays, and
        if the file has changed."""
        import numpy as np

        if self.strings is not None:
            texts = self.strings.texts()
            if any(isinstance(text, bytes) for text in texts):
                raise self._changed()
            return cast(list[str], texts)
        if self.kind == _ARRAY:
            raise ModelError(f"the file's {self.key} has arrays within it, which nothing here reads")
        return np.frombuffer(self._read(), _SCALARS[self.kind], self.count)

    @cached_property
    def strings(self) -> StringPiece | None:
        """The strings, read once and not made; None if it has numbers or arrays. Raises `ModelError` as `content`."""
        if self.ends is None:
            return None
        if self.undecoded is not None:
            raise ModelError(f"the file's {self.key} is not UTF-8 in element {self.undecoded}")
        try:
            return StringPiece.with_ends(self._read(), self.ends)
        except ValueError:
            raise self._changed() from None

    def _read(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.begin)
            content = file.read(self.end - self.begin)
        if len(content) < self.end - self.begin:
            raise self._changed()
        return content

    def _changed(self) -> ModelError:
        return ModelError(f"cannot read {self.file}: it was changed while it was read")

    def as_tensors(self, names: Sequence[str]) -> list[FileTensor]:
        """Returns each of its float32 numbers as a tensor of this name."""
        import numpy as np

        dtype = np.dtype("<f4")
        places = (self.begin + i * dtype.itemsize for i in range(self.count))
        return [
            FileTensor(name, "F32", (1,), self.file, at, dtype, (1,)) for name, at in zip(names, places, strict=True)
        ]


class GgufHeader(Struct, frozen=True):
    """`values` has the metadata that are numbers or strings; a string that is not UTF-8 is bytes. `lists` has the short
    arrays, and None for long ones, such as the vocabulary, and for arrays of arrays. `arrays` has all of them."""

    values: Mapping[str, Any]
    lists: Mapping[str, tuple[Any, ...] | None]
    arrays: Mapping[str, FileArray]
    tensors: tuple[FileTensor, ...]

    def shown(self, key: str) -> str:
        """Returns a value for people, "" without one. Bytes that are not UTF-8 are replaced."""
        value = self.values.get(key, "")
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class _Reading:
    """A file that is read from front to back, from byte `begin` to before byte `end`."""

    def __init__(self, file: BinaryIO, end: int, begin: int = 0) -> None:
        self._file = file
        self._left = min(end - begin, _MOST_HEADER_BYTES)
        self._is_all = end - begin <= _MOST_HEADER_BYTES
        self._num_inner_arrays = 0
        self.at = begin

    def _advance(self, count: int) -> None:
        if count > self._left:
            raise ValueError("it is cut short" if self._is_all else "its header is longer than that of any model")
        self._left -= count
        self.at += count

    def take(self, count: int) -> bytes:
        self._advance(count)
        content = self._file.read(count)
        if len(content) < count:
            raise ValueError("it became shorter while it was read")
        return content

    def skip(self, count: int) -> None:
        self._advance(count)
        self._file.seek(count, 1)

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str | bytes:
        """Reads a string. Returns its bytes if it is not UTF-8: most strings change no result."""
        return decoded(self.take(self.number("<Q")))

    def name(self) -> str:
        """Reads a name, which messages may quote."""
        length = self.number("<Q")
        if length > _MOST_NAME_BYTES:
            raise ValueError(f"a name in it has {length} bytes")
        name = decoded(self.take(length))
        if isinstance(name, bytes):
            raise ValueError(f"a name in it is not UTF-8: {name[:100]!r}")
        if not name.isprintable():
            raise ValueError(f"a name in it is {name[:100]!r}")
        return name

    def strings(self, count: int) -> Iterator[StringPiece]:
        """Yields the `count` strings of an array in pieces. Makes none of them."""
        if count > _MOST_STRINGS:
            raise ValueError(f"an array in it counts {count} strings")
        while count:
            data = self._file.read(min(self._left, PIECE_BYTES))
            self._file.seek(self.at)
            piece = StringPiece.of(data, count)
            if piece.count:
                self.skip(piece.num_bytes)
            else:
                # The first string is longer than a piece, or the file ends within it, which this says.
                piece = StringPiece.of_one(self.take(self.number("<Q")))
            count -= piece.count
            yield piece

    def _skip_strings(self, count: int) -> tuple[NDArray[np.int64], int | None, list[str | bytes]]:
        """Returns where each string of an array ends, int64 [count], counted from the first one; the number of the
        first that is not UTF-8, None without; and the strings, if they are few."""
        import numpy as np

        begin, ends, undecoded, few = self.at, [np.zeros(0, np.int64)], None, list[str | bytes]()
        for piece in self.strings(count):
            if undecoded is None and not piece.is_utf8():
                before = sum(map(len, ends))
                undecoded = before + next(i for i, text in enumerate(piece.texts()) if isinstance(text, bytes))
            ends.append(piece.ends + (self.at - begin - piece.ends[-1]))
            few += piece.texts() if count <= _FEW else ()
        return np.concatenate(ends), undecoded, few

    def array(self, path: Path, key: str) -> tuple[FileArray, tuple[Any, ...] | None]:
        """Returns the array `key` of the file `path`, and its few strings or numbers."""
        kind, count, begin = self.number("<I"), self.number("<Q"), self.at
        undecoded, ends, few = None, None, list[Any]()
        is_few = count <= (_FEW if kind == _STRING else _FEW_NUMBERS)
        if kind == _STRING:
            ends, undecoded, few = self._skip_strings(count)
        elif kind in _SCALARS and is_few:
            few = [self.number(_SCALARS[kind]) for _ in range(count)]
        else:
            self._skip_elements(kind, count, 1)
        is_kept = is_few and kind != _ARRAY
        return FileArray(path, key, kind, count, begin, self.at, undecoded, ends), tuple(few) if is_kept else None

    def _skip_elements(self, kind: int, count: int, depth: int) -> None:
        """Skips the elements of an array, which is in `depth` - 1 others."""
        if kind == _STRING:
            self._skip_strings(count)
        elif kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind != _ARRAY:
            raise ValueError(f"an array in it has elements of the type {kind}")
        else:
            self._num_inner_arrays += count
            if depth > _MOST_DEPTH or self._num_inner_arrays > _MOST_VALUES:
                raise ValueError("it has too many arrays within arrays")
            for _ in range(count):
                self._skip_elements(self.number("<I"), self.number("<Q"), depth + 1)


def read_header(path: Path) -> GgufHeader:
    """Returns the header of a GGUF file. All its tensors lie inside the file. Raises `ModelError` with one line if
    the header is damaged or not known, and `OSError`."""
    num_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            return _parse_header(path, _Reading(file, num_bytes), num_bytes)
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {fault_or_pointer(path, first_line(error))}") from error


def require_beginning(path: Path) -> None:
    """Raises `ModelError` with one line if a file does not begin as a GGUF file does, or counts more than a model has,
    and `OSError`. Reads 24 bytes: `read_header` may take a second."""
    num_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            _counts(_Reading(file, num_bytes))
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {fault_or_pointer(path, first_line(error))}") from error


def _counts(reading: _Reading) -> tuple[int, int]:
    """Reads the fixed part of a header. Returns the number of tensors and of values. Raises `ValueError`."""
    if reading.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reading.number("<I")
    if version not in _VERSIONS:
        raise ValueError("it has the byte order of other machines" if version % 65536 == 0 else f"version {version}")
    num_tensors, num_values = reading.number("<Q"), reading.number("<Q")
    if num_tensors > _MOST_TENSORS or num_values > _MOST_VALUES:
        raise ValueError(f"its header counts {num_tensors} tensors and {num_values} values")
    return num_tensors, num_values


def _parse_header(path: Path, reading: _Reading, num_bytes: int) -> GgufHeader:
    num_tensors, num_values = _counts(reading)
    values: dict[str, Any] = {}
    lists: dict[str, tuple[Any, ...] | None] = {}
    arrays: dict[str, FileArray] = {}
    seen: set[str] = set()
    alignment = 32
    for _ in range(num_values):
        key, kind = reading.name(), reading.number("<I")
        if key in seen:
            raise ValueError(f"{key!r} is in it twice")
        seen.add(key)
        if kind == _ARRAY:
            arrays[key], lists[key] = reading.array(path, key)
        elif kind == _STRING:
            values[key] = reading.text()
        elif kind in _SCALARS:
            values[key] = reading.number(_SCALARS[kind])
        else:
            raise ValueError(f"{key!r} has a value of the type {kind}")
        if key == "general.alignment":
            alignment = values.get(key, 0)
            if kind != _UINT32 or alignment == 0 or alignment & (alignment - 1):
                raise ValueError(f"its alignment is {alignment}")
    described = [_tensor(path, reading) for _ in range(num_tensors)]
    begin = -(-reading.at // alignment) * alignment
    if twice := [name for name, count in Counter(tensor.name for tensor in described).items() if count > 1]:
        raise ValueError(f"the tensor {twice[0]!r} is in it twice")
    return GgufHeader(values, lists, arrays, tuple(_placed(described, begin, alignment, num_bytes)))


def _tensor(path: Path, reading: _Reading) -> FileTensor:
    """Returns a tensor whose offset counts from where the tensors begin."""
    import numpy as np

    name, dimensions = reading.name(), reading.number("<I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"the tensor {name!r} has {dimensions} dimensions")
    sizes = tuple(reading.number("<Q") for _ in range(dimensions))
    number, offset = reading.number("<I"), reading.number("<Q")
    if number not in TYPES:
        raise ValueError(f"the tensor {name!r} has the type {number}, which is not known")
    kind, block, block_bytes = TYPES[number].name, TYPES[number].weights, TYPES[number].num_bytes
    if not all(sizes) or sizes[0] % block:
        raise ValueError(f"the tensor {name!r} of type {kind} has the sizes {sizes}")
    shape, dtype = sizes[::-1], np.dtype(_PLAIN.get(kind, np.uint8))
    stored_shape = shape if kind in _PLAIN else (*shape[:-1], shape[-1] // block * block_bytes)
    return FileTensor(name, kind, shape, path, offset, dtype, stored_shape)


def _placed(described: Iterable[FileTensor], begin: int, alignment: int, num_bytes: int) -> Iterator[FileTensor]:
    """Yields the tensors of a file of `num_bytes`, whose offsets counted from `begin`, with offsets from its start.
    Raises `ValueError` unless each follows the one before it at the next multiple of the alignment, which llama.cpp
    requires too: otherwise tensors could share bytes, or have those of others."""
    end = 0
    for tensor in described:
        if tensor.offset != end:
            raise ValueError(
                f"the tensor {tensor.name!r} begins at byte {tensor.offset} of its tensors, "
                f"and those before it take the first {end} bytes"
            )
        first, end = begin + end, -(-(end + tensor.num_bytes) // alignment) * alignment
        if (missing := first + tensor.num_bytes - num_bytes) > 0:
            raise ValueError(
                f"it is cut short: {missing} bytes are missing up to the end of the tensor {tensor.name!r}"
            )
        yield replace(tensor, offset=first)
