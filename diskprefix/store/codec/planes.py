"""Floating-point values as two planes of bytes: the exponents, of which there are few different ones, and the rest.

What a model computes spreads over few exponents, while signs and fractions look like noise. `README.md` of the store
gives the bits of each plane.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint16]
"""Values of two bytes, or the halves of longer ones."""

_TILE = 256 * 1024
"""Values that are worked on at a time: what they need stays in a core's cache, and there are few calls to make."""


@dataclass(frozen=True)
class FloatFormat:
    """How values of `item_bytes` bytes are taken apart and put together. Safe to call from several threads."""

    item_bytes: int
    _split: Callable[..., None]
    _join: Callable[..., None]

    def split(self, raw: memoryview) -> tuple[Bytes, Bytes]:
        """Exponents and rest of the values in `raw`: one byte and `item_bytes - 1` bytes for each."""
        values = np.frombuffer(raw, dtype=f"<u{self.item_bytes}")
        exponents = np.empty(len(values), np.uint8)
        rest = np.empty(len(values) * (self.item_bytes - 1), np.uint8)
        planes = self._planes(exponents, rest)
        for start in range(0, len(values), _TILE):
            part = slice(start, start + _TILE)
            self._split(values[part], *(plane[part] for plane in planes))
        return exponents, rest

    def join(self, exponents: Bytes, rest: Bytes, out: Bytes) -> None:
        """Write the values to `out`, shape [rows, row_bytes]; each row is contiguous."""
        planes = self._planes(exponents, rest)
        for part, tile in _tiles(out.view(f"<u{self.item_bytes}")):
            self._join(tile, *(plane[part].reshape(tile.shape) for plane in planes))

    def _planes(self, exponents: Bytes, rest: Bytes) -> list[npt.NDArray[Any]]:
        """Arrays with one element a value."""
        if self.item_bytes == 2:
            return [exponents, rest]
        return [exponents, rest[: len(exponents)], rest[len(exponents) :].view("<u2")]


def _tiles(out: npt.NDArray[Any]) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
    """Whole rows, as many as fit a tile, or parts of one row; each with the place of its values in the planes."""
    num_rows, row = out.shape
    rows, columns = max(1, _TILE // row), min(row, _TILE)
    for top in range(0, num_rows, rows):
        for left in range(0, row, columns):
            tile = out[top : top + rows, left : left + columns]
            start = top * row + left
            yield slice(start, start + tile.size), tile


class _Scratch(threading.local):
    """Memory of the calling thread for two tiles: fresh memory costs more than the work that is done in it."""

    def __init__(self) -> None:
        self._words = np.empty((2, _TILE), np.uint16)

    def words(self, shape: tuple[int, ...]) -> tuple[Words, Words]:
        size = math.prod(shape)
        return self._words[0, :size].reshape(shape), self._words[1, :size].reshape(shape)


_scratch = _Scratch()


def _split_bf16(values: Words, exponents: Bytes, rest: Bytes) -> None:
    signs, fractions = _scratch.words(values.shape)
    np.right_shift(values, np.uint16(7), out=signs)
    np.copyto(exponents, signs, casting="unsafe")
    np.right_shift(values, np.uint16(8), out=signs)
    np.bitwise_and(signs, np.uint16(0x80), out=signs)
    np.bitwise_and(values, np.uint16(0x7F), out=fractions)
    np.bitwise_or(signs, fractions, out=signs)
    np.copyto(rest, signs, casting="unsafe")


def _join_bf16(out: Words, exponents: Bytes, rest: Bytes) -> None:
    """Widening the rest as signed bytes puts the sign where it belongs; what else it sets is masked out."""
    upper, lower = _scratch.words(out.shape)
    np.copyto(upper, exponents)
    np.multiply(upper, np.uint16(1 << 7), out=upper)
    np.copyto(lower, rest.view(np.int8), casting="unsafe")
    np.bitwise_and(lower, np.uint16(0x807F), out=lower)
    np.bitwise_or(upper, lower, out=out)


def _split_fp16(values: Words, exponents: Bytes, rest: Bytes) -> None:
    upper, _ = _scratch.words(values.shape)
    np.right_shift(values, np.uint16(8), out=upper)
    np.copyto(exponents, upper, casting="unsafe")
    np.copyto(rest, values, casting="unsafe")


def _join_fp16(out: Words, exponents: Bytes, rest: Bytes) -> None:
    upper, lower = _scratch.words(out.shape)
    np.copyto(upper, exponents)
    np.multiply(upper, np.uint16(1 << 8), out=upper)
    np.copyto(lower, rest)
    np.bitwise_or(upper, lower, out=out)


def _split_fp32(values: npt.NDArray[np.uint32], exponents: Bytes, rest: Bytes, lower: Words) -> None:
    halves = values.view("<u2")
    _split_bf16(halves[1::2], exponents, rest)
    np.copyto(lower, halves[0::2])


def _join_fp32(out: npt.NDArray[np.uint32], exponents: Bytes, rest: Bytes, lower: Words) -> None:
    halves = out.view("<u2")
    _join_bf16(halves[:, 1::2], exponents, rest)
    np.copyto(halves[:, 0::2], lower)


BF16 = FloatFormat(2, _split_bf16, _join_bf16)
FP16 = FloatFormat(2, _split_fp16, _join_fp16)
FP32 = FloatFormat(4, _split_fp32, _join_fp32)
