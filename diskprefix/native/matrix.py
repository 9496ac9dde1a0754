"""Matrices of the compiled products."""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Sequence

import numpy as np

from diskprefix.native import COLUMNS, ROWS, address_of, require
from diskprefix.native.library import operators

_MATRIX = struct.Struct("@8q 3P")
"""`Matrix` of `source/interface.h`."""

_SCALES = {"float16": 0, "exponents": 1, "bytes": 2, "nibbles": 3, "shared": 4, "float8": 5}
_TABLE = 64
"""The size of a table. With fewer codes, their numbers are repeated."""


class Matrix:
    """A matrix [rows, columns] for products with rows. `address` is the address of its description for C++."""

    def __init__(
        self,
        weights: np.ndarray,
        size: tuple[int, int],
        *,
        bits: int = 16,
        group: int = 0,
        has_zeros: bool = False,
        scales: str = "float16",
        numbers: Sequence[float] = (),
        has_table: bool = False,
        bias: np.ndarray | None = None,
        form: object = "bfloat16",
    ) -> None:
        """`weights` are bfloat16 [rows, columns], or with fewer bits uint8, packed as `model.quants.quant_form`
        describes. `numbers` are the numbers of codes; without `has_table` they are consecutive. `bias` is float32
        [rows]. `form` is for people.

        Raises `ValueError` if the compiled product does not know the form, or if `weights` or `bias` do not have the
        size that it would read.
        """
        taken = np.uint16 if bits == 16 else np.uint8
        require(weights.flags.c_contiguous and weights.dtype == taken, weights)
        if bias is not None:
            require(bias.dtype == np.float32 and bias.shape == size[:1], weights, bias)
            bias = np.ascontiguousarray(bias)
        (self.rows, self.columns), self.form, self.weights = size, form, weights
        has_numbers = 0 < len(numbers) <= _TABLE
        table = np.array([*numbers] * (_TABLE // len(numbers)), np.float32) if has_numbers else None
        self._kept = weights, table, bias
        self.bias = bias
        if (compiled := operators()) is None:
            raise ValueError("there are no compiled operators")
        num_bytes = struct.pack("@q", weights.nbytes)
        packed = _MATRIX.pack(
            *(*size, bits, group, int(has_zeros), _SCALES[scales], int(has_table), compiled.row_bits),
            *map(address_of, self._kept),
        )
        self._describe(packed)
        require(not compiled.require_matrix(self._described, num_bytes), weights)

    def _describe(self, packed: bytes) -> None:
        self._described = ctypes.create_string_buffer(packed, len(packed))
        self.address = ctypes.addressof(self._described)

    def part(self, first: int, end: int) -> Matrix:
        """Returns the matrix of the rows from `first` to `end`, in the same memory. Both are multiples of `ROWS`."""
        require(first % ROWS == end % ROWS == 0 <= first < end <= self.rows, *self._kept[:1])
        part = copy.copy(self)
        part.rows = end - first
        part.bias = None if self.bias is None else self.bias[first:end]
        (_, *form, weights, table, bias), kept = _MATRIX.unpack(self._described), self._kept[0]
        weights += first * (kept.nbytes // self.rows)
        part._describe(_MATRIX.pack(part.rows, *form, weights, table, bias + 4 * first if bias else 0))
        return part


def fills_blocks(weight: np.ndarray) -> bool:
    """Returns whether a matrix consists of whole blocks."""
    return weight.ndim == 2 and weight.shape[0] % ROWS == 0 and weight.shape[1] % COLUMNS == 0
