"""Finds the layout of a model's state by running the model, and rehearses a restore. README.md says how and why.

A layout is unsupported if a layer has an unknown class, if the model cannot be run this way, or if the rehearsal fails.
Such models run on transformers' own state (`kv.uncached`).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
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

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import (
    CacheArgument,
    Group,
    LayerKind,
    LayerSpec,
    Layout,
    StateGroup,
    StateSpec,
    TensorSpec,
    is_out_of_memory,
)
from diskprefix.memo import Memo
from diskprefix.model.exact.layer_kinds import sample_of
from diskprefix.model.load.kernel_settings import computed_by
from diskprefix.printable import first_line
from diskprefix.store.codec.planes import Bytes
from diskprefix.version import __version__

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
"""Exactly these classes: one that inherits from them may keep more."""

_Spec = TypeVar("_Spec", TensorSpec, StateSpec)

_STEP = 4
"""Tokens in a step of the rehearsal."""
_rehearsals = Memo("rehearsals", version=2, max_records=32)

_OPTIONS = ("position_ids", "logits_to_keep")

_MAX_STATE_ERROR = 0.05
_MAX_LOGITS_ERROR = 0.3
_MAX_LOOKAHEAD = 0.005
"""The largest allowed difference between a run in two steps and a run in one pass, relative to the difference of a run
that never saw the first step. Rounding is smaller by orders of magnitude; a dropped state gives nearly 1."""


class _Unsupported(Exception):
    """Its arguments are the reasons why a model's state cannot be cached."""


def rehearse(model: PreTrainedModel, identity: str = "") -> Layout:
    """Returns the layout of the model's state, after a rehearsed restore. For a model that cannot be cached,
    `unsupported` has the reasons.

    A rehearsal takes a dozen forwards of a sample of the layers (`model.exact.layer_kinds`). The layout of one that
    succeeded is remembered for `identity`, the model's fingerprint, if it is given: class, configuration and libraries
    decide it. Raises only what torch raises when memory runs out.
    """
    key = hashlib.sha256(f"{__version__} {computed_by(model)} {identity}".encode()).hexdigest() if identity else ""
    if key and (remembered := _rehearsals.get(key)) is not None:
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            return Layout.of_record(remembered)
    layout = read_layout(model)
    if layout.unsupported:
        return layout
    tokens = made_up_tokens(model, 1, _STEP)

    def rehearsed() -> Layout:
        with sample_of(model, layout, lambda: _arena(model, layout).forward(model, tokens)).alone():
            return _rehearsed(model, layout)

    found = _or_unsupported(model, rehearsed)
    if key and not found.unsupported:
        _rehearsals.put(key, found.record())
    return found


def read_layout(model: PreTrainedModel) -> Layout:
    """Returns the layout of the model's state after a forward of a few tokens, without a rehearsal. For a model that
    cannot be cached, `unsupported` has the reasons. Raises only what torch raises when memory runs out."""

    def read() -> Layout:
        _check_outside(model)
        return _read_layout(model)

    return _or_unsupported(model, read)


def _or_unsupported(model: PreTrainedModel, find: Callable[[], Layout]) -> Layout:
    try:
        with torch.inference_mode():
            return find()
    except _Unsupported as found:
        return unsupported(model, *found.args)
    except Exception as error:  # a model class of any age and author may fail in any way
        if is_out_of_memory(error):
            raise
        return unsupported(model, f"{type(model).__name__}: {type(error).__name__}: {first_line(error)}")


def unsupported(model: PreTrainedModel, *reasons: str) -> Layout:
    """Returns the layout of a model that is not cached."""
    return Layout(layers=(), groups=(), vocab_size=0, logits_dtype=model.dtype, unsupported=reasons)


def _check_outside(model: PreTrainedModel) -> None:
    """Raises `_Unsupported` for what can be seen without running the model."""
    name = type(model).__name__
    # One kind of RoPE for the whole model, or one for each kind of layer.
    ropes = [getattr(module, "rope_type", None) for module in model.modules()]
    found = moving_ropes(str(kind) for rope in ropes for kind in (rope.values() if isinstance(rope, dict) else [rope]))
    if _cache_argument(model) is None:
        found.append(f"{name} takes no past_key_values")
    elif not model._supports_default_dynamic_cache():
        found.append(f"{name} has a cache of its own")
    if found:
        raise _Unsupported(*found)


def _cache_argument(model: PreTrainedModel) -> CacheArgument | None:
    accepted = inspect.signature(type(model).forward).parameters
    known: tuple[CacheArgument, ...] = ("past_key_values", "cache_params")
    return next((argument for argument in known if argument in accepted), None)


def moving_ropes(kinds: Iterable[str]) -> list[str]:
    """Returns the kinds of RoPE whose frequencies depend on more than the position. Dynamic frequencies depend on
    earlier runs. Those of longrope change for all positions when a sequence outgrows the original length."""
    return sorted(f"{kind} RoPE" for kind in set(kinds) if "dynamic" in kind or kind == "longrope")


def made_up_tokens(model: PreTrainedModel, seed: int, num_tokens: int) -> torch.Tensor:
    """Returns random token ids of the model's vocabulary, shape [1, num_tokens], the same for the same seed."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (1, num_tokens), generator=generator).to(model.device)


def _read_layout(model: PreTrainedModel) -> Layout:
    argument, cache = _cache_argument(model), DynamicCache(config=model.config)
    assert argument is not None
    output = model(input_ids=made_up_tokens(model, 0, _STEP), use_cache=True, **{argument: cache})
    layers = cache.layers
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in KINDS})
    if unknown:
        raise _Unsupported(*unknown)
    tensors = [spec for i, layer in enumerate(layers) for spec in _tensor_specs(i, layer)]
    states = [spec for i, layer in enumerate(layers) for spec in _state_specs(i, layer)]
    if not tensors and not states:
        raise _Unsupported(f"{type(model).__name__} leaves layers of its cache empty")
    return Layout(
        layers=tuple(map(_layer_spec, layers)),
        groups=tuple(map(Group, _by_form(tensors))),
        vocab_size=output.logits.shape[-1],
        logits_dtype=output.logits.dtype,
        states=tuple(map(StateGroup, _by_form(states))),
        cache_argument=argument,
        options=tuple(option for option in _OPTIONS if option in inspect.signature(type(model).forward).parameters),
    )


def _by_form(specs: list[_Spec]) -> list[tuple[_Spec, ...]]:
    """Returns the specs grouped by form, in the order of the first of each form."""
    forms = dict.fromkeys(spec.form for spec in specs)
    return [tuple(spec for spec in specs if spec.form == form) for form in forms]


def _layer_spec(layer: Any) -> LayerSpec:
    kind = KINDS[type(layer)]
    if kind != "linear" and kind != "none" and layer.keys is None:
        # Nothing was written to it: the layer uses another layer's keys, or has no attention.
        kind = "linear" if kind.startswith("linear") else "none"
    window = layer.sliding_window if kind.endswith("sliding") else None
    num_states = getattr(layer, "number_of_states", 0) if kind.startswith("linear") else 0
    return LayerSpec(kind, window, num_states, 0 if kind in ("none", "linear") else _latent_dim(layer))


def _latent_dim(layer: Any) -> int:
    """Returns the size of the latents that a layer keeps, 0 if it keeps keys and values: a latent and a rotary key are
    shared by all heads."""
    keys, values = layer.keys, layer.values
    is_latent = keys.ndim == values.ndim == 4 and keys.shape[1] == values.shape[1] == 1
    return keys.shape[3] if is_latent and keys.shape[3] != values.shape[3] else 0


def _tensor_specs(index: int, layer: Any) -> list[TensorSpec]:
    spec = _layer_spec(layer)
    if spec.kind in ("none", "linear"):
        return []
    parts = [("keys", layer.keys), ("values", layer.values)]
    for part, tensor in parts:
        if tensor.ndim != 4 or tensor.shape[0] != 1 or tensor.shape[2] != min(_STEP, (spec.window or _STEP + 1) - 1):
            raise _Unsupported(f"{type(layer).__name__} with {part} of shape {list(tensor.shape)}")
    if spec.latent_dim:
        parts = [("latent", torch.cat([layer.keys, layer.values], dim=-1))]
    return [TensorSpec(index, part, t.shape[1], t.shape[3], t.dtype, spec.window) for part, t in parts]


def _state_specs(index: int, layer: Any) -> list[StateSpec]:
    if not _layer_spec(layer).kind.startswith("linear"):
        return []
    named = [("conv", layer.conv_states), ("recurrent", layer.recurrent_states)]
    return [
        StateSpec(index, part, i, tuple(tensor.shape[1:]), tensor.dtype)
        for part, states in named
        for i, tensor in states.items()
        if tensor is not None
    ]


def _rehearsed(model: PreTrainedModel, layout: Layout) -> Layout:
    """Returns the layout if a restore gives the bits of the uninterrupted run. Raises `_Unsupported` if not."""
    token_ids = made_up_tokens(model, 1, 2 * _STEP + 1)
    first, second, last = token_ids[:, :_STEP], token_ids[:, _STEP : 2 * _STEP], token_ids[:, 2 * _STEP :]
    cold = _arena(model, layout)
    cold.forward(model, first)
    warm = _arena(model, layout)
    restore(cold, warm)
    expected = [cold.forward(model, second)]
    continued = cold.read_states()
    expected.append(cold.forward(model, last))
    interrupt(model, layout)
    found = [warm.forward(model, second), warm.forward(model, last)]
    if not all(map(torch.equal, found, expected)):
        raise _Unsupported(f"{type(model).__name__} keeps state outside its cache")
    _compare_with_one_pass(model, layout, token_ids[:, : 2 * _STEP], expected[0], continued)
    return layout


def _compare_with_one_pass(
    model: PreTrainedModel, layout: Layout, token_ids: torch.Tensor, logits: torch.Tensor, states: memoryview
) -> None:
    """Raises `_Unsupported` if the model ignores the earlier state when it adds several tokens to it, if only the
    logits are wrong, or if a token depends on later tokens.

    `logits` and `states` come from two steps. Of the states those of the first layer are compared, where both runs have
    nearly the same input.
    """
    dropped = _arena(model, layout)
    second_alone = dropped.forward(model, token_ids[:, _STEP:])
    if layout.states:
        whole = _arena(model, layout)
        whole.forward(model, token_ids)
        ends = [_first_recurrent(layout, found) for found in (states, whole.read_states(), dropped.read_states())]
        if _error(*ends) > _MAX_STATE_ERROR:
            raise _Unsupported(f"{type(model).__name__} adds tokens to a state only one by one")
    one_pass = model(input_ids=token_ids, use_cache=False).logits[0]
    if _error(logits, one_pass[-1], second_alone) > _MAX_LOGITS_ERROR:
        raise _Unsupported(f"{type(model).__name__} does not continue a sequence step by step")
    other_end = torch.cat([token_ids[:, :_STEP], made_up_tokens(model, 3, _STEP)], dim=1)
    beginning, again = one_pass[:_STEP], model(input_ids=other_end, use_cache=False).logits[0, :_STEP]
    if _error(again, beginning, beginning.roll(1, dims=0)) > _MAX_LOOKAHEAD:
        raise _Unsupported(f"{type(model).__name__} looks at what comes later")


def _error(found: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor) -> float:
    """Returns the distance of `found` from `right`, relative to that of `wrong`; 0 if `wrong` equals `right`."""
    scale = (wrong.float() - right.float()).abs().max()
    return float((found.float() - right.float()).abs().max() / scale) if scale else 0.0


def _first_recurrent(layout: Layout, states: memoryview) -> torch.Tensor:
    """Returns the recurrent state of the first layer that has one, or else the first state of a convolution."""
    specs = [spec for group in layout.states for spec in group.specs]
    starts = accumulate((spec.num_bytes for spec in specs), initial=0)
    *_, start, spec = min(
        (spec.part != "recurrent", spec.layer, spec.index, start, spec)
        for spec, start in zip(specs, starts, strict=False)
    )
    return torch.frombuffer(bytearray(states[start : start + spec.num_bytes]), dtype=spec.dtype)


def _arena(model: PreTrainedModel, layout: Layout) -> KVArena:
    arena = KVArena(layout, model.device, capacity_step=2 * _STEP + 1)
    arena.reserve(2 * _STEP + 1)
    return arena


def interrupt(model: PreTrainedModel, layout: Layout) -> None:
    """Computes a few tokens of another sequence."""
    _arena(model, layout).forward(model, made_up_tokens(model, 2, _STEP + 1))


def restore(source: KVArena, target: KVArena) -> None:
    """Copies the state of a sequence into other memory, which has room for it, as a restore does."""
    num_tokens, layout, start = source.num_tokens, source.layout, 0
    payload = memoryview(bytes(source.read_tokens(0, num_tokens)) + bytes(source.read_states()))

    def write(out: Bytes) -> None:
        nonlocal start
        out[...] = np.frombuffer(payload[start : start + out.size], np.uint8).reshape(out.shape)
        start += out.size

    rows = [len(g.specs) * g.heads for g in layout.groups] + [len(g.specs) * g.rows_each for g in layout.states]
    for group, num_rows in enumerate(rows):
        target.fill(0, num_tokens, group, slice(0, num_rows), write)
    target.truncate(num_tokens)
