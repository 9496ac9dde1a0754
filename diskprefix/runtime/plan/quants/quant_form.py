"""The forms of quantised weights: the bits of codes, scales and zeros, and their layout in memory.

A weight is `number × scale + zero`, computed in float32 and rounded to bfloat16 where it is looked up. Its code, of 1
to 8 bits, selects the number. Along a row of a matrix, groups of 16 to 128 weights share their scale and zero. Products
with rows of bfloat16 (`--rows bf16`) take the rounded weights, all others the numbers, scales and zeros.

In memory, 16 rows are a strip, and 32 columns of a strip are a block. A strip is a sequence of units. A unit is a
block, the blocks of a larger group, eight blocks (scales in `bytes`, `nibbles` or `shared`), or two blocks (`float8`).
It has the scales of its groups, then the zeros, then the codes of its blocks. Scales and zeros are [groups, 16 rows]. A
unit of eight blocks begins with a float16 for each row, which multiplies the scales (a byte for each group); if there
are zeros, another float16 multiplies them, and the result is subtracted. A unit of two blocks begins with a float32 for
each row instead. Units and strips are contiguous, so a product reads from the first to the last byte.

The codes of a block are 8 lines of 64 lanes. A line is four columns, and its lanes are these columns of the first row,
of the second row, and so on. Codes of 8 bits are bytes. Other codes are in planes of 64 bytes. The first planes have
the low bits of the codes of consecutive lines, the first line in the lowest bits: 4 bits of a code, or 2 if a code has
2 or 3 bits, or its only bit. The next planes have the remaining bits in the same way.

For AMX in bfloat16 there are 16 lines of 32 lanes: a line is a row of the strip, and its lanes are the 32 columns; if
the block has two groups, their columns alternate. Planes are of 16-bit words.
"""

from __future__ import annotations

from msgspec import Struct

from diskprefix.native import COLUMNS, ROWS

_TABLES: dict[str, tuple[float, ...]] = {
    "binary": (-1, 1),
    "ternary": (-1, 0, 1, 2),
    "iq1": tuple(number + shift for shift in (0.125, -0.125) for number in (-1, 0, 1, 0)),
    "iq2": tuple(sign * number / 8 for sign in (1, -1) for number in (8, 25, 43, 0)),
    "iq3_xxs": tuple(sign * number / 4 for sign in (1, -1) for number in (4, 12, 20, 28, 36, 44, 52, 62)),
    "iq3_s": tuple(sign * number for sign in (1, -1) for number in range(1, 17, 2)),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""The numbers of codes that are not consecutive integers."""

_NUMBER_BYTES = {"float16": 2, "exponents": 1, "bytes": 1, "nibbles": 1, "shared": 0, "float8": 1}
"""Bytes of the scale of a group, by how scales are stored."""
_SHARED_BYTES = {"bytes": 2, "nibbles": 2, "shared": 2, "float8": 4}
"""Bytes of the factor of the scales in a unit, for each row. The factor of the zeros has the same size."""
_OF_MANY = ("bytes", "nibbles", "shared")


class QuantForm(Struct, frozen=True):
    """Codes of `bits` bits. Their numbers are in a `table`, or else are integers: from 0 on, or signed if there are no
    zeros.

    `scales` says how scales and zeros are stored: a `float16` for each group; `exponents` of 2 (MXFP4); `bytes` or
    `nibbles` (scale and zero in one byte), multiplied by one float16 for 256 columns; that float16 alone (`shared`);
    `float8` with 4 bits of exponent and 3 of mantissa, multiplied by a float32 of the row (NVFP4).
    """

    bits: int
    group: int
    has_zeros: bool
    scales: str
    table: str = ""

    def __str__(self) -> str:
        zeros = "zeros" if self.has_zeros else "symmetric"
        return f"{self.kind} {self.group} {zeros} {self.scales} {self.table}".strip()

    @property
    def kind(self) -> str:
        """The usual name of the type of codes, such as `int4`."""
        return f"int{self.bits}"

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers of the codes."""
        least = 0 if self.has_zeros else -(1 << self.bits - 1)
        return _TABLES[self.table] if self.table else tuple(range(least, least + (1 << self.bits)))

    @property
    def unit_columns(self) -> int:
        if self.scales == "float8":
            return 2 * COLUMNS
        return 8 * COLUMNS if self.scales in _OF_MANY else max(COLUMNS, self.group)

    @property
    def numbers_bytes(self) -> int:
        """Bytes of scales and zeros in a unit."""
        parts = 2 if self.has_zeros else 1
        shared = _SHARED_BYTES.get(self.scales, 0) * parts
        of_group = _NUMBER_BYTES[self.scales] * (1 if self.scales == "nibbles" else parts)
        return ROWS * (shared + self.unit_columns // self.group * of_group)

    @property
    def unit_bytes(self) -> int:
        return self.numbers_bytes + ROWS * self.unit_columns * self.bits // 8

    @property
    def weight_bits(self) -> float:
        """Bits per weight, including scales and zeros."""
        return self.unit_bytes * 8 / (ROWS * self.unit_columns)

    def packed_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        return rows // ROWS, columns // self.unit_columns, self.unit_bytes


FILE_FORMS = {
    "Q1_0": QuantForm(1, 128, False, "float16", "binary"),
    "Q2_0": QuantForm(2, 64, False, "float16", "ternary"),
    "Q4_0": QuantForm(4, 32, False, "float16"),
    "Q4_1": QuantForm(4, 32, True, "float16"),
    "Q5_0": QuantForm(5, 32, False, "float16"),
    "Q5_1": QuantForm(5, 32, True, "float16"),
    "Q8_0": QuantForm(8, 32, False, "float16"),
    "Q2_K": QuantForm(2, 16, True, "nibbles"),
    "Q3_K": QuantForm(3, 16, False, "bytes"),
    "Q4_K": QuantForm(4, 32, True, "bytes"),
    "Q5_K": QuantForm(5, 32, True, "bytes"),
    "Q6_K": QuantForm(6, 16, False, "bytes"),
    "IQ1_S": QuantForm(3, 32, False, "bytes", "iq1"),
    "IQ1_M": QuantForm(3, 16, False, "bytes", "iq1"),
    "IQ2_XXS": QuantForm(3, 32, False, "bytes", "iq2"),
    "IQ2_XS": QuantForm(3, 16, False, "bytes", "iq2"),
    "IQ2_S": QuantForm(3, 16, False, "bytes", "iq2"),
    "IQ3_XXS": QuantForm(4, 32, False, "bytes", "iq3_xxs"),
    "IQ3_S": QuantForm(4, 32, False, "bytes", "iq3_s"),
    "IQ4_NL": QuantForm(4, 32, False, "float16", "iq4"),
    "IQ4_XS": QuantForm(4, 32, False, "bytes", "iq4"),
    "TQ1_0": QuantForm(2, 32, False, "shared", "ternary"),
    "TQ2_0": QuantForm(2, 32, False, "shared", "ternary"),
    "MXFP4": QuantForm(4, 32, False, "exponents", "mxfp4"),
    "NVFP4": QuantForm(4, 16, False, "float8", "mxfp4"),
}
"""The form of each type of quants in files, which keeps each number. `native.packing` converts to it."""
