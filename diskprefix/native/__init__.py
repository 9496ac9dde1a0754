"""The C++ operators, and the size of the blocks in which they take matrices."""

from __future__ import annotations

from typing import Any

ROWS, COLUMNS = 16, 32
"""The size of a block. A matrix has a multiple of both."""


def require(is_taken: bool, *tensors: Any) -> None:
    """Raises `ValueError` unless an operator takes these tensors: it gets their addresses, and would read and write
    beside them."""
    if not is_taken:
        forms = ", ".join(f"{one.dtype} {list(one.shape)}" for one in tensors)
        raise ValueError(f"a compiled operator does not take {forms}")
