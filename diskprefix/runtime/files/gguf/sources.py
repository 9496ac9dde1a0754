"""The sources of parameters: tensors of a `.gguf` file, and the changes to their rows and numbers.

A `TensorSource` moves rows, and may change numbers. A source that only moves rows is applied to row numbers, so
quantised matrices stay in the file and are packed in the right order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

Array: TypeAlias = np.ndarray[Any, Any]
Rows: TypeAlias = Callable[..., Array]
"""Takes the configuration and an array for each tensor, [rows, ..] or for experts [experts, rows, ..]. Returns the rows
of the parameter. The arrays contain row numbers, biases, or weights."""
Values: TypeAlias = Callable[[Any, Array], Array]
"""Takes the configuration and weights in float32, with rows in order. Returns the parameter."""
Columns: TypeAlias = Callable[[Any], tuple[int, int, int]]
"""Takes the configuration. Returns sizes (a, b, width): the columns are [a, b, width] in the parameter, and
[b, a, width] in the file."""


def same(_: Any, array: Array) -> Array:
    return array


class TensorSource(Struct, frozen=True):
    """A parameter made from `tensors`, by their names within a block without `.weight` and `.bias`. Without `values`,
    no number changes, and `rows` may be applied to row numbers. With `columns`, the columns of the file are in another
    order, and a product with its quants takes its inputs in that order."""

    tensors: tuple[str, ...]
    rows: Rows = same
    values: Values | None = None
    columns: Columns | None = None
    is_of_heads: bool = False
    """True if each tensor has one matrix for each head, which operators take unchanged."""
    is_of_model: bool = False
    """True if the tensors are outside of blocks, although the parameter belongs to a layer."""


Sources: TypeAlias = Mapping[str, str | TensorSource | tuple[str | TensorSource, ...]]
"""The sources of parameters, by names without `.weight` and `.bias`: an unchanged tensor, a `TensorSource`, or several:
the first counts whose tensors a file has. Names within a layer apply to all layers."""


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def below_each_other(_: Any, *parts: Array) -> Array:
    return np.concatenate(parts, axis=1)


def of_experts(*tensors: str) -> TensorSource:
    """Returns the source of the experts' matrices of several tensors, concatenated row-wise for each expert."""
    return TensorSource(tensors, below_each_other)


def joined(*tensors: str) -> TensorSource:
    return TensorSource(tensors, lambda _, *parts: np.concatenate(parts))


def changed(tensor: str, values: Values, rows: Rows = same) -> TensorSource:
    return TensorSource((tensor,), rows, values)


def moved(tensor: str, rows: Rows) -> TensorSource:
    return TensorSource((tensor,), rows)


def _attention_rows(config: Any, both: Array, part: int) -> Array:
    """Returns the rows of queries, keys or values from a matrix with all three."""
    queries, keys = (number * head_dim(config) for number in (config.num_attention_heads, config.num_key_value_heads))
    first = (0, queries, queries + keys)[part]
    return both[first : first + (queries, keys, keys)[part]]


def attention_part(part: int, rows: Rows = same) -> TensorSource:
    """Returns the source of queries (0), keys (1) or values (2) in `attn_qkv`."""
    return moved("attn_qkv", lambda config, both: rows(config, _attention_rows(config, both, part)))


def _paired(rows: Array, num_heads: int) -> Array:
    """Returns rows with interleaved rotary pairs as rows with pairs half a head apart (llama.cpp's `permute`)."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def paired_queries(config: Any, rows: Array) -> Array:
    return _paired(rows, config.num_attention_heads)


def paired_keys(config: Any, rows: Array) -> Array:
    return _paired(rows, config.num_key_value_heads)


def minus_one(_: Any, numbers: Array) -> Array:
    return numbers - 1


def log_of_negative(_: Any, numbers: Array) -> Array:
    """Returns `A_log` from the rates of a state, rounded once: numpy's logarithm of float32 differs between CPUs."""
    return np.log(-numbers.astype(np.float64)).astype(numbers.dtype)


def _grouped(rows: Array, config: Any, width: int) -> Array:
    """Returns the rows of value heads grouped by key head. The file has the first value head of each key head, then the
    second ones, and so on."""
    keys = config.linear_num_key_heads
    per_key = config.linear_num_value_heads // keys
    return rows.reshape(per_key, keys, width, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def grouped_heads(config: Any, rows: Array) -> Array:
    return _grouped(rows, config, 1)


def grouped_values(config: Any, rows: Array) -> Array:
    return _grouped(rows, config, config.linear_value_head_dim)


def grouped_after_keys(config: Any, rows: Array) -> Array:
    """Returns the rows of queries, keys and values, with the values grouped by key head."""
    first_value = 2 * config.linear_key_head_dim * config.linear_num_key_heads
    return np.concatenate([rows[:first_value], grouped_values(config, rows[first_value:])])


def grouped_columns(config: Any) -> tuple[int, int, int]:
    """Returns the sizes of columns grouped by key head (see `_grouped`)."""
    keys = config.linear_num_key_heads
    return keys, config.linear_num_value_heads // keys, config.linear_value_head_dim


def expansion_of_latents(_: Any, keys: Array, values: Array) -> Array:
    """Returns [heads × (key_dim + value_dim), latent_dim] from [heads, latent_dim, key_dim] and [heads, value_dim,
    latent_dim]."""
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return both.reshape(-1, both.shape[2])
