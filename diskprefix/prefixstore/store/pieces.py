"""The pieces of a raw payload, computed from the layout in the root's record. See `codec/README.md`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, Protocol, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.codec.codec import PIECE_BYTES, Element, Piece
from diskprefix.prefixstore.store.schema import NodeKind

LAYOUT_VERSION = 1
"""The version of the byte format that a `LayoutText` describes."""

DTYPES = {
    "bfloat16": (2, Element.BF16, "BF16"),
    "float16": (2, Element.FP16, "F16"),
    "float32": (4, Element.FP32, "F32"),
    "float64": (8, Element.BYTES, "F64"),
    "float8_e4m3fn": (1, Element.FP8_E4M3, "F8_E4M3"),
    "float8_e5m2": (1, Element.FP8_E5M2, "F8_E5M2"),
    "int32": (4, Element.BYTES, "I32"),
    "int64": (8, Element.BYTES, "I64"),
    "uint8": (1, Element.BYTES, "U8"),
    "int8": (1, Element.BYTES, "I8"),
    "q8": (34, Element.Q8, "U8"),
}
"""torch's name of a dtype → its bytes, its element in pieces, safetensors' name. An element of q8 has 32 numbers of 8
bits and their scale."""

Payload: TypeAlias = Sequence[memoryview]
"""The raw bytes of each piece, C-contiguous. An index may make a copy each time."""


class Hold(Protocol):
    """Memory that holds payloads until they are written or lost. For any thread."""

    def release(self) -> None:
        """Gives the memory back. May be called twice."""

    def frees(self) -> bool:
        """Returns whether a release would free pages that others need."""


Axis: TypeAlias = Literal["page", "head", "token", "dim"]
_AXES: frozenset[tuple[Axis, ...]] = frozenset(
    {("head", "token", "dim"), ("page", "head", "token", "dim"), ("page", "token", "head", "dim")}
)


class LayoutGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Per-token tensors of one form. A payload holds them in the order of the layers, so that its first pieces are
    enough for the first layers.

    `axes` is the order of each tensor's axes. With an axis "page", the tokens are in pages of `page` tokens, and a page
    is never cut.
    """

    heads: int
    head_dim: int
    dtype: str
    tensors: tuple[str, ...]
    window: int | None = None
    axes: tuple[Axis, ...] = ("head", "token", "dim")
    page: int = 1

    @property
    def rows_each(self) -> int:
        """The number of rows of each tensor in a payload. A row holds elements of every token, token after token."""
        return self.heads if self.axes[0] == "head" else 1

    @property
    def row_elements(self) -> int:
        """The number of elements of each token in a row."""
        return self.heads * self.head_dim // self.rows_each

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the shape of one tensor with `num_tokens` tokens."""
        sizes = {"page": num_tokens // self.page, "head": self.heads, "token": self.page, "dim": self.head_dim}
        if self.axes[0] == "head":
            return 1, self.heads, num_tokens, self.head_dim
        return tuple(sizes[axis] for axis in self.axes)

    def rows(self) -> Piece:
        """Returns the rows of one token. Raises `ValueError` for a form that no engine writes."""
        if self.axes not in _AXES or self.page < 1 or (self.page > 1 and self.axes[0] != "page"):
            raise ValueError(f"axes {','.join(self.axes)} with pages of {self.page} tokens")
        return _rows(len(self.tensors) * self.rows_each, self.row_elements, self.dtype)


class LayoutState(msgspec.Struct, frozen=True):
    """States of one shape. Each tensor has the shape `shape` and is cut into `rows` rows."""

    shape: tuple[int, ...]
    rows: int
    dtype: str
    tensors: tuple[str, ...]


class LayoutText(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parsed form of the text that `kv.layout.Layout.describe` returns. A connector makes such a text for the pages
    of its engine.

    `shard` is the rank of the process that computed the state, and the number of ranks that share each token.
    """

    version: int
    groups: tuple[LayoutGroup, ...]
    logits: tuple[int, str]
    states: tuple[LayoutState, ...] = ()
    shard: tuple[int, int] = (0, 1)

    def text(self) -> str:
        """Returns the canonical text."""
        return msgspec.json.encode(self).decode()


class PayloadLayout(Struct, frozen=True):
    """The form of the payloads under one root. Each group is given as one piece with all its rows; the `groups` have
    the size of one token."""

    groups: tuple[Piece, ...]
    logits: Piece
    states: tuple[Piece, ...] = ()

    @classmethod
    @lru_cache(maxsize=64)
    def parse(cls, text: str) -> PayloadLayout:
        """Returns the layout in the layout text of a root. Raises `StoreCorrupt`."""
        try:
            layout = msgspec.json.decode(text, type=LayoutText)
            groups = tuple(group.rows() for group in layout.groups)
            return cls(groups, _rows(1, *layout.logits), tuple(map(_state_rows, layout.states)))
        except (msgspec.DecodeError, KeyError, ValueError, ZeroDivisionError) as error:
            raise StoreCorrupt(f"a payload layout cannot be read: {error}") from error

    @property
    def logits_group(self) -> int:
        """The number of the group of the logits."""
        return len(self.groups) + len(self.states)

    def payload_bytes(self, num_tokens: int, kind: NodeKind) -> int:
        states_bytes = sum(rows.num_bytes for rows in self.states) if kind != NodeKind.BLOCK else 0
        logits_bytes = self.logits.num_bytes if kind == NodeKind.TAIL else 0
        return num_tokens * sum(rows.num_bytes for rows in self.groups) + states_bytes + logits_bytes

    def pieces(self, num_tokens: int, kind: NodeKind) -> tuple[Piece, ...]:
        """Returns the pieces of a node with `num_tokens` tokens, in the order of the payload."""
        return () if kind == NodeKind.GHOST else _pieces(self, num_tokens, kind)


def split_payload(payload: memoryview, pieces: Iterable[Piece]) -> Payload:
    """Returns the pieces of a contiguous payload."""
    ends = tuple(accumulate(piece.num_bytes for piece in pieces))
    return tuple(payload[start:end] for start, end in pairwise((0, *ends)))


@lru_cache(maxsize=1024)
def _pieces(layout: PayloadLayout, num_tokens: int, kind: NodeKind) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for group, rows in enumerate(layout.groups):
        pieces += _cut_rows(group, rows, rows.row_bytes * num_tokens)
    if kind != NodeKind.BLOCK:
        for group, rows in enumerate(layout.states, start=len(layout.groups)):
            pieces += _cut_rows(group, rows, rows.row_bytes)
    if kind == NodeKind.TAIL:
        pieces.append(replace(layout.logits, group=layout.logits_group))
    return tuple(pieces)


def _cut_rows(group: int, rows: Piece, row_bytes: int) -> list[Piece]:
    if not row_bytes:
        return []
    rows_in_piece = max(1, PIECE_BYTES // row_bytes)
    return [
        Piece(min(rows_in_piece, rows.num_rows - first), row_bytes, rows.element, group, first)
        for first in range(0, rows.num_rows, rows_in_piece)
    ]


def _state_rows(state: LayoutState) -> Piece:
    elements = math.prod(state.shape)
    if state.rows < 1 or elements % state.rows:
        raise ValueError(f"{state.rows} rows of {elements} elements")
    return _rows(len(state.tensors) * state.rows, elements // state.rows, state.dtype)


def _rows(num_rows: int, elements: int, dtype: str) -> Piece:
    itemsize, element, _ = DTYPES[dtype]
    if num_rows < 0 or elements < 0:
        raise ValueError(f"{num_rows} rows of {elements} elements")
    return Piece(num_rows, elements * itemsize, element)
