"""The compiled product with a quantised matrix, called with torch's tensors."""

from __future__ import annotations

import struct

import torch

from diskprefix.native.library import Operators

_CALL = struct.Struct("@7q 4P q P")
"""`QuantisedProduct` of `source/interface.h`."""

_SCALE_TYPES = {torch.float32: 0, torch.float16: 2}

REVISION = 1
"""The number changes with the bits of the result."""


class QuantisedProduct:
    """Multiplies rows with one matrix of 4 or 8 bits. `model.quants` describes its forms and how it is `packed`."""

    def __init__(
        self,
        operators: Operators,
        packed: torch.Tensor,
        size: tuple[int, int],
        *,
        bits: int,
        group: int,
        has_zeros: bool,
        scale_type: torch.dtype,
        bias: torch.Tensor | None,
    ) -> None:
        """`packed` is uint8, for a matrix of `size` (rows, columns). `bias` has a number for each row."""
        assert packed.is_contiguous()
        self._operators, self._packed = operators, packed
        self._bias = None if bias is None else bias.float().contiguous()
        self._size = size
        self._form = (*size, bits, group, int(has_zeros), _SCALE_TYPES[scale_type])
        self._addresses = packed.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns bfloat16 [.., rows of the matrix] for bfloat16 [.., columns of the matrix]. Raises `MemoryError`."""
        matrix_rows, columns = self._size
        assert rows.dtype is torch.bfloat16
        assert rows.shape[-1] == columns
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], matrix_rows)
        call = _CALL.pack(
            *(rows.numel() // columns, *self._form, rows.data_ptr(), *self._addresses, out.data_ptr()),
            *(torch.get_num_threads(), self._operators.parallel_for),
        )
        if self._operators.quantised_product(call):
            raise MemoryError("there is no memory left for a product")
        return out
