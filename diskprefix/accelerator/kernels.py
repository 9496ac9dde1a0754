"""Kernels in Triton whose result for a row has one order of operations, whatever else is computed with it.

No sum is shared between programs by the number of rows: tiles of a product and of keys are counted from 0, and sums
over tiles go in ascending order. Launches turn fusion of multiplication and addition off (`enable_fp_fusion`), because
a compiler fuses differently in different kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
"""Below every score, but finite: a difference of two of these is 0."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _numbers_of(codes, half: tl.constexpr, BITS: tl.constexpr, IS_E4M3: tl.constexpr):
    """Returns the numbers of codes, float32: integers, those of 4 bits in one half of a byte, or float8 (e4m3)."""
    if IS_E4M3:
        # As a float16 it has the same digits, and an exponent that is 8 less. Each device has those.
        bits = codes.to(tl.int16)
        small = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        numbers = small.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif BITS == 4:
        numbers = ((codes >> (4 * half)) & 15).to(tl.float32)
    else:
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def product(
    rows,
    matrix,
    scales,
    zeros,
    bias,
    out,
    order,
    tiles,
    num_rows,
    outer,
    inner,
    row_stride,
    outer_stride,
    inner_stride,
    scale_stride,
    matrix_size,
    scales_size,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    BITS: tl.constexpr,
    IS_E4M3: tl.constexpr,
    QUANT_GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
):
    """Computes rows [num_rows, inner] × matrix [outer, inner] + bias [outer] → out [num_rows, outer]. `IS_WHOLE` says
    that `inner` is a multiple of its block. Programs of `GROUP` blocks of rows read the same columns one after another.

    With fewer than 16 `BITS` the matrix has codes (`grouped.GroupedMatrix`): `QUANT_GROUP` columns share a scale and
    a zero, [outer, groups]. A weight is code × scale + zero, rounded to the dtype of the rows.

    With `NUM_CHOSEN` there is a matrix for each expert, of so many numbers and scales. `operators.Routes` describes
    `order` and `tiles`. A row of `out` is a pair of a row and a choice, and `NUM_CHOSEN` pairs have one row.
    """
    number = tl.program_id(0)
    blocks_of_rows, blocks_of_outer = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(outer, BLOCK_OUTER)
    if NUM_CHOSEN > 0:
        tile = tiles + 3 * (number // blocks_of_outer)
        expert, first, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
        places = first + tl.arange(0, BLOCK_ROWS)
        is_row = places < end
        at_rows = tl.load(order + places, mask=is_row, other=0)
        at_outer = number % blocks_of_outer * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
        of_rows = at_rows // NUM_CHOSEN
        matrix += expert * matrix_size
        scales += expert * scales_size
        zeros += expert * scales_size
        bias += expert * outer
        # There are more tiles than are needed.
        inner = tl.where(first < end, inner, 0)
    else:
        first = number // (GROUP * blocks_of_outer) * GROUP
        together = min(blocks_of_rows - first, GROUP)
        within = number % (GROUP * blocks_of_outer)
        at_rows = (first + within % together) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        at_outer = within // together * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
        is_row = at_rows < num_rows
        of_rows = tl.where(is_row, at_rows, 0)
    at_inner = tl.arange(0, BLOCK_INNER)
    is_outer = at_outer < outer
    # Rows and columns beyond the end are those of the beginning: they are not written.
    from_rows = rows + of_rows.to(tl.int64)[:, None] * row_stride + at_inner[None, :]
    of_outer = tl.where(is_outer, at_outer, 0).to(tl.int64)
    from_matrix = matrix + of_outer[None, :] * outer_stride + at_inner.to(tl.int64)[:, None] * inner_stride
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    GROUPS: tl.constexpr = BLOCK_INNER // QUANT_GROUP if QUANT_GROUP < BLOCK_INNER else 1
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTER), dtype=tl.float32)
    for start in range(0, inner, BLOCK_INNER * HALVES):
        if BITS < 16 or IS_WHOLE:
            found = tl.load(from_matrix)
        else:
            found = tl.load(from_matrix, mask=(at_inner < inner - start)[:, None], other=0.0)
        for half in tl.static_range(HALVES):
            at = start + half * BLOCK_INNER
            if IS_WHOLE:
                part = tl.load(from_rows + at)
            else:
                part = tl.load(from_rows + at, mask=(at_inner < inner - at)[None, :], other=0.0)
            columns = found
            if BITS < 16:
                of_groups = of_outer[None, :] * scale_stride + (at // QUANT_GROUP + tl.arange(0, GROUPS))[:, None]
                numbers = _numbers_of(found, half, BITS, IS_E4M3)
                numbers = tl.reshape(numbers, (GROUPS, BLOCK_INNER // GROUPS, BLOCK_OUTER))
                numbers *= tl.load(scales + of_groups).to(tl.float32)[:, None, :]
                if HAS_ZEROS:
                    numbers += tl.load(zeros + of_groups).to(tl.float32)[:, None, :]
                columns = tl.reshape(numbers, (BLOCK_INNER, BLOCK_OUTER)).to(part.dtype)
            if IS_WIDENED:
                part, columns = part.to(tl.float32), columns.to(tl.float32)
            total = tl.dot(part, columns, total, input_precision="ieee")
        from_matrix += BLOCK_INNER * inner_stride
    if HAS_BIAS:
        total += tl.load(bias + at_outer, mask=is_outer, other=0.0).to(tl.float32)[None, :]
    to = out + at_rows.to(tl.int64)[:, None] * outer + at_outer[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_outer[None, :])


@triton.jit(do_not_specialize_on_alignment=["rows", "row_stride"])
def norm(rows, weight, out, width, row_stride, epsilon, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the norm by the root of the mean square of one row. `KIND` is a `NormKind` of the compiled operators."""
    at = tl.arange(0, BLOCK)
    is_in = at < width
    number = tl.program_id(0).to(tl.int64)
    numbers = tl.load(rows + number * row_stride + at, mask=is_in, other=0.0).to(tl.float32)
    weights = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32)
    normed = numbers * (1.0 / tl.sqrt_rn(tl.sum(numbers * numbers, 0) / width + epsilon))
    dtype: tl.constexpr = out.dtype.element_ty
    if KIND == 0:
        normed = normed.to(dtype).to(tl.float32)
    if KIND == 2:
        weights += 1.0
    tl.store(out + number * width + at, (normed * weights).to(dtype), mask=is_in)


@triton.jit
def _merged(highest, total, taken, highest_of_part, total_of_part, taken_of_part):
    """Returns the attention of two parts of the keys together: highest score, sum of weights, sum of values."""
    higher = tl.maximum(highest, highest_of_part)
    kept, added = tl.exp2(highest - higher), tl.exp2(highest_of_part - higher)
    together = total * kept + total_of_part * added
    return higher, together, taken * kept[:, None] + taken_of_part * added[:, None]


@triton.jit
def _with_tile(
    highest,
    total,
    taken,
    queries,
    positions,
    first_visible,
    from_keys,
    from_values,
    start,
    end,
    scale,
    softcap,
    in_keys,
    in_values,
    is_key_dim,
    is_value_dim,
    IS_MASKED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Returns the attention of rows with one more tile of keys, which begins at position `start`. Without `IS_MASKED`
    each row sees all of them, which gives the bits that a mask would give."""
    at_keys = start + tl.arange(0, BLOCK_KEYS)
    if IS_MASKED:
        is_key = at_keys < end
        keys = tl.load(from_keys + in_keys, mask=is_key[None, :] & is_key_dim[:, None], other=0.0)
        values = tl.load(from_values + in_values, mask=is_key[:, None] & is_value_dim[None, :], other=0.0)
    elif IS_WHOLE:
        keys, values = tl.load(from_keys + in_keys), tl.load(from_values + in_values)
    else:
        keys = tl.load(from_keys + in_keys, mask=is_key_dim[:, None], other=0.0)
        values = tl.load(from_values + in_values, mask=is_value_dim[None, :], other=0.0)
    if IS_WIDENED:
        keys = keys.to(tl.float32)
    scores = tl.dot(queries, keys, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh of scores, which are in units of log2(e).
        doubled = tl.exp2(scores * (2.0 / softcap))
        scores = (1.0 - 2.0 / (doubled + 1.0)) * (softcap * LOG2_E)
    if IS_MASKED:
        is_seen = (at_keys[None, :] <= positions[:, None]) & (at_keys[None, :] >= first_visible[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights, kept = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
    total = total * kept + tl.sum(weights, 1)
    weights = weights.to(values.dtype)
    if IS_WIDENED:
        weights, values = weights.to(tl.float32), values.to(tl.float32)
    taken = tl.dot(weights, values, taken * kept[:, None], input_precision="ieee")
    return higher, total, taken


@triton.jit
def _first_visible(positions, window, chunk):
    """Returns the first position that each position sees. A `window` or `chunk` of 0 is none."""
    first = positions * 0
    if window > 0:
        first = tl.maximum(positions - window + 1, 0)
    if chunk > 0:
        first = positions - positions % chunk
    return first


@triton.jit
def attention(
    queries,
    runs,
    tiles,
    out,
    sums,
    parts,
    sinks,
    head_stride,
    row_stride,
    keys_number,
    values_number,
    scale,
    softcap,
    window,
    chunk,
    max_parts,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SPAN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Computes a tile of queries over the keys of one head, span after span. With `IS_SPLIT` it computes one span,
    whose part goes to `sums` and `parts`, for `attention_of_parts`. They have room for `max_parts` rows of a tile.

    A row of a tile is a token and one of the `GROUP` heads that share keys. `tiles`, int64 [.., 2], are a run and the
    run's first row in the tile. `runs` are described in `operators`; `keys_number` says which tensor of a run's memory
    has the keys, `values_number` which has the values.
    """
    tile, group = tl.program_id(0), tl.program_id(1)
    run, first_row = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1).to(tl.int32)
    of_run = runs + 11 * run
    start, num_rows = tl.load(of_run).to(tl.int32), tl.load(of_run + 1).to(tl.int32)
    element = tl.pointer_type(queries.dtype.element_ty)
    from_keys = tl.multiple_of(tl.load(of_run + 3), 2 * ALIGNMENT).to(element)
    from_keys += tl.multiple_of(keys_number * tl.load(of_run + 4) + group * tl.load(of_run + 5), ALIGNMENT)
    key_stride = tl.multiple_of(tl.load(of_run + 6), ALIGNMENT)
    from_values = tl.multiple_of(tl.load(of_run + 7), 2 * ALIGNMENT).to(element)
    from_values += tl.multiple_of(values_number * tl.load(of_run + 8) + group * tl.load(of_run + 9), ALIGNMENT)
    value_stride = tl.multiple_of(tl.load(of_run + 10), ALIGNMENT)

    in_tile = tl.arange(0, BLOCK_ROWS)
    at_rows = first_row + in_tile // GROUP
    at_heads = group * GROUP + in_tile % GROUP
    is_row = (at_rows < num_rows) & (in_tile < BLOCK_ROWS // GROUP * GROUP)
    positions = start + at_rows
    first_visible = _first_visible(positions, window, chunk)
    at_key, at_value = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    is_key_dim, is_value_dim = at_key < KEY_DIM, at_value < VALUE_DIM
    rows_of_step = (tl.load(of_run + 2) + at_rows).to(tl.int64)
    query = tl.load(
        queries + at_heads[:, None] * head_stride + rows_of_step[:, None] * row_stride + at_key[None, :],
        mask=is_row[:, None] & is_key_dim[None, :],
        other=0.0,
    )
    if IS_WIDENED:
        query = query.to(tl.float32)
    in_block = tl.arange(0, BLOCK_KEYS)
    in_keys = in_block[None, :] * key_stride.to(tl.int32) + at_key[:, None]
    in_values = in_block[:, None] * value_stride.to(tl.int32) + at_value[None, :]

    end = start + tl.minimum(first_row + BLOCK_ROWS // GROUP, num_rows)
    # Tiles of keys before this one change nothing.
    begin = _first_visible(start + first_row, window, chunk) // BLOCK_KEYS * BLOCK_KEYS
    # Up to here, every row sees all keys.
    full_end = (start + first_row + 1) // BLOCK_KEYS * BLOCK_KEYS
    if (window > 0) | (chunk > 0):
        full_end = begin
    IS_WHOLE: tl.constexpr = KEY_DIM == BLOCK_KEY and VALUE_DIM == BLOCK_VALUE
    highest = tl.full((BLOCK_ROWS,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    taken = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), dtype=tl.float32)
    first_span, end_span = begin // SPAN, tl.cdiv(end, SPAN)
    if IS_SPLIT:
        first_span = tl.maximum(first_span, tl.program_id(2))
        end_span = tl.minimum(end_span, tl.program_id(2) + 1)
    for span in range(first_span, end_span):
        highest_of_part = tl.full((BLOCK_ROWS,), LOWEST, dtype=tl.float32)
        total_of_part = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        taken_of_part = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), dtype=tl.float32)
        first_key, end_key = tl.maximum(begin, span * SPAN), tl.minimum(end, span * SPAN + SPAN)
        first_masked = tl.maximum(first_key, tl.minimum(full_end, end_key // BLOCK_KEYS * BLOCK_KEYS))
        for at in range(first_key, first_masked, BLOCK_KEYS):
            highest_of_part, total_of_part, taken_of_part = _with_tile(
                highest_of_part, total_of_part, taken_of_part, query, positions, first_visible,
                from_keys + at * key_stride, from_values + at * value_stride, at, end_key, scale, softcap,
                in_keys, in_values, is_key_dim, is_value_dim, False, IS_WHOLE, HAS_SOFTCAP, IS_WIDENED,
                BLOCK_KEYS,
            )  # fmt: skip
        for at in range(first_masked, end_key, BLOCK_KEYS):
            highest_of_part, total_of_part, taken_of_part = _with_tile(
                highest_of_part, total_of_part, taken_of_part, query, positions, first_visible,
                from_keys + at * key_stride, from_values + at * value_stride, at, end_key, scale, softcap,
                in_keys, in_values, is_key_dim, is_value_dim, True, IS_WHOLE, HAS_SOFTCAP, IS_WIDENED,
                BLOCK_KEYS,
            )  # fmt: skip
        if IS_SPLIT:
            number = ((tile * tl.num_programs(1) + group) * tl.num_programs(2) + span).to(tl.int64)
            tl.store(sums + number * 2 * max_parts + in_tile, highest_of_part, mask=is_row)
            tl.store(sums + number * 2 * max_parts + max_parts + in_tile, total_of_part, mask=is_row)
            to = parts + (number * max_parts + in_tile[:, None]) * BLOCK_VALUE + at_value[None, :]
            tl.store(to, taken_of_part, mask=is_row[:, None])
        else:
            highest, total, taken = _merged(highest, total, taken, highest_of_part, total_of_part, taken_of_part)
    if not IS_SPLIT:
        _write(
            out, highest, total, taken, sinks, rows_of_step, at_heads, is_row, at_value,
            GROUP * tl.num_programs(1), VALUE_DIM, HAS_SINKS,
        )  # fmt: skip


@triton.jit
def attention_of_parts(
    runs,
    tiles,
    out,
    sums,
    parts,
    sinks,
    num_spans,
    window,
    chunk,
    max_parts,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merges the parts of `ROWS` rows of a tile, span after span, as `attention` does."""
    tile, group = tl.program_id(0), tl.program_id(1)
    run, first_row = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1).to(tl.int32)
    start, num_rows = tl.load(runs + 11 * run).to(tl.int32), tl.load(runs + 11 * run + 1).to(tl.int32)
    in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    at_rows = first_row + in_tile // GROUP
    is_row = (at_rows < num_rows) & (in_tile < BLOCK_ROWS // GROUP * GROUP)
    at_value = tl.arange(0, BLOCK_VALUE)
    end = start + tl.minimum(first_row + BLOCK_ROWS // GROUP, num_rows)
    begin = _first_visible(start + first_row, window, chunk)
    highest = tl.full((ROWS,), LOWEST, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    taken = tl.zeros((ROWS, BLOCK_VALUE), dtype=tl.float32)
    for span in range(begin // SPAN, tl.cdiv(end, SPAN)):
        number = ((tile * tl.num_programs(1) + group) * num_spans + span).to(tl.int64)
        highest_of_part = tl.load(sums + number * 2 * max_parts + in_tile, mask=is_row, other=LOWEST)
        total_of_part = tl.load(sums + number * 2 * max_parts + max_parts + in_tile, mask=is_row, other=0.0)
        of_part = parts + (number * max_parts + in_tile[:, None]) * BLOCK_VALUE + at_value[None, :]
        taken_of_part = tl.load(of_part, mask=is_row[:, None], other=0.0)
        highest, total, taken = _merged(highest, total, taken, highest_of_part, total_of_part, taken_of_part)
    rows_of_step = (tl.load(runs + 11 * run + 2) + at_rows).to(tl.int64)
    _write(
        out, highest, total, taken, sinks, rows_of_step, group * GROUP + in_tile % GROUP, is_row, at_value,
        GROUP * tl.num_programs(1), VALUE_DIM, HAS_SINKS,
    )  # fmt: skip


@triton.jit
def _write(
    out,
    highest,
    total,
    taken,
    sinks,
    rows_of_step,
    at_heads,
    is_row,
    at_value,
    num_heads,
    VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Writes the weighted means of values to `out`, [rows, heads, value_dim]."""
    if HAS_SINKS:
        sink = tl.load(sinks + at_heads, mask=is_row, other=0.0) * LOG2_E
        higher = tl.maximum(highest, sink)
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.exp2(sink - higher)
        taken = taken * kept[:, None]
    # Rows that are not written have seen no key.
    mean = taken / tl.where(is_row, total, 1.0)[:, None]
    to = out + (rows_of_step * num_heads + at_heads)[:, None] * VALUE_DIM + at_value[None, :]
    tl.store(to, mean.to(out.dtype.element_ty), mask=is_row[:, None] & (at_value < VALUE_DIM)[None, :])


@triton.jit
def keep(
    rows,
    runs,
    head_stride,
    row_stride,
    number,
    DIM: tl.constexpr,
    PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Copies rows of a step, [heads, rows, dim], to where they belong in the memory of their runs. `PLACE` is the first
    column of `runs` that describes the memory, `number` the number of the tensor in it."""
    run, head = tl.program_id(0), tl.program_id(1)
    of_run = runs + 11 * run
    num_rows = tl.load(of_run + 1).to(tl.int32)
    at_rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    at = tl.arange(0, BLOCK)
    is_in = (at_rows < num_rows)[:, None] & (at < DIM)[None, :]
    of_step = (tl.load(of_run + 2) + at_rows).to(tl.int64)
    found = tl.load(rows + head * head_stride + of_step[:, None] * row_stride + at[None, :], mask=is_in, other=0.0)
    to = tl.load(of_run + PLACE).to(tl.pointer_type(rows.dtype.element_ty))
    to += number * tl.load(of_run + PLACE + 1) + head * tl.load(of_run + PLACE + 2)
    positions = (tl.load(of_run) + at_rows).to(tl.int64)
    tl.store(to + positions[:, None] * tl.load(of_run + PLACE + 3) + at[None, :], found, mask=is_in)
