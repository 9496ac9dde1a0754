"""The tensors of a model's state, and their form in payloads.

Per-token tensors (keys, values) can be cut into blocks anywhere. States (of convolutions and recurrences) exist at one
position only, and are stored at checkpoints. Tensors of equal form are one *group*, which is copied at once.
`grid.state_layout` finds the layout of a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, TypeAlias

from msgspec import Struct, to_builtins

from diskprefix.prefixstore.kv.numbers import item_bytes, num_items
from diskprefix.prefixstore.store.pieces import LAYOUT_VERSION, LayoutGroup, LayoutState, LayoutText

LayerKind: TypeAlias = Literal["full", "sliding", "linear", "linear+full", "linear+sliding", "none"]
"""The kind of a layer. `sliding` includes chunked attention, `linear` also Mamba and short convolutions. `none` keeps
nothing."""
ExactAt: TypeAlias = Literal["token", "grid"]
"""The exactness of a model. `token`: the bits of a token's state do not depend on how the prompt is cut into steps.
`grid`: the bits are equal only if all steps are steps of one grid."""


class LayerSpec(Struct, frozen=True):
    """The kind of one layer. `window` is in tokens. `num_states` counts convolution and recurrent states. `latent_dim`:
    the size of the latents of latent attention (MLA), 0 for other attention."""

    kind: LayerKind = "full"
    window: int | None = None
    num_states: int = 0
    latent_dim: int = 0


class TensorSpec(Struct, frozen=True):
    """The per-token state of one layer: shape [1, heads, tokens, head_dim] in the model's run.

    `part` is keys, values, latent or hidden. The row of a latent ends with its rotary key. Only a draft layer has
    `hidden`: the hidden states of the layer before it, after the norm. A layer attends to at most `window` tokens,
    including the current one.
    """

    layer: int
    part: str
    heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def form(self) -> tuple[int, int, str, int | None]:
        return self.heads, self.head_dim, self.dtype, self.window

    @property
    def items(self) -> int:
        """The number of items in a row of one head."""
        return num_items(self.head_dim, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.items * item_bytes(self.dtype)


class StateSpec(Struct, frozen=True):
    """The state of one layer at one position: shape [1, *shape] in the model's run. `part` is conv or recurrent."""

    layer: int
    part: str
    index: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def form(self) -> tuple[tuple[int, ...], str]:
        return self.shape, self.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


class Group(Struct, frozen=True):
    """A group of per-token tensors of one form, stacked: a payload holds them as [len(specs), heads, num_tokens,
    items]."""

    specs: tuple[TensorSpec, ...]

    @property
    def heads(self) -> int:
        return self.specs[0].heads

    @property
    def head_dim(self) -> int:
        return self.specs[0].head_dim

    @property
    def items(self) -> int:
        return self.specs[0].items

    @property
    def dtype(self) -> str:
        return self.specs[0].dtype

    @property
    def window(self) -> int | None:
        return self.specs[0].window

    @property
    def bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token for spec in self.specs)

    def first_needed(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def described(self) -> LayoutGroup:
        tensors = tuple(f"{spec.layer}.{spec.part}" for spec in self.specs)
        return LayoutGroup(self.heads, self.items, self.dtype, tensors, self.window)


class StateGroup(Struct, frozen=True):
    """A group of states of one form, stacked: [len(specs), *shape]."""

    specs: tuple[StateSpec, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.specs[0].shape

    @property
    def dtype(self) -> str:
        return self.specs[0].dtype

    @property
    def rows_each(self) -> int:
        """The rows of each state in a payload: its first dimension (heads, channels) if it has several, else 1."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def described(self) -> LayoutState:
        tensors = tuple(f"{spec.layer}.{spec.part}{spec.index}" for spec in self.specs)
        return LayoutState(self.shape, self.rows_each, self.dtype, tensors)


class Layout(Struct, frozen=True, dict=True):
    """The layout of one model's state. `unsupported` lists the reasons why the state cannot be cached.

    `options` are those of the arguments `position_ids` and `logits_to_keep` that the model's forward takes. `packs`:
    one forward can compute several sequences, each with the same bits as alone.
    """

    layers: tuple[LayerSpec, ...]
    groups: tuple[Group, ...]
    vocab_size: int
    logits_dtype: str
    unsupported: tuple[str, ...] = ()
    states: tuple[StateGroup, ...] = ()
    options: tuple[str, ...] = ("position_ids", "logits_to_keep")
    exact_at: ExactAt = "grid"
    packs: bool = False

    @cached_property
    def has_draft_layer(self) -> bool:
        """True if the last layer is a draft layer (`model.drafts`)."""
        return any(spec.part == "hidden" for group in self.groups for spec in group.specs)

    @property
    def is_sliceable(self) -> bool:
        """True if a prefix can be restored without a checkpoint."""
        return not self.states

    @property
    def state_kind(self) -> Literal["token", "sliceable", "token_checkpoints", "checkpoints"]:
        """The places where a restored prefix can end: any token, the end of any block, or a checkpoint (at any token,
        or at the end of a block)."""
        if not self.is_sliceable:
            return "token_checkpoints" if self.exact_at == "token" else "checkpoints"
        return "token" if self.exact_at == "token" else "sliceable"

    def loaded_bytes(self, num_tokens: int) -> int:
        """Returns the bytes that a restore of `num_tokens` tokens loads; layers with a window load only the window."""
        loaded = (g.bytes_per_token * (num_tokens - min(g.first_needed(num_tokens), num_tokens)) for g in self.groups)
        return sum(loaded) + self.state_bytes

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def state_bytes(self) -> int:
        return sum(group.num_bytes for group in self.states)

    @property
    def logits_bytes(self) -> int:
        return self.vocab_size * item_bytes(self.logits_dtype)

    def describe(self) -> str:
        """Returns a canonical text, which is a part of the root's identity and of its record."""
        text = LayoutText(
            version=LAYOUT_VERSION,
            groups=tuple(group.described() for group in self.groups),
            logits=(self.vocab_size, self.logits_dtype),
            states=tuple(group.described() for group in self.states),
        )
        return text.text()

    def as_record(self) -> dict[str, Any]:
        """Returns all fields as JSON values. `of_record` is the inverse."""
        record: dict[str, Any] = to_builtins(self)
        return record

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Layout:
        """Returns the layout of a record. Raises `LookupError`, `TypeError` or `ValueError` for another record."""
        layers = tuple(LayerSpec(**_fields(layer)) for layer in record["layers"])
        groups = tuple(Group(tuple(TensorSpec(**_fields(s)) for s in group["specs"])) for group in record["groups"])
        states = tuple(StateGroup(tuple(StateSpec(**_fields(s)) for s in group["specs"])) for group in record["states"])
        return cls(**(_fields(record) | {"layers": layers, "groups": groups, "states": states}))


def _fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a record, with tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` of Python, torch or a driver says that no memory is left, on any device."""
    # cuBLAS, cuDNN and similar libraries allocate their own memory, and torch raises a plain RuntimeError when that
    # fails.
    phrases = ("OutOfMemoryError", "can't allocate memory", "out of memory", "_ALLOC_FAILED")
    text = f"{type(error).__name__} {error}" if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or any(phrase in text for phrase in phrases)
