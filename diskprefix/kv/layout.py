"""Which tensors a block of this model holds, found by asking the model itself.

One token is run through transformers' own cache for this config, and what its layers then hold is read off: the class
of each layer, and the heads, head size and dtype of its keys and values. Tensors of the same form make one *group*, so
that a block is copied with one strided copy per group instead of one per tensor. Layers whose class we do not know make
the layout unsupported: such models run on transformers' own cache, without ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYOUT_VERSION = 1


@dataclass(frozen=True)
class TensorSpec:
    """Per-token state of one layer: shape [1, heads, tokens, head_dim] in the model's run, `part` keys or values."""

    layer: int
    part: str
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def form(self) -> tuple[int, int, torch.dtype]:
        return self.heads, self.head_dim, self.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Tensors of one form, stacked: a payload holds them as [len(specs), heads, num_tokens, head_dim]."""

    specs: tuple[TensorSpec, ...]

    @property
    def heads(self) -> int:
        return self.specs[0].heads

    @property
    def head_dim(self) -> int:
        return self.specs[0].head_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.specs[0].dtype

    @property
    def bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token for spec in self.specs)


@dataclass(frozen=True)
class Layout:
    """The payload layout of one model. `unsupported` names the layer classes that keep it from being cached."""

    num_layers: int
    groups: tuple[Group, ...]
    vocab_size: int
    logits_dtype: torch.dtype
    unsupported: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def logits_bytes(self) -> int:
        return self.vocab_size * self.logits_dtype.itemsize

    def payload_bytes(self, num_tokens: int, *, with_logits: bool) -> int:
        """Size of the raw payload of a node: its tokens' state, and for a tail the next-token logits."""
        return self.bytes_per_token * num_tokens + (self.logits_bytes if with_logits else 0)

    def describe(self) -> str:
        """Canonical text: part of the root, and kept in the store beside it."""
        return json.dumps(
            {
                "version": LAYOUT_VERSION,
                "groups": [
                    {
                        "heads": group.heads,
                        "head_dim": group.head_dim,
                        "dtype": _dtype_name(group.dtype),
                        "tensors": [f"{spec.layer}.{spec.part}" for spec in group.specs],
                    }
                    for group in self.groups
                ],
                "logits": [self.vocab_size, _dtype_name(self.logits_dtype)],
            },
            separators=(",", ":"),
        )


def probe_layout(model: PreTrainedModel) -> Layout:
    """Run one token through `model` and read its state's layout off transformers' own cache."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
    unsupported = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    specs = [] if unsupported else [spec for i, layer in enumerate(cache.layers) for spec in _specs(i, layer)]
    forms = dict.fromkeys(spec.form for spec in specs)
    return Layout(
        num_layers=len(cache.layers),
        groups=tuple(Group(tuple(s for s in specs if s.form == form)) for form in forms),
        vocab_size=logits.shape[-1],
        logits_dtype=logits.dtype,
        unsupported=tuple(unsupported),
    )


def _specs(index: int, layer: Any) -> list[TensorSpec]:
    parts = (("keys", layer.keys), ("values", layer.values))
    return [TensorSpec(index, part, t.shape[1], t.shape[3], t.dtype) for part, t in parts]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
