"""Which tensors a block of this model holds, found by asking the model itself.

One token is run through transformers' own cache for this config, and what its layers then hold is read off: the class
of each layer, and the heads, head size and dtype of its keys and values. Tensors of the same form make one *group*, so
that a block is copied with one strided copy per group instead of one per tensor. Whatever we do not know makes the
layout unsupported: another class of layer, state outside the cache, a model that cannot be asked. Such models run on
transformers' own state, without ours.
"""

from __future__ import annotations

import inspect
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
    """The payload layout of one model. `unsupported` names what keeps it from being cached."""

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
    """Run one token through `model` and read its state's layout off transformers' own cache.

    A model that cannot be read is unsupported, with the reason. Raises only what running out of memory raises.
    """
    obstacles = _obstacles(model)
    if obstacles:
        return _uncacheable(model, obstacles)
    try:
        return _read_layout(model)
    except Exception as error:  # a model class of any age and author may fail in any way
        if is_out_of_memory(error):
            raise
        first_line = next(iter(str(error).splitlines()), "")
        return _uncacheable(model, [f"{type(model).__name__}: {type(error).__name__}: {first_line}"])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how Python or torch say that there is no memory left, on any device."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _obstacles(model: PreTrainedModel) -> list[str]:
    """What keeps `model` from being cached, as far as it can be seen without running it."""
    name = type(model).__name__
    found = _moving_ropes(model)
    if "past_key_values" not in inspect.signature(type(model).forward).parameters:
        found.append(f"{name} takes no past_key_values")
    elif not model._supports_default_dynamic_cache():
        found.append(f"{name} has a cache of its own")
    return found


def _moving_ropes(model: PreTrainedModel) -> list[str]:
    """The kinds of RoPE whose frequencies depend on more than the position, as transformers' `dynamic_rope_update`
    tells them apart.

    Dynamic ones are kept in the module and depend on what ran before. longrope's change for all positions once a
    sequence grows past the original length, so keys that a shorter run computed are wrong then: `generate` computes
    them again.
    """
    kinds = {kind for module in model.modules() for kind in _rope_types(getattr(module, "rope_type", None))}
    return sorted(f"{kind} RoPE" for kind in kinds if "dynamic" in kind or kind == "longrope")


def _rope_types(rope_type: Any) -> list[str]:
    """One for the whole model, or one for each kind of layer."""
    return [str(kind) for kind in rope_type.values()] if isinstance(rope_type, dict) else [str(rope_type)]


def _read_layout(model: PreTrainedModel) -> Layout:
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        # The same call as the engine's.
        logits = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    unknown = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    unread = [f"{type(model).__name__} leaves layers of its cache empty"] if not _are_filled(cache) else []
    if unknown or unread:
        return _uncacheable(model, unknown or unread)
    specs = [spec for i, layer in enumerate(cache.layers) for spec in _specs(i, layer)]
    forms = dict.fromkeys(spec.form for spec in specs)
    return Layout(
        num_layers=len(cache.layers),
        groups=tuple(Group(tuple(s for s in specs if s.form == form)) for form in forms),
        vocab_size=logits.shape[-1],
        logits_dtype=logits.dtype,
    )


def _are_filled(cache: DynamicCache) -> bool:
    """Whether there are layers, and each holds keys and values of the one token, shape [1, heads, 1, head_dim]."""
    tensors = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
    return bool(tensors) and all(t is not None and t.ndim == 4 and t.shape[0] == t.shape[2] == 1 for t in tensors)


def _uncacheable(model: PreTrainedModel, reasons: list[str]) -> Layout:
    return Layout(num_layers=0, groups=(), vocab_size=0, logits_dtype=model.dtype, unsupported=tuple(reasons))


def _specs(index: int, layer: Any) -> list[TensorSpec]:
    parts = (("keys", layer.keys), ("values", layer.values))
    return [TensorSpec(index, part, t.shape[1], t.shape[3], t.dtype) for part, t in parts]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
