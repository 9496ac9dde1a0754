"""Numbers of a model in arrays. A dtype is given by its name. numpy lacks bfloat16 and the types of eight bits: arrays
hold the bits of bfloat16 and float8 numbers as unsigned integers, and items of q8 (`Q8Block` of
`native/source/interface.h`) as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from diskprefix.prefixstore.kv.sizes import Q8_BLOCK
from diskprefix.prefixstore.store.pieces import DTYPES

Array = npt.NDArray[Any]
_AS_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "q8": "V34"}
_NAN = 0x7FC0
"""The bits of NaN in bfloat16, the same as in torch."""


def item_bytes(dtype: str) -> int:
    """Returns the bytes of one item: one number, or with q8 32 numbers and their scale. Raises `KeyError` for a type
    that is not stored."""
    return DTYPES[dtype][0]


def num_items(count: int, dtype: str) -> int:
    """Returns the number of items that hold `count` numbers of a row."""
    return -(-count // Q8_BLOCK) if dtype == "q8" else count


def array_dtype(dtype: str) -> np.dtype[Any]:
    """Returns numpy's type of arrays of these numbers."""
    return np.dtype(_AS_BITS.get(dtype, dtype))


def dtype_of(array: Array) -> str:
    """Returns the dtype of the numbers in an array of a model. Arrays of uint16 hold bfloat16."""
    return "bfloat16" if array.dtype == np.uint16 else array.dtype.name


def converted(array: Array, dtype: str) -> Array:
    """Returns numbers in another type, rounded to the nearest value, ties to even. Makes no copy if they have that type
    already."""
    if dtype_of(array) == dtype:
        return array
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if dtype != "bfloat16":
        return array.astype(array_dtype(dtype), copy=False)
    bits = array.astype(np.float32, copy=False).view(np.uint32)
    rounded = (bits + (bits >> 16 & 1) + 0x7FFF >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(_NAN), rounded)
