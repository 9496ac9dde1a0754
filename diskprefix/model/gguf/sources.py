"""Of which tensors of a `.gguf` file a parameter is made, and how.

A `TensorSource` moves rows, and may change numbers. What moves rows alone is given their numbers, so quantised
matrices stay in the file, and are packed in the right order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

Array: TypeAlias = np.ndarray[Any, Any]
Rows: TypeAlias = Callable[..., Array]
"""Takes the configuration and an array for each tensor, whose first dimension is the rows, or for experts [experts,
rows, ..]. Returns the rows of the parameter. An array has the numbers of rows, biases, or weights."""
Values: TypeAlias = Callable[[Any, Array], Array]
"""Takes the configuration and weights in float32, with their rows in order. Returns the parameter."""
Columns: TypeAlias = Callable[[Any], tuple[int, int, int]]
"""Takes the configuration. Returns sizes (a, b, width): the columns of the parameter are [a, b, width], the columns of
the file [b, a, width]."""


def same(_: Any, one: Array) -> Array:
    return one


class TensorSource(Struct, frozen=True):
    """A parameter made of `tensors`, which are named within their block, without `.weight` and `.bias`. Without
    `values` rows stay as they are, and `rows` may be given their numbers. With `columns`, the file has columns in
    another order: a product with its quants takes its inputs in that order."""

    tensors: tuple[str, ...]
    rows: Rows = same
    values: Values | None = None
    columns: Columns | None = None
    is_of_heads: bool = False
    """True if each tensor has a matrix of each head, which operators may take as it is."""
    is_of_model: bool = False
    """True if the tensors are outside of blocks, though the parameter is of a layer."""


Sources: TypeAlias = Mapping[str, str | TensorSource | tuple[str | TensorSource, ...]]
"""Parameters, without `.weight` and `.bias`, and what each is made of: a tensor as it is, a `TensorSource`, or the
first of several whose tensors a file has. Names within a layer stand for each layer."""


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def below_each_other(_: Any, *parts: Array) -> Array:
    return np.concatenate(parts, axis=1)


def of_experts(*tensors: str) -> TensorSource:
    """Returns the source of matrices of experts that lie below each other."""
    return TensorSource(tensors, below_each_other)


def joined(*tensors: str) -> TensorSource:
    return TensorSource(tensors, lambda _, *parts: np.concatenate(parts))


def changed(tensor: str, values: Values, rows: Rows = same) -> TensorSource:
    return TensorSource((tensor,), rows, values)


def moved(tensor: str, rows: Rows) -> TensorSource:
    return TensorSource((tensor,), rows)


def _attention_rows(config: Any, both: Array, part: int) -> Array:
    """Returns the rows of queries, keys or values of a matrix that has all of them."""
    queries, keys = (number * head_dim(config) for number in (config.num_attention_heads, config.num_key_value_heads))
    first = (0, queries, queries + keys)[part]
    return both[first : first + (queries, keys, keys)[part]]


def attention_part(part: int, rows: Rows = same) -> TensorSource:
    """Returns the source of queries (0), keys (1) or values (2) in `attn_qkv`."""
    return moved("attn_qkv", lambda config, both: rows(config, _attention_rows(config, both, part)))


def _paired(one: Array, num_heads: int) -> Array:
    """Returns rows whose rotary pairs lie side by side with these half a head apart (`permute` of llama.cpp)."""
    return one.reshape(num_heads, -1, 2, *one.shape[1:]).swapaxes(1, 2).reshape(one.shape)


def paired_queries(config: Any, one: Array) -> Array:
    return _paired(one, config.num_attention_heads)


def paired_keys(config: Any, one: Array) -> Array:
    return _paired(one, config.num_key_value_heads)


def minus_one(_: Any, one: Array) -> Array:
    return one - 1


def log_of_negative(_: Any, one: Array) -> Array:
    """Returns `A_log` of the rates of a state."""
    return np.log(-one)


def _grouped(one: Array, config: Any, width: int) -> Array:
    """Returns rows of value heads by their key heads. The file has the first one of each key head, then the second."""
    keys = config.linear_num_key_heads
    per_key = config.linear_num_value_heads // keys
    return one.reshape(per_key, keys, width, *one.shape[1:]).swapaxes(0, 1).reshape(one.shape)


def grouped_heads(config: Any, one: Array) -> Array:
    return _grouped(one, config, 1)


def grouped_values(config: Any, one: Array) -> Array:
    return _grouped(one, config, config.linear_value_head_dim)


def grouped_behind_keys(config: Any, one: Array) -> Array:
    """Returns rows of queries, keys and values, of which the values are by their key heads."""
    behind = 2 * config.linear_key_head_dim * config.linear_num_key_heads
    return np.concatenate([one[:behind], grouped_values(config, one[behind:])])


def grouped_columns(config: Any) -> tuple[int, int, int]:
    """Returns the sizes of columns by their key heads (see `_grouped`)."""
    keys = config.linear_num_key_heads
    return keys, config.linear_num_value_heads // keys, config.linear_value_head_dim


def expansion_of_latents(_: Any, keys: Array, values: Array) -> Array:
    """Returns [heads × (key_dim + value_dim), latent_dim] of [heads, latent_dim, key_dim] and [heads, value_dim,
    latent_dim]."""
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return both.reshape(-1, both.shape[2])
