"""The compiled operator for the experts of a mixture, called with torch's tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from diskprefix.native import require
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix

_EXPERTS = struct.Struct("@4q 3P 3P 2P P q P")
"""`Experts` of `source/interface.h`."""


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The sum of down × (curve(gate × row) × up_curve(up × row)) over the experts that a router chose, each times its
    weight; without `up` it is down × curve(gate × row).

    `gate`, `up` and `down` have a matrix for each expert. Curves are bfloat16 [65 537], by the bits of a number, and
    one more.
    """

    gate: Sequence[Matrix]
    up: Sequence[Matrix]
    down: Sequence[Matrix]
    curve: torch.Tensor
    up_curve: torch.Tensor | None = None

    def __post_init__(self) -> None:
        sizes = {(one.rows, one.columns) for one in (*self.gate, *self.up)}
        is_square = len(sizes) == 1 and {(one.columns, one.rows) for one in self.down} == sizes
        require(is_square and len(self.down) == len(self.gate) and len(self.up) in (0, len(self.gate)))

    @cached_property
    def _addresses(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate, up, down = (
            torch.tensor([matrix.address for matrix in matrices], dtype=torch.int64, device="cpu")
            for matrices in (self.gate, self.up, self.down)
        )
        return gate, up, down

    def __call__(
        self, operators: Operators, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns bfloat16 [n, width] for rows of that shape; `chosen` and `weights` are [n, experts of a row]. The
        experts of a row are added up in their order.

        Raises `IndexError` if there is no expert of a number, `MemoryError`.
        """
        num_rows, num_chosen = chosen.shape
        require(
            rows.dtype is torch.bfloat16
            and rows.shape == (num_rows, self.gate[0].columns)
            and weights.numel() == chosen.numel()
            and num_chosen > 0,
            *(rows, chosen, weights),
        )
        rows, chosen, weights = rows.contiguous(), chosen.long().contiguous(), weights.float().contiguous()
        out = torch.empty_like(rows)
        gate, up, down = self._addresses
        call = _EXPERTS.pack(
            *(num_rows, num_chosen, len(self.gate), 0, rows.data_ptr(), chosen.data_ptr(), weights.data_ptr()),
            *(gate.data_ptr(), up.data_ptr() if self.up else 0, down.data_ptr()),
            *(self.curve.data_ptr(), 0 if self.up_curve is None else self.up_curve.data_ptr()),
            *(out.data_ptr(), torch.get_num_threads(), operators.parallel_for),
        )
        failed = operators.experts(call)
        if failed == 2:
            raise IndexError(f"a router chose an expert that is not one of the {len(self.gate)}")
        if failed:
            raise MemoryError("there is no memory left for the experts")
        return out
