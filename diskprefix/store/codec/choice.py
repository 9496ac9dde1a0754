"""What `--kv-cache-codec auto` decides: whether payloads are stored raw or in planes, by what a restore will take.

`measure` takes the figures on this machine: the disk by reading a temporary file in the store's folder past the page
cache, the decoders on values as models produce them. `README.md` of the store gives the formula that `choose` uses.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from diskprefix.store.codec.codec import PIECE_BYTES, Codec, Element, Piece, decode_piece, encode_piece
from diskprefix.store.codec.planes import Bytes

_MIB = 1 << 20
_FILE_BYTES = 64 * _MIB
_MOST_WRITING_S = 0.15
_MOST_READING_S = 0.1
_DECODED_BYTES = 32 * _MIB
_CONTENT_BYTES = 4 * _MIB
"""Of different values, and what is written and read at a time."""
_ROW_BYTES = 32 * 1024
_THREADS = 2


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, in bytes of KV a second; `disk_bytes_per_s` in bytes of the file, None if it took no file.

    `planes_ratio`: how many bytes of KV one stored byte holds.
    """

    disk_bytes_per_s: float | None
    raw_bytes_per_s: float
    planes_bytes_per_s: float
    planes_ratio: float


class CodecRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The codec that `--kv-cache-codec auto` chose for a store, and a sentence that gives the reason."""

    codec: Codec
    reason: str


def choose(measured: Speeds, *, budget_bytes: int, available_memory_bytes: int) -> CodecRecord:
    """Returns the codec that a restore is expected to be faster with."""
    disk = measured.disk_bytes_per_s
    if disk is None:
        reason = "the folder takes no file to measure the disk with; raw is the fastest from memory"
        return CodecRecord(codec=Codec.RAW, reason=reason)
    cached = min(1.0, available_memory_bytes / 2 / budget_bytes)
    raw_s = _seconds_per_byte(cached, disk, measured.raw_bytes_per_s)
    planes_s = _seconds_per_byte(cached, disk * measured.planes_ratio, measured.planes_bytes_per_s)
    return CodecRecord(
        codec=Codec.RAW if raw_s <= planes_s else Codec.PLANES,
        reason=f"a restore is expected to run at {_gb(1 / raw_s)} GB/s raw and {_gb(1 / planes_s)} GB/s in planes: "
        f"{cached:.0%} of the budget fit into the page cache, the disk reads {_gb(disk)} GB/s, raw restores at "
        f"{_gb(measured.raw_bytes_per_s)} GB/s, planes at {_gb(measured.planes_bytes_per_s)} GB/s and "
        f"{measured.planes_ratio:.2f} times smaller",
    )


def measure(folder: Path) -> Speeds:
    """Measure the disk under `folder`, and decoding on `_THREADS` threads. Takes about half a second.

    The disk is not measured if `folder` is not writable, or is nearly full. The temporary file is always removed.
    Errors of the disk are not raised.
    """
    values = _values(_CONTENT_BYTES)
    with ThreadPoolExecutor(_THREADS) as threads:
        raw, _ = _restore_speed(values, Codec.RAW, threads)
        planes, ratio = _restore_speed(values, Codec.PLANES, threads)
    return Speeds(
        disk_bytes_per_s=_disk_speed(folder, values.tobytes()),
        raw_bytes_per_s=raw,
        planes_bytes_per_s=planes,
        planes_ratio=ratio,
    )


def _seconds_per_byte(cached: float, disk: float, decoder: float) -> float:
    return cached / decoder + (1 - cached) * max(1 / disk, 1 / decoder)


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f}"


def _values(num_bytes: int) -> Bytes:
    """Normally distributed bf16 values, one row a head, each with a scale of its own; shape [rows, _ROW_BYTES]."""
    random = np.random.default_rng(0)
    values = random.standard_normal((num_bytes // _ROW_BYTES, _ROW_BYTES // 2), dtype=np.float32)
    values *= np.exp(random.standard_normal((len(values), 1), dtype=np.float32))
    return np.ascontiguousarray((values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)).view(np.uint8)


def _restore_speed(values: Bytes, codec: Codec, threads: ThreadPoolExecutor) -> tuple[float, float]:
    """Bytes of KV a second that `threads` decode from memory, and the ratio that `codec` reaches."""
    rows = PIECE_BYTES // _ROW_BYTES
    piece = Piece(rows, _ROW_BYTES, Element.BF16)
    encoded = [
        encode_piece(values[top : top + rows].reshape(-1).data, piece, codec, 0) for top in range(0, len(values), rows)
    ]
    ratio = values.size / sum(map(len, encoded))
    # Copies, so that there is more than a processor's cache holds. Twice: the first time touches the memory.
    stored = [memoryview(bytes(encoded[i % len(encoded)])) for i in range(_DECODED_BYTES // PIECE_BYTES)]
    out = np.empty((len(stored), rows, _ROW_BYTES), np.uint8)

    def decode(thread: int) -> None:
        for i in range(thread, len(stored), _THREADS):
            decode_piece(stored[i], piece, 0, out[i])

    def seconds() -> float:
        started = time.perf_counter()
        list(threads.map(decode, range(_THREADS)))
        return time.perf_counter() - started

    return out.size / min(seconds() for _ in range(3)), ratio


def _disk_speed(folder: Path, content: bytes) -> float | None:
    """Bytes a second of a sequential read past the page cache, None if the folder takes no file."""
    try:
        free = os.statvfs(folder)
        if free.f_bavail * free.f_frsize < 4 * _FILE_BYTES:
            return None
        writing, name = tempfile.mkstemp(prefix="speed-", dir=folder)
        with open(writing, "wb", buffering=0):
            try:
                reading = _open_past_the_cache(name)
            finally:
                os.unlink(name)  # nothing is left whatever happens
            with open(reading, "rb", buffering=0):
                return _read(reading, _write(writing, content)) or None
    except OSError:
        return None


def _open_past_the_cache(name: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # not every file system can
        return os.open(name, os.O_RDONLY)


def _write(descriptor: int, content: bytes) -> int:
    """Bytes that are on the disk now: less than planned where it is slow."""
    written = 0
    started = time.perf_counter()
    while written < _FILE_BYTES and time.perf_counter() - started < _MOST_WRITING_S:
        written += os.write(descriptor, content)
        os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return written


def _read(descriptor: int, num_bytes: int) -> float:
    """Bytes a second of reading that much from the start, or what there is time for."""
    part = mmap.mmap(-1, _CONTENT_BYTES)  # whole pages, as reading past the cache demands
    found = 0
    started = time.perf_counter()
    while found < num_bytes and time.perf_counter() - started < _MOST_READING_S:
        found += os.preadv(descriptor, [part], found)
    return found / (time.perf_counter() - started)
