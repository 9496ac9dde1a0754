"""Matrices whose weights are quantised by group, as the kernels take them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from diskprefix.accelerator.tiles import PAIRED

GROUPS = (32, 64, 128)


class GroupedMatrix(nn.Module):
    """A matrix [outer, inner], or one of each expert, whose weights are code × scale + zero, computed in float32 and
    rounded to the dtype of the rows.

    `codes` are int8 or float8_e4m3fn [.., outer, columns], or uint8 with two codes of 4 bits in a byte (`PAIRED`).
    `scales` and `zeros` (or None) are float16 or float32 [.., outer, groups]. Columns are filled up with zeros.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None, *, bits: int = 8
    ) -> None:
        """`codes` are int8 or float8_e4m3fn [.., outer, inner]. With 4 `bits` they are 0 to 15."""
        super().__init__()
        self.inner, self.bits, self.group = codes.shape[-1], bits, codes.shape[-1] // scales.shape[-1]
        assert self.group in GROUPS
        assert bits == 8 or codes.dtype is torch.int8
        kind, columns = codes.dtype, -(-self.inner // PAIRED) * PAIRED
        numbers = functional.pad(codes.view(torch.uint8), (0, columns - self.inner))
        if bits == 4:
            low, high = numbers.view(*numbers.shape[:-1], -1, 2, PAIRED // 2).unbind(-2)
            numbers, kind = (low | high << 4).flatten(-2), torch.uint8
        self.register_buffer("codes", numbers.view(kind))
        for name, of_groups in (("scales", scales), ("zeros", zeros)):
            filled = columns // self.group - scales.shape[-1]
            self.register_buffer(name, None if of_groups is None else functional.pad(of_groups, (0, filled)))

    def dequantised(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Returns the weights, [.., outer, inner]."""
        numbers = self.codes
        if self.bits == 4:
            pairs = numbers.view(*numbers.shape[:-1], -1, PAIRED // 2)
            numbers = torch.stack([pairs & 15, pairs >> 4], dim=-2).flatten(-3)
        found = numbers.float().view(*self.scales.shape, self.group) * self.scales.float().unsqueeze(-1)
        if self.zeros is not None:
            found += self.zeros.float().unsqueeze(-1)
        return found.flatten(-2)[..., : self.inner].to(dtype)
