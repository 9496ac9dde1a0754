"""The compiled parts of a layer, called with torch's tensors: norms, gated products, attention with its products."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from diskprefix.native import require
from diskprefix.native.attention_operator import DTYPES
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix
from diskprefix.native.unseen import unseen

_NORM = struct.Struct("@4q 3P d q P")
_GATED = struct.Struct("@q P 3P P P q P")
_BLOCK = struct.Struct("@q P 4P 2P q d q 2P P 8q P2q 2P 2d q P")
"""`Norm`, `Gated` and `AttentionBlock` of `source/interface.h`."""

NORM_KINDS = (0, 1, 2)
"""`NormKind` of `source/interface.h`."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm by the root of the mean square. `weight` has a number for each of a row."""

    weight: torch.Tensor
    kind: int
    epsilon: float

    @unseen
    def __call__(self, operators: Operators, rows: torch.Tensor) -> torch.Tensor:
        """Returns the norm of rows [.., width], in their dtype, which is that of the weight."""
        require(rows.dtype is self.weight.dtype and rows.shape[-1] == len(self.weight), rows, self.weight)
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        if operators.norm(self.call(operators, rows.numel() // rows.shape[-1], rows.data_ptr(), out.data_ptr())):
            raise MemoryError("there is no memory left for a norm")
        return out

    def call(self, operators: Operators, num_rows: int, rows: int = 0, out: int = 0) -> bytes:
        """Returns the argument of the operator. `rows` and `out` are addresses."""
        return _NORM.pack(
            *(DTYPES[self.weight.dtype], self.kind, num_rows, len(self.weight), rows, self.weight.data_ptr(), out),
            *(self.epsilon, torch.get_num_threads(), operators.parallel_for),
        )


@dataclass(frozen=True, eq=False)
class Gated:
    """down × (curve(gate × row) × (up × row)). `curve`: bfloat16 [65 537], by the bits of a number, and one more."""

    gate: Matrix
    up: Matrix
    down: Matrix
    curve: torch.Tensor

    @unseen
    def __call__(self, operators: Operators, rows: torch.Tensor) -> torch.Tensor:
        """Returns bfloat16 [.., rows of down] for bfloat16 [.., columns of gate and up]."""
        require(rows.dtype is torch.bfloat16 and rows.shape[-1] == self.gate.columns, rows)
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self.down.rows)
        if operators.gated(self.call(operators, rows.numel() // rows.shape[-1], rows.data_ptr(), out.data_ptr())):
            raise MemoryError("there is no memory left for a product")
        return out

    def call(self, operators: Operators, num_rows: int, rows: int = 0, out: int = 0) -> bytes:
        """Returns the argument of the operator. `rows` and `out` are addresses."""
        return _GATED.pack(
            *(num_rows, rows, self.gate.address, self.up.address, self.down.address, self.curve.data_ptr(), out),
            *(torch.get_num_threads(), operators.parallel_for),
        )


@dataclass(frozen=True, eq=False)
class StepPlace:
    """The positions of the rows of a step: cosines and sines, bfloat16 [1, rows, rotary_dim], the pattern of visible
    tokens, and the sequences' memory, with room for the rows, as `attention_operator.run_of` describes it."""

    runs: bytes
    num_runs: int
    cosines: torch.Tensor
    sines: torch.Tensor
    window: int = 0
    chunk: int = 0


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Products that give queries, keys and values, a norm of each head or none, rotary embedding, keys and values to
    memory, attention, and the last product, in bfloat16."""

    query: Matrix
    key: Matrix
    value: Matrix
    last: Matrix
    key_dim: int
    value_dim: int
    scale: float
    softcap: float
    query_norm: Norm | None
    key_norm: Norm | None
    sinks: torch.Tensor | None

    @unseen
    def __call__(self, operators: Operators, rows: torch.Tensor, place: StepPlace) -> torch.Tensor:
        """Returns bfloat16 [1, rows, rows of last] for bfloat16 [1, rows, columns of query]."""
        require(rows.dtype is torch.bfloat16 and rows.shape == (1, rows.shape[1], self.query.columns), rows)
        rows = rows.contiguous()
        out = rows.new_empty(1, rows.shape[1], self.last.rows)
        call = self.call(operators, place, rows.shape[1], rows.data_ptr(), out.data_ptr())
        if operators.attention_block(call, place.runs):
            raise MemoryError("there is no memory left for attention")
        return out

    def call(self, operators: Operators, place: StepPlace, num_rows: int, rows: int = 0, out: int = 0) -> bytes:
        """Returns the argument of the operator. `rows` and `out` are addresses."""
        norm, of_keys, cosines, sines = self.query_norm, self.key_norm, place.cosines, place.sines
        require(
            cosines.dtype is sines.dtype is torch.bfloat16
            and cosines.shape == sines.shape == (1, num_rows, self.key_dim)
            and cosines.is_contiguous()
            and sines.is_contiguous(),
            *(cosines, sines),
        )
        return _BLOCK.pack(
            *(num_rows, rows, self.query.address, self.key.address, self.value.address, self.last.address),
            *(0 if norm is None else norm.weight.data_ptr(), 0 if of_keys is None else of_keys.weight.data_ptr()),
            *(0 if norm is None else norm.kind, 0.0 if norm is None else norm.epsilon),
            *(self.key_dim, cosines.data_ptr(), sines.data_ptr(), out),
            *(0, self.query.rows // self.key_dim, self.key.rows // self.key_dim, self.key_dim, self.value_dim),
            *(place.num_runs, place.window, place.chunk, 0, 0, 0, 0),
            *(0 if self.sinks is None else self.sinks.data_ptr(), self.scale, self.softcap),
            *(torch.get_num_threads(), operators.parallel_for),
        )
