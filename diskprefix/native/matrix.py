"""Matrices of the compiled products."""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Sequence

import torch

from diskprefix.native import COLUMNS, ROWS, require
from diskprefix.native.library import operators

_MATRIX = struct.Struct("@7q 3P")
"""`Matrix` of `source/interface.h`."""

_SCALES = {"float16": 0, "exponents": 1, "bytes": 2, "nibbles": 3, "shared": 4}
_TABLE = 64
"""Numbers in a table. Those of fewer codes stand in it again and again."""


class Matrix:
    """A matrix [rows, columns] to multiply rows with. `address` is that of its description for C++."""

    def __init__(
        self,
        weights: torch.Tensor,
        size: tuple[int, int],
        *,
        bits: int = 16,
        group: int = 0,
        has_zeros: bool = False,
        scales: str = "float16",
        numbers: Sequence[float] = (),
        has_table: bool = False,
        bias: torch.Tensor | None = None,
        form: object = torch.bfloat16,
    ) -> None:
        """`weights` are bfloat16 of that size, or with fewer bits uint8, packed as `model.quants.quant_form` describes.
        `numbers` belong to the codes; they follow each other without `has_table`. `bias` has a number for each row.
        `form` is kept, to show it.

        Raises `ValueError` if the compiled product does not know the form, or if `weights` or `bias` have another
        size than it would read.
        """
        require(weights.is_contiguous() and (weights.dtype is torch.bfloat16) == (bits == 16), weights)
        require(bias is None or bias.shape == size[:1], weights, bias)
        (self.rows, self.columns), self.form, self.weights = size, form, weights
        table = (
            torch.tensor([*numbers] * (_TABLE // len(numbers)), dtype=torch.float32)
            if 0 < len(numbers) <= _TABLE
            else None
        )
        self._kept = weights, table, None if bias is None else bias.detach().float().contiguous()
        found = _MATRIX.pack(
            *(*size, bits, group, int(has_zeros), _SCALES[scales], int(has_table)),
            *(0 if part is None else part.data_ptr() for part in self._kept),
        )
        self._describe(found)
        compiled, num_bytes = operators(), struct.pack("@q", weights.numel() * weights.itemsize)
        require(compiled is not None and not compiled.require_matrix(self._described, num_bytes), weights)

    def _describe(self, found: bytes) -> None:
        self._described = ctypes.create_string_buffer(found, len(found))
        self.address = ctypes.addressof(self._described)

    def part(self, first: int, end: int) -> Matrix:
        """Returns the matrix of the rows from `first` to `end`, in the same memory. Both are multiples of `ROWS`."""
        require(first % ROWS == end % ROWS == 0 <= first < end <= self.rows, *self._kept[:1])
        part = copy.copy(self)
        part.rows = end - first
        (_, *form, weights, table, bias), kept = _MATRIX.unpack(self._described), self._kept[0]
        weights += first * (kept.numel() * kept.itemsize // self.rows)
        part._describe(_MATRIX.pack(part.rows, *form, weights, table, bias + 4 * first if bias else 0))
        return part


def fills_blocks(weight: torch.Tensor) -> bool:
    """Returns whether a matrix is of whole blocks."""
    return weight.ndim == 2 and weight.shape[0] % ROWS == 0 and weight.shape[1] % COLUMNS == 0
