"""Operators called with torch's tensors, each as a plan of one operation."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diskprefix.native import calls, packing
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix
from diskprefix.runtime.plan.quants import forms
from diskprefix.runtime.plan.quants.quant_form import QuantForm
from tests.arrays import array_of

DTYPES = {torch.float32: calls.FLOAT32, torch.bfloat16: calls.BFLOAT16}

Runs = Sequence[tuple[int, torch.Tensor, torch.Tensor]]
"""For each sequence the number of its rows, the state before them, [1, ..], and where the one behind them goes, which
may be the same tensor."""


def run(operators: Operators, kind: int, call: ctypes.Structure, num_rows: int, runs: Runs = ()) -> None:
    operation = calls.Operation(kind, 0, ctypes.addressof(call))
    plan = calls.Operations(1, ctypes.addressof(operation))
    described, addresses = (calls.PlanRun * max(1, len(runs)))(), list[ctypes.Array[ctypes.c_void_p]]()
    for place, (rows, *states) in zip(described, runs, strict=False):
        addresses += [(ctypes.c_void_p * 1)(state.data_ptr()) for state in states]
        # Before its first token a sequence has zeros.
        place.start, place.num_rows = 1, rows
        place.befores, place.states = map(ctypes.addressof, addresses[-2:])
    step = (num_rows, 0, len(runs), 1, 0, ctypes.addressof(described), num_threads())
    assert not operators.run(bytes(plan), bytes(calls.PlanStep(*step)))


def attention(
    operators: Operators,
    query: torch.Tensor,
    runs: Sequence[calls.RunCall],
    *,
    kv_heads: int,
    value_dim: int,
    sinks: torch.Tensor | None = None,
    **form: Any,
) -> torch.Tensor:
    """Returns [rows, heads, value_dim] for queries [heads, rows, key_dim]."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    heads, rows, key_dim = query.shape
    out = torch.empty((rows, heads, value_dim), dtype=query.dtype)
    call = calls.AttentionCall(
        dtype=DTYPES[query.dtype], num_heads=heads, num_kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim,
        num_runs=len(runs), query=query.data_ptr(), query_head_stride=query.stride(0),
        query_row_stride=query.stride(1), out=out.data_ptr(), sinks=0 if sinks is None else sinks.data_ptr(),
        num_threads=num_threads(), **form,
    )  # fmt: skip
    assert not operators.attention(bytes(call), b"".join(map(bytes, runs)))
    return out


def in_q8(operators: Operators, rows: torch.Tensor) -> torch.Tensor:
    """Rows [tokens, heads, dim] as memory in 8 bits, uint8 [heads, tokens, bytes]."""
    num_rows, heads, dim = rows.shape
    out = torch.full((heads, num_rows, -(-dim // 32) * 34), 255, dtype=torch.uint8)
    page = (ctypes.c_void_p * 1)(out.data_ptr())
    table = (ctypes.c_void_p * 1)(ctypes.addressof(page))
    memory = calls.PagedRowsCall(0, 0, num_rows * -(-dim // 32), -(-dim // 32), 1)
    call = calls.NormRotateStoreCall(
        dtype=DTYPES[rows.dtype], num_heads=heads, dim=dim, row_stride=heads * dim, rows=rows.data_ptr(), to=memory
    )
    operation, sequence = (
        calls.Operation(calls.NORM_ROTATE_STORE, 0, ctypes.addressof(call)),
        calls.PlanRun(0, num_rows),
    )
    sequence.tables = ctypes.addressof(table)
    step = calls.PlanStep(num_rows, 0, 1, num_rows, 0, ctypes.addressof(sequence), num_threads())
    assert not operators.run(bytes(calls.Operations(1, ctypes.addressof(operation))), bytes(step))
    return out


def matrix(weights: torch.Tensor, size: tuple[int, int], *, bias: torch.Tensor | None = None, **form: Any) -> Matrix:
    return Matrix(array_of(weights), size, bias=None if bias is None else array_of(bias.float()), **form)


def matrix_of(packed: torch.Tensor, form: QuantForm, bias: torch.Tensor | None) -> Matrix:
    return forms.matrix_of(array_of(packed), form, None if bias is None else array_of(bias.float()))


def pack(operators: Operators, kind: str, content: torch.Tensor, order: torch.Tensor | None, out: torch.Tensor) -> None:
    packing.pack(operators, kind, array_of(content), None if order is None else array_of(order), array_of(out))


def product(operators: Operators, rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """bfloat16 rows [rows, columns] → [rows, rows of the matrix]."""
    rows = rows.contiguous()
    out = rows.new_empty(len(rows), matrix.rows)
    call = calls.ProductCall(num_matrices=1, rows=rows.data_ptr())
    call.matrices[0], call.outs[0] = matrix.address, out.data_ptr()
    run(operators, calls.PRODUCT, call, len(rows))
    return out


def rows_of(operators: Operators, matrix: Matrix, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a quantised matrix, bfloat16 [ids, columns]."""
    out = torch.empty(len(ids), matrix.columns, dtype=torch.bfloat16)
    call = calls.LookupCall(ids=ids.data_ptr(), matrix=matrix.address, out=out.data_ptr())
    run(operators, calls.LOOK_UP, call, len(ids))
    return out


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of a mixture. Curves are bfloat16 [65 537]."""

    gate: Sequence[Matrix]
    up: Sequence[Matrix]
    down: Sequence[Matrix]
    curve: torch.Tensor
    up_curve: torch.Tensor | None = None

    def __call__(
        self, operators: Operators, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """bfloat16 rows [rows, width]; the experts of each and their weights, [rows, count]."""
        rows, chosen, weights = rows.contiguous(), chosen.contiguous(), weights.contiguous()
        gate, up, down = (
            torch.tensor([one.address for one in matrices]) for matrices in (self.gate, self.up, self.down)
        )
        out = torch.empty_like(rows)
        call = calls.ExpertsCall(
            num_chosen=chosen.shape[1], num_experts=len(gate), rows=rows.data_ptr(), chosen=chosen.data_ptr(),
            weights=weights.data_ptr(), gate=gate.data_ptr(), up=up.data_ptr() if self.up else 0, down=down.data_ptr(),
            curve=self.curve.data_ptr(), up_curve=0 if self.up_curve is None else self.up_curve.data_ptr(),
            out=out.data_ptr(),
        )  # fmt: skip
        run(operators, calls.EXPERTS, call, len(rows))
        return out


def norm(operators: Operators, rows: torch.Tensor, weight: torch.Tensor, kind: int, epsilon: float) -> torch.Tensor:
    """[.., width]."""
    rows, out = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
    call = calls.NormCall(
        dtype=DTYPES[rows.dtype], kind=kind, width=len(weight), rows=rows.data_ptr(), weight=weight.data_ptr(),
        out=out.data_ptr(), epsilon=epsilon,
    )  # fmt: skip
    run(operators, calls.NORM, call, rows.numel() // len(weight))
    return out


def head_products(
    operators: Operators, rows: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor, *, is_transposed: bool
) -> None:
    """Rows [heads, rows, inner] × matrices [heads, inner, outer], or if turned [heads, outer, inner]."""
    (heads, num_rows, inner), outer = rows.shape, out.shape[-1]
    call = calls.DenseProductCall(
        dtype=DTYPES[rows.dtype], is_transposed=is_transposed, num_heads=heads, inner=inner, outer=outer,
        rows=rows.data_ptr(), head_stride=rows.stride(0), row_stride=rows.stride(1),
        matrices=matrices.data_ptr(), matrix_stride=matrices.stride(0), line_stride=matrices.stride(1),
        out=out.data_ptr(), out_head_stride=out.stride(0), out_row_stride=out.stride(1),
    )  # fmt: skip
    run(operators, calls.DENSE, call, num_rows)


def packed_head_products(
    operators: Operators, rows: torch.Tensor, matrices: Sequence[Matrix], out: torch.Tensor
) -> None:
    """bfloat16 rows [heads, rows, inner], in `out` [heads, rows, outer]."""
    addresses = torch.tensor([one.address for one in matrices])
    call = calls.HeadProductCall(
        num_heads=len(matrices), rows=rows.data_ptr(), head_stride=rows.stride(0), row_stride=rows.stride(1),
        matrices=addresses.data_ptr(), out=out.data_ptr(), out_head_stride=out.stride(0), out_row_stride=out.stride(1),
    )  # fmt: skip
    run(operators, calls.HEAD_PRODUCT, call, rows.shape[1])


def convolution(
    operators: Operators,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: Runs,
    *,
    has_silu: bool,
) -> torch.Tensor:
    """Rows [1, rows, channels], a weight [channels, kernel], states [1, channels, kernel]."""
    (_, num_rows, channels), rows = rows.shape, rows.contiguous()
    out = torch.empty_like(rows)
    call = calls.ConvolutionCall(
        dtype=DTYPES[rows.dtype], channels=channels, kernel=weight.shape[1], has_silu=has_silu, row_stride=channels,
        rows=rows.data_ptr(), weight=weight.data_ptr(), bias=0 if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
    )  # fmt: skip
    run(operators, calls.CONVOLVE, calls.PlannedConvolutionCall(call), num_rows, runs)
    return out


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
    """Queries and keys [1, rows, key_heads, key_dim], values [1, rows, heads, value_dim], decays [1, rows, heads] or
    [1, rows, heads, key_dim], betas [1, rows, heads], states float32 [1, heads, key_dim, value_dim]."""
    (_, num_rows, heads, value_dim), (key_heads, key_dim) = value.shape, key.shape[2:]
    query, key, value, decay, beta = (one.contiguous() for one in (query, key, value, decay, beta))
    out = torch.empty_like(value)
    call = calls.DeltaRuleCall(
        dtype=DTYPES[value.dtype], heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim,
        decay_dim=key_dim if decay.ndim == 4 else 1, query=query.data_ptr(), key=key.data_ptr(),
        value=value.data_ptr(), query_stride=query.stride(1), key_stride=key.stride(1), value_stride=value.stride(1),
        decay=decay.data_ptr(), beta=beta.data_ptr(), out=out.data_ptr(), epsilon=epsilon,
    )  # fmt: skip
    run(operators, calls.DELTA_RULE, calls.PlannedDeltaRuleCall(call), num_rows, runs)
    return out


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
    """Rows [1, rows, heads, dim], steps [1, rows, heads], A and D [heads], B and C [1, rows, groups, state_dim], states
    float32 [1, heads, dim, state_dim]; float32."""
    (_, num_rows, heads, dim), (groups, state_dim) = rows.shape, into.shape[2:]
    rows, steps, into, out_of = (one.contiguous() for one in (rows, steps, into, out_of))
    out = torch.empty(rows.shape, dtype=torch.float32)
    call = calls.StateSpaceCall(
        dtype=DTYPES[rows.dtype], heads=heads, groups=groups, dim=dim, state_dim=state_dim, rows=rows.data_ptr(),
        into=into.data_ptr(), from_=out_of.data_ptr(), row_stride=rows.stride(1), into_stride=into.stride(1),
        from_stride=out_of.stride(1), steps=steps.data_ptr(), decay=decay.data_ptr(),
        skip=0 if skip is None else skip.data_ptr(), out=out.data_ptr(),
    )  # fmt: skip
    run(operators, calls.STATE_SPACE, calls.PlannedStateSpaceCall(call), num_rows, runs)
    return out


def gate(operators: Operators, numbers: torch.Tensor, function: str) -> torch.Tensor:
    """A function of float32 numbers [count]."""
    out = torch.empty_like(numbers)
    call = calls.GateCall(
        dtype=calls.FLOAT32, width=len(numbers), each=1, function=calls.FUNCTIONS[function], factor=1.0,
        gate=numbers.data_ptr(), out=out.data_ptr(),
    )  # fmt: skip
    run(operators, calls.GATE, call, 1)
    return out


def angles(
    operators: Operators, positions: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [positions, frequencies]."""
    cosines, sines = (torch.empty(len(positions), len(frequencies)) for _ in range(2))
    call = calls.AnglesCall(
        dtype=calls.FLOAT32, half=len(frequencies), axis_stride=len(positions), positions=positions.data_ptr(),
        frequencies=frequencies.data_ptr(), factor=1.0, cosines=cosines.data_ptr(), sines=sines.data_ptr(),
    )  # fmt: skip
    run(operators, calls.ANGLES, call, len(positions))
    return cosines, sines
