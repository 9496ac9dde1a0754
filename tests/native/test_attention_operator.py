"""Attention of our own: right, the same bits for a row in every company, and the masks and arguments that it takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Gemma4TextConfig, Llama4TextConfig, LlamaConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from diskprefix.kv.layout import Group, TensorSpec
from diskprefix.kv.page_table import LayerRows, PageTable
from diskprefix.kv.pages import Page
from diskprefix.kv.step import Run, Step, computing
from diskprefix.kv.transfer import bytes_of
from diskprefix.model.exact.attention import attend
from diskprefix.model.exact.patterns import NAME, NotInvariant, Pattern, pattern_of
from diskprefix.native import library
from diskprefix.native.attention_operator import attention_to_all
from diskprefix.native.library import Operators
from tests.native.variants import WITH_PAIRS, of_this_cpu

MODULE: Any = SimpleNamespace(training=False)
ALL = Pattern()
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
    pattern: Pattern = ALL
    scaling: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    length: int = LENGTH


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

    def side_by_side(self, run: Run, first: int = 0) -> torch.Tensor:
        """The same with memory in one piece, which begins with a position and ends with the run."""
        return computed([(self, run)], *(part[None, :, first : run.end] for part in (self.keys, self.values)))

    def cut(self, steps: Sequence[int]) -> torch.Tensor:
        ends = [sum(steps[: i + 1]) for i in range(len(steps))]
        return torch.cat([self.attended(Run(end - n, n)) for end, n in zip(ends, steps, strict=True)])


def in_pages(memory: torch.Tensor, page_tokens: int, first: int = 0) -> LayerRows:
    """Memory [heads, tokens, dim] in pages that are scattered, and whose rest is no number. Those with tokens before
    `first` only are not there."""
    heads, num_tokens, dim = memory.shape
    rows = LayerRows(PageTable(Group((TensorSpec(0, "keys", heads, dim, memory.dtype),)), page_tokens), 0, 0, dim)
    order = torch.randperm(-(-num_tokens // page_tokens), generator=torch.Generator().manual_seed(1)).tolist()
    pages = torch.full((len(order), 1, heads, page_tokens, dim), float("nan"), dtype=memory.dtype)
    for number, place in enumerate(order):
        rows.table.set(number, Page(0, pages[place], 1, bytes_of(pages[place])))
    rows.put(0, memory)
    rows.table.first = first // page_tokens
    for number in range(rows.table.first):
        rows.table.set(number, None)
    return rows


def together(runs: Sequence[tuple[Layer, Run]], page_tokens: int = PAGE) -> torch.Tensor:
    seen = [(layer, run, layer.case.pattern.first_visible(run.start)) for layer, run in runs]
    keys = [in_pages(layer.keys[:, : run.end], page_tokens, first) for layer, run, first in seen]
    values = [in_pages(layer.values[:, : run.end], page_tokens, first) for layer, run, first in seen]
    return computed(runs, keys, values)


def computed(runs: Sequence[tuple[Layer, Run]], keys: Any, values: Any) -> torch.Tensor:
    one = runs[0][0]
    with computing(Step(tuple(run for _, run in runs))):
        found, _ = attend(
            MODULE,
            torch.cat([layer.queries[:, run.start : run.end] for layer, run in runs], dim=1).unsqueeze(0),
            keys,
            values,
            one.case.pattern,
            scaling=one.case.scaling,
            softcap=one.case.softcap,
            s_aux=one.sinks,
        )
    return found[0]


def plain(layer: Layer, spans: Spans = ()) -> torch.Tensor:
    case, length, group = layer.case, layer.case.length, layer.case.heads // layer.case.kv_heads
    keys, values = (memory.double().repeat_interleave(group, 0) for memory in (layer.keys, layer.values))
    scale = case.key_dim**-0.5 if case.scaling is None else case.scaling
    scores = layer.queries.double() @ keys.transpose(1, 2) * scale
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    first = torch.tensor([case.pattern.first_visible(query) for query in range(length)]).unsqueeze(1)
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


ERRORS = {torch.float32: 3e-6, torch.bfloat16: 0.03, torch.float16: 2e-3}
SMALL = Case(key_dim=32, value_dim=32)
CASES = {
    "groups of three": replace(SMALL, heads=9, kv_heads=3, key_dim=64, value_dim=64),
    "groups of seven": replace(SMALL, heads=7, kv_heads=1, key_dim=64, value_dim=64),
    "one group of many heads": replace(SMALL, heads=34, kv_heads=1, key_dim=16, value_dim=16),
    "window and soft cap": replace(SMALL, pattern=Pattern(window=270), softcap=2.0),
    "chunks": replace(SMALL, pattern=Pattern(chunk=270), scaling=0.3),
    "soft cap and sinks": replace(SMALL, softcap=2.0, sinks=True),
    "sinks and window": replace(SMALL, pattern=Pattern(window=24), sinks=True),
    "keys of three vectors and values of two and a half": replace(SMALL, heads=6, key_dim=96, value_dim=80),
    "no groups, and values of another size, which fill no vector": replace(SMALL, kv_heads=4, key_dim=27, value_dim=18),
}
OF_ALL_VARIANTS = tuple(CASES)[::3]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def layers(name: str, dtype: torch.dtype) -> tuple[Layer, torch.Tensor]:
    layer = Layer.of(replace(CASES[name], dtype=dtype))
    return layer, plain(layer)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def names_for(variant: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns the layers that a variant is tested with: fewer where its code is that of a variant before it."""
    has_own_code = variant in (*WITH_PAIRS, "neon_bf16") and dtype == torch.bfloat16
    return tuple(CASES) if has_own_code or variant == of_this_cpu()[0] else OF_ALL_VARIANTS


@pytest.mark.parametrize(
    ("operators", "dtype", "name"),
    [
        pytest.param(variant, dtype, name, id=f"{variant}-{dtype}-{name}")
        for variant in of_this_cpu()
        for dtype in ERRORS
        for name in names_for(variant, dtype)
    ],
    indirect=["operators"],
)
@pytest.mark.usefixtures("operators")
def test_it_is_attention_with_the_same_bits_in_every_step(name: str, dtype: torch.dtype) -> None:
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
    "all": Case(heads=8, kv_heads=4, pattern=Pattern(whole_pictures=True)),
    "window": replace(SMALL, pattern=Pattern(window=24, whole_pictures=True), sinks=True, dtype=torch.float32),
    "wide window": replace(SMALL, heads=9, kv_heads=1, pattern=Pattern(window=270, whole_pictures=True), softcap=2.0),
}


def seeing(start: int, end: int) -> Run:
    return Run(start, end - start, tuple(span for span in PICTURES if span[0] < end and start < span[1]))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("name", WHOLE)
def test_tokens_of_a_picture_see_each_other_with_the_same_bits_in_every_step(name: str) -> None:
    layer = Layer.of(WHOLE[name])
    whole = layer.attended(seeing(0, LENGTH))
    assert (whole.double() - plain(layer, PICTURES)).abs().max() < ERRORS[layer.case.dtype]
    # The last ones begin within a picture.
    steps = [(0, 3), (3, 41), (41, 200), (200, 300), (300, 530), (530, LENGTH), (0, 300), (40, LENGTH)]
    for start, end in [*steps, (39, 40), (201, 530), (255, 300), (529, 533)]:
        torch.set_num_threads(1 + start % 3)
        assert bits(layer.attended(seeing(start, end))) == bits(whole[start:end]), (start, end)
    run, first = seeing(320, 530), layer.case.pattern.first_visible(320)
    assert bits(layer.side_by_side(run, first)) == bits(whole[320:530])
    text = [n for n in range(LENGTH) if not any(begin <= n < end for begin, end in PICTURES)]
    assert bits(whole[text]) == bits(layer.attended(Run(0, LENGTH))[text])
    causal = replace(layer, case=replace(layer.case, pattern=replace(layer.case.pattern, whole_pictures=False)))
    assert bits(causal.attended(seeing(0, LENGTH))) == bits(layer.attended(Run(0, LENGTH)))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(("heads", "rows", "dim"), [(4, 37, 16), (2, 300, 72), (3, 1024, 80)])
def test_each_row_of_an_encoder_sees_all(heads: int, rows: int, dim: int) -> None:
    compiled = library.operators()
    assert compiled is not None
    torch.manual_seed(rows)
    query, key, value = (torch.randn(rows, heads, dim, dtype=torch.bfloat16).transpose(0, 1) for _ in range(3))
    found = attention_to_all(compiled, query, key, value, dim**-0.5)
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
        torch.set_num_threads(threads)
        found.add(bits(layer.attended(Run(LENGTH - num_rows, num_rows))))
    assert len(found) == 1


@pytest.mark.usefixtures("operators")
def test_memory_may_begin_where_the_window_does() -> None:
    layer = Layer.of(replace(SMALL, pattern=Pattern(window=20)))
    run = Run(2 * PAGE + 30, 10)
    for first in (0, 2 * PAGE, run.start - 19):
        assert bits(layer.side_by_side(run, first)) == bits(layer.attended(run))
    with pytest.raises(NotInvariant, match="does not keep"):
        layer.side_by_side(run, run.start - 18)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_a_row_with_a_score_that_is_no_number_is_none_in_any_batch(softcap: float) -> None:
    layer = Layer.of(replace(SMALL, dtype=torch.float32, softcap=softcap))
    layer.keys[:, 300] = float("nan")
    whole = layer.cut([LENGTH])
    assert whole[:300].isfinite().all()
    assert whole[300:].isnan().all()
    assert all(layer.attended(Run(position, 1)).isnan().all() for position in range(300, 332))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dims", [(-3, -2), (-2, -1)])
def test_rows_may_lie_anywhere_in_memory(dims: tuple[int, int]) -> None:
    layer, run = Layer.of(replace(SMALL, dtype=torch.float32)), Run(0, LENGTH)
    queries, keys, values = (
        memory.transpose(*dims).contiguous().transpose(*dims) for memory in (layer.queries, layer.keys, layer.values)
    )
    moved = replace(layer, queries=queries, keys=keys, values=values)
    assert bits(moved.side_by_side(run)) == bits(layer.side_by_side(run))


@pytest.mark.parametrize("page_tokens", [256, 512, 64, 48, 500])
def test_scattered_pages_give_the_bits_of_one_memory(operators: Operators, page_tokens: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for name in names_for(operators.variant, dtype):
            layer, _ = layers(name, dtype)
            other = replace(layer, queries=layer.queries.flip(0), keys=layer.keys.flip(1), values=layer.values.flip(1))
            runs = [(layer, Run(400, 20)), (other, Run(40, 1)), (layer, Run(LENGTH - 1, 1)), (other, Run(255, 130))]
            # What a call without a number leaves behind must not come to the rows of pages that are not there.
            nothing = replace(layer, keys=layer.keys * float("nan"), values=layer.values * float("nan"))
            nothing.attended(Run(LENGTH - 20, 20))
            alone = torch.cat([one.side_by_side(run) for one, run in runs])
            assert bits(together(runs, page_tokens)) == bits(alone), name


@pytest.mark.usefixtures("operators")
def test_values_may_be_a_part_of_the_keys_in_pages() -> None:
    layer, _ = layers("one group of many heads", torch.bfloat16)
    latents = replace(layer, values=layer.keys[..., :8])
    for page_tokens in (256, 48):
        rows = in_pages(layer.keys, page_tokens)
        for run in (Run(LENGTH - 1, 1), Run(200, 300)):
            found = computed([(latents, run)], [rows], [replace(rows, end=8)])
            assert bits(found) == bits(latents.attended(run))


@pytest.mark.usefixtures("operators")
def test_scores_of_any_size_give_finite_weights() -> None:
    layer = Layer.of(replace(SMALL, dtype=torch.float32))
    layer.keys.mul_(1e18)
    assert (layer.cut([LENGTH]).double() - plain(layer)).abs().max() < 1e-5


def test_there_is_one_pool_of_threads() -> None:
    assert library.operators() is not None
    layer, _ = layers("groups of three", torch.bfloat16)
    torch.set_num_threads(2)
    torch.ones(1 << 20).mul_(2)
    before = len(list(Path("/proc/self/task").iterdir()))
    layer.cut([LENGTH])
    # Those of a larger team, of another test, may end meanwhile.
    assert len(list(Path("/proc/self/task").iterdir())) <= before
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1


# As models call it: masks and arguments.


def test_the_pattern_is_that_of_the_mask_of_transformers() -> None:
    embedded = torch.zeros(1, 3, 8)

    def pattern(create: Any, config: Any) -> Any:
        config._attn_implementation = NAME
        return create(config=config, inputs_embeds=embedded, attention_mask=None, past_key_values=None)

    assert pattern(create_causal_mask, LlamaConfig()) == Pattern()
    gemma3, gemma4 = Gemma3TextConfig(sliding_window=7), Gemma4TextConfig(sliding_window=7)
    assert pattern(create_causal_mask, gemma3) == Pattern(whole_pictures=True)
    assert pattern(create_sliding_window_causal_mask, gemma3) == Pattern(window=7, whole_pictures=True)
    assert pattern(create_sliding_window_causal_mask, gemma4) == Pattern(window=7)
    gemma4.use_bidirectional_attention = "vision"
    assert pattern(create_sliding_window_causal_mask, gemma4) == Pattern(window=7, whole_pictures=True)
    assert pattern(create_causal_mask, gemma4) == Pattern()
    assert pattern(create_chunked_causal_mask, Llama4TextConfig(attention_chunk_size=7)) == Pattern(chunk=7)


def test_a_mask_of_another_form_is_refused() -> None:
    with pytest.raises(NotInvariant, match="mask of its own"):
        pattern_of(mask_function=lambda _b, _h, query, key: (key <= query) | (key == 3))


@pytest.mark.parametrize("name", ["position_bias", "indices"])
def test_an_argument_that_changes_the_result_is_refused(name: str) -> None:
    layer = Layer.of(Case())
    with computing(Step((Run(0, 1),))), pytest.raises(NotInvariant, match=name):
        attend(MODULE, layer.queries[None, :, :1], layer.keys, layer.values, Pattern(), **{name: torch.zeros(1)})  # type: ignore[arg-type]


def test_without_a_step_it_is_refused() -> None:
    layer = Layer.of(Case())
    with pytest.raises(NotInvariant, match="without a step"):
        attend(MODULE, layer.queries[None, :, :1], layer.keys, layer.values, Pattern())


def test_without_an_operator_for_its_numbers_it_is_refused() -> None:
    with pytest.raises(NotInvariant, match="float64"):
        Layer.of(Case(dtype=torch.float64)).attended(Run(0, 1))
    library.choose("torch")
    with pytest.raises(NotInvariant, match="bfloat16"):
        Layer.of(Case()).attended(Run(0, 1))


@pytest.mark.parametrize("is_in_pages", [True, False])
@pytest.mark.parametrize("change", ["dtype", "key_dim", "fewer values", "heads"])
def test_memory_of_another_form_is_refused(change: str, is_in_pages: bool) -> None:
    layer, run = Layer.of(Case()), Run(LENGTH - 2, 2)
    match change:
        case "dtype":
            layer.keys = layer.keys.float()
        case "key_dim":
            layer.keys = layer.keys[..., :8]
        case "fewer values":
            layer.values = layer.values[:, :PAGE]
        case "heads":
            layer.keys = layer.keys.repeat(2, 1, 1)[:3]
            layer.values = layer.values.repeat(2, 1, 1)[:3]
    with pytest.raises(NotInvariant, match=r"memory of another form|does not keep"):
        layer.attended(run) if is_in_pages else layer.side_by_side(run)


def test_only_the_last_rows_may_be_cut_from_a_mask() -> None:
    everything = slice(None)
    assert Pattern(window=5)[:, :, -3:, :] == Pattern(window=5, last=3)
    for part in ((everything, everything, slice(3, None), everything), (everything, everything, slice(-3, None))):
        with pytest.raises(NotInvariant, match="part of a mask"):
            Pattern()[part]
