"""Packed matrices of a model in a file, which later starts map instead of packing them again.

The file has the matrices, each from a page on, a table (`_Contents`, MessagePack), and an end of fixed size: a name,
the version, the size of the table and its digest. So a file that was cut has no end. The table has a digest of each
matrix, and of a small known matrix of each kind as the operators packed it: what another packer has made is not read.
`packed_weights.py` says where the files are.

The map is private: where the file's contents are damaged, the matrix is packed in their place, in memory alone.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import struct
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np
from msgspec import Struct

from diskprefix.file_system import LOCAL, file_system
from diskprefix.native import ROWS
from diskprefix.native.library import Operators
from diskprefix.native.packing import TYPES, pack
from diskprefix.runtime.memory import LargePages
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from diskprefix.tokens import content_digest as digest_of

VERSION = 1
"""Rises when the same matrices would lie otherwise in a file."""
_END = struct.Struct("<8sIQ16s")
_NAME = b"dpweight"
_MAX_TABLE_BYTES = 1 << 28
_PAGE = 1 << 16
"""The largest page of a kernel, so that each matrix has pages of its own."""
_POPULATE_READ = 22
"""`MADV_POPULATE_READ`, which Python does not name: what cannot be read is an error there, and not a signal."""
_READ_BYTES = 1 << 24
_MAP_FIXED = 0x10
_LIBC = ctypes.CDLL(None, use_errno=True)


class UnusableFile(Exception):
    """A file of packed matrices cannot be used. The message says why."""


class DamagedFile(UnusableFile):
    """A file was cut or changed after it was made."""


class Packable(Protocol):
    """A matrix that can be packed. `content_digest` tells which bytes of the model's files it consists of, and
    `packed_shape` is uint8 [.., strips, units, bytes of a unit]."""

    @property
    def kind(self) -> str: ...

    @property
    def content_digest(self) -> bytes: ...

    @property
    def packed_shape(self) -> tuple[int, ...]: ...


class PackedMatrix(Struct, frozen=True, eq=False):
    """A matrix as it is packed: uint8 `packed`, of a `kind` of `native.packing.TYPES`. For `content_digest` see
    `Packable`."""

    content_digest: bytes
    kind: str
    packed: np.ndarray


class _Place(Struct, frozen=True):
    kind: str
    offset: int
    shape: tuple[int, ...]
    digest: bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape)


class _Contents(Struct, frozen=True):
    known: dict[str, bytes]
    """The digest of the known matrix of each kind, as it was packed."""
    places: dict[bytes, _Place]
    """The matrices by their `content_digest`."""
    sources: list[bytes]
    """The files of the model, links resolved, when this was made."""
    model: str
    """The digest of the model's contents."""


class PackedFile:
    """The matrices of an open file. For any thread."""

    def __init__(self, path: Path, contents: _Contents, matrices: np.ndarray, mapped: mmap.mmap | None) -> None:
        self.path, self._contents, self._matrices, self._mapped = path, contents, matrices, mapped

    @classmethod
    def open(cls, path: Path, model: str, operators: Operators | None) -> PackedFile:
        """Maps the file of a model, given by the digest of its contents, or reads it where it may come over a network.
        Without `operators`, any packer may have made it. Raises `UnusableFile`, `OSError`, `MemoryError`."""
        with opened(path) as file:
            contents, end = _read_contents(file)
            if contents.model != model:
                raise UnusableFile("it is that of another model")
            if operators is not None:
                _require_packer(contents, operators)
            return cls(path, contents, *_mapped(file, end))

    def matrix(self, source: Packable) -> np.ndarray | None:
        """Returns the memory of a packed matrix, None if the file has none for this source. It may be written to: the
        file stays as it is."""
        place = self._contents.places.get(source.content_digest)
        if place is None or (place.kind, place.shape) != (source.kind, source.packed_shape):
            return None
        return self._matrices[place.offset : place.offset + place.num_bytes].reshape(place.shape)

    def is_intact(self, content_digest: bytes) -> bool:
        """Compares a matrix with its digest. Reads all of it, so that its pages are in memory. What the disk cannot
        read becomes empty memory, which the matrix can be packed into."""
        place = self._contents.places[content_digest]
        content = self._matrices[place.offset : place.offset + place.num_bytes]
        if self._mapped is not None and len(content) and not _read_pages(content):
            _empty(content)
            return False
        return digest_of(content.data) == place.digest

    def compare(self, advance: Callable[[int], None]) -> tuple[int, int]:
        """Compares all matrices, and calls `advance` with the bytes of each. Returns how many are damaged, and how many
        there are."""
        num_damaged = 0
        for content_digest, place in self._contents.places.items():
            num_damaged += not self.is_intact(content_digest)
            advance(place.num_bytes)
        return num_damaged, len(self._contents.places)

    def __contains__(self, content_digest: object) -> bool:
        return content_digest in self._contents.places

    def others(self, taken: Container[bytes]) -> Iterator[PackedMatrix]:
        """Yields the matrices that are not among those `taken`, and are intact."""
        for content_digest, place in self._contents.places.items():
            if content_digest not in taken and self.is_intact(content_digest):
                content = self._matrices[place.offset : place.offset + place.num_bytes]
                yield PackedMatrix(content_digest, place.kind, content.reshape(place.shape))


def sources_of(path: Path) -> list[Path]:
    """Returns the files of the model from which a file was packed. Reads its table alone. Raises `UnusableFile`,
    `OSError`."""
    with opened(path) as file:
        contents, _ = _read_contents(file)
    return [Path(os.fsdecode(source)) for source in contents.sources]


def _read_pages(content: np.ndarray) -> bool:
    """Reads the pages of mapped memory. Returns False for an error of the disk, or a file that was cut meanwhile."""
    advise = getattr(_LIBC, "madvise", None)
    if advise is None or not sys.platform.startswith("linux"):
        return True
    address, size = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.nbytes)
    while advise(address, size, _POPULATE_READ):
        # Bound: a signal interrupts one call. Before Linux 5.14 the kernel does not know it.
        if (error := ctypes.get_errno()) != errno.EINTR:
            return error == errno.EINVAL
    return True


def _empty(content: np.ndarray) -> None:
    """Puts empty pages in place of those of a map. Raises `OSError`."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    address, size = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.nbytes)
    put = _LIBC.mmap
    put.restype = ctypes.c_void_p
    if put(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0)) != content.ctypes.data:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def packed_bytes(matrices: Sequence[PackedMatrix], sources: Sequence[Path]) -> int:
    """Returns how many bytes a file of these matrices has at most."""
    named = sum(len(os.fsencode(source)) + 8 for source in sources)
    return sum(matrix.packed.nbytes + _PAGE for matrix in matrices) + 256 * (1 + len(matrices)) + named


def write_packed(
    file: BinaryIO, matrices: Sequence[PackedMatrix], model: str, sources: Sequence[Path], operators: Operators
) -> Iterator[None]:
    """Writes and syncs a file of matrices from the files `sources` of a `model`, and yields after each piece of 16 MiB.
    Raises `OSError`."""
    places, offset = dict[bytes, _Place](), 0
    for matrix in matrices:
        content = matrix.packed.reshape(-1)
        places[matrix.content_digest] = _Place(matrix.kind, offset, matrix.packed.shape, digest_of(content.data))
        for first in range(0, len(content), _READ_BYTES):
            file.write(content[first : first + _READ_BYTES].data)
            # Not all at the end, when what a request saves would wait for gigabytes.
            _sync(file)
            yield
        file.write(bytes(-len(content) % _PAGE))
        offset += len(content) + -len(content) % _PAGE
    kinds = sorted({matrix.kind for matrix in matrices})
    known = {kind: _known(operators, kind) for kind in kinds}
    table = msgspec.msgpack.encode(_Contents(known, places, list(map(os.fsencode, sources)), model))
    file.write(table)
    file.write(_END.pack(_NAME, VERSION, len(table), digest_of(table)))
    _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that no other user may write. Raises `UnusableFile`, `OSError`."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, given: os.open(name, given | flags)) as file:
        _require_private(file)
        yield file


def _require_private(file: BinaryIO) -> None:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise UnusableFile("it is not a file")
    if status.st_uid != os.geteuid():
        raise UnusableFile(f"it belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o077:
        raise UnusableFile(f"other users may read or write it (mode {stat.S_IMODE(status.st_mode):o})")


def _read_contents(file: BinaryIO) -> tuple[_Contents, int]:
    """Returns the table, and where the matrices end. Everything is compared before it is used."""
    size = os.fstat(file.fileno()).st_size
    if size < _END.size:
        raise DamagedFile("it is cut short")
    end = os.pread(file.fileno(), _END.size, size - _END.size)
    name, version, table_bytes, digest = _END.unpack(end.ljust(_END.size, b"\0"))
    if name != _NAME:
        raise DamagedFile("it is cut short or damaged")
    if version != VERSION:
        raise UnusableFile(f"its version is {version}, not {VERSION}")
    at = size - _END.size - table_bytes
    if at < 0 or table_bytes > _MAX_TABLE_BYTES:
        raise DamagedFile("its end is damaged")
    content = os.pread(file.fileno(), table_bytes, at)
    if digest_of(content) != digest:
        raise DamagedFile("its table is damaged")
    try:
        contents = msgspec.msgpack.decode(content, type=_Contents)
    except msgspec.DecodeError as error:
        raise DamagedFile("its table is damaged") from error
    for place in contents.places.values():
        if place.kind not in TYPES or min(place.shape, default=-1) < 0 or place.offset < 0:
            raise DamagedFile("its table is damaged")
        if place.offset + place.num_bytes > at:
            raise DamagedFile("a matrix is beyond its end")
    return contents, at


def _require_packer(contents: _Contents, operators: Operators) -> None:
    for kind in {place.kind for place in contents.places.values()}:
        if contents.known.get(kind) != _known(operators, kind):
            raise UnusableFile("another version of diskprefix has packed it")


def _known(operators: Operators, kind: str) -> bytes:
    """Returns the digest of a matrix of two strips as it is packed, with its rows in order and the last one first. What
    is done to a model's numbers before they are packed is not in it: `VERSION` rises with that."""
    weights, num_bytes = TYPES[kind].weights, TYPES[kind].num_bytes
    blocks = max(1, 256 // weights)
    content = np.random.default_rng(blocks).integers(0, 256, (2 * ROWS, blocks * num_bytes), np.uint8)
    factors = np.ones(2 * ROWS, np.float32) if kind == "NVFP4" else None
    packed = np.zeros((2, *FILE_FORMS[kind].packed_shape(2 * ROWS, blocks * weights)), np.uint8)
    for out, order in zip(packed, (None, np.arange(2 * ROWS, dtype=np.int32)[::-1].copy()), strict=True):
        pack(operators, kind, content, order, out, factors, threads=1)
    return digest_of(packed.data)


def _mapped(file: BinaryIO, size: int) -> tuple[np.ndarray, mmap.mmap | None]:
    """Returns the matrices, uint8 [size], and their map if they are mapped."""
    if not size:
        return np.empty(0, np.uint8), None
    if file_system(Path(file.name)) not in LOCAL:
        # A page of a map that does not arrive would end the process.
        content, at = LargePages().take((size,), np.uint8), 0
        # Bound: each round reads some of it.
        while at < size:
            if not (piece := os.pread(file.fileno(), min(_READ_BYTES, size - at), at)):
                raise DamagedFile("it is cut short")
            content[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        return content, None
    # Private and writable; without MAP_NORESERVE the kernel would count it as memory that may be needed.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    mapped = mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(mapped, np.uint8), mapped
