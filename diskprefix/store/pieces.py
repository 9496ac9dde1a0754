"""How a raw payload is cut into pieces, read off the layout that the root records.

A *form* is what a group of the layout looks like to the store: `rows` rows, one for each head of each tensor, with
`bytes_per_token` bytes for each token. A raw payload is the rows of the first group one after the other, then those of
the second, …, and for a tail the next-token logits. A piece holds whole rows of one group, as many as fit
`PIECE_BYTES` but at least one; the logits are a piece of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec

from diskprefix.errors import StoreCorrupt
from diskprefix.store.codec import PIECE_BYTES, Element, Piece

_ELEMENTS = {
    "bfloat16": (2, Element.BF16),
    "float16": (2, Element.FP16),
    "float32": (4, Element.FP32),
    "float64": (8, Element.BYTES),
    "float8_e4m3fn": (1, Element.FP8_E4M3),
    "float8_e5m2": (1, Element.FP8_E5M2),
}


class LayoutGroup(msgspec.Struct, frozen=True):
    heads: int
    head_dim: int
    dtype: str
    tensors: tuple[str, ...]


class LayoutText(msgspec.Struct, frozen=True):
    """The text that `kv.layout.Layout.describe` writes."""

    version: int
    groups: tuple[LayoutGroup, ...]
    logits: tuple[int, str]


@dataclass(frozen=True)
class Form:
    """One group of a layout, or the logits (one row, with bytes for one token)."""

    rows: int
    bytes_per_token: int
    element: Element


@dataclass(frozen=True)
class Cut:
    """One piece of a payload, and the rows that it holds: `piece.num_rows` of `group`, from `first_row` on.

    The logits are row 0 of the group after the last one.
    """

    piece: Piece
    group: int
    first_row: int


@dataclass(frozen=True)
class PayloadLayout:
    """What a payload under one root holds."""

    groups: tuple[Form, ...]
    logits: Form

    @classmethod
    def parse(cls, text: str) -> PayloadLayout:
        """From the layout text of a root. Raises `StoreCorrupt`."""
        try:
            found = msgspec.json.decode(text, type=LayoutText)
            groups = tuple(_form(len(g.tensors) * g.heads, g.head_dim, g.dtype) for g in found.groups)
            return cls(groups, _form(1, *found.logits))
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            raise StoreCorrupt(f"a payload layout cannot be read: {error}") from error

    def payload_bytes(self, num_tokens: int, *, with_logits: bool) -> int:
        return sum(cut.piece.num_bytes for cut in self.cuts(num_tokens, with_logits=with_logits))

    def pieces(self, num_tokens: int, *, with_logits: bool) -> tuple[Piece, ...]:
        """The pieces of a block of `num_tokens` tokens, or of a tail, in the order of the payload."""
        return tuple(cut.piece for cut in self.cuts(num_tokens, with_logits=with_logits))

    def cuts(self, num_tokens: int, *, with_logits: bool) -> tuple[Cut, ...]:
        return _cuts(self, num_tokens, with_logits)


@lru_cache(maxsize=1024)
def _cuts(layout: PayloadLayout, num_tokens: int, with_logits: bool) -> tuple[Cut, ...]:
    cuts: list[Cut] = []
    for group, form in enumerate(layout.groups):
        row_bytes = form.bytes_per_token * num_tokens
        if not row_bytes:
            continue
        rows_in_piece = max(1, PIECE_BYTES // row_bytes)
        for first in range(0, form.rows, rows_in_piece):
            rows = min(rows_in_piece, form.rows - first)
            cuts.append(Cut(Piece(rows, row_bytes, form.element), group, first))
    if with_logits:
        cuts.append(Cut(Piece(1, layout.logits.bytes_per_token, layout.logits.element), len(layout.groups), 0))
    return tuple(cuts)


def _form(rows: int, elements_per_token: int, dtype: str) -> Form:
    itemsize, element = _ELEMENTS[dtype]
    if rows < 0 or elements_per_token < 0:
        raise ValueError(f"{rows} rows of {elements_per_token} elements")
    return Form(rows, elements_per_token * itemsize, element)
