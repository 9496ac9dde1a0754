"""The C++ operators, and the size of the blocks in which they take matrices.

They take numpy arrays by their addresses. An array of bfloat16 numbers has their bits as uint16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np  # The front reads the variants' names without it.

ROWS, COLUMNS = 16, 32
"""The size of a block. A matrix has a multiple of both."""


def require(is_taken: bool, *arrays: np.ndarray) -> None:
    """Raises `ValueError` unless an operator takes these arrays: it gets their addresses, and would read and write
    beside them."""
    if not is_taken:
        forms = ", ".join(f"{one.dtype} {list(one.shape)}" for one in arrays)
        raise ValueError(f"a compiled operator does not take {forms}")


def address_of(array: np.ndarray | None) -> int:
    """Returns the address of an array's first number, 0 without an array."""
    return 0 if array is None else int(array.ctypes.data)
