"""The types of tensors in `.gguf` files. The library `gguf` has them too, and takes long to import."""

from __future__ import annotations

from typing import NamedTuple

_TABLE = """
    0 F32 1 4, 1 F16 1 2, 2 Q4_0* 32 18, 3 Q4_1* 32 20, 6 Q5_0* 32 22, 7 Q5_1* 32 24, 8 Q8_0* 32 34, 9 Q8_1 32 40,
    10 Q2_K* 256 84, 11 Q3_K* 256 110, 12 Q4_K* 256 144, 13 Q5_K* 256 176, 14 Q6_K* 256 210, 15 Q8_K 256 292,
    16 IQ2_XXS* 256 66, 17 IQ2_XS* 256 74, 18 IQ3_XXS* 256 98, 19 IQ1_S* 256 50, 20 IQ4_NL* 32 18, 21 IQ3_S* 256 110,
    22 IQ2_S* 256 82, 23 IQ4_XS* 256 136, 24 I8 1 1, 25 I16 1 2, 26 I32 1 4, 27 I64 1 8, 28 F64 1 8, 29 IQ1_M* 256 56,
    30 BF16 1 2, 34 TQ1_0* 256 54, 35 TQ2_0* 256 66, 39 MXFP4* 32 17, 40 NVFP4* 64 36, 41 Q1_0* 128 18, 42 Q2_0* 64 18
"""
"""Number, name, weights of a block and its bytes. `native.packing` packs those with a star."""


class GgufType(NamedTuple):
    """A type of tensors. A block has `weights` numbers in `num_bytes` bytes."""

    number: int
    name: str
    weights: int
    num_bytes: int
    is_packed: bool


def _read(row: str) -> GgufType:
    number, name, weights, num_bytes = row.split()
    return GgufType(int(number), name.rstrip("*"), int(weights), int(num_bytes), name.endswith("*"))


GGUF_TYPES = tuple(map(_read, _TABLE.split(",")))
