"""The experts of gpt-oss in a folder: codes of 4 bits in blocks of 32, with a power of two for each block (MXFP4).

A parameter is two tensors: `_blocks`, uint8 [experts, rows, groups, 16], and `_scales`, uint8 [experts, rows, groups].
Byte j of a block has number 2j in its low half and number 2j + 1 in its high half. Files in the GGUF format have the
same codes in another order, so the products of these compute with them as they are: nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from msgspec import Struct

from diskprefix.errors import ModelError
from diskprefix.native import ROWS
from diskprefix.native.library import Operators
from diskprefix.native.packing import pack
from diskprefix.prefixstore.kv.numbers import converted, dtype_of
from diskprefix.runtime.files.checkpoint import BLOCKS, MXFP4, SCALES, StoredTensor
from diskprefix.runtime.files.file_matrix import MatrixPacking
from diskprefix.runtime.plan.part_options import ExpertsForm
from diskprefix.runtime.plan.quants.forms import compiled, weights_of
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from diskprefix.runtime.plan.weights import Quants
from diskprefix.tokens import content_digest as digest_of

FORM = FILE_FORMS[MXFP4]
_BLOCK = 16
"""Bytes of the codes of a block."""
_LOW, _HIGH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
"""The halves of eight bytes."""


class Mxfp4Experts(Struct, frozen=True):
    """The blocks and scales of a parameter of experts, [experts, rows, columns]."""

    blocks: StoredTensor
    scales: StoredTensor

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, StoredTensor]) -> Mxfp4Experts | None:
        """Returns the blocks and scales of a parameter, None if it is stored otherwise. Raises `ModelError` if they do
        not fit together."""
        blocks, scales = tensors.get(f"{name}{BLOCKS}"), tensors.get(f"{name}{SCALES}")
        if blocks is None and scales is None:
            return None
        for tensor, end in ((blocks, BLOCKS), (scales, SCALES)):
            if tensor is None:
                raise ModelError(f"the weights lack {name}{end}")
            if tensor.kind != "U8":
                raise ModelError(f"{tensor.file.name}: {tensor.name} is of the type {tensor.kind}, not U8")
        assert blocks is not None, "it was looked for"
        assert scales is not None, "it was looked for"
        if len(blocks.shape) != 4 or blocks.shape[3] != _BLOCK or scales.shape != blocks.shape[:3]:
            raise ModelError(f"{blocks.name} is {blocks.shape}, and {scales.name} is {scales.shape}: no blocks of 32")
        if blocks.shape[1] % ROWS:
            raise ModelError(f"{blocks.name} has {blocks.shape[1]} rows, which is not a multiple of {ROWS}")
        return cls(blocks, scales)

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, groups, _ = self.blocks.shape
        return experts, rows, groups * FORM.group

    def rows_of(self, expert: int) -> np.ndarray:
        """Returns the rows of an expert as a GGUF file has them, uint8 [rows, 17 × groups]: byte j of a block has
        number j in the low half and number j + 16 in the high half. Raises `ModelError` if the file is cut short."""
        _, rows, groups, _ = self.blocks.shape
        blocks, scales = np.empty((rows, groups, _BLOCK), np.uint8), np.empty((rows, groups), np.uint8)
        self.blocks.read_into(blocks, expert * blocks.nbytes)
        self.scales.read_into(scales, expert * scales.nbytes)
        content = np.empty((rows, groups, 1 + _BLOCK), np.uint8)
        content[..., 0] = scales
        # Eight bytes at a time, then two bytes of a block side by side.
        halves = blocks.view(np.uint64)
        first, last = halves[..., 0], halves[..., 1]
        low = np.ascontiguousarray((first & _LOW) | ((last & _LOW) << 4)).view(np.uint8)
        high = np.ascontiguousarray(((first >> 4) & _LOW) | (last & _HIGH)).view(np.uint8)
        pairs = low | (high.astype(np.dtype("<u2")) << 8)
        content[..., 1:] = pairs.view(np.uint8).reshape(blocks.shape)
        return content.reshape(rows, -1)

    def packed(self, name: str, form: ExpertsForm, packing: MatrixPacking, *, is_unread: bool) -> dict[str, Quants]:
        """Returns the quants of the parts of a parameter, `gate` and `up` or `down`, which are packed for the products
        until `finish_packing` of `packing`. Raises `ModelError`, `MemoryError`."""
        _, rows, _ = self.shape
        halves = form.halves(name, np.arange(rows, dtype=np.int32)[None])
        parts = _ExpertParts(self, tuple(np.ascontiguousarray(order[0]) for order in halves.values()))
        if any(len(order) % ROWS for order in parts.orders):
            raise ModelError(f"{self.blocks.name} has {rows} rows, which is not a multiple of {2 * ROWS}")
        packed = np.empty(parts.packed_shape, np.uint8) if is_unread else packing.take(parts)
        return {part: Quants(of_part, FORM) for part, of_part in zip(halves, packed, strict=True)}

    def transposed(self, out: np.ndarray) -> np.ndarray:
        """Fills the parameter as modules have it, [experts, columns, rows], in its type. An expert is read at a time.
        Raises `ModelError`, `OSError`, `MemoryError`."""
        _, rows, columns = self.shape
        packed = np.empty(FORM.packed_shape(rows, columns), np.uint8)
        for expert, place in enumerate(out):
            pack(compiled(), MXFP4, self.rows_of(expert), None, packed)
            place[...] = converted(weights_of(packed, FORM), dtype_of(out)).T
        return out


class _ExpertParts(Struct, frozen=True, eq=False):
    """The parts of a parameter, as one matrix [parts, experts, rows, columns]. Row i of a part is row `order[i]` of the
    parameter; all parts have as many."""

    experts: Mxfp4Experts
    orders: tuple[np.ndarray, ...]

    @property
    def kind(self) -> str:
        return MXFP4

    @property
    def content_digest(self) -> bytes:
        blocks = self.experts.blocks
        named = repr((blocks.name, blocks.shape, len(self.orders))).encode()
        return digest_of(named + b"".join(order.tobytes() for order in self.orders))

    @property
    def packed_shape(self) -> tuple[int, ...]:
        experts, _, columns = self.experts.shape
        return len(self.orders), experts, *FORM.packed_shape(len(self.orders[0]), columns)

    def tasks(self, operators: Operators, out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Yields functions that each pack an expert; see `PackableMatrix`."""
        parts = out.reshape(self.packed_shape)

        def pack_expert(expert: int) -> None:
            content = self.experts.rows_of(expert)
            for order, packed in zip(self.orders, parts, strict=True):
                pack(operators, MXFP4, content, order, packed[expert], threads=1)

        yield from (partial(pack_expert, expert) for expert in range(parts.shape[1]))
