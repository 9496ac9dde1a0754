"""The compiled packing of weights from GGUF files, called with torch's tensors."""

from __future__ import annotations

import struct

import torch

from diskprefix.native.library import Operators
from diskprefix.native.matrix import COLUMNS, ROWS

_PACKING = struct.Struct("@4q 3P q P")
"""`Packing` of `source/interface.h`."""

_TYPES = {
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
}
"""The number of a type in the file, and the weights and bytes of a block."""


def pack(operators: Operators, kind: str, content: torch.Tensor, order: torch.Tensor | None, out: torch.Tensor) -> None:
    """Packs rows of a GGUF tensor of the type `kind` into `out`.

    These are whole strips of a packed matrix in the form `model.quants.gguf_quants.form_of(kind)`: uint8 [strips,
    blocks, bytes of a block]. `content` are the bytes of the file, uint8 [rows, bytes of a row]. Row i of `out` is row
    `order[i]` (int32) of it, or row i without an order. Raises `MemoryError`.
    """
    number, weights, num_bytes = _TYPES[kind]
    strips, columns = out.shape[0], out.shape[1] * COLUMNS
    assert content.dtype is out.dtype is torch.uint8
    assert content.is_contiguous()
    assert out.is_contiguous()
    assert columns % weights == 0
    assert content.shape[1] == columns // weights * num_bytes
    if order is None:
        assert len(content) == strips * ROWS
    else:
        assert order.dtype is torch.int32
        assert order.is_contiguous()
        assert order.shape == (strips * ROWS,)
        assert int(order.min()) >= 0
        assert int(order.max()) < len(content)
    call = _PACKING.pack(
        *(number, strips, columns, out[0].nbytes, content.data_ptr(), 0 if order is None else order.data_ptr()),
        *(out.data_ptr(), torch.get_num_threads(), operators.parallel_for),
    )
    if operators.pack(call):
        raise MemoryError("there is no memory left for packing weights")
