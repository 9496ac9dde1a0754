"""Quants that give the numbers of other formats exactly: (code - zero) × scale, and MXFP4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch

from diskprefix.errors import ModelError
from diskprefix.model.quants.forms import Quants, lines_of
from diskprefix.model.quants.gguf_quants import form_of
from diskprefix.model.quants.products import compiled
from diskprefix.model.quants.quant_form import QuantForm
from diskprefix.native import COLUMNS, ROWS
from diskprefix.native.packing import pack

_MXFP4 = "MXFP4"


@dataclass(frozen=True, eq=False)
class SignedQuants:
    """A matrix [rows, columns] in 4 or 5 bits without zeros: `steps` int8 of that shape, `scales` float32 [rows,
    columns / 32], which float16 holds."""

    bits: int
    steps: torch.Tensor
    scales: torch.Tensor

    @property
    def form(self) -> QuantForm:
        return QuantForm(self.bits, COLUMNS, False, "float16")

    def dequantised(self) -> torch.Tensor:
        """Returns the weights, bfloat16 [rows, columns]."""
        return Quants(self.steps, self.scales).dequantised()

    def packed(self) -> torch.Tensor:
        """Returns its blocks, uint8 of `form.packed_shape`."""
        rows, columns = self.steps.shape
        blocks = rows // ROWS, columns // COLUMNS
        scales = self.scales.half().view(blocks[0], ROWS, blocks[1]).transpose(1, 2).contiguous().view(torch.uint8)
        lines = lines_of(self.steps + (1 << (self.bits - 1))).to(torch.int32)
        planes = [_words(lines & 15, 4), *([_words(lines >> 4, 1)] if self.bits == 5 else [])]
        return torch.cat([scales, *planes], dim=2)


@dataclass(frozen=True, eq=False)
class ExpertQuants:
    """A matrix [rows, columns] of each expert in MXFP4: `blocks` uint8 [experts, rows, columns / 32, 16], with two
    neighbouring codes in a byte, and `scales` uint8 [experts, rows, columns / 32], which are exponents."""

    blocks: torch.Tensor
    scales: torch.Tensor

    @property
    def form(self) -> QuantForm:
        found = form_of(_MXFP4)
        assert found is not None
        return found

    @property
    def outline(self) -> torch.Tensor:
        """A tensor of the type and shape of `dequantised`, without memory for its numbers."""
        experts, rows, blocks = self.scales.shape
        return torch.zeros(1, dtype=torch.bfloat16).expand(experts, blocks * COLUMNS, rows)

    def dequantised(self) -> torch.Tensor:
        """Returns the weights, bfloat16 [experts, columns, rows], as gpt-oss has them. All are exact."""
        numbers, found = torch.tensor(self.form.numbers), torch.empty(self.outline.mT.shape, dtype=torch.bfloat16)
        for expert, (blocks, scales) in enumerate(zip(self.blocks, self.scales, strict=True)):
            weights = torch.ldexp(numbers[halves_of(blocks).int()], scales.unsqueeze(-1).int() - 128)
            found[expert] = weights.flatten(-2)
        return found.mT

    def packed(self) -> torch.Tensor:
        """Returns the blocks of each matrix, uint8 [experts, *`form.packed_shape`], by the compiled packing."""
        found = compiled()
        columns, rows = self.outline.shape[1:]
        out = torch.empty(len(self.blocks), *self.form.packed_shape(rows, columns), dtype=torch.uint8)
        for blocks, scales, to in zip(self.blocks, self.scales, out, strict=True):
            # A byte of a .gguf file has codes that are half a block apart.
            low, high = halves_of(blocks).chunk(2, dim=-1)
            content = torch.cat([scales.unsqueeze(-1), low | high << 4], dim=-1)
            pack(found, _MXFP4, content.flatten(1), None, to)
        return out


ExactQuants: TypeAlias = Quants | SignedQuants | ExpertQuants
OneMatrix: TypeAlias = Quants | SignedQuants


@dataclass(frozen=True, eq=False)
class JoinedQuants:
    """Matrices of single experts in one parameter: `rows`, int64 [experts, rows], are those of `matrices`, which are
    counted one after the other."""

    rows: torch.Tensor
    matrices: Sequence[OneMatrix]

    def dequantised(self) -> torch.Tensor:
        """Returns the weights, bfloat16 [experts, rows, columns]."""
        return torch.cat([one.dequantised() for one in self.matrices])[self.rows]

    def packed(self, rows: torch.Tensor) -> tuple[torch.Tensor, QuantForm]:
        """Returns the blocks of the matrices that have these `rows`, [experts, *`form.packed_shape`], and the smallest
        form that holds all of them. Raises `ModelError` if an expert has no whole matrix there."""
        firsts = [0, *accumulate(len(one.scales) for one in self.matrices)]
        whole = {(first, len(one.scales)): one for first, one in zip(firsts, self.matrices, strict=False)}
        found = [whole.get((int(of_one[0]), len(of_one))) for of_one in rows]
        alike = _in_one_form([one for one in found if one is not None])
        if len(alike) != len(rows) or not torch.equal(rows, rows[:, :1] + torch.arange(rows.shape[1])):
            raise ModelError("quantised experts are put together in a way that is not served; add --weights native")
        form = max((one.form for one in alike), key=lambda form: form.weight_bits)
        return torch.stack([one.packed(form) if isinstance(one, Quants) else one.packed() for one in alike]), form


def _in_one_form(matrices: Sequence[OneMatrix]) -> Sequence[OneMatrix]:
    """Returns the same numbers as quants of one kind, whose forms differ in the type of scales at most."""
    signed = [one for one in matrices if isinstance(one, SignedQuants)]
    if len(signed) == len(matrices):
        bits = max((one.bits for one in signed), default=0)
        return [SignedQuants(bits, one.steps, one.scales) for one in signed]
    return matrices if not signed and len({one.form for one in matrices}) == 1 else [*map(_of_8_bits, matrices)]


def _of_8_bits(matrix: OneMatrix) -> Quants:
    if isinstance(matrix, SignedQuants):
        return Quants(matrix.steps, matrix.scales)
    if matrix.zeros is None:
        return matrix
    # Products of scales and whole numbers, see `exact_quants`. A scale of 0 has the zero 0.
    offsets = matrix.zeros / torch.where(matrix.scales == 0, 1.0, matrix.scales)
    steps = matrix.codes.view(*offsets.shape, COLUMNS) + offsets.to(torch.int8).unsqueeze(-1)
    return Quants(steps.view(matrix.codes.shape), matrix.scales)


def halves_of(content: torch.Tensor) -> torch.Tensor:
    """Returns the two halves of each byte, the lower one first, uint8 [.., 2 × bytes]."""
    return torch.stack([content & 15, content >> 4], dim=-1).flatten(-2)


def _words(digits: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns words of 16 bits as uint8 [.., bytes], for digits [.., lines, lanes] of so many bits."""
    in_word = 16 // bits
    shifts = torch.arange(0, 16, bits, dtype=torch.int32).view(-1, 1)
    words = (digits.view(*digits.shape[:-2], -1, in_word, digits.shape[-1]) << shifts).sum(-2)
    return words.to(torch.int16).flatten(-2).view(torch.uint8)


def exact_quants(bits: int, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> Quants | SignedQuants:
    """Returns the smallest quants for codes [rows, columns], and zeros and scales [rows, groups]. Codes and zeros are
    uint8 or int8. Raises `ValueError` if no form holds the differences of codes and zeros.

    A weight is the difference, which float32 holds, times the scale, rounded once to float32.
    """
    rows, groups = scales.shape
    repeats = codes.shape[1] // groups // COLUMNS
    scales, offsets = (part.repeat_interleave(repeats, dim=1) for part in (scales.float(), zeros.to(torch.int16)))
    steps = codes.to(torch.int16).view(rows, -1, COLUMNS) - offsets.unsqueeze(-1)
    low, high = (int(number) for number in steps.aminmax())
    if not -128 <= low <= high <= 127:
        raise ValueError(f"differences of codes and zeros from {low} to {high}")
    steps = steps.to(torch.int8).view(rows, -1)
    found: list[Quants | SignedQuants] = [Quants(steps, scales)]
    if torch.equal(scales.half().float(), scales):
        found += [SignedQuants(size, steps, scales) for size in (4, 5) if -1 << size - 1 <= low <= high < 1 << size - 1]
    elif bits == 4 and torch.equal(scales.bfloat16().float(), scales):
        # Products of bfloat16 scales with codes and zeros of 4 bits are exact in float32, and so are their sums.
        found.append(Quants(codes.to(torch.int8).contiguous(), scales, -(offsets.float() * scales)))
    return min(found, key=lambda quants: quants.form.weight_bits)
