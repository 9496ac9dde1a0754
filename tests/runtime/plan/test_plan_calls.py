"""A call of a plan has the addresses, strides and sizes of its operands. Operands that it cannot hold are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from diskprefix.native import calls
from diskprefix.runtime.plan.operands import Buffer, Weight, WeightedNorm
from diskprefix.runtime.plan.plan import ComputePlan


@pytest.fixture
def plan() -> ComputePlan:
    return ComputePlan(calls.BFLOAT16, max_rows=4, vocab_size=100)


def weight(*shape: int) -> Weight:
    numbers = np.zeros(shape, np.uint16)
    return Weight(numbers.ctypes.data, shape, numbers)


def test_a_buffer_is_its_address_and_its_stride(plan: ComputePlan) -> None:
    rows, gate = plan.rows(64), plan.rows(96)
    out = plan.gated(gate.part(32, 64), rows, "silu")
    [made] = plan.operations
    call = made.call
    assert (call.gate, call.gate_stride) == (gate.address + 32 * 2, 96)
    assert (call.up, call.up_stride, call.out, call.width) == (rows.address, 64, out.address, 64)
    assert (made.kind, call.dtype, made.is_of_logits) == (calls.GATE, calls.BFLOAT16, False)


def test_a_stride_may_be_in_bytes(plan: ComputePlan) -> None:
    rows = plan.rows(64)
    out = plan.per_group(rows, 4, 4, 8)
    [made] = plan.operations
    assert (made.call.source, made.call.row_bytes, made.call.head_bytes) == (rows.address + 8, 128, 32)
    assert (made.call.out, made.call.out_row_bytes, made.call.out_head_bytes) == (out.address, 64, 16)


def test_a_norm_is_its_weights_its_kind_and_its_epsilon(plan: ComputePlan) -> None:
    norm = WeightedNorm(weight(16), calls.ONE_MORE, 0.5)
    plan.norm(plan.rows(16), norm)
    plan.norm_rotate_store(plan.rows(32), 16, norm=norm)
    of_rows, of_heads = plan.operations
    assert (of_rows.call.weight, of_rows.call.kind, of_rows.call.epsilon) == (norm.weight.address, calls.ONE_MORE, 0.5)
    assert (of_heads.call.norm, of_heads.call.norm_kind, of_heads.call.epsilon) == (*vars_of(norm),)
    assert of_rows.kept == of_heads.kept == (norm,)


def vars_of(norm: WeightedNorm) -> tuple[int, int, float]:
    return norm.weight.address, norm.kind, norm.epsilon


def part(plan: ComputePlan) -> Buffer:
    return plan.rows(64).part(0, 32)


SIDE_BY_SIDE: dict[str, Callable[[ComputePlan], object]] = {
    "norm": lambda plan: plan.norm(part(plan), WeightedNorm(weight(32), calls.ROUNDED, 0.0)),
    "widened": lambda plan: plan.widened(part(plan)),
    "select_logit_rows": lambda plan: plan.select_logit_rows(part(plan)),
    "add": lambda plan: plan.add(plan.rows(32), part(plan)),
    "add to": lambda plan: plan.add(part(plan), plan.rows(32)),
    "scale": lambda plan: plan.scale(part(plan), 2.0),
    "scale_by_position": lambda plan: plan.scale_by_position(part(plan), 1, 64, 0.5),
    "match_rms": lambda plan: plan.match_rms(plan.rows(32), part(plan)),
    "sparsify_gate": lambda plan: plan.sparsify_gate(part(plan), 1.0),
    "pictures": lambda plan: plan.pictures(part(plan)),
}


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_numbers_that_do_not_lie_side_by_side_are_refused_without_a_field_for_the_stride(
    name: str, plan: ComputePlan
) -> None:
    with pytest.raises(ValueError, match="numbers that do not lie side by side"):
        SIDE_BY_SIDE[name](plan)
    assert plan.operations == []


def test_rows_with_logits_and_all_rows_are_not_mixed(plan: ComputePlan) -> None:
    with pytest.raises(ValueError, match="rows of other tokens"):
        plan.add(plan.rows(32), plan.rows(32, is_of_logits=True))
    assert plan.operations == []


def test_an_operand_that_the_call_does_not_have_is_refused(plan: ComputePlan) -> None:
    """The assignment alone would set an attribute that no operator reads."""
    with pytest.raises(AssertionError, match="GateSparsityCall has no deviation"):
        plan._call(calls.SPARSIFY_GATE, rows=plan.rows(32), deviation=1.0)


def test_layers_use_the_buffers_of_earlier_layers_again(plan: ComputePlan) -> None:
    kept = plan.rows(32)
    addresses = list[int]()
    for _ in range(2):
        with plan.scratch():
            addresses.append(plan.copy(kept).address)
    assert addresses[0] == addresses[1] != kept.address
    assert (len(plan.buffers), plan.layers) == (2, [range(1), range(1, 2)])
