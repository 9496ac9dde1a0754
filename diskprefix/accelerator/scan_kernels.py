"""Kernels in Triton for layers with a state, computed strictly token after token, and for sums along a row.

A program goes over all tokens of one sequence for some channels, or for some columns of the state of a head. `runs`,
int64 [runs, 3], are the first row of a sequence in the step, the number of its rows, and an address; `behind` it, so
many numbers, lies its state, which is changed in place. So each number is one chain of operations, however the tokens
are cut into steps. A compiler orders a sum by the layout of what was loaded. The alignment of rows, which steps may
change, is hidden from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diskprefix.accelerator.kernels import LOG2_E


@triton.jit(do_not_specialize_on_alignment=["rows", "row_stride"])
def row_sums(rows, out, width, row_stride, divisor, BLOCK: tl.constexpr):
    """Computes the sum of one row, divided by `divisor`."""
    number, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    found = tl.load(rows + number * row_stride + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + number, (tl.sum(found, 0) / divisor).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["behind"])
def convolution(
    rows,
    weight,
    bias,
    out,
    runs,
    behind,
    channels,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the causal convolution of each channel, rows [.., channels] → out. A state, [channels, kernel], has the
    last inputs. `TAPS` is the power of two from `KERNEL` on."""
    of_run = runs + 3 * tl.program_id(0)
    first, num_rows = tl.load(of_run), tl.load(of_run + 1).to(tl.int32)
    state = tl.load(of_run + 2).to(tl.pointer_type(rows.dtype.element_ty)) + behind
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = at < channels
    from_rows = rows + first * channels + at[None, :]
    for start in range(0, num_rows, BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        is_in = (tokens < num_rows)[:, None] & is_channel[None, :]
        total = tl.zeros((BLOCK_TOKENS, BLOCK), dtype=tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + at, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(KERNEL):
            position = (tokens + tap - (KERNEL - 1))[:, None]
            before = tl.load(state + at[None, :] * KERNEL + KERNEL + position, mask=is_in & (position < 0), other=0.0)
            inside = tl.load(from_rows + position.to(tl.int64) * channels, mask=is_in & (position >= 0), other=0.0)
            number = tl.where(position < 0, before, inside).to(tl.float32)
            total += number * tl.load(weight + at * KERNEL + tap, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if HAS_SILU:
            total = total.to(rows.dtype.element_ty).to(tl.float32)
            total = total / (1.0 + tl.exp2(-total * LOG2_E))
        to = out + (first + tokens.to(tl.int64))[:, None] * channels + at[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=is_in)
    taps = tl.arange(0, TAPS)
    position = (num_rows - KERNEL + taps)[:, None]
    is_in = (taps < KERNEL)[:, None] & is_channel[None, :]
    before = tl.load(state + at[None, :] * KERNEL + KERNEL + position, mask=is_in & (position < 0), other=0.0)
    inside = tl.load(from_rows + position.to(tl.int64) * channels, mask=is_in & (position >= 0), other=0.0)
    # The state is read by all threads of the program before one of them writes.
    tl.debug_barrier()
    tl.store(state + at[None, :] * KERNEL + taps[:, None], tl.where(position < 0, before, inside), mask=is_in)


@triton.jit
def _of_length(numbers, epsilon):
    return numbers * (1.0 / tl.sqrt_rn(tl.sum(numbers * numbers, 0) + epsilon))


@triton.jit(
    do_not_specialize=["behind"],
    do_not_specialize_on_alignment=["query", "key", "value", "query_stride", "key_stride", "value_stride"],
)
def delta_rule(
    query,
    key,
    value,
    decay,
    beta,
    out,
    runs,
    behind,
    key_heads,
    key_dim,
    value_dim,
    query_stride,
    key_stride,
    value_stride,
    scale,
    epsilon,
    HAS_LENGTH: tl.constexpr,
    HAS_DECAYS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Computes the gated delta rule for some columns of the state of a head, [key_dim, value_dim]. With `HAS_DECAYS`
    each row of the state has a decay of its own."""
    of_run, head, heads = runs + 3 * tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, num_rows = tl.load(of_run), tl.load(of_run + 1).to(tl.int32)
    at_key, at_value = tl.arange(0, BLOCK_KEY), tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    is_key, is_value = at_key < key_dim, at_value < value_dim
    of_state = tl.load(of_run + 2).to(tl.pointer_type(tl.float32)) + behind + head * key_dim * value_dim
    of_state += at_key[:, None] * value_dim + at_value[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state = tl.load(of_state, mask=is_state, other=0.0)
    of_key = head // (heads // key_heads) * key_dim + at_key
    for token in range(num_rows):
        row = first + token
        asked = tl.load(query + row * query_stride + of_key, mask=is_key, other=0.0).to(tl.float32)
        known = tl.load(key + row * key_stride + of_key, mask=is_key, other=0.0).to(tl.float32)
        if HAS_LENGTH:
            asked, known = _of_length(asked, epsilon), _of_length(known, epsilon)
        asked = asked * scale
        number = row * heads + head
        if HAS_DECAYS:
            decays = tl.load(decay + number * key_dim + at_key, mask=is_key, other=0.0)
            state = state * tl.exp2(decays * LOG2_E)[:, None]
        else:
            state = state * tl.exp2(tl.load(decay + number) * LOG2_E)
        values = tl.load(value + row * value_stride + head * value_dim + at_value, mask=is_value, other=0.0)
        change = (values.to(tl.float32) - tl.sum(state * known[:, None], 0)) * tl.load(beta + number)
        state = state + known[:, None] * change[None, :]
        found = tl.sum(state * asked[:, None], 0)
        tl.store(out + number * value_dim + at_value, found.to(out.dtype.element_ty), mask=is_value)
    tl.store(of_state, state, mask=is_state)


@triton.jit(
    do_not_specialize=["behind"],
    do_not_specialize_on_alignment=["rows", "into", "out_of", "row_stride", "into_stride", "out_of_stride"],
)
def state_space(
    rows,
    steps,
    decay,
    into,
    out_of,
    skip,
    out,
    runs,
    behind,
    groups,
    dim,
    state_dim,
    row_stride,
    into_stride,
    out_of_stride,
    HAS_SKIP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
):
    """Computes the state space of Mamba 2 for some rows of the state of a head, [dim, state_dim]."""
    of_run, head, heads = runs + 3 * tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, num_rows = tl.load(of_run), tl.load(of_run + 1).to(tl.int32)
    at_dim, at_state = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_STATE)
    is_dim, is_column = at_dim < dim, at_state < state_dim
    of_state = tl.load(of_run + 2).to(tl.pointer_type(tl.float32)) + behind + head * dim * state_dim
    of_state += at_dim[:, None] * state_dim + at_state[None, :]
    is_state = is_dim[:, None] & is_column[None, :]
    state = tl.load(of_state, mask=is_state, other=0.0)
    of_group, of_head = head // (heads // groups) * state_dim + at_state, tl.load(decay + head)
    for token in range(num_rows):
        row = first + token
        number = row * heads + head
        step = tl.load(steps + number)
        inputs = tl.load(rows + row * row_stride + head * dim + at_dim, mask=is_dim, other=0.0).to(tl.float32)
        came = tl.load(into + row * into_stride + of_group, mask=is_column, other=0.0).to(tl.float32)
        asked = tl.load(out_of + row * out_of_stride + of_group, mask=is_column, other=0.0).to(tl.float32)
        state = state * tl.exp2(step * of_head * LOG2_E) + (inputs * step)[:, None] * came[None, :]
        found = tl.sum(state * asked[None, :], 1)
        if HAS_SKIP:
            found += inputs * tl.load(skip + head)
        tl.store(out + number * dim + at_dim, found, mask=is_dim)
    tl.store(of_state, state, mask=is_state)
