"""Checks of the kernels in Triton, on an accelerator or in Triton's interpreter: `tools/gpu --part kernels`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch.nn import functional

from diskprefix.accelerator import operators, scan_operators, tiles
from diskprefix.accelerator.grouped import GroupedMatrix
from diskprefix.accelerator.operators import Routes
from diskprefix.accelerator.tiles import Sizes, Tiles

HEADS, GROUPS, DIM, TOKENS = 4, 2, 32, 560
START, SPAN = 500, 256
PATTERNS: tuple[dict[str, Any], ...] = ({}, {"window": 200, "sinks": True}, {"chunk": 300, "softcap": 20.0})
"""Two of a kind together: an interpreter takes seconds for each."""
ScanRuns: TypeAlias = list[tuple[int, torch.Tensor]]
SIZES = (1, 5, 37)
"""Numbers of rows. A row of the last is computed in each of them."""


def cancelling(num_rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows whose sums nearly cancel: what remains is rounding error, which reveals the order of a sum."""
    numbers = torch.randn(num_rows, inner // 2) * torch.exp2(torch.randint(-4, 5, (num_rows, inner // 2)).float())
    return torch.cat([numbers, -numbers], dim=1)[:, torch.randperm(inner)].to(dtype)


def require_the_same_in_any_company(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    """Raises `AssertionError` if a row has other bits with fewer, more, or other rows beside it."""
    found = compute(rows)
    for size in SIZES:
        for first in (0, len(rows) - size):
            part = slice(first, first + size)
            assert torch.equal(compute(rows[part]), found[part]), f"{size} rows"


def check_products(dtype: torch.dtype) -> None:
    rows, matrix, bias = cancelling(37, 200, dtype), torch.randn(70, 200).to(dtype), torch.randn(70).to(dtype)
    found = operators.product(rows, matrix, bias)
    expected = functional.linear(rows.float(), matrix.float(), bias.float())
    torch.testing.assert_close(found.float(), expected, atol=5e-3, rtol=1e-2)
    require_the_same_in_any_company(lambda some: operators.product(some, matrix, bias), rows)
    turned = matrix.t().contiguous()
    assert torch.equal(operators.product(rows, turned, bias, is_plain=True), found)


class ByRows(Sizes):
    """Sizes that change the order of a sum with the number of rows."""

    def product(self, num_rows: int, *_: Any) -> Tiles:
        return Tiles(32, 32, 16 if num_rows < 8 else 128, 4, 1)


def check_that_another_order_shows() -> None:
    """The check finds tiles that depend on the number of rows, where these change the order of the sums."""
    matrix, rows = torch.randn(70, 200), cancelling(37, 200, torch.float32)
    sizes = ByRows(**vars(tiles.sizes_of(rows.device)))
    with patch.object(operators, "sizes_of", lambda _device: sizes):
        try:
            require_the_same_in_any_company(lambda some: operators.product(some, matrix), rows)
        except AssertionError:
            return
    raise AssertionError("another order of the sums was not found")


def quantised(kind: str, shape: tuple[int, ...], group: int) -> GroupedMatrix:
    of_groups = (*shape[:-1], shape[-1] // group)
    scales = (torch.rand(of_groups) / 64 + 1 / 64).half()
    if kind == "int4":
        return GroupedMatrix(torch.randint(0, 16, shape, dtype=torch.int8), scales, -8 * scales, bits=4)
    codes = torch.randint(-127, 128, shape, dtype=torch.int8)
    return GroupedMatrix(codes if kind == "int8" else (codes / 16).to(torch.float8_e4m3fn), scales.float())


def check_quantised_products(kind: str, group: int, dtype: torch.dtype) -> None:
    matrix, bias = quantised(kind, (70, 192 if group < 128 else 256), group), torch.randn(70).to(dtype)
    rows = cancelling(37, matrix.inner, dtype)
    found, weights = operators.product(rows, matrix, bias), matrix.dequantised(dtype)
    expected = functional.linear(rows.float(), weights.float(), bias.float())
    # The interpreter does not round weights to bfloat16 but cuts them off.
    torch.testing.assert_close(found.float(), expected, atol=0.02 * float(expected.abs().max()), rtol=1e-2)
    if dtype is torch.float16:
        assert torch.equal(found, operators.product(rows, weights, bias)), "the weights themselves"
    require_the_same_in_any_company(lambda some: operators.product(some, matrix, bias), rows)


def check_e4m3() -> None:
    """Each of the 254 numbers of float8 (e4m3) is itself."""
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes.float().nan_to_num(0.0)
    matrix = GroupedMatrix(numbers.to(torch.float8_e4m3fn)[None], torch.ones(1, 2))
    found = operators.product(torch.eye(256).half(), matrix)[:, 0]
    assert torch.equal(found.float(), numbers)


def check_experts(kind: str, dtype: torch.dtype, num_experts: int = 5, num_chosen: int = 2) -> None:
    """What an expert has for a row is its product with this row alone, and weighs no other."""
    rows, bias = cancelling(41, 192, dtype), torch.randn(num_experts, 70).to(dtype)
    shape = (num_experts, 70, 192)
    matrices = torch.randn(shape).to(dtype) if kind == "plain" else quantised(kind, shape, 32)
    # The second choice of most rows is one expert, which has more than a tile of them; one expert has none.
    chosen = torch.stack([torch.arange(41) % 3, torch.full((41,), 4)], dim=1)

    def compute(some: torch.Tensor, of_some: torch.Tensor) -> torch.Tensor:
        routes = Routes.of(of_some, num_experts, dtype)
        return operators.expert_product(some, matrices, bias, routes).view(len(some), num_chosen, -1)

    found = compute(rows, chosen)
    weights = matrices if isinstance(matrices, torch.Tensor) else matrices.dequantised(dtype)
    expected = torch.einsum("ri,rkoi->rko", rows.float(), weights.float()[chosen]) + bias.float()[chosen]
    torch.testing.assert_close(found.float(), expected, atol=0.02 * float(expected.abs().max()), rtol=1e-2)
    assert torch.equal(compute(rows[7:8], chosen[7:8]), found[7:8]), "alone"
    other = torch.randperm(41)
    assert torch.equal(compute(rows[other], chosen[other]), found[other]), "in another order"
    few = chosen.clone()
    few[20:, 1] = 3
    assert torch.equal(compute(rows, few)[:20], found[:20]), "with fewer rows of this expert"
    if isinstance(matrices, torch.Tensor):
        routes, turned = Routes.of(chosen, num_experts, dtype), matrices.mT.contiguous().mT
        again = operators.expert_product(rows, turned, bias, routes)
        assert torch.equal(again.view_as(found), found), "of matrices that lie column by column"


def check_norms(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(5, 96).to(dtype), torch.randn(96).to(dtype)
    found = operators.norm(rows, weight, 1, 1e-6)
    expected = functional.rms_norm(rows.float(), (96,), weight.float(), 1e-6)
    torch.testing.assert_close(found.float(), expected, atol=1e-4, rtol=1e-2)
    assert torch.equal(operators.norm(rows[3:4], weight, 1, 1e-6), found[3:4])


def runs_of(*runs: operators.PlacedRun) -> operators.Runs:
    return operators.Runs(operators.RunTable.of(runs), device=runs[0].keys.device)


def check_attention(dtype: torch.dtype, pattern: dict[str, Any]) -> None:
    pattern = pattern | ({"sinks": torch.linspace(-2, 2, HEADS)} if "sinks" in pattern else {})
    memory = torch.randn(2, 1, GROUPS, TOKENS, DIM).to(dtype)
    memory[..., START + 40 :, :] = torch.nan
    queries = torch.randn(HEADS, TOKENS, DIM).to(dtype)

    def attend(start: int, num_rows: int, num_spans: int | None = None) -> torch.Tensor:
        runs = runs_of(operators.PlacedRun(start, num_rows, memory, memory))
        rows = queries[:, start : start + num_rows]
        return operators.attention(rows, runs, (0, 1), GROUPS, DIM, scale=DIM**-0.5, num_spans=num_spans, **pattern)

    found = attend(START, 10)
    torch.testing.assert_close(found.float(), plain_attention(queries, memory, pattern), atol=1e-2, rtol=1e-2)
    assert torch.equal(attend(START, 10, 1), attend(START, 10, 3)), "in spans side by side"
    assert torch.equal(attend(START, 10, 1), attend(START, 10, 8)), "in more spans than there are"
    assert torch.equal(attend(START + 5, 1), found[5:6]), "alone"
    assert torch.equal(attend(START - 7, 40)[7:17], found), "between others"
    memory[..., START + 10 :, :] = torch.nan
    assert torch.equal(attend(START, 10), found), "what lies behind the end is not read"


def plain_attention(queries: torch.Tensor, memory: torch.Tensor, pattern: dict[str, Any]) -> torch.Tensor:
    keys, values = (part[0].float().nan_to_num(0.0).repeat_interleave(HEADS // GROUPS, 0) for part in memory)
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
    placed = operators.PlacedRun(5, 3, first, first), operators.PlacedRun(579, 1, second, second, 512, 512)
    runs = runs_of(*placed)
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
    found = operators.attention(queries[:, 3:], runs_of(placed[1]), numbers, GROUPS, DIM, scale=0.2, window=50)
    assert torch.equal(together[3:], found)


def check_scans(dtype: torch.dtype, heads: int = 4, of_keys: int = 2, dim: int = 24, kernel: int = 4) -> None:
    """Each of the recurrences is what it is token after token, and its numbers do not depend on cuts or company."""
    count = 9
    rows, weight, bias = (
        torch.randn(1, count, 70).to(dtype),
        torch.randn(70, kernel).to(dtype),
        torch.randn(70).to(dtype),
    )
    inputs = torch.cat([first := torch.randn(1, 70, kernel).to(dtype), rows.mT], dim=2)[..., 1:].float()
    summed = functional.conv1d(inputs, weight.float()[:, None], bias.float(), groups=70)
    _check_scan(
        lambda at, runs: scan_operators.convolution(rows[:, at], weight, bias, runs, has_silu=True),
        *(first, functional.silu(summed.to(dtype).float()).mT, inputs[..., -kernel:]),
    )
    query, key = torch.randn(2, 1, count, of_keys, dim).to(dtype)
    value, beta = torch.randn(1, count, heads, dim).to(dtype), torch.rand(1, count, heads)
    state = torch.randn(1, heads, dim, dim)

    def delta_rule(decay: torch.Tensor, at: slice, runs: ScanRuns) -> torch.Tensor:
        rows_of = query[:, at], key[:, at], value[:, at], decay[:, at], beta[:, at]
        return scan_operators.delta_rule(*rows_of, runs, 1e-6)

    for decay in (-torch.rand(1, count, heads), -torch.rand(1, count, heads, dim)):
        expected = _plain_delta_rule(query, key, value, decay, beta, state)
        _check_scan(partial(delta_rule, decay), state, *expected)
    into, out_of, steps = *torch.randn(2, 1, count, of_keys, 16).to(dtype), torch.rand(1, count, heads)
    decays, skip, state = -torch.rand(heads), torch.randn(heads), torch.randn(1, heads, dim, 16)
    _check_scan(
        lambda at, runs: scan_operators.state_space(
            *(value[:, at], steps[:, at], decays, into[:, at], out_of[:, at], skip, runs)
        ),
        *(state, *_plain_state_space(value, steps, decays, into, out_of, skip, state)),
    )


def _check_scan(
    compute: Callable[[slice, ScanRuns], torch.Tensor],
    state: torch.Tensor,
    expected: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """`compute` computes the tokens of a slice, as runs of so many rows and a state."""
    count, whole, parts, others = expected.shape[1], state.clone(), state.clone(), [state.clone(), state.clone()]
    found = compute(slice(0, count), [(count, whole)])
    atol = 0.01 * float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected.float(), atol=atol, rtol=1e-2)
    torch.testing.assert_close(whole.float(), last.float(), atol=atol, rtol=1e-2)
    cuts = ((0, 1), (1, 3), (3, count))
    cut = [compute(slice(start, end), [(end - start, parts)]) for start, end in cuts]
    assert torch.equal(torch.cat(cut, dim=1), found), "in other steps"
    assert torch.equal(parts, whole), "the state after other steps"
    # Two sequences share the rows: the second one begins with the third token.
    both = compute(slice(0, count), [(2, others[0]), (count - 2, others[1])])
    assert torch.equal(both[:, :2], found[:, :2]), "with another sequence"
    alone = state.clone()
    assert torch.equal(compute(slice(2, count), [(count - 2, alone)]), both[:, 2:]), "as another sequence"
    assert torch.equal(alone, others[1]), "the state of another sequence"


def _plain_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    state, found = state[0].clone(), []
    lengths = [one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (query.float(), key.float())]
    queries, keys = (one.repeat_interleave(len(state) // one.shape[2], 2)[0] for one in lengths)
    for token in range(len(queries)):
        kept = decay[0, token].exp()
        state = state * (kept[:, None, None] if kept.ndim == 1 else kept[..., None])
        known = torch.einsum("hkv,hk->hv", state, keys[token])
        change = (value[0, token].float() - known) * beta[0, token, :, None]
        state = state + keys[token][..., None] * change[:, None]
        found.append(torch.einsum("hkv,hk->hv", state, queries[token]) * query.shape[-1] ** -0.5)
    return torch.stack(found)[None], state[None]


def _plain_state_space(
    rows: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    state, found = state[0].clone(), []
    came, asked = (one.float().repeat_interleave(len(state) // one.shape[2], 2)[0] for one in (into, out_of))
    for token, inputs in enumerate(rows[0].float()):
        step = steps[0, token]
        state = state * (step * decay).exp()[:, None, None]
        state = state + (inputs * step[:, None])[..., None] * came[token][:, None]
        found.append(torch.einsum("hds,hs->hd", state, asked[token]) + inputs * skip[:, None])
    return torch.stack(found)[None], state[None]


def check_row_sums(dtype: torch.dtype) -> None:
    rows = cancelling(37, 200, dtype)
    found = scan_operators.row_sums(rows, 7.0)
    torch.testing.assert_close(found.float(), rows.float().sum(-1, keepdim=True) / 7, atol=1e-4, rtol=1e-2)
    require_the_same_in_any_company(lambda some: scan_operators.row_sums(some, 7.0), rows)


HALF = (torch.float16, torch.bfloat16)
CHECKS: dict[str, list[Callable[[], None]]] = {
    "products": [*(partial(check_products, one) for one in (torch.float32, HALF[1])), check_that_another_order_shows],
    "norms": [partial(check_norms, one) for one in (torch.float32, torch.bfloat16)],
    "attention": [
        *(partial(check_attention, torch.bfloat16, one) for one in PATTERNS),
        partial(check_attention, torch.float32, {}),
    ],
    "memory": [partial(check_memory, one) for one in (torch.float32, torch.bfloat16)],
    "quantised products": [
        *(partial(check_quantised_products, *one) for one in (("int8", 32, HALF[0]), ("int4", 32, HALF[0]))),
        *(partial(check_quantised_products, *one) for one in (("int4", 64, HALF[1]), ("e4m3", 128, HALF[0]))),
        check_e4m3,
    ],
    "recurrences": [partial(check_scans, torch.float32)],
    "sums along a row": [partial(check_row_sums, one) for one in (torch.float32, torch.bfloat16)],
    "experts": [partial(check_experts, *one) for one in (("plain", HALF[1]), ("int4", HALF[0]))],
}


def run(name: str, device: str) -> None:
    """Runs the checks of one kind. Raises `AssertionError`."""
    torch.manual_seed(0)
    with torch.device(device), patch.object(operators, "SPAN", SPAN):
        for check in CHECKS[name]:
            check()
