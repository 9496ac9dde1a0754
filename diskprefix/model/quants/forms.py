"""Weights in 4, 5 or 8 bits: the forms, how a matrix gets one, and how it lies in memory.

A weight is `code × scale + zero`, computed in float32 and rounded to bfloat16. Along a row of a matrix, groups of 16 or
32 weights share their scale and zero. The compiled products compute with these bfloat16 numbers, but for those of the
variant `avx512_bf16`, which do not round them.

In memory, 16 rows × 32 columns are a block: codes, scales, zeros. Blocks of the same 16 rows follow each other, so a
product reads from the first to the last byte. The codes of a block are 32 vectors of 16: of a pair of columns those of
8 rows, then those of the other 8, the two of a row side by side. With 8 bits a code is a byte. With fewer, a word of 32
bits has the codes at one place of 8 (4 bits) or 6 (5 bits) consecutive vectors. With 5 bits, 2 bits of each word are
left: they hold the last two vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from diskprefix.native.matrix import COLUMNS, ROWS

_SHRUNK = (1.0, 0.94, 0.88, 0.82)
"""The parts of a group's range that are tried for 4 bits. A smaller one cuts the outermost weights off and is finer."""
_AT_ONCE = 1 << 18
"""Weights that are worked on at a time, so that the work does not take several times the memory of the matrix."""


@dataclass(frozen=True)
class QuantForm:
    """Codes of `bits` bits have a sign if there are no zeros. Scales and zeros are float16 or float32."""

    bits: int
    group: int
    has_zeros: bool
    scale_type: torch.dtype

    def __str__(self) -> str:
        zeros = "zeros" if self.has_zeros else "symmetric"
        return f"int{self.bits} {self.group} {zeros} {str(self.scale_type).removeprefix('torch.')}"

    @classmethod
    def parse(cls, text: str) -> QuantForm:
        """Returns the form that `str` described. Raises `ValueError` for other texts."""
        for form in FORMS:
            if str(form) == text:
                return form
        raise ValueError(f"{text!r} is not a form of quantised weights")

    @property
    def code_bytes(self) -> int:
        return ROWS * COLUMNS * self.bits // 8

    @property
    def block_bytes(self) -> int:
        scales = ROWS * (COLUMNS // self.group) * self.scale_type.itemsize
        return self.code_bytes + scales * (2 if self.has_zeros else 1)

    def packed_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        return rows // ROWS, columns // COLUMNS, self.block_bytes


FORMS = tuple(
    QuantForm(bits, group, has_zeros, scale_type)
    for bits, group, has_zeros in ((4, 32, True), (5, 32, False), (5, 32, True), (8, 32, False), (8, 16, False))
    for scale_type in (torch.float16, torch.float32)
)


_LEFT_OVER = {5: ((0, 30, 0, 2), (1, 30, 2, 2), (2, 30, 4, 1), (3, 30, 0, 2), (4, 30, 2, 2), (2, 31, 4, 1))}
"""The places of the last two vectors, by the bits of a code: word, bit of the word, bit of the code, number of bits."""


@dataclass(frozen=True, eq=False)
class Quants:
    """A matrix [rows, columns]: `codes` int8 of that shape, `scales` and `zeros` float32 [rows, columns / group]."""

    bits: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @cached_property
    def form(self) -> QuantForm:
        """The smallest form that holds it exactly."""
        numbers = [self.scales] if self.zeros is None else [self.scales, self.zeros]
        is_half = all(torch.equal(part.half().float(), part) for part in numbers)
        return QuantForm(self.bits, self.group, self.zeros is not None, torch.float16 if is_half else torch.float32)

    def rows(self, order: torch.Tensor) -> Quants:
        """Returns the matrix whose row i is row `order[i]`."""
        zeros = None if self.zeros is None else self.zeros[order]
        return Quants(self.bits, self.group, self.codes[order], self.scales[order], zeros)

    def dequantised(self) -> torch.Tensor:
        """Returns the weights, bfloat16 [rows, columns]."""
        found = torch.empty(self.codes.shape, dtype=torch.bfloat16)
        step = max(1, _AT_ONCE // self.codes.shape[1])
        for first in range(0, len(found), step):
            part = slice(first, first + step)
            scales = self.scales[part]
            groups = self.codes[part].view(*scales.shape, self.group).float() * scales.unsqueeze(-1)
            if self.zeros is not None:
                groups += self.zeros[part].unsqueeze(-1)
            found[part] = groups.view(len(scales), -1)
        return found

    def packed(self) -> torch.Tensor:
        """Returns its blocks, uint8 of `form.packed_shape`."""
        rows, columns = self.codes.shape
        blocks = rows // ROWS, columns // COLUMNS
        # Half, row of it, block, pair of columns, column of it.
        codes = self.codes.view(blocks[0], 2, 8, blocks[1], 16, 2).permute(0, 3, 4, 1, 2, 5).reshape(*blocks, 32, 16)
        parts = [(codes if self.bits == 8 else _in_words(codes, self.bits)).view(torch.uint8).reshape(*blocks, -1)]
        for numbers in (self.scales, self.zeros):
            if numbers is not None:
                of_block = numbers.to(self.form.scale_type).view(blocks[0], ROWS, blocks[1], COLUMNS // self.group)
                parts.append(of_block.permute(0, 2, 3, 1).contiguous().view(*blocks, -1).view(torch.uint8))
        return torch.cat(parts, dim=2)


def _in_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns int32 [.., bits, 16] for codes int8 [.., 32, 16]."""
    found = torch.empty(*codes.shape[:2], bits, 16, dtype=torch.int32)
    in_word = 32 // bits
    for part, words in zip(codes, found, strict=True):
        vectors = part.to(torch.int32) & ((1 << bits) - 1)
        shifts = torch.arange(0, in_word * bits, bits, dtype=torch.int32).view(-1, 1)
        # No two have a bit in common.
        words[:] = (vectors[:, : in_word * bits].view(-1, bits, in_word, 16) << shifts).sum(2, dtype=torch.int32)
        for place, (word, at, low, size) in enumerate(_LEFT_OVER.get(bits, ())):
            digit = vectors[:, 30 + place // 3] >> low & ((1 << size) - 1)
            words[:, word] |= digit << at
    return found


def _of_words(words: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """Returns the inverse of `_in_words`."""
    bits, in_word = form.bits, 32 // form.bits
    found = torch.empty(*words.shape[:2], 32, 16, dtype=torch.int8)
    shifts = torch.arange(0, in_word * bits, bits, dtype=torch.int32).view(-1, 1)
    for part, codes in zip(words, found, strict=True):
        vectors = torch.zeros(len(part), 32, 16, dtype=torch.int32)
        vectors[:, : in_word * bits] = (part.unsqueeze(2) >> shifts).flatten(1, 2)
        for place, (word, at, low, size) in enumerate(_LEFT_OVER.get(bits, ())):
            vectors[:, 30 + place // 3] |= (part[:, word] >> at & ((1 << size) - 1)) << low
        vectors &= (1 << bits) - 1
        codes[:] = vectors if form.has_zeros else vectors - ((vectors >> (bits - 1)) << bits)
    return found


def unpacked(packed: torch.Tensor, form: QuantForm) -> Quants:
    """Returns the inverse of `Quants.packed`."""
    strips, blocks, _ = packed.shape
    rows, columns = strips * ROWS, blocks * COLUMNS
    codes = packed[..., : form.code_bytes].contiguous().view(torch.int8).view(strips, blocks, -1, 16)
    if form.bits < 8:
        codes = _of_words(codes.view(torch.int32).view(strips, blocks, -1, 16), form)
    codes = codes.view(strips, blocks, 16, 2, 8, 2).permute(0, 3, 4, 1, 2, 5).reshape(rows, columns)
    numbers = packed[..., form.code_bytes :].contiguous().view(form.scale_type).float()
    parts = numbers.view(strips, blocks, -1, COLUMNS // form.group, ROWS).permute(2, 0, 4, 1, 3)
    scales, *zeros = parts.reshape(-1, rows, columns // form.group).unbind()
    return Quants(form.bits, form.group, codes, scales, zeros[0] if zeros else None)


def quantised(weight: torch.Tensor, bits: int) -> Quants:
    """Returns a matrix of floating-point numbers in 8 bits (symmetric) or in 4 (with zeros), in groups of 32."""
    rows, columns = weight.shape
    parts = [
        (_in_4_bits if bits == 4 else _in_8_bits)(part.reshape(len(part), columns // COLUMNS, COLUMNS).float())
        for part in torch.split(weight, max(1, _AT_ONCE // columns))
    ]
    codes, scales, *zeros = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    return Quants(bits, COLUMNS, codes.view(rows, columns), scales, zeros[0] if zeros else None)


def _in_8_bits(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = _stored(groups.abs().amax(-1, keepdim=True) / 127)
    codes = (groups / _divisor(scales)).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales[..., 0]


def _in_4_bits(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the best of several ranges. In each, scale and zero have the least squared error for the codes."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    middle = groups.mean(-1, keepdim=True)
    best: tuple[torch.Tensor, ...] = ()
    for part in _SHRUNK:
        zeros, scales = low * part + middle * (1 - part), (high - low) * (part / 15)
        codes = _codes(groups, scales, zeros)
        spread = codes - codes.mean(-1, keepdim=True)
        squares = spread.square().sum(-1, keepdim=True)
        fitted = (spread * (groups - middle)).sum(-1, keepdim=True) / squares.clamp(min=1)
        scales = _stored(torch.where(squares > 0, fitted, scales))
        zeros = _stored(middle - codes.mean(-1, keepdim=True) * scales)
        codes = _codes(groups, scales, zeros)
        errors = (codes * scales + zeros - groups).square().sum(-1, keepdim=True)
        found = codes, scales, zeros, errors
        better = errors < (best or found)[-1]
        best = tuple(torch.where(better, new, old) for new, old in zip(found, best or found, strict=True))
    return best[0].to(torch.int8), best[1][..., 0], best[2][..., 0]


def _codes(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return ((groups - zeros) / _divisor(scales)).round_().clamp_(0, 15)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scales to divide by. A group of equal weights has the scale 0, and every code is right for it."""
    return torch.where(scales == 0, 1.0, scales)


def _stored(numbers: torch.Tensor) -> torch.Tensor:
    """Returns them as float16 numbers, or as bfloat16 numbers where they are too large or too small for that. So a code
    times a scale is exact in float32."""
    half = numbers.half().float()
    is_normal = (half.abs() >= torch.finfo(torch.float16).smallest_normal) & half.isfinite()
    return torch.where(is_normal | (numbers == 0), half, numbers.bfloat16().float())
