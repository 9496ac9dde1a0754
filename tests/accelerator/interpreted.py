"""`TRITON_INTERPRET=1 python -m tests.accelerator.interpreted`: checks the kernels, and prints `done` at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from diskprefix.accelerator import operators

HEADS, GROUPS, DIM, TOKENS = 4, 2, 32, 2600
START = 2500
PATTERNS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 300},
    {"chunk": 700},
    {"softcap": 20.0},
    {"sinks": torch.linspace(-2, 2, HEADS)},
)


def check_products(dtype: torch.dtype) -> None:
    rows, matrix, bias = torch.randn(37, 100).to(dtype), torch.randn(70, 100).to(dtype), torch.randn(70).to(dtype)
    found = operators.product(rows, matrix, bias)
    expected = functional.linear(rows.float(), matrix.float(), bias.float())
    torch.testing.assert_close(found.float(), expected, atol=1e-4, rtol=1e-2)
    for row in (0, 5, 36):
        assert torch.equal(operators.product(rows[row : row + 1], matrix, bias), found[row : row + 1])
    turned = matrix.t().contiguous()
    assert torch.equal(operators.product(rows, turned, bias, is_plain=True), found)


def check_norms(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(5, 96).to(dtype), torch.randn(96).to(dtype)
    found = operators.norm(rows, weight, 1, 1e-6)
    expected = functional.rms_norm(rows.float(), (96,), weight.float(), 1e-6)
    torch.testing.assert_close(found.float(), expected, atol=1e-4, rtol=1e-2)
    assert torch.equal(operators.norm(rows[3:4], weight, 1, 1e-6), found[3:4])


def check_attention(dtype: torch.dtype, pattern: dict[str, Any]) -> None:
    memory = torch.randn(2, 1, GROUPS, TOKENS, DIM).to(dtype)
    queries = torch.randn(HEADS, TOKENS, DIM).to(dtype)

    def attend(start: int, num_rows: int, num_spans: int | None = None) -> torch.Tensor:
        runs = operators.Runs([operators.PlacedRun(start, num_rows, 0, memory[0, 0], memory[1, 0])])
        rows = queries[:, start : start + num_rows]
        return operators.attention(rows, runs, (0, 1), GROUPS, DIM, scale=DIM**-0.5, num_spans=num_spans, **pattern)

    found = attend(START, 10)
    torch.testing.assert_close(found.float(), plain_attention(queries, memory, pattern), atol=1e-2, rtol=1e-2)
    assert torch.equal(attend(START, 10, 1), attend(START, 10, 3)), "in spans side by side"
    assert torch.equal(attend(START + 5, 1), found[5:6]), "alone"
    assert torch.equal(attend(START - 7, 40)[7:17], found), "between others"


def plain_attention(queries: torch.Tensor, memory: torch.Tensor, pattern: dict[str, Any]) -> torch.Tensor:
    keys, values = (part[0].float().repeat_interleave(HEADS // GROUPS, 0) for part in memory)
    at, positions = torch.arange(TOKENS)[None], torch.arange(START, START + 10)[:, None]
    seen = at <= positions
    if "window" in pattern:
        seen &= at > positions - pattern["window"]
    if "chunk" in pattern:
        seen &= at >= positions - positions % pattern["chunk"]
    scores = queries[:, START : START + 10].float() @ keys.mT * DIM**-0.5
    if "softcap" in pattern:
        scores = torch.tanh(scores / pattern["softcap"]) * pattern["softcap"]
    scores = scores.masked_fill(~seen, float("-inf"))
    if "sinks" in pattern:
        scores = torch.cat([scores, pattern["sinks"].view(HEADS, 1, 1).expand(HEADS, 10, 1)], dim=-1)
    found: torch.Tensor = scores.softmax(-1)[..., :TOKENS] @ values
    return found.permute(1, 0, 2)


def check_memory(dtype: torch.dtype) -> None:
    """Two sequences in a step: each row goes to its own memory, and attends to that."""
    first, second = torch.zeros(3, 1, GROUPS, 64, DIM).to(dtype), torch.randn(3, 1, GROUPS, 128, DIM).to(dtype)
    keys, values = torch.randn(2, GROUPS, 4, DIM).to(dtype)
    runs = operators.Runs(
        [
            operators.PlacedRun(5, 3, 0, first[1, 0], first[2, 0]),
            operators.PlacedRun(579, 1, 512, second[1, 0], second[2, 0]),
        ]
    )
    numbers = operators.number_of(first[1, 0]), operators.number_of(first[2, 0])
    assert numbers == (1, 2)
    before = second.clone()
    operators.keep(runs, keys, values, numbers)
    assert torch.equal(first[1, 0, :, 5:8], keys[:, :3])
    assert torch.equal(first[2, 0, :, 5:8], values[:, :3])
    assert torch.equal(second[2, 0, :, 67], values[:, 3])
    assert not first[0].any()
    assert torch.equal(second[:, :, :, :67], before[:, :, :, :67])
    queries = torch.randn(HEADS, 4, DIM).to(dtype)
    together = operators.attention(queries, runs, numbers, GROUPS, DIM, scale=0.2, window=50)
    alone = operators.Runs([operators.PlacedRun(579, 1, 512, second[1, 0], second[2, 0])])
    found = operators.attention(queries[:, 3:], alone, numbers, GROUPS, DIM, scale=0.2, window=50)
    assert torch.equal(together[3:], found)


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in (torch.float32, torch.bfloat16):
        check_products(each)
        check_norms(each)
        check_memory(each)
    for one in PATTERNS:
        check_attention(torch.bfloat16, one)
    check_attention(torch.float32, {})
    print("done")
