"""The C++ operators, and the size of the blocks of their matrices.

They take the addresses of numpy arrays. bfloat16 arrays have the type uint16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np  # The router reads the variants' names without it.

ROWS, COLUMNS = 16, 32
"""The size of a block. The rows and columns of a matrix are multiples of them."""


def require(is_taken: bool, *arrays: np.ndarray) -> None:
    """Raises `ValueError` unless an operator takes these arrays. It gets their addresses only, so it would read and
    write out of bounds."""
    if not is_taken:
        forms = ", ".join(f"{array.dtype} {list(array.shape)}" for array in arrays)
        raise ValueError(f"a compiled operator does not take {forms}")


def address_of(array: np.ndarray | None) -> int:
    """Returns the address of an array's first number, 0 without an array."""
    return 0 if array is None else int(array.ctypes.data)
