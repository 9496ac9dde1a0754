"""The parts of a model that kernels in Triton compute on an accelerator (`accelerator`): products, attention, norms.

On a CPU they run in Triton's interpreter, slowly, if the environment variable TRITON_INTERPRET is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from diskprefix.kv.layers import AppendedRows
from diskprefix.kv.sizes import TILE
from diskprefix.kv.step import Step, is_accelerated
from diskprefix.model.exact.patterns import NotInvariant, Pattern
from diskprefix.native.blocks import Norm

if TYPE_CHECKING:
    from diskprefix.accelerator.grouped import GroupedMatrix
    from diskprefix.accelerator.operators import Routes, Runs, RunTable


def why_not(device: torch.device) -> str:
    """Returns why the kernels do not compute on a device, "" if they do."""
    if not is_accelerated(device):
        return f"Triton, whose kernels make a model exact at every token, does not run on {device.type}"
    try:
        _operators()
    except ImportError as error:
        return f"it needs Triton: {error}"
    return ""


@cache
def _operators() -> ModuleType:
    # Only for models on an accelerator: it takes a while, and torch's build for CPUs comes without Triton.
    from diskprefix.accelerator import operators

    return operators


@cache
def scan_operators() -> ModuleType:
    """Returns the functions for recurrences, and for sums along a row."""
    from diskprefix.accelerator import scan_operators

    return scan_operators


def uploaded(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Returns numbers on a device, without waiting for an accelerator."""
    if not is_accelerated(device):
        return torch.from_numpy(numbers)
    found: torch.Tensor = _operators().uploaded(numbers, device)
    return found


def staged(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Returns numbers in main memory that a device copies from."""
    found: torch.Tensor = _operators().staged(numbers, device)
    return found


def kernel(device: torch.device) -> str:
    """Returns the version of the kernels and of their tiles on a device, for the identity."""
    return str(_operators().identity(device))


def grouped(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int) -> GroupedMatrix:
    """Returns a quantised matrix as the kernels take it; the arguments are those of `GroupedMatrix`."""
    from diskprefix.accelerator.grouped import GroupedMatrix

    return GroupedMatrix(codes, scales, zeros, bits=bits)


def grouped_product(matrix: GroupedMatrix, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Returns [.., outer] for rows [.., inner] and a quantised matrix."""
    found: torch.Tensor = _operators().product(rows, matrix, bias)
    return found


def routes(chosen: torch.Tensor, num_experts: int, dtype: torch.dtype) -> Routes:
    """Returns the rows of each expert; the arguments are those of `Routes.of`."""
    found: Routes = _operators().Routes.of(chosen, num_experts, dtype)
    return found


def expert_product(
    rows: torch.Tensor, matrices: torch.Tensor | GroupedMatrix, bias: torch.Tensor | None, routes: Routes
) -> torch.Tensor:
    """Returns [pairs, outer] for the rows of each expert and its matrix."""
    if isinstance(matrices, torch.Tensor) and matrices.dtype is not rows.dtype:
        raise NotInvariant(f"experts of {matrices.dtype} for rows of {rows.dtype}")
    found: torch.Tensor = _operators().expert_product(rows, matrices, bias, routes)
    return found


def product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, *, is_plain: bool) -> torch.Tensor:
    """Returns [.., outer] for rows [.., inner] and a matrix [outer, inner], or [inner, outer] with `is_plain`."""
    if rows.dtype not in _operators().DTYPES or matrix.dtype is not rows.dtype or matrix.ndim != 2:
        raise NotInvariant(f"a product of {rows.dtype} and {matrix.dtype}")
    found: torch.Tensor = _operators().product(rows, matrix, bias, is_plain=is_plain)
    return found


def normed(norm: Norm, rows: torch.Tensor) -> torch.Tensor:
    """Returns the norm of rows [.., width], in their dtype, which is that of the weight."""
    found: torch.Tensor = _operators().norm(rows, norm.weight, norm.kind, norm.epsilon)
    return found


def attend(step: Step, query: torch.Tensor, appended: AppendedRows, pattern: Pattern, **options: Any) -> torch.Tensor:
    """Writes the rows of a step to the memory of their sequences. Returns the attention's output for `query`, [heads,
    rows, key_dim], of shape [rows, heads, value_dim]."""
    first = appended.layers[0]
    for layer, run in zip(appended.layers, step.runs, strict=True):
        if layer.first > pattern.first_visible(run.start) // TILE * TILE:
            raise NotInvariant("attention to tokens that the cache does not keep")
    operators, dim = _operators(), max(query.shape[-1], first.values.shape[-1])
    if query.dtype not in operators.DTYPES or first.keys.dtype is not query.dtype or dim > operators.MAX_DIM:
        raise NotInvariant(f"attention in {query.dtype} over {first.keys.dtype} with heads of {dim}")
    runs = runs_of(step, appended)
    numbers = operators.number_of(first.keys[0]), operators.number_of(first.values[0])
    operators.keep(runs, appended.keys[0], appended.values[0], numbers)
    found: torch.Tensor = operators.attention(
        query, runs, numbers, first.keys.shape[1], first.values.shape[-1],
        window=pattern.window or 0, chunk=pattern.chunk or 0, **options,
    )  # fmt: skip
    return found


def runs_of(step: Step, appended: AppendedRows) -> Runs:
    """Returns the runs of a step as kernels take them. Layers whose memory lies in the same tensors share them."""
    first = appended.layers[0]
    key = tuple(memory.untyped_storage().data_ptr() for memory in (first.keys, first.values))
    found: Runs | None = step.tables.get(key)
    if found is None:
        # Of a sequence that computes alone, as its model does not pack.
        memory = ((layer.keys, layer.values) for layer in appended.layers)
        rows = [
            (run.start, run.num_rows, keys[None], values[None], layer.first, layer.first)
            for run, layer, (keys, values) in zip(step.runs, appended.layers, memory, strict=True)
        ]
        found = step.tables[key] = _operators().Runs(run_table(rows), device=first.keys.device)
    return found


def run_table(runs: Sequence[tuple[int, int, torch.Tensor, torch.Tensor, int, int]]) -> RunTable:
    """Returns the runs of a step and their memory; the numbers and tensors are those of `PlacedRun`."""
    operators = _operators()
    found: RunTable = operators.RunTable.of([operators.PlacedRun(*run) for run in runs])
    return found


def one_tile_each(num_runs: int) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = _operators().one_tile_each(num_runs)
    return found


def runs(table: RunTable, end: int, rows: torch.Tensor, tiles: torch.Tensor) -> Runs:
    """Returns a table whose rows and tiles are on the device; the arguments are those of `Runs`."""
    found: Runs = _operators().Runs(table, end, rows, tiles)
    return found


def state_runs(step: Step, states: Sequence[torch.Tensor]) -> Any:
    """Returns the runs of a step with their states, as functions for recurrences take them; None if the step has no
    table of them."""
    table = step.tables.get(states[0].untyped_storage().data_ptr())
    return None if table is None else scan_operators().StateTable(table, states[0])


def spans_before(end: int) -> int:
    """Returns the number of spans that attention has up to a position."""
    return -(-end // int(_operators().SPAN))


def span_end(num_spans: int) -> int:
    return num_spans * int(_operators().SPAN)
