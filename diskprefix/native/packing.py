"""The compiled packing of weights from GGUF files."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np

from diskprefix.gguf_types import GGUF_TYPES
from diskprefix.native import ROWS, address_of, require
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import Operators

_PACKING = struct.Struct("@5q 5P q")
"""`Packing` of `source/interface.h`."""

TYPES = {kind.name: kind for kind in GGUF_TYPES if kind.is_packed}
"""The types that are packed, by name."""
_WITH_GRID = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def pack(
    operators: Operators,
    kind: str,
    content: np.ndarray,
    order: np.ndarray | None,
    out: np.ndarray,
    factors: np.ndarray | None = None,
    threads: int | None = None,
) -> None:
    """Packs rows of a GGUF tensor of the type `kind` into `out`.

    `out` has whole strips of a packed matrix in the form `model.quants.quant_form.FILE_FORMS[kind]`: uint8 [strips,
    units, bytes of a unit]. `content` has the bytes of the file, uint8 [rows, bytes of a row]. Row i of `out` is row
    `order[i]` (int32) of `content`, or row i without an order. Scales of NVFP4 are multiplied by `factors`, float32
    [rows of `out`]. `threads`: 1 for only the calling thread, None for all. Raises `MemoryError`.
    """
    if order is None:
        has_rows = len(content) == out.shape[0] * ROWS
    else:
        has_rows = 0 <= int(order.min()) <= int(order.max()) < len(content)
    require(has_rows and content.dtype == np.uint8 and content.flags.c_contiguous, content, out)
    _call(operators, kind, content.shape[1], order, out, factors, content=address_of(content), threads=threads)


def pack_file(
    operators: Operators,
    kind: str,
    file: int,
    offset: int,
    row_bytes: int,
    order: np.ndarray | None,
    out: np.ndarray,
    factors: np.ndarray | None = None,
) -> None:
    """As `pack`, for a GGUF tensor whose content begins at `offset` of the open `file`, on the calling thread. Each
    piece is packed before the next one is read. Raises `EOFError` if the file is cut short."""
    _call(operators, kind, row_bytes, order, out, factors, file=file, offset=offset, threads=1)


def _call(
    operators: Operators,
    kind: str,
    row_bytes: int,
    order: np.ndarray | None,
    out: np.ndarray,
    factors: np.ndarray | None,
    *,
    file: int = -1,
    offset: int = 0,
    content: int = 0,
    threads: int | None = None,
) -> None:
    number, weights, num_bytes = TYPES[kind].number, TYPES[kind].weights, TYPES[kind].num_bytes
    strips, columns = out.shape[0], row_bytes // num_bytes * weights
    has_units = row_bytes % num_bytes == 0 and out.shape[1] == columns // weights
    require(has_units and out.dtype == np.uint8 and out.flags.c_contiguous, out)
    if order is not None:
        require(order.dtype == np.int32 and order.shape == (strips * ROWS,) and order.flags.c_contiguous, order)
    if factors is not None:
        is_right = factors.dtype == np.float32 and factors.shape == (strips * ROWS,) and factors.flags.c_contiguous
        require(is_right, factors)
    grid = _grid_of(kind) if kind in _WITH_GRID else None
    parts = map(address_of, (grid, order, factors, out))
    call = _PACKING.pack(number, strips, columns, file, offset, content, *parts, threads or num_threads())
    match operators.pack(call):
        case 1:
            raise MemoryError("there is no memory left for packing weights")
        case 2:
            raise EOFError("the file is cut short")


@cache
def _grid_of(kind: str) -> np.ndarray:
    """Returns the codes in the rows of a type's grid, uint8 [rows, 4 or 8]."""
    from gguf import quants  # here, as few files have these types

    described = getattr(quants, kind)
    described.init_grid()
    grid = described.grid.reshape(described.grid_shape)
    codes: np.ndarray = np.searchsorted(np.array(described.grid_map, grid.dtype), grid).astype(np.uint8)
    return codes
