"""Finds the layout of a model's state by running the model over a few tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from diskprefix.prefixstore.kv.layout import (
    Group,
    LayerKind,
    LayerSpec,
    Layout,
    StateGroup,
    StateSpec,
    TensorSpec,
    is_out_of_memory,
)
from diskprefix.printable import first_line
from diskprefix.runtime.grid.cache_argument import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS: dict[type[Any], LayerKind] = {
    DynamicLayer: "full",
    DynamicSlidingWindowLayer: "sliding",
    LinearAttentionLayer: "linear",
    LinearAttentionAndFullAttentionLayer: "linear+full",
    LinearAttentionAndSlidingWindowAttentionLayer: "linear+sliding",
    DummyLayer: "none",
}
"""Exactly these classes: a subclass may keep more state."""

_Spec = TypeVar("_Spec", TensorSpec, StateSpec)
_NUM_TOKENS = 4
_OPTIONS = ("position_ids", "logits_to_keep")


class Unsupported(Exception):
    """Its arguments are the reasons why a model's state cannot be cached."""


def read_layout(model: PreTrainedModel) -> Layout:
    """Returns the layout of the model's state after a forward of a few tokens. For a model that cannot be cached,
    `unsupported` has the reasons. Raises only torch's out-of-memory errors."""

    def read() -> Layout:
        _check_outside(model)
        return _read_layout(model)

    return or_unsupported(model, read)


def or_unsupported(model: PreTrainedModel, find: Callable[[], Layout]) -> Layout:
    """Returns the layout from `find`, or a layout with the reason why the model is not cached. `find` may raise
    `Unsupported` or any other error, because model classes are of any age and author."""
    try:
        with torch.inference_mode():
            return find()
    except Unsupported as refusal:
        return unsupported(model, *refusal.args)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return unsupported(model, f"{type(model).__name__}: {type(error).__name__}: {first_line(error)}")


def unsupported(model: PreTrainedModel, *reasons: str) -> Layout:
    """Returns the layout of a model that is not cached."""
    return Layout(layers=(), groups=(), vocab_size=0, logits_dtype=_name(model.dtype), unsupported=reasons)


def _check_outside(model: PreTrainedModel) -> None:
    """Raises `Unsupported` for what can be seen without running the model."""
    name = type(model).__name__
    # One kind of RoPE for the whole model, or one for each kind of layer.
    ropes = [getattr(module, "rope_type", None) for module in model.modules()]
    kinds = {str(kind) for rope in ropes for kind in (rope.values() if isinstance(rope, dict) else [rope])}
    # Dynamic frequencies depend on earlier runs. longrope's frequencies change for all positions when a sequence
    # outgrows the original length.
    reasons = sorted(f"{kind} RoPE" for kind in kinds if "dynamic" in kind or kind == "longrope")
    if cache_argument(type(model).forward) is None:
        reasons.append(f"{name} takes no cache")
    elif not model._supports_default_dynamic_cache():
        reasons.append(f"{name} has a cache of its own")
    if reasons:
        raise Unsupported(*reasons)


def made_up_tokens(model: PreTrainedModel, seed: int, num_tokens: int) -> torch.Tensor:
    """Returns random token ids of the model's vocabulary, shape [1, num_tokens]. Equal seeds give equal tokens."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (1, num_tokens), generator=generator).to(model.device)


def _read_layout(model: PreTrainedModel) -> Layout:
    argument, cache = cache_argument(type(model).forward), DynamicCache(config=model.config)
    assert argument is not None, "a model without one was refused before"
    output = model(input_ids=made_up_tokens(model, 0, _NUM_TOKENS), use_cache=True, **{argument: cache})
    layers = cache.layers
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in KINDS})
    if unknown:
        raise Unsupported(*unknown)
    tensors = [spec for i, layer in enumerate(layers) for spec in _tensor_specs(i, layer)]
    states = [spec for i, layer in enumerate(layers) for spec in _state_specs(i, layer)]
    if not tensors and not states:
        raise Unsupported(f"{type(model).__name__} leaves layers of its cache empty")
    return Layout(
        layers=tuple(map(_layer_spec, layers)),
        groups=tuple(map(Group, _by_form(tensors))),
        vocab_size=output.logits.shape[-1],
        logits_dtype=_name(output.logits.dtype),
        states=tuple(map(StateGroup, _by_form(states))),
        options=tuple(option for option in _OPTIONS if option in inspect.signature(type(model).forward).parameters),
    )


def _by_form(specs: list[_Spec]) -> list[tuple[_Spec, ...]]:
    """Returns the specs grouped by form, in the order of the first of each form."""
    forms = dict.fromkeys(spec.form for spec in specs)
    return [tuple(spec for spec in specs if spec.form == form) for form in forms]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layer_spec(layer: Any) -> LayerSpec:
    kind = KINDS[type(layer)]
    if kind != "linear" and kind != "none" and layer.keys is None:
        # Nothing was written to it: the layer uses another layer's keys, or has no attention.
        kind = "linear" if kind.startswith("linear") else "none"
    window = layer.sliding_window if kind.endswith("sliding") else None
    num_states = getattr(layer, "number_of_states", 0) if kind.startswith("linear") else 0
    return LayerSpec(kind, window, num_states, 0 if kind in ("none", "linear") else _latent_dim(layer))


def _latent_dim(layer: Any) -> int:
    """Returns the size of latents with a rotary key, which all heads share; 0 for a layer of keys and values."""
    keys, values = layer.keys, layer.values
    is_latent = keys.ndim == values.ndim == 4 and keys.shape[1] == values.shape[1] == 1
    return keys.shape[3] if is_latent and keys.shape[3] != values.shape[3] else 0


def _tensor_specs(index: int, layer: Any) -> list[TensorSpec]:
    spec = _layer_spec(layer)
    if spec.kind in ("none", "linear"):
        return []
    parts = [("keys", layer.keys), ("values", layer.values)]
    for part, tensor in parts:
        if (
            tensor.ndim != 4
            or tensor.shape[0] != 1
            or tensor.shape[2] != min(_NUM_TOKENS, (spec.window or _NUM_TOKENS + 1) - 1)
        ):
            raise Unsupported(f"{type(layer).__name__} with {part} of shape {list(tensor.shape)}")
    if spec.latent_dim:
        parts = [("latent", torch.cat([layer.keys, layer.values], dim=-1))]
    return [TensorSpec(index, part, t.shape[1], t.shape[3], _name(t.dtype), spec.window) for part, t in parts]


def _state_specs(index: int, layer: Any) -> list[StateSpec]:
    if not _layer_spec(layer).kind.startswith("linear"):
        return []
    named = [("conv", layer.conv_states), ("recurrent", layer.recurrent_states)]
    return [
        StateSpec(index, part, i, tuple(tensor.shape[1:]), _name(tensor.dtype))
        for part, states in named
        for i, tensor in states.items()
        if tensor is not None
    ]
