"""The compiled recurrences: what transformers computes, and the same bits however the tokens are cut and packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from diskprefix.native.compute_threads import use_threads
from diskprefix.native.library import Operators
from tests.native import one_operation as scans

ROWS, HEADS, KEY_HEADS, DIM = 37, 4, 2, 40
"""A head's size fills no vectors."""
KERNEL = 4

Scan = Callable[[slice, scans.Runs], torch.Tensor]
"""Of some rows of an input; the states change."""


def made_up(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))


def convolution(operators: Operators, dtype: torch.dtype) -> tuple[Scan, torch.Tensor]:
    rows, weight, bias = (made_up(*shape).to(dtype) for shape in ((ROWS, DIM), (DIM, KERNEL), (DIM,)))

    def scan(part: slice, runs: scans.Runs) -> torch.Tensor:
        return scans.convolution(operators, rows[:, part], weight[0], bias[0], runs, has_silu=True)

    return scan, made_up(DIM, KERNEL).to(dtype)


def delta_rule(operators: Operators, dtype: torch.dtype, *, of_keys: bool = False) -> tuple[Scan, torch.Tensor]:
    query, key, value = (made_up(ROWS, heads, DIM).to(dtype) for heads in (KEY_HEADS, KEY_HEADS, HEADS))
    decay = -made_up(ROWS, HEADS, *[DIM] * of_keys).abs()
    beta = made_up(ROWS, HEADS).sigmoid()

    def scan(part: slice, runs: scans.Runs) -> torch.Tensor:
        of_heads = query[:, part], key[:, part], value[:, part]
        return scans.delta_rule(operators, *of_heads, decay[:, part], beta[:, part], runs, 1e-6)

    return scan, made_up(HEADS, DIM, DIM)


def state_space(operators: Operators, dtype: torch.dtype) -> tuple[Scan, torch.Tensor]:
    rows, into, out_of = (made_up(ROWS, heads, DIM).to(dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    steps, decay = made_up(ROWS, HEADS).abs(), -made_up(HEADS).abs()[0]

    def scan(part: slice, runs: scans.Runs) -> torch.Tensor:
        inputs = rows[:, part], steps[:, part], decay, into[:, part], out_of[:, part]
        return scans.state_space(operators, *inputs, decay, runs)

    return scan, made_up(HEADS, DIM, DIM)


SCANS: dict[str, Callable[[Operators, torch.dtype], tuple[Scan, torch.Tensor]]] = {
    "convolution": convolution,
    "delta rule": delta_rule,
    "delta rule of keys": partial(delta_rule, of_keys=True),
    "state space": state_space,
}


@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_and_states_have_the_same_bits_however_they_are_cut_and_packed(
    operators: Operators, kind: str, dtype: torch.dtype
) -> None:
    scan, state = SCANS[kind](operators, dtype)
    use_threads(1)
    whole = state.clone()
    expected = scan(slice(0, ROWS), [(ROWS, whole, whole)])
    use_threads(2)
    found, start, before, after = [], 0, state.clone(), torch.full_like(state, torch.nan)
    for end in (1, 2, 7, 30, ROWS):
        kept = before.clone()
        found.append(scan(slice(start, end), [(end - start, before, after)]))
        assert torch.equal(before, kept)
        start, before, after = end, after, before
    assert torch.equal(torch.cat(found, dim=1), expected)
    assert torch.equal(before, whole)
    first, second = state.clone(), torch.full_like(state, torch.nan)
    together = scan(slice(0, ROWS), [(9, first, first), (ROWS - 9, state, second)])
    assert torch.equal(together[:, :9], expected[:, :9])
    alone = state.clone()
    assert torch.equal(together[:, 9:], scan(slice(9, ROWS), [(ROWS - 9, alone, alone)]))
    assert torch.equal(alone, second)


@pytest.mark.parametrize("of_keys", [False, True])
def test_a_nan_decay_makes_a_nan_state(operators: Operators, of_keys: bool) -> None:
    query, key = made_up(1, KEY_HEADS, DIM), made_up(1, KEY_HEADS, DIM)
    decay, state = -made_up(1, HEADS, *[DIM] * of_keys).abs(), made_up(HEADS, DIM, DIM)
    decay[:, :, 1] = torch.nan
    scans.delta_rule(operators, query, key, made_up(1, HEADS, DIM), decay, made_up(1, HEADS), [(1, state, state)], 1e-6)
    assert state[0, 1].isnan().all()
    state = made_up(HEADS, DIM, DIM)
    rows, into = made_up(1, HEADS, DIM), made_up(1, KEY_HEADS, DIM)
    steps, rates = made_up(1, HEADS).abs(), -made_up(HEADS).abs()[0]
    rates[1] = torch.nan
    scans.state_space(operators, rows, steps, rates, into, into, None, [(1, state, state)])
    assert state[0, 1].isnan().all()
    assert state[0, 0].isfinite().all()


def test_the_convolution_is_that_of_torch(operators: Operators) -> None:
    rows, weight, state = made_up(ROWS, DIM), made_up(DIM, KERNEL)[0], made_up(DIM, KERNEL, seed=2)
    inputs = torch.cat([state[..., 1:], rows.mT], dim=-1)
    expected = functional.silu(functional.conv1d(inputs, weight[:, None], groups=DIM)).mT
    found = scans.convolution(operators, rows, weight, None, [(ROWS, state, state)], has_silu=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state, inputs[..., -KERNEL:])


def test_the_delta_rule_is_that_of_transformers(operators: Operators) -> None:
    query, key = made_up(ROWS, KEY_HEADS, DIM), made_up(ROWS, KEY_HEADS, DIM, seed=2)
    value, state = made_up(ROWS, HEADS, DIM), made_up(HEADS, DIM, DIM)
    decay, beta = -made_up(ROWS, HEADS).abs(), made_up(ROWS, HEADS).sigmoid()
    expected = torch_recurrent_gated_delta_rule(
        query, key, value, decay, beta, state.clone(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    found = scans.delta_rule(operators, query, key, value, decay, beta, [(ROWS, state, state)], 1e-6)
    torch.testing.assert_close((found, state), tuple(expected), rtol=1e-4, atol=1e-5)


def test_the_state_space_is_that_of_transformers(operators: Operators) -> None:
    rows, into, out_of = (made_up(ROWS, heads, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    steps, decay, state = made_up(ROWS, HEADS).abs(), -made_up(HEADS).abs()[0], made_up(HEADS, DIM, DIM)
    expected = mamba2_chunk_scan(
        rows, steps, decay, into, out_of, 16, D=decay, initial_states=state.clone(), return_final_states=True
    )
    found = scans.state_space(operators, rows, steps, decay, into, out_of, decay, [(ROWS, state, state)])
    torch.testing.assert_close((found, state), tuple(expected), rtol=1e-4, atol=1e-4)
