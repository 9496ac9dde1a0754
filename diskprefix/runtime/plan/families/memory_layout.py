"""The memory layout of a decoder that has a plan: rows of keys and values, and states, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

from diskprefix.errors import SettingsError
from diskprefix.prefixstore.kv.layout import Group, LayerKind, LayerSpec, Layout, StateGroup, StateSpec, TensorSpec
from diskprefix.prefixstore.kv.sizes import Q8_BLOCK
from diskprefix.runtime.plan.draft_layer import with_one_more
from diskprefix.runtime.plan.families.declared import first_of, option
from diskprefix.runtime.plan.families.types.known_types import type_of

_Spec = TypeVar("_Spec", TensorSpec, StateSpec)


def layout_of(config: Any, dtype: str, kv_type: str = "auto", *, with_draft_layer: bool = False) -> Layout:
    """Returns the layout of a model with a plan that computes in `dtype`. `config` is the configuration of the whole
    model. Raises `SettingsError` for rows that `kv_type` does not take."""
    text = config.get_text_config(decoder=True)
    text = with_one_more(text) if with_draft_layer else text
    kinds = _kinds_of_layers(text)
    layers = [_layer(text, number, kind, dtype, kv_type) for number, kind in enumerate(kinds)]
    tensors = [spec for _, of_layer, _ in layers for spec in of_layer]
    if with_draft_layer:
        tensors.append(TensorSpec(len(kinds) - 1, "hidden", 1, text.hidden_size, dtype))
    return Layout(
        layers=tuple(spec for spec, _, _ in layers),
        groups=tuple(map(Group, _by_form(tensors))),
        vocab_size=text.vocab_size,
        logits_dtype="float32" if type_of(text).float_logits else dtype,
        states=tuple(map(StateGroup, _by_form([spec for *_, of_layer in layers for spec in of_layer]))),
    )


def _kinds_of_layers(config: Any) -> list[str]:
    """Returns the kind of each layer by transformers' names, "none" for layers without state."""
    count = config.num_hidden_layers
    plain = type_of(config).all_layers if option(config, "sliding_window") is None else "sliding_attention"
    kinds = [*(option(config, "layer_types") or [plain] * count)]
    own = count - (option(config, "num_kv_shared_layers") or 0)
    return ["none" if kind in ("moe", "mlp") else kind for kind in kinds[:own]] + ["none"] * (count - own)


def _layer(
    config: Any, number: int, kind: str, dtype: str, kv_type: str
) -> tuple[LayerSpec, list[TensorSpec], list[StateSpec]]:
    """Returns a layer, its rows of keys and values, and its states."""
    has_states, has_rows = (
        kind in ("linear_attention", "conv", "hybrid"),
        kind not in ("linear_attention", "conv", "none"),
    )
    states = [*_states(config, number, kind, dtype)] if has_states else []
    if not has_rows:
        return LayerSpec("linear" if has_states else "none", None, len({spec.index for spec in states})), [], states
    window = config.sliding_window if kind == "sliding_attention" else None
    window = config.attention_chunk_size if kind == "chunked_attention" else window
    form: LayerKind = "full" if window is None else "sliding"
    rank = option(config, "kv_lora_rank")
    if rank is not None:
        heads, key_dim, value_dim = 1, rank, config.qk_rope_head_dim
    else:
        heads, key_dim, value_dim = _heads(config, number, kind)
    # Keys and values of a single head share a row if their sizes differ.
    is_latent = rank is not None or (heads == 1 and key_dim != value_dim)
    parts = [("latent", key_dim + value_dim)] if is_latent else [("keys", key_dim), ("values", value_dim)]
    if kv_type == "q8" and is_latent and key_dim % Q8_BLOCK:
        raise SettingsError(f"--kv-type q8 has no place for latents of {key_dim} numbers: {Q8_BLOCK} share a scale")
    of_rows = dtype if kv_type == "auto" else kv_type
    of_keys = dtype if type_of(config).wide_keys else of_rows
    rows = [TensorSpec(number, part, heads, dim, of_keys if part == "keys" else of_rows, window) for part, dim in parts]
    if kind == "indexed_attention":
        rows.append(TensorSpec(number, "index", 1, config.indexer_head_dim, dtype))
    latent_dim = key_dim if is_latent else 0
    if has_states:
        return LayerSpec("linear+full", None, 1, latent_dim), rows, states
    return LayerSpec(form, window, 0, latent_dim), rows, states


def _heads(config: Any, number: int, kind: str) -> tuple[int, int, int]:
    """Returns the number of key-value heads of a layer, and the sizes of a head's keys and values."""
    own = config.per_layer_config[number]
    heads = first_of(own, "num_key_value_heads num_attention_heads", 1)
    dim = option(own, "head_dim") or own.hidden_size // own.num_attention_heads
    if type_of(config).windows_double_heads:
        return heads * (2 if kind == "sliding_attention" else 1), dim, config.v_head_dim
    return 1 if option(config, "multi_query", False) else heads, dim, dim


def _states(config: Any, number: int, kind: str, dtype: str) -> Iterator[StateSpec]:
    """Yields the states of a layer: of its convolution, then of its recurrence."""
    if kind == "conv":
        yield StateSpec(number, "conv", 0, (config.hidden_size, config.conv_L_cache), dtype)
        return
    first = partial(first_of, config)
    if first("linear_key_head_dim linear_head_dim", None) is not None:
        heads, key_dim = (
            first("linear_num_value_heads linear_num_heads", 0),
            first("linear_key_head_dim linear_head_dim", 0),
        )
        key_heads, dim = first("linear_num_key_heads", heads), first("linear_value_head_dim linear_head_dim", 0)
        shape, of_keys, kernel = (heads, key_dim, dim), key_heads * key_dim, config.linear_conv_kernel_dim
    else:
        heads, dim = (
            first("mamba_n_heads mamba_num_heads num_heads", 0),
            first("mamba_d_head mamba_head_dim head_dim", 0),
        )
        state_dim = first("mamba_d_state ssm_state_size state_size", 0)
        of_keys = first("mamba_n_groups n_groups", 0) * state_dim
        shape, kernel = (heads, dim, state_dim), first("mamba_d_conv conv_kernel", 0)
    yield StateSpec(number, "conv", 0, (2 * of_keys + heads * dim, kernel), dtype)
    yield StateSpec(number, "recurrent", 0, shape, "float32")
    if number + 1 in (option(config, "ple_layer_ids") or ()):
        # A state of the convolution for each stream, and the last tokens.
        kernel = (config.ple_conv_kernel_size - 1) * config.ngram_size + 1
        yield StateSpec(number, "conv", 1, (config.hc_count * config.hidden_size, kernel), dtype)
        yield StateSpec(number, "ngrams", 0, (config.ngram_size - 1,), "float32")


def _by_form(specs: list[_Spec]) -> list[tuple[_Spec, ...]]:
    """Returns the specs grouped by form. Groups are in the order of their first spec."""
    forms = dict.fromkeys(spec.form for spec in specs)
    return [tuple(spec for spec in specs if spec.form == form) for form in forms]
