"""Attention: right, and the same bits for a row in every company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from diskprefix.native import library
from diskprefix.native.attention_operator import attention_to_all
from diskprefix.native.compute_threads import use_threads
from diskprefix.native.library import Operators
from diskprefix.prefixstore.kv.step import Run
from tests.arrays import array_of, tensor_of
from tests.native.one_operation import attention, in_q8
from tests.native.pages import Pages
from tests.native.variants import in_depth

PAGE = 256
LENGTH = 2 * PAGE + 44
"""Three tiles of the operator, the last one not full. No longer, as `tools/arm64` emulates this."""
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int = 0
    chunk: int = 0
    scaling: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    length: int = LENGTH

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5 if self.scaling is None else self.scaling

    def first_visible(self, position: int) -> int:
        if self.window:
            return max(0, position - self.window + 1)
        return position - position % self.chunk if self.chunk else 0


@dataclass
class Layer:
    """The queries of a sequence, [heads, length, key_dim], with its keys and values, [kv_heads, length, dim]."""

    case: Case
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, case: Case, *, seed: int = 0) -> Layer:
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(case.dtype)

        keys, values = (numbers(case.kv_heads, case.length, dim) for dim in (case.key_dim, case.value_dim))
        sinks = numbers(case.heads) if case.sinks else None
        return cls(case, numbers(case.heads, case.length, case.key_dim), keys, values, sinks)

    def attended(self, run: Run) -> torch.Tensor:
        """[rows, heads, value_dim]."""
        return together([(self, run)])

    def cut(self, steps: Sequence[int]) -> torch.Tensor:
        ends = [sum(steps[: i + 1]) for i in range(len(steps))]
        return torch.cat([self.attended(Run(end - n, n)) for end, n in zip(ends, steps, strict=True)])


def together(runs: Sequence[tuple[Layer, Run]], page_tokens: int = PAGE) -> torch.Tensor:
    one = runs[0][0]
    pages = [
        Pages([layer.keys[:, : run.end], layer.values[:, : run.end]], page_tokens, layer.case.first_visible(run.start))
        for layer, run in runs
    ]
    compiled = library.operators()
    assert compiled is not None
    return attention(
        compiled,
        torch.cat([layer.queries[:, run.start : run.end] for layer, run in runs], dim=1),
        [of.run(run.start, run.num_rows, run.flat_spans) for of, (_, run) in zip(pages, runs, strict=True)],
        kv_heads=one.case.kv_heads,
        value_dim=one.values.shape[2],
        scale=one.case.scale,
        window=one.case.window,
        chunk=one.case.chunk,
        softcap=one.case.softcap,
        sinks=None if one.sinks is None else one.sinks.float(),
    )


def plain(layer: Layer, spans: Spans = ()) -> torch.Tensor:
    case, length, group = layer.case, layer.case.length, layer.case.heads // layer.case.kv_heads
    keys, values = (memory.double().repeat_interleave(group, 0) for memory in (layer.keys, layer.values))
    scores = layer.queries.double() @ keys.transpose(1, 2) * case.scale
    if case.softcap:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    first = torch.tensor([case.first_visible(query) for query in range(length)]).unsqueeze(1)
    positions = torch.arange(length)
    ends = positions + 1
    for begin, end in spans:
        ends[begin:end] = end
    visible = (first <= positions) & (positions < ends.unsqueeze(1))
    scores = scores.masked_fill(~visible, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.double().view(-1, 1, 1).expand(-1, length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return (weights @ values).transpose(0, 1)


def random_steps(seed: int) -> list[int]:
    chosen, steps = random.Random(seed), list[int]()
    while sum(steps) < LENGTH:
        steps.append(min(LENGTH - sum(steps), chosen.choice((1, 1, 2, 3, 9, 31, 33, 64, 130, 200))))
    return steps


ERRORS = {torch.float32: 3e-6, torch.bfloat16: 0.03}
SMALL = Case(key_dim=32, value_dim=32)
CASES = {
    "groups of three": replace(SMALL, heads=9, kv_heads=3, key_dim=64, value_dim=64),
    "groups of seven": replace(SMALL, heads=7, kv_heads=1, key_dim=64, value_dim=64),
    "one group of many heads": replace(SMALL, heads=34, kv_heads=1, key_dim=16, value_dim=16),
    "window and soft cap": replace(SMALL, window=270, softcap=2.0),
    "chunks": replace(SMALL, chunk=270, scaling=0.3),
    "soft cap and sinks": replace(SMALL, softcap=2.0, sinks=True),
    "sinks and window": replace(SMALL, window=24, sinks=True),
    "keys of three vectors and values of two and a half": replace(SMALL, heads=6, key_dim=96, value_dim=80),
    "no groups, and values of another size, which fill no vector": replace(SMALL, kv_heads=4, key_dim=27, value_dim=18),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    use_threads(1)


@cache
def layers(name: str, dtype: torch.dtype) -> tuple[Layer, torch.Tensor]:
    layer = Layer.of(replace(CASES[name], dtype=dtype))
    return layer, plain(layer)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def has_tiles(operators: Operators, dtype: torch.dtype) -> bool:
    """Returns whether these operators have code of their own: products of bfloat16 by the tiles of AMX."""
    return operators.rows == "bf16" and dtype == torch.bfloat16


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("operators", "dtype", "name"),
    [
        pytest.param(*choice.values, dtype, name, id=f"{choice.id}-{dtype}-{name}")
        for choice in in_depth("8", "bf16")
        for dtype in ERRORS
        for name in CASES
    ],
    indirect=["operators"],
)
@pytest.mark.usefixtures("operators")
def test_attention_has_the_same_bits_in_every_step(name: str, dtype: torch.dtype) -> None:
    layer, expected = layers(name, dtype)
    whole = layer.cut([LENGTH])
    assert (whole.double() - expected).abs().max() < ERRORS[dtype]
    for steps in (random_steps(1), [256, 256, LENGTH - 512]):
        assert bits(layer.cut(steps)) == bits(whole), steps
    alone = [layer.attended(Run(LENGTH - 20 + i, 1)) for i in range(20)]
    assert bits(torch.cat(alone)) == bits(whole[-20:])


PICTURES = ((3, 40), (200, 300), (300, 530))
"""Within a tile, and up to the middle of the next and the last."""
WHOLE = {
    "all": Case(heads=8, kv_heads=4),
    "window": replace(SMALL, window=24, sinks=True, dtype=torch.float32),
    "wide window": replace(SMALL, heads=9, kv_heads=1, window=270, softcap=2.0),
}


def seeing(start: int, end: int) -> Run:
    return Run(start, end - start, tuple(span for span in PICTURES if span[0] < end and start < span[1]))


@pytest.mark.cases(3)
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("name", WHOLE)
def test_tokens_of_a_picture_see_each_other_with_the_same_bits_in_every_step(name: str) -> None:
    layer = Layer.of(WHOLE[name])
    whole = layer.attended(seeing(0, LENGTH))
    assert (whole.double() - plain(layer, PICTURES)).abs().max() < ERRORS[layer.case.dtype]
    # The last ones begin within a picture.
    steps = [(0, 3), (3, 41), (41, 200), (200, 300), (300, 530), (530, LENGTH), (0, 300), (40, LENGTH)]
    for start, end in [*steps, (39, 40), (201, 530), (255, 300), (529, 533)]:
        use_threads(1 + start % 3)
        assert bits(layer.attended(seeing(start, end))) == bits(whole[start:end]), (start, end)
    text = [n for n in range(LENGTH) if not any(begin <= n < end for begin, end in PICTURES)]
    assert bits(whole[text]) == bits(layer.attended(Run(0, LENGTH))[text])


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(("heads", "rows", "dim"), [(4, 37, 16), (2, 300, 72), (3, 1024, 80)])
def test_each_row_of_an_encoder_sees_all(heads: int, rows: int, dim: int) -> None:
    compiled = library.operators()
    assert compiled is not None
    torch.manual_seed(rows)
    query, key, value = (torch.randn(rows, heads, dim, dtype=torch.bfloat16).transpose(0, 1) for _ in range(3))
    found = tensor_of(attention_to_all(compiled, array_of(query), array_of(key), array_of(value), dim**-0.5))
    query, key, value = query.double(), key.double(), value.double()
    expected = torch.softmax(query @ key.transpose(1, 2) * dim**-0.5, dim=-1) @ value
    assert torch.allclose(found.double(), expected, atol=0.02)


@pytest.mark.parametrize("page_tokens", [256, 48])
def test_pictures_of_one_sequence_change_no_bit_of_another(page_tokens: int) -> None:
    one, other = (Layer.of(WHOLE["wide window"], seed=seed) for seed in (1, 2))
    runs = [
        (other, Run(40, 1)),
        (one, seeing(199, 530)),
        (other, Run(255, 130)),
        (one, seeing(25, 60)),
        (one, Run(9, 3)),
    ]
    assert bits(together(runs, page_tokens)) == bits(torch.cat([layer.attended(run) for layer, run in runs]))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 200])
def test_the_number_of_threads_changes_no_bit(num_rows: int, dtype: torch.dtype) -> None:
    layer, _ = layers("groups of three", dtype)
    found = set()
    for threads in (1, 2, 3, 7):
        use_threads(threads)
        found.add(bits(layer.attended(Run(LENGTH - num_rows, num_rows))))
    assert len(found) == 1


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_a_nan_score_makes_a_nan_row_in_any_batch(softcap: float) -> None:
    layer = Layer.of(replace(SMALL, dtype=torch.float32, softcap=softcap))
    layer.keys[:, 300] = float("nan")
    whole = layer.cut([LENGTH])
    assert whole[:300].isfinite().all()
    assert whole[300:].isnan().all()
    assert all(layer.attended(Run(position, 1)).isnan().all() for position in range(300, 332))


@pytest.mark.cases(1)
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("page_tokens", [256, 512, 64, 48, 500])
def test_scattered_pages_give_the_bits_of_one_memory(page_tokens: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for name in CASES:
            layer, _ = layers(name, dtype)
            other = replace(layer, queries=layer.queries.flip(0), keys=layer.keys.flip(1), values=layer.values.flip(1))
            runs = [(layer, Run(400, 20)), (other, Run(40, 1)), (layer, Run(LENGTH - 1, 1)), (other, Run(255, 130))]
            # The window has passed the whole of a tile's first page.
            runs += [(layer, Run(345, 1))]
            # What a call without a number leaves behind must not come to the rows of pages that are not there.
            nothing = replace(layer, keys=layer.keys * float("nan"), values=layer.values * float("nan"))
            nothing.attended(Run(LENGTH - 20, 20))
            alone = torch.cat([together([pair], 4 * PAGE) for pair in runs])
            assert bits(together(runs, page_tokens)) == bits(alone), name


@pytest.mark.usefixtures("operators")
def test_values_may_be_a_part_of_the_keys_in_pages() -> None:
    layer, _ = layers("one group of many heads", torch.bfloat16)
    apart, inside = (replace(layer, values=values) for values in (layer.keys[..., :8].clone(), layer.keys[..., :8]))
    for page_tokens in (256, 48):
        for run in (Run(LENGTH - 1, 1), Run(200, 300)):
            assert bits(together([(inside, run)], page_tokens)) == bits(apart.attended(run))


@pytest.mark.usefixtures("operators")
def test_scores_of_any_size_give_finite_weights() -> None:
    layer = Layer.of(replace(SMALL, dtype=torch.float32))
    layer.keys.mul_(1e18)
    assert (layer.cut([LENGTH]).double() - plain(layer)).abs().max() < 1e-5


def scales_and_codes(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory in 8 bits as float32: [heads, tokens, items, 1] and [heads, tokens, items, 32]."""
    items = memory.reshape(*memory.shape[:2], -1, 34)
    return items[..., :2].contiguous().view(torch.bfloat16).float(), items[..., 2:].view(torch.int8).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 80])
def test_numbers_in_8_bits_are_the_nearest_multiples_of_a_scale(
    operators: Operators, dim: int, dtype: torch.dtype
) -> None:
    rows = torch.randn((5, 2, dim), generator=torch.Generator().manual_seed(1))
    rows[1] *= 1e-6
    rows[2, 0, :32] = 0.0
    rows[3, 1, 40], rows[4, 0, 3] = float("nan"), float("-inf")
    rows = rows.to(dtype)
    scales, codes = scales_and_codes(in_q8(operators, rows))
    expected = torch.nn.functional.pad(rows.transpose(0, 1).float(), (0, -dim % 32)).reshape(2, 5, -1, 32)
    is_none = ~expected.isfinite().all(-1, keepdim=True)
    assert torch.equal(scales.isnan(), is_none)
    assert int(is_none.sum()) == 2
    error = (expected - codes * scales).abs() / scales.clamp(min=1e-30)
    assert float(error[(~is_none).expand_as(error)].max()) <= 0.5001
    assert float(codes[(~is_none & (scales > 0)).expand_as(codes)].abs().max()) == 127


@pytest.mark.parametrize("page_tokens", [256, 48])
def test_attention_reads_numbers_in_8_bits_as_their_products(operators: Operators, page_tokens: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for key_dim, value_dim in ((64, 96), (80, 16)):
            layer = Layer.of(replace(SMALL, key_dim=key_dim, value_dim=value_dim, dtype=dtype))
            in_8_bits = [in_q8(operators, one.transpose(0, 1).contiguous()) for one in (layer.keys, layer.values)]
            factors = dtype if has_tiles(operators, dtype) else torch.float32
            memory = [torch.mul(*scales_and_codes(one)).flatten(-2).to(factors) for one in in_8_bits]
            of_factors = replace(
                layer,
                queries=layer.queries.to(factors),
                keys=memory[0][..., :key_dim],
                values=memory[1][..., :value_dim],
            )
            for run in (Run(LENGTH - 1, 1), Run(250, 3), Run(200, 300)):
                pages = Pages([one[:, : run.end] for one in in_8_bits], page_tokens)
                queries = layer.queries[:, run.start : run.end]
                found = attention(
                    *(operators, queries, [pages.run(run.start, run.num_rows)]),
                    kv_heads=layer.case.kv_heads,
                    value_dim=value_dim,
                    scale=layer.case.scale,
                )
                assert bits(found) == bits(of_factors.attended(run).to(dtype))
