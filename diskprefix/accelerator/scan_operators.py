"""Layers with a state, and sums along a row, by the kernels for an accelerator. `native.scans` describes the arguments
and has the same functions for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import triton

from diskprefix.accelerator import scan_kernels
from diskprefix.accelerator.operators import uploaded
from diskprefix.accelerator.tiles import SCANS


@dataclass(frozen=True, eq=False)
class StateTable:
    """The runs of a step and the memory of their states: `table`, int64 [runs, 3], has the first row of a run in the
    step, the number of its rows, and the address of the first of its states. `state` is that of the first run to use:
    those of the others lie as far behind their first ones."""

    table: torch.Tensor
    state: torch.Tensor


Runs: TypeAlias = Sequence[tuple[int, torch.Tensor]] | StateTable
"""The number of rows of each run with its state, or a table on the device."""

_OPTIONS = {"num_warps": SCANS.warps, "enable_fp_fusion": False}


def row_sums(rows: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """Returns the sum of each row divided by `divisor`, [.., 1] for [.., width], in the dtype of the rows."""
    width = rows.shape[-1]
    flat = rows.reshape(-1, width)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    out = rows.new_empty(*rows.shape[:-1], 1)
    if len(flat):
        block = triton.next_power_of_2(width)
        scan_kernels.row_sums[(len(flat),)](flat, out, width, flat.stride(0), divisor, BLOCK=block, **_OPTIONS)
    return out


def convolution(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, runs: Runs, *, has_silu: bool
) -> torch.Tensor:
    (_, num_rows, channels), kernel = rows.shape, weight.shape[1]
    rows, weight = rows.contiguous(), weight.to(rows.dtype).contiguous()
    out = torch.empty_like(rows)
    scan_kernels.convolution[(_count(runs), triton.cdiv(channels, SCANS.channels))](
        *(rows, weight, weight if bias is None else bias.to(rows.dtype).contiguous(), out),
        *(*_table(runs, num_rows, (1, channels, kernel), rows.dtype), channels),
        KERNEL=kernel,
        TAPS=triton.next_power_of_2(kernel),
        HAS_BIAS=bias is not None,
        HAS_SILU=has_silu,
        BLOCK_TOKENS=SCANS.tokens,
        BLOCK=SCANS.channels,
        **_OPTIONS,
    )
    return out


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    runs: Runs,
    epsilon: float,
) -> torch.Tensor:
    (_, num_rows, heads, value_dim), (key_heads, key_dim) = value.shape, key.shape[2:]
    query, key, value = (_by_rows(numbers) for numbers in (query, key, value))
    out = value.new_empty(value.shape)
    scan_kernels.delta_rule[(_count(runs), heads, triton.cdiv(value_dim, SCANS.columns))](
        *(query, key, value, decay.float().contiguous(), beta.float().contiguous(), out),
        *_table(runs, num_rows, (1, heads, key_dim, value_dim), torch.float32),
        *(key_heads, key_dim, value_dim, query.stride(1), key.stride(1), value.stride(1)),
        *(key_dim**-0.5, epsilon),
        HAS_LENGTH=epsilon > 0,
        HAS_DECAYS=decay.ndim == 4,
        BLOCK_KEY=triton.next_power_of_2(key_dim),
        BLOCK_VALUE=SCANS.columns,
        **_OPTIONS,
    )
    return out


def state_space(
    rows: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor | None,
    runs: Runs,
) -> torch.Tensor:
    (_, num_rows, heads, dim), (groups, state_dim) = rows.shape, into.shape[2:]
    rows, into, out_of = (_by_rows(numbers) for numbers in (rows, into, out_of))
    decay = decay.float().contiguous()
    out = rows.new_empty(rows.shape, dtype=torch.float32)
    scan_kernels.state_space[(_count(runs), heads, triton.cdiv(dim, SCANS.rows))](
        *(rows, steps.float().contiguous(), decay, into, out_of),
        *(decay if skip is None else skip.float().contiguous(), out),
        *_table(runs, num_rows, (1, heads, dim, state_dim), torch.float32),
        *(groups, dim, state_dim, rows.stride(1), into.stride(1), out_of.stride(1)),
        HAS_SKIP=skip is not None,
        BLOCK_DIM=SCANS.rows,
        BLOCK_STATE=triton.next_power_of_2(state_dim),
        **_OPTIONS,
    )
    return out


def _count(runs: Runs) -> int:
    return len(runs.table) if isinstance(runs, StateTable) else len(runs)


def _by_rows(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the numbers, [1, rows, heads, dim], with those of a row side by side."""
    is_one_row = numbers.stride(3) == 1 and numbers.stride(2) == numbers.shape[3]
    return numbers if is_one_row else numbers.contiguous()


def _table(runs: Runs, num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Returns a table as that of a `StateTable`, and how many numbers behind its addresses the states are."""
    for state in [runs.state] if isinstance(runs, StateTable) else [state for _, state in runs]:
        if state.shape != shape or state.dtype is not dtype or not state.is_contiguous():
            raise ValueError(f"a state of {state.dtype} {list(state.shape)}, {dtype} {list(shape)} expected")
    if isinstance(runs, StateTable):
        return runs.table, int(runs.state.storage_offset())
    found, row = [], 0
    for rows, state in runs:
        found.append([row, rows, state.data_ptr()])
        row += rows
    assert row == num_rows
    return uploaded(np.array(found, np.int64), runs[0][1].device), 0
