"""Quantised weights: how a matrix gets a form of `quant_form.py`, is packed, and is given to the compiled operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diskprefix.errors import ModelError
from diskprefix.model.quants.quant_form import QuantForm
from diskprefix.native import COLUMNS, ROWS
from diskprefix.native.library import Operators, has_rows, operators
from diskprefix.native.matrix import Matrix, rows_of

_SHRUNK = (1.0, 0.94, 0.88, 0.82)
"""The parts of a group's range that are tried for 4 bits. A smaller one cuts the outermost weights off and is finer."""
_AT_ONCE = 1 << 18
"""Weights that are worked on at a time, so that the work does not take several times the memory of the matrix."""

_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, eq=False)
class Quants:
    """A matrix [rows, columns] that was quantised here: `codes` int8 of that shape, `scales` and `zeros` float32 [rows,
    columns / 32], which float16 holds."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @property
    def kind(self) -> str:
        """The type of files that has such numbers."""
        return "Q8_0" if self.zeros is None else "Q4_1"

    def packed(self) -> torch.Tensor:
        """Returns its blocks, uint8 of the `packed_shape` of its form."""
        rows, units = self.scales.shape
        parts = [
            numbers.half().view(rows // ROWS, ROWS, units).transpose(1, 2).contiguous().view(torch.uint8)
            for numbers in (self.scales, self.zeros)
            if numbers is not None
        ]
        lines = lines_of(self.codes)
        codes = lines.view(torch.uint8) if self.zeros is None else _in_words(lines)
        parts.append(codes.reshape(rows // ROWS, units, -1))
        return torch.cat(parts, dim=2)


def lines_of(codes: torch.Tensor) -> torch.Tensor:
    """Returns the lines of the blocks, [strips, blocks, 16, 32], for codes [rows, columns] in groups of 32."""
    rows, columns = codes.shape
    if has_rows():
        return codes.view(rows // ROWS, ROWS, columns // COLUMNS, COLUMNS).transpose(1, 2).contiguous()
    # Row of the strip, pair of columns, column of it.
    pairs = codes.view(rows // ROWS, ROWS, columns // COLUMNS, 16, 2).permute(0, 2, 3, 1, 4)
    return pairs.reshape(rows // ROWS, columns // COLUMNS, 16, 32)


def _in_words(codes: torch.Tensor) -> torch.Tensor:
    """Returns uint8 [.., 4, 64] for codes of 4 bits, int8 [.., 16, 32]."""
    pairs = codes.view(*codes.shape[:-2], 4, 4, 32)
    low, high = (pairs[..., first, :] | pairs[..., first + 1, :] << 4 for first in (0, 2))
    return torch.stack([low, high], dim=-1).view(torch.uint8).flatten(-2)


def quantised(weight: torch.Tensor, bits: int) -> Quants:
    """Returns a matrix of floating-point numbers in 8 bits (symmetric) or in 4 (with zeros), in groups of 32."""
    rows, columns = weight.shape
    parts = [
        (_in_4_bits if bits == 4 else _in_8_bits)(part.reshape(len(part), columns // COLUMNS, COLUMNS).float())
        for part in torch.split(weight, max(1, _AT_ONCE // columns))
    ]
    codes, scales, *zeros = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    return Quants(codes.view(rows, columns), scales, zeros[0] if zeros else None)


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
    """Returns them as float16 numbers. So a code times a scale is exact in float32."""
    return numbers.clamp(-_LARGEST, _LARGEST).half().float()


def compiled() -> Operators:
    """Returns the compiled operators. Raises `ModelError` if there are none."""
    found = operators()
    if found is None:
        raise ModelError("quantised weights need the compiled operators; add --weights native")
    return found


def matrix_of(packed: torch.Tensor, form: QuantForm, bias: torch.Tensor | None) -> Matrix:
    """Returns a matrix that is packed as `quant_form` describes."""
    return Matrix(
        packed,
        (packed.shape[0] * ROWS, packed.shape[1] * form.unit_columns),
        bits=form.bits,
        group=form.group,
        has_zeros=form.has_zeros,
        scales=form.scales,
        numbers=form.numbers,
        has_table=bool(form.table),
        bias=bias,
    )


def weights_of(packed: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """Returns the weights, bfloat16 [rows, columns]."""
    matrix = matrix_of(packed, form, None)
    return rows_of(compiled(), matrix, torch.arange(matrix.rows))
