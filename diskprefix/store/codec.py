"""Payload codecs and the reading of payload pages.

A stored payload is checked before it is used: its length against the index, then its checksum. Sizes that come from
disk are compared with what the caller expects and never used to allocate.
"""

from __future__ import annotations

import ctypes
import mmap
from enum import IntEnum

import numpy as np
import zstandard

from diskprefix.errors import StoreCorrupt
from diskprefix.store.schema import NodeRecord
from diskprefix.tokens import TokenIds, checksum

_MADV_POPULATE_READ = 22
"""Linux 5.14; other kernels answer EINVAL and the pages come by ordinary faults."""

_libc = ctypes.CDLL(None, use_errno=False)


class Codec(IntEnum):
    RAW = 0


def read_payload(record: NodeRecord, stored: memoryview, *, expected_bytes: int) -> memoryview:
    """The raw bytes of a payload, verified. Raises `StoreCorrupt`; safe to call from several threads.

    `expected_bytes` is what the layout says a node of this kind holds. The answer may be a view of the memory map: it
    is good for as long as the snapshot that gave `stored`.
    """
    if record.codec != Codec.RAW:
        raise StoreCorrupt(f"unknown payload codec {record.codec}")
    if not len(stored) == record.stored_bytes == record.raw_bytes == expected_bytes:
        raise StoreCorrupt(
            f"payload has {len(stored)} bytes, its record says {record.stored_bytes}, the layout {expected_bytes}"
        )
    populate(stored)
    if checksum(stored) != record.checksum:
        raise StoreCorrupt("payload checksum does not match")
    return stored


def populate(view: memoryview) -> None:
    """Fault in the pages under `view` with one system call; on a cold page cache this reads at the disk's speed."""
    if not len(view):
        return
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    start = address - address % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + len(view) - start), _MADV_POPULATE_READ)


def encode_tokens(token_ids: TokenIds) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(token_ids.astype("<i4").tobytes())


def decode_tokens(stored: bytes | memoryview, *, max_tokens: int) -> TokenIds:
    """Inverse of `encode_tokens`. Raises `StoreCorrupt` on anything that is not at most `max_tokens` int32."""
    try:
        size = zstandard.frame_content_size(stored)
        if not 0 <= size <= 4 * max_tokens or size % 4:
            raise StoreCorrupt(f"a history record claims {size} bytes")
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
    except zstandard.ZstdError as error:
        raise StoreCorrupt(f"a history record cannot be read: {error}") from error
    return np.frombuffer(raw, dtype="<i4").astype(np.int32)
