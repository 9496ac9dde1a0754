"""The compiled indexer: the blocks with the largest scores, the first of equal ones, and attention to these alone."""

from __future__ import annotations

import ctypes

import pytest
import torch

from diskprefix.native import calls
from diskprefix.native.compute_threads import num_threads, use_threads
from diskprefix.native.library import Operators
from tests.native import one_operation
from tests.native.pages import Pages

BLOCK, CHOSEN, HEADS, DIM, TOKENS, PAGE_TOKENS = 4, 5, 3, 24, 300, 32
START = 250


def chosen_of(operators: Operators, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The blocks that rows of queries [rows, heads, dim] from token `START` on choose, of keys [1, tokens, dim]."""
    pages = Pages([keys, keys], PAGE_TOKENS)
    run, chosen = pages.run(START, len(query)), torch.full((len(query), CHOSEN), -1, dtype=torch.int32)
    table = (ctypes.c_void_p * 1)(run.keys.pages)
    rows = calls.PagedRowsCall(0, run.keys.offset, run.keys.head_stride, run.keys.token_stride, 0)
    call = calls.ChooseBlocksCall(
        dtype=one_operation.DTYPES[query.dtype], num_heads=HEADS, dim=DIM, block=BLOCK, num_chosen=CHOSEN,
        query=query.data_ptr(), keys=rows, chosen=chosen.data_ptr(),
    )  # fmt: skip
    operation = calls.Operation(calls.CHOOSE_BLOCKS, 0, ctypes.addressof(call))
    sequence = calls.PlanRun(START, len(query))
    sequence.tables = ctypes.addressof(table)
    step = calls.PlanStep(len(query), 0, 1, PAGE_TOKENS, 0, ctypes.addressof(sequence), num_threads())
    assert not operators.run(bytes(calls.Operations(1, ctypes.addressof(operation))), bytes(step))
    return chosen


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_blocks_with_the_largest_scores_are_chosen_in_order(
    operators: Operators, dtype: torch.dtype, threads: int
) -> None:
    use_threads(threads)
    made = torch.Generator().manual_seed(1)
    # Whole numbers, whose sums have no rounding.
    query = torch.randint(-3, 4, (50, HEADS, DIM), generator=made).to(dtype)
    keys = torch.randint(-3, 4, (1, TOKENS, DIM), generator=made).to(dtype)
    found = chosen_of(operators, query, keys)
    assert torch.equal(chosen_of(operators, query[:2], keys), found[:2])
    for row, blocks in enumerate(found.tolist()):
        count = (START + row + 1) // BLOCK
        of_blocks = keys[0, BLOCK - 1 : count * BLOCK : BLOCK].double()
        scores = (query[row].double() @ of_blocks.T).relu().sum(0).tolist()
        expected = sorted(range(count), key=lambda block: (-scores[block], block))[:CHOSEN]
        assert blocks == sorted(expected)


@pytest.mark.parametrize("rows", [1, 40])
def test_attention_sees_the_chosen_blocks_and_the_tokens_after_the_last_block(operators: Operators, rows: int) -> None:
    made = torch.Generator().manual_seed(2)
    query = torch.randn(4, rows, DIM, generator=made)
    keys, values = (torch.randn(2, TOKENS, DIM, generator=made) for _ in range(2))
    chosen = torch.stack([torch.randperm(60, generator=made)[:CHOSEN].sort().values for _ in range(rows)]).int()
    pages = Pages([keys, values], PAGE_TOKENS)
    form = {"scale": DIM**-0.5, "block": BLOCK, "num_chosen": CHOSEN, "chosen": chosen.data_ptr()}
    found = one_operation.attention(operators, query, [pages.run(START, rows)], kv_heads=2, value_dim=DIM, **form)
    for row in range(rows):
        end = START + row + 1
        seen = torch.zeros(TOKENS, dtype=torch.bool)
        for block in chosen[row].tolist():
            seen[block * BLOCK : (block + 1) * BLOCK] = True
        seen[end // BLOCK * BLOCK : end] = True
        for head in range(4):
            scores = (query[head, row] @ keys[head // 2].T * DIM**-0.5).masked_fill(~seen, -torch.inf)
            assert torch.allclose(found[row, head], scores.softmax(-1) @ values[head // 2], atol=1e-5)
