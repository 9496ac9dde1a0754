"""Payload codecs, and the reading of payload pages. `README.md` gives the format of a stored piece.

A piece is checked before it is used: its checksum, unless a digest has verified it, then its sizes against what the
caller expects. Sizes from the disk are never used to allocate.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from enum import IntEnum

import numpy as np
import zstandard
from msgspec import Struct

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.codec.planes import BF16, FP16, FP32, Bytes, join, split
from diskprefix.tokens import checksum

PIECE_BYTES = 512 * 1024
"""The size of a piece before encoding. The format depends on it, because payloads are cut there."""

_HEADER = struct.Struct("<QIIBB30x")
_CHECKSUM = struct.Struct("<Q")
_MIN_SAVING = 32
"""Data that does not become shorter by 1/32 stays raw: decoding it would take longer than reading it."""
_RUN_BYTES = 16 * 1024
"""The minimum size of a run of rows with its own code: layers and heads differ, so each run gets one."""
_MAX_WINDOW_BYTES = 1 << 19

_MADV_POPULATE_READ = 22
"""Linux 5.14. Older kernels return EINVAL, and the pages are read by ordinary page faults."""

_UNREADABLE = {errno.EFAULT, errno.EIO, getattr(errno, "EHWPOISON", 133)}
"""The errors of madvise for pages whose access would end the process with SIGBUS."""

_libc = ctypes.CDLL(None, use_errno=True)


class Codec(IntEnum):
    RAW = 0
    ZSTD = 1
    PLANES = 2


class Element(IntEnum):
    """The type of the values in a payload."""

    BYTES = 0
    BF16 = 1
    FP16 = 2
    FP32 = 3
    FP8_E4M3 = 4
    FP8_E5M2 = 5
    Q8 = 6


_CODECS = frozenset(Codec)
_FORMATS = {Element.BF16: BF16, Element.FP16: FP16, Element.FP32: FP32}
_EXPONENTS: dict[Element, tuple[type[np.signedinteger], type[np.unsignedinteger], int]] = {
    Element.BF16: (np.int16, np.uint16, 0x7F80),
    Element.FP16: (np.int16, np.uint16, 0x7C00),
    Element.FP32: (np.int32, np.uint32, 0x7F800000),
}
"""Signed and unsigned integers of the element's size, and the bits of infinity. The bits of NaN are greater."""


class Piece(Struct, frozen=True):
    """The form of a piece before encoding: rows of one group of a payload, from `first_row` on. The groups of a payload
    are numbered: those of per-token tensors first, then those of states, then the logits."""

    num_rows: int
    row_bytes: int
    element: Element
    group: int = 0
    first_row: int = 0

    @property
    def rows(self) -> slice:
        """The rows of the group that the piece holds."""
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def max_bytes(self) -> int:
        """The maximum size of the stored piece, with any codec."""
        return _HEADER.size + self.num_bytes


def piece_seed(name: bytes, index: int) -> int:
    """Returns the seed of a piece's checksum. The seed differs for each piece, so a piece does not verify in the place
    of another one."""
    return (int.from_bytes(name[:8], "little") + index) % 2**64


def encode_piece(raw: memoryview, piece: Piece, codec: Codec, seed: int | None) -> bytearray:
    """Returns the piece as it is stored. `raw` is C-contiguous and holds `piece.num_bytes` bytes.

    A piece that the codec does not make shorter is stored raw. `seed` seeds the checksum; with None the piece gets no
    checksum, because the caller verifies it otherwise. For any thread.
    """
    assert len(raw) == piece.num_bytes < 2**32
    used, bits, data = _encode(raw, piece, codec)
    if not _is_worthwhile(len(data), len(raw)):
        used, bits, data = Codec.RAW, 0, raw
    stored = bytearray().join([_HEADER.pack(0, len(raw), bits, used, piece.element), data])
    if seed is not None:
        _CHECKSUM.pack_into(stored, 0, checksum(memoryview(stored)[_CHECKSUM.size :], seed))
    return stored


def decode_piece(stored: memoryview, piece: Piece, seed: int | None, out: Bytes) -> None:
    """Verifies a stored piece and writes it to `out`, shape [num_rows, row_bytes]; each row is contiguous. `seed` seeds
    the checksum; None if the caller has verified the piece already. For any thread.

    Raises `StoreCorrupt`; then the content of `out` is undefined.
    """
    assert out.shape == (piece.num_rows, piece.row_bytes)
    if len(stored) < _HEADER.size:
        raise StoreCorrupt(f"a piece of {len(stored)} bytes is shorter than its header")
    stated_checksum, raw_bytes, bits, codec, element = _HEADER.unpack_from(stored)
    if seed is not None and stated_checksum != checksum(stored[_CHECKSUM.size :], seed):
        raise StoreCorrupt("the checksum of a piece does not match")
    if (raw_bytes, element) != (piece.num_bytes, piece.element):
        raise StoreCorrupt(
            f"a piece claims {raw_bytes} bytes of kind {element} where {piece.num_bytes} bytes of kind "
            f"{piece.element.value} belong"
        )
    if codec not in _CODECS or (not raw_bytes and codec != Codec.RAW):
        raise StoreCorrupt(f"a piece of {raw_bytes} bytes has the unknown codec {codec}")
    data = stored[_HEADER.size :]
    if codec == Codec.PLANES:
        form = _FORMATS.get(piece.element)
        if form is None or piece.row_bytes % form.item_bytes:
            raise StoreCorrupt(f"rows of {piece.row_bytes} bytes of kind {element} cannot be in planes")
        join(form, bits, data, out)
    else:
        raw = _content(_zstd.decompressor, data, range(out.size, out.size + 1)) if codec == Codec.ZSTD else data
        if len(raw) != out.size:
            raise StoreCorrupt(f"a piece has {len(raw)} bytes of data instead of {out.size}")
        out[...] = np.frombuffer(raw, dtype=np.uint8).reshape(out.shape) if len(raw) else 0


def is_finite(raw: memoryview, element: Element) -> bool:
    """Returns whether no value is infinite or NaN. Values of fp8 count as finite, and so do bytes."""
    if element == Element.Q8:
        # 32 codes are finite if their scale is.
        raw, element = np.ndarray(len(raw) // 34, np.uint16, raw, strides=(34,)).copy().data, Element.BF16
    if element not in _EXPONENTS:
        return True
    signed, unsigned, infinity = _EXPONENTS[element]
    # The greatest signed integer is the largest positive value, the greatest unsigned one the largest negative value.
    largest = int(np.frombuffer(raw, dtype=signed).max(initial=0))
    last = int(np.frombuffer(raw, dtype=unsigned).max(initial=0))
    return largest < infinity and last < np.iinfo(signed).max + 1 + infinity


def _encode(raw: memoryview, piece: Piece, codec: Codec) -> tuple[Codec, int, bytes | memoryview]:
    """Returns the codec, the number of bits of a code in planes, and the data."""
    # Codes of 8 bits have an entropy of nearly 8 bits, and decoding them would take longer than reading them.
    if codec == Codec.RAW or not raw or (codec == Codec.PLANES and piece.element == Element.Q8):
        return Codec.RAW, 0, raw
    form = _FORMATS.get(piece.element)
    if codec == Codec.ZSTD or piece.element == Element.BYTES or (form and piece.row_bytes % form.item_bytes):
        return Codec.ZSTD, 0, _zstd.general.compress(raw)
    if form is None:
        return Codec.ZSTD, 0, _entropy_code(raw, piece.row_bytes)
    values = np.frombuffer(raw, np.uint8).reshape(piece.num_rows, piece.row_bytes)
    planes = split(form, values)
    if planes is None:
        return Codec.RAW, 0, raw
    bits, data = planes
    # Signs and fractions rarely shrink. If they do, as for zeros, a zstd frame may be far shorter, although it decodes
    # more slowly.
    if _shrinks(data[: len(raw) // form.item_bytes * (form.item_bytes - 1)]):
        frame = _zstd.general.compress(raw)
        if len(frame) < len(data) // 2:
            return Codec.ZSTD, 0, frame
    return Codec.PLANES, bits, data.data


def _shrinks(plane: Bytes) -> bool:
    """Returns whether a sample of a plane becomes shorter."""
    if len(plane) > 4 * _RUN_BYTES:
        plane = np.ascontiguousarray(plane[: len(plane) // 16 * 16].reshape(16, -1)[:, : _RUN_BYTES // 16])
    return _is_worthwhile(len(_zstd.entropy.compress(plane.data)), plane.size)


def _entropy_code(data: memoryview, row_bytes: int) -> bytes:
    """Returns one zstd frame with a block boundary after every run of rows, so that each run has its own code."""
    run = -(-_RUN_BYTES // row_bytes) * row_bytes
    frame = _zstd.entropy.compressobj(size=len(data))
    parts = []
    for start in range(0, len(data), run):
        parts.append(frame.compress(data[start : start + run]))
        if start + run < len(data):
            parts.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    return b"".join([*parts, frame.flush()])


def _is_worthwhile(stored_bytes: int, raw_bytes: int) -> bool:
    return stored_bytes <= raw_bytes - raw_bytes // _MIN_SAVING


class _Zstd(threading.local):
    """The zstd contexts of a thread, which are slow to make.

    `entropy` is for values, which hardly repeat. With a hash table of 64 entries and a minimum match of 7 bytes, nearly
    all bytes go to the Huffman coder. Its output is smaller than the output of level 1, and decodes twice as fast.
    """

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        entropy = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            write_content_size=True,
        )
        self.entropy = zstandard.ZstdCompressor(compression_params=entropy)
        self.general = zstandard.ZstdCompressor(level=1)
        self.record_compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self.record_decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def populate(view: memoryview) -> None:
    """Reads the pages under `view` into memory with one system call, at the disk's speed. Does nothing if all are in
    the page cache: mapping them here would take a fifth of a restore.

    Raises `StoreCorrupt` if the file is too short or the disk cannot be read, where an access would end the process.
    """
    if not len(view):
        return
    start = address(view) // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = address(view) + len(view) - start
    if _is_in_memory(start, num_bytes):
        return
    failed = _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_POPULATE_READ)
    if failed and (number := ctypes.get_errno()) in _UNREADABLE:
        raise StoreCorrupt(f"the pages of a payload cannot be read: {os.strerror(number)}")


def _is_in_memory(start: int, num_bytes: int) -> bool:
    """Returns whether all pages from address `start` on are in the page cache."""
    flags = np.zeros(-(-num_bytes // mmap.PAGESIZE), dtype=np.uint8)
    failed = _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), ctypes.c_void_p(flags.ctypes.data))
    return not failed and bool((flags & 1).all())


def address(view: memoryview) -> int:
    """Returns the address of the first byte of a view."""
    start: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return start


def compress(raw: bytes) -> bytes:
    """Returns one zstd frame that states the size of its content."""
    return _zstd.record_compressor.compress(raw)


def decompress(stored: bytes | memoryview, *, max_bytes: int) -> bytes:
    """Inverse of `compress`. Raises `StoreCorrupt` for anything that is not a frame of at most `max_bytes`."""
    return _content(_zstd.record_decompressor, stored, range(max_bytes + 1))


def _content(decompressor: zstandard.ZstdDecompressor, frame: bytes | memoryview, sizes: range) -> bytes:
    """Returns the content of one zstd frame. Raises `StoreCorrupt` unless the frame states one of the `sizes` and its
    content has that size."""
    try:
        size = zstandard.frame_content_size(frame)
        if size not in sizes:
            raise StoreCorrupt(f"a compressed frame claims {size} bytes")
        return decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise StoreCorrupt(f"a compressed frame cannot be read: {error}") from error
