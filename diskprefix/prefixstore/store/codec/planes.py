"""Floating-point values as two planes: the exponents as codes of a few bits, and the other bits unchanged.

The values of a model have few different exponents, while signs and fractions look like noise. `README.md` gives the
bytes. The compiled operators encode at the speed of memory. Without them, numpy produces identical bytes.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diskprefix.errors import StoreCorrupt
from diskprefix.native import library
from diskprefix.native.library import PlanesCall, PlanesOperators

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint16]
"""Values of two bytes, or the upper halves of values of four."""

MAX_BITS = 4
_GROUP = 64
"""The number of values whose codes share words: word i has bit i of each code."""
_RUN = 2048
"""The number of neighbouring values of a row that share a base."""


class FloatFormat(Struct, frozen=True):
    """Values of `item_bytes` bytes. `dtype` is the number in `native/source/interface.h`. The bits `marks` of the upper
    byte are stored beside the codes."""

    dtype: int
    item_bytes: int
    marks: tuple[int, ...] = ()

    def exponents(self, words: Words) -> Bytes:
        return (words >> 10 & 0x1F if self.marks else words >> 7).astype(np.uint8)

    def rest(self, words: Words) -> Bytes:
        return (words if self.marks else words >> 8 & 0x80 | words & 0x7F).astype(np.uint8)

    def joined(self, exponents: Bytes, rest: Bytes) -> Words:
        """Returns the words. With `marks`, `exponents` are whole upper bytes."""
        upper, lower = exponents.astype(np.uint16), rest.astype(np.uint16)
        words = upper << 8 | lower if self.marks else upper << 7 | (lower & 0x80) << 8 | lower & 0x7F
        return words.astype(np.uint16, copy=False)


BF16 = FloatFormat(1, 2)
FP16 = FloatFormat(2, 2, (0x01, 0x02, 0x80))
FP32 = FloatFormat(0, 4)


class _Parts(NamedTuple):
    """The sizes in bytes of the parts of the data before the exceptions."""

    rest: int
    codes: int
    counts: int
    bases: int

    @classmethod
    def of(cls, form: FloatFormat, num_rows: int, width: int, bits: int) -> _Parts:
        """Returns the sizes for rows of `width` values."""
        words = num_rows * -(-width // _GROUP) * (bits + len(form.marks))
        runs = num_rows * -(-width // _RUN)
        return cls(num_rows * width * (form.item_bytes - 1), 8 * words, 2 * runs, runs)


def split(form: FloatFormat, values: Bytes) -> tuple[int, Bytes] | None:
    """Returns the number of bits of a code, and the data of `values`, shape [rows, row_bytes]; each row is contiguous.
    Returns None if the data would not be shorter than the values. For any thread."""
    operators = _operators()
    return split_with_numpy(form, values) if operators is None else split_with(operators, form, values)


def join(form: FloatFormat, bits: int, data: memoryview, out: Bytes) -> None:
    """Writes the values to `out`, shape [rows, row_bytes]; each row is contiguous. For any thread.

    Raises `StoreCorrupt` for data that `split` cannot have returned; then the content of `out` is undefined.
    """
    operators = _operators()
    if operators is None:
        is_valid = join_with_numpy(form, bits, data, out)
    else:
        is_valid = join_with(operators, form, bits, data, out)
    if not is_valid:
        raise StoreCorrupt(f"{len(data)} bytes are no {out.size // form.item_bytes} values in planes")


def _operators() -> PlanesOperators | None:
    """Returns the compiled operators, None if there are none or the CPU is big-endian."""
    return library.planes() if sys.byteorder == "little" else None


def split_with(operators: PlanesOperators, form: FloatFormat, values: Bytes) -> tuple[int, Bytes] | None:
    """Does what `split` does, with the compiled operators."""
    data = np.empty(values.size, np.uint8)
    call = _call(form, 0, values, data)
    return None if operators.split(ctypes.byref(call)) else (call.bits, data[: call.num_bytes])


def join_with(operators: PlanesOperators, form: FloatFormat, bits: int, data: memoryview, out: Bytes) -> bool:
    """Does what `join` does, with the compiled operators. Returns whether the data is valid."""
    return not operators.join(ctypes.byref(_call(form, bits, out, np.frombuffer(data, np.uint8))))


def _call(form: FloatFormat, bits: int, values: Bytes, data: Bytes) -> PlanesCall:
    num_rows, row_bytes = values.shape
    assert values.strides[1] == 1
    assert not row_bytes % form.item_bytes
    return PlanesCall(
        dtype=form.dtype,
        bits=bits,
        num_rows=num_rows,
        width=row_bytes // form.item_bytes,
        stride=values.strides[0],
        num_bytes=data.size,
        values=values.ctypes.data,
        data=data.ctypes.data,
    )


def split_with_numpy(form: FloatFormat, values: Bytes) -> tuple[int, Bytes] | None:
    """Does what `split` does, with numpy."""
    items = values.view(f"<u{form.item_bytes}")
    words = items if form.item_bytes == 2 else (items >> 16).astype(np.uint16)
    exponents = form.exponents(words)
    best = _codes(exponents)
    num_rows, width = exponents.shape
    total = [
        sum(_Parts.of(form, num_rows, width, bits)) + int(counts.sum())
        for bits, (_, counts) in enumerate(best, start=1)
    ]
    bits = int(np.argmin(total)) + 1
    if total[bits - 1] >= values.size:
        return None
    bases, counts = best[bits - 1]
    codes = _by_value(bases, width) - exponents
    is_exception = codes >= (1 << bits) - 1
    codes[is_exception] = (1 << bits) - 1
    planes = [codes & 1 << bit for bit in range(bits)] + [words >> 8 & mark for mark in form.marks]
    packed = [np.packbits(_in_groups(plane != 0), axis=-1, bitorder="little") for plane in planes]
    parts = [form.rest(words), np.stack(packed, axis=2), counts.astype("<u2"), bases, exponents[is_exception]]
    if form.item_bytes == 4:
        parts.insert(1, items.astype("<u2"))
    return bits, np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def join_with_numpy(form: FloatFormat, bits: int, data: memoryview, out: Bytes) -> bool:
    """Does what `join` does, with numpy. Returns whether the data is valid."""
    items = out.view(f"<u{form.item_bytes}")
    num_rows, width = items.shape
    if not 1 <= bits <= MAX_BITS:
        return False
    sizes = _Parts.of(form, num_rows, width, bits)
    if len(data) < sum(sizes):
        return False
    rest, codes, counts, bases, exceptions = np.split(np.frombuffer(data, np.uint8), np.cumsum(sizes))
    listed = counts.view("<u2").reshape(num_rows, -1)
    if listed.sum() != exceptions.size:
        return False
    groups = codes.reshape(num_rows, -(-width // _GROUP), bits + len(form.marks), 8)
    planes = [
        np.unpackbits(groups[:, :, bit], axis=-1, bitorder="little").reshape(num_rows, -1)[:, :width]
        for bit in range(groups.shape[2])
    ]
    values: Any = planes[0]
    for bit in range(1, bits):
        values = values | planes[bit] << bit
    is_exception = values == (1 << bits) - 1
    for start in range(0, width, _RUN):
        if (is_exception[:, start : start + _RUN].sum(axis=1) != listed[:, start // _RUN]).any():
            return False
    exponents: Any = _by_value(bases.reshape(num_rows, -1), width) - values
    exponents[is_exception] = exceptions
    if form.marks:
        exponents = exponents << 2 & 0x7C
        for plane, mark in zip(planes[bits:], form.marks, strict=True):
            exponents |= plane * np.uint8(mark)
    words = form.joined(exponents, rest[: items.size].reshape(items.shape))
    if form.item_bytes == 4:
        lower = rest[items.size :].view("<u2").reshape(items.shape)
        items[...] = words.astype(np.uint32) << 16 | lower
    else:
        items[...] = words
    return True


def _codes(exponents: Bytes) -> list[tuple[Bytes, npt.NDArray[np.int64]]]:
    """Returns, for each number of bits from 1 on, two arrays of shape [rows, runs]: the base of each run, and the
    number of its exceptions. Of the bases with the fewest exceptions, chooses the lowest."""
    runs = [row[start : start + _RUN] for row in exponents for start in range(0, len(row), _RUN)]
    counted = np.array([np.bincount(run, minlength=256) for run in runs]).reshape(len(exponents), -1, 256)
    before = np.zeros((*counted.shape[:2], 257), np.int64)
    np.cumsum(counted, axis=2, out=before[:, :, 1:])
    by_bits = []
    for bits in range(1, MAX_BITS + 1):
        # A lower base would not have fewer exceptions, and codes would wrap around to 255.
        lowest = (1 << bits) - 2
        window = before[:, :, lowest + 1 :] - before[:, :, : 256 - lowest]
        bases = lowest + window.argmax(axis=2)
        by_bits.append((bases.astype(np.uint8), before[:, :, -1] - window.max(axis=2)))
    return by_bits


def _by_value(bases: Bytes, width: int) -> Bytes:
    return bases[:, np.arange(width) // _RUN]


def _in_groups(plane: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Returns the values in shape [rows, groups, 64], with zeros after the end of each row."""
    num_rows, width = plane.shape
    return np.pad(plane, ((0, 0), (0, -width % _GROUP))).reshape(num_rows, -1, _GROUP)
