"""The size of a model's state. A simulation needs no more of the model."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.prefixstore.cache.policy.select import StateKind
from diskprefix.prefixstore.store.changes import node_bytes
from diskprefix.prefixstore.store.codec.codec import Element, Piece
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.schema import NodeKind

_ROW_BYTES = 128
_STATE_ROW_BYTES = 1 << 10


class Geometry(Struct, frozen=True, dict=True):
    """The size and kind of a model's state: `bytes_per_token`, `state_bytes` of a checkpoint (0 for models without
    checkpoints), and `logits_bytes` at the end of a prompt. `exact_at`: see `kv.layout.Layout`."""

    bytes_per_token: int
    state_bytes: int = 0
    logits_bytes: int = 2 * 49_152
    exact_at: Literal["token", "grid"] = "grid"

    @property
    def state_kind(self) -> StateKind:
        if self.state_bytes:
            return "token_checkpoints" if self.exact_at == "token" else "checkpoints"
        return "token" if self.exact_at == "token" else "sliceable"

    @cached_property
    def layout(self) -> PayloadLayout:
        """A layout with these sizes. Its rows may differ from the model's."""
        states = (Piece(-(-self.state_bytes // _STATE_ROW_BYTES), _STATE_ROW_BYTES, Element.BYTES),)
        return PayloadLayout(
            groups=(Piece(-(-self.bytes_per_token // _ROW_BYTES), _ROW_BYTES, Element.BF16),),
            logits=Piece(1, self.logits_bytes, Element.BF16),
            states=states if self.state_bytes else (),
        )

    def stored_bytes(self, num_tokens: int, kind: NodeKind) -> int:
        """Returns the size of an uncompressed node in the file: its records, and whole pages for its pieces."""
        return node_bytes(num_tokens, [piece.num_bytes for piece in self.layout.pieces(num_tokens, kind)])


SLICEABLE = Geometry(bytes_per_token=23_040)
"""SmolLM2-135M in bf16, restored at the ends of blocks."""
TOKEN = replace(SLICEABLE, exact_at="token")
"""`SLICEABLE`, exact at every token."""
CHECKPOINTS = Geometry(bytes_per_token=24_576, state_bytes=75 << 20, logits_bytes=2 * 151_936)
"""Qwen3-Next-80B-A3B in bf16: 12 layers of attention, 36 of linear attention with states in fp32."""
