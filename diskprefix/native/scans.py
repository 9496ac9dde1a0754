"""The compiled operators of layers with a state, called with torch's tensors: token after token, for several sequences
at once. The state behind them goes to the place of the one before, or to another."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from diskprefix.native import require
from diskprefix.native.attention_operator import DTYPES
from diskprefix.native.library import Operators
from diskprefix.native.unseen import unseen

_RUN = struct.Struct("@q 2P")
_CONVOLUTION = struct.Struct("@7q 3P P q P")
_DELTA_RULE = struct.Struct("@7q 3P 3q 2P P d q P")
_STATE_SPACE = struct.Struct("@6q 3P 3q 3P P q P")
"""`StateRun`, `Convolution`, `DeltaRule` and `StateSpace` of `source/interface.h`."""

MAX_KERNEL = 16

Runs = Sequence[tuple[int, torch.Tensor, torch.Tensor]]
"""For each sequence the number of its rows, the state before them, [1, ..], and where the one behind them goes, which
may be the same tensor."""


@unseen
def convolution(
    operators: Operators,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: Runs,
    *,
    has_silu: bool,
) -> torch.Tensor:
    """Returns the causal convolution of each channel alone, [1, rows, channels], in the dtype of `rows` of that shape.
    `weight` is [channels, kernel], a state [1, channels, kernel]: the last inputs, the newest one last."""
    (_, num_rows, channels), kernel = rows.shape, weight.shape[1]
    require(kernel <= MAX_KERNEL and len(weight) == channels and (bias is None or len(bias) == channels), rows, weight)
    _check(runs, num_rows, (1, channels, kernel), rows.dtype)
    rows, weight = rows.contiguous(), weight.to(rows.dtype).contiguous()
    bias = None if bias is None else bias.to(rows.dtype).contiguous()
    out = torch.empty_like(rows)
    call = _CONVOLUTION.pack(
        *(DTYPES[rows.dtype], len(runs), num_rows, channels, kernel, has_silu, channels),
        *(rows.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(torch.get_num_threads(), operators.parallel_for),
    )
    _run(operators.convolution, call, runs)
    return out


@unseen
def delta_rule(
    operators: Operators,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    runs: Runs,
    epsilon: float,
) -> torch.Tensor:
    """Returns the gated delta rule, [1, rows, heads, value_dim], in the dtype of `value` of that shape.

    `query` and `key` are [1, rows, key_heads, key_dim], and get length 1 if `epsilon` is not 0. `decay` has logarithms:
    [1, rows, heads], or [1, rows, heads, key_dim]. `beta` is [1, rows, heads], a state float32 [1, heads, key_dim,
    value_dim].
    """
    (_, num_rows, heads, value_dim), (key_heads, key_dim) = value.shape, key.shape[2:]
    _check(runs, num_rows, (1, heads, key_dim, value_dim), torch.float32)
    require(
        query.shape == key.shape == (1, num_rows, key_heads, key_dim)
        and decay.shape in ((1, num_rows, heads), (1, num_rows, heads, key_dim))
        and beta.shape == (1, num_rows, heads)
        and heads % key_heads == 0
        and query.dtype is key.dtype is value.dtype,
        *(query, key, value, decay, beta),
    )
    query, key, value = (_by_rows(numbers) for numbers in (query, key, value))
    decay, beta = decay.float().contiguous(), beta.float().contiguous()
    out = value.new_empty(value.shape)
    call = _DELTA_RULE.pack(
        *(DTYPES[value.dtype], len(runs), heads, key_heads, key_dim, value_dim, key_dim if decay.ndim == 4 else 1),
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), query.stride(1), key.stride(1), value.stride(1)),
        *(decay.data_ptr(), beta.data_ptr(), out.data_ptr(), epsilon),
        *(torch.get_num_threads(), operators.parallel_for),
    )
    _run(operators.delta_rule, call, runs)
    return out


@unseen
def state_space(
    operators: Operators,
    rows: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor | None,
    runs: Runs,
) -> torch.Tensor:
    """Returns the state space of Mamba 2, float32 [1, rows, heads, dim], for `rows` of that shape.

    `steps` are [1, rows, heads], `decay` and `skip` (A and D) [heads], `into` and `out_of` (B and C) [1, rows, groups,
    state_dim] in the dtype of `rows`, a state float32 [1, heads, dim, state_dim].
    """
    (_, num_rows, heads, dim), (groups, state_dim) = rows.shape, into.shape[2:]
    _check(runs, num_rows, (1, heads, dim, state_dim), torch.float32)
    require(
        into.shape == out_of.shape == (1, num_rows, groups, state_dim)
        and steps.shape == (1, num_rows, heads)
        and decay.shape == (heads,)
        and (skip is None or skip.shape == (heads,))
        and heads % groups == 0
        and rows.dtype is into.dtype is out_of.dtype,
        *(rows, steps, decay, into, out_of),
    )
    rows, into, out_of = (_by_rows(numbers) for numbers in (rows, into, out_of))
    steps, decay = steps.float().contiguous(), decay.float().contiguous()
    skip = None if skip is None else skip.float().contiguous()
    out = torch.empty(rows.shape, dtype=torch.float32)
    call = _STATE_SPACE.pack(
        *(DTYPES[rows.dtype], len(runs), heads, groups, dim, state_dim),
        *(rows.data_ptr(), into.data_ptr(), out_of.data_ptr(), rows.stride(1), into.stride(1), out_of.stride(1)),
        *(steps.data_ptr(), decay.data_ptr(), 0 if skip is None else skip.data_ptr(), out.data_ptr()),
        *(torch.get_num_threads(), operators.parallel_for),
    )
    _run(operators.state_space, call, runs)
    return out


def _by_rows(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the numbers, [1, rows, heads, dim], with those of a row side by side."""
    is_one_row = numbers.stride(3) == 1 and numbers.stride(2) == numbers.shape[3]
    return numbers if is_one_row else numbers.contiguous()


def _check(runs: Runs, num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if sum(rows for rows, *_ in runs) != num_rows:
        raise ValueError(f"sequences of {[rows for rows, *_ in runs]} rows, {num_rows} expected")
    for state in (state for _, *states in runs for state in states):
        if state.shape != shape or state.dtype is not dtype or not state.is_contiguous():
            raise ValueError(f"a state of {state.dtype} {list(state.shape)}, {dtype} {list(shape)} expected")


def _run(operator: object, call: bytes, runs: Runs) -> None:
    assert callable(operator)
    packed = (_RUN.pack(num_rows, before.data_ptr(), state.data_ptr()) for num_rows, before, state in runs)
    if operator(call, b"".join(packed)):
        raise MemoryError("there is no memory left for a recurrence")
