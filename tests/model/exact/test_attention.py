"""Attention of our own: right for every feature, and the same bits for a token in every company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Llama4TextConfig, LlamaConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from diskprefix.kv.sizes import TILE
from diskprefix.kv.step import Run, Step, computing
from diskprefix.model.exact.attention import attend
from diskprefix.model.exact.patterns import NAME, NotInvariant, Pattern, pattern_of
from diskprefix.native import library

MODULE: Any = SimpleNamespace(training=False)
CAPACITY = 2 * TILE
LENGTH = TILE + 300
ALL = Pattern()


@dataclass(frozen=True)
class Case:
    """The properties of an attention layer. `sinks`: one for each head."""

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


CASES = {
    "grouped": Case(),
    "multi-query": Case(heads=5, kv_heads=1),
    "no groups": Case(kv_heads=4),
    "large groups": Case(heads=14, kv_heads=2, key_dim=64, value_dim=64),
    "scaled": Case(scaling=0.3),
    "window": Case(pattern=Pattern(window=24)),
    "long window": Case(pattern=Pattern(window=TILE + 7)),
    "chunks": Case(pattern=Pattern(chunk=24)),
    "soft cap": Case(softcap=2.0),
    "soft cap and window": Case(softcap=2.0, pattern=Pattern(window=24)),
    "sinks": Case(sinks=True, pattern=Pattern(window=24)),
    "sinks and soft cap": Case(sinks=True, softcap=2.0),
    "values of another size": Case(kv_heads=4, key_dim=24, value_dim=16),
    "odd sizes": Case(key_dim=10, value_dim=10),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@dataclass
class Layer:
    """The queries of a sequence, [heads, length, key_dim], and memory that holds its keys and values. Behind the end it
    is what another sequence left."""

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

        keys, values = (
            torch.full((1, case.kv_heads, CAPACITY, dim), float("nan"), dtype=case.dtype)
            for dim in (case.key_dim, case.value_dim)
        )
        keys[0, :, : case.length] = numbers(case.kv_heads, case.length, case.key_dim)
        values[0, :, : case.length] = numbers(case.kv_heads, case.length, case.value_dim)
        sinks = numbers(case.heads) if case.sinks else None
        return cls(case, numbers(case.heads, case.length, case.key_dim), keys, values, sinks)

    def memory(self, run: Run, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values from a position on, up to the end of the run's last tile."""
        reach = -(-run.end // TILE) * TILE
        return self.keys[:, :, first:reach], self.values[:, :, first:reach]

    def attended(self, run: Run, first: int = 0) -> torch.Tensor:
        """[rows, heads, value_dim], where memory begins with a position."""
        return together([(self, run)], first)

    def cut(self, steps: Sequence[int]) -> torch.Tensor:
        ends = [sum(steps[: i + 1]) for i in range(len(steps))]
        return torch.cat([self.attended(Run(end - n, n)) for end, n in zip(ends, steps, strict=True)])


def together(runs: Sequence[tuple[Layer, Run]], first: int = 0) -> torch.Tensor:
    """Attention of the rows of several sequences in one step, with the sinks of the first."""
    one = runs[0][0]
    memory = [layer.memory(run, first) for layer, run in runs]
    with computing(Step(tuple(run for _, run in runs))):
        found, _ = attend(
            MODULE,
            torch.cat([layer.queries[:, run.start : run.end] for layer, run in runs], dim=1).unsqueeze(0),
            [keys for keys, _ in memory],
            [values for _, values in memory],
            one.case.pattern,
            scaling=one.case.scaling,
            softcap=one.case.softcap,
            s_aux=one.sinks,
        )
    return found[0]


def plain(layer: Layer) -> torch.Tensor:
    """The same by the textbook, in float64."""
    case, length, group = layer.case, layer.case.length, layer.case.heads // layer.case.kv_heads
    keys, values = (memory[0, :, :length].double().repeat_interleave(group, 0) for memory in (layer.keys, layer.values))
    scale = case.key_dim**-0.5 if case.scaling is None else case.scaling
    scores = layer.queries.double() @ keys.transpose(1, 2) * scale
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    first = torch.tensor([case.pattern.first_visible(query) for query in range(length)]).unsqueeze(1)
    positions = torch.arange(length)
    visible = (first <= positions) & (positions <= positions.unsqueeze(1))
    scores = scores.masked_fill(~visible, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.double().view(-1, 1, 1).expand(-1, length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return (weights @ values).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_attention(case: Case, dtype: torch.dtype) -> None:
    layer = Layer.of(replace(case, dtype=dtype))
    error = (layer.attended(Run(0, LENGTH)).double() - plain(layer)).abs().max()
    assert error < (0.06 if dtype == torch.bfloat16 else 1e-5)


def random_steps(seed: int, length: int = LENGTH) -> list[int]:
    chosen, steps = random.Random(seed), list[int]()
    while sum(steps) < length:
        steps.append(min(length - sum(steps), chosen.choice((1, 1, 2, 3, 9, 31, 33, 64, 130, 200))))
    return steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_has_the_same_bits_however_its_sequence_is_cut(case: Case, dtype: torch.dtype) -> None:
    layer = Layer.of(replace(case, dtype=dtype))
    whole = layer.cut([LENGTH])
    for steps in (random_steps(1), random_steps(2), [256, 256, LENGTH - 512], [300, 150, *[1] * (LENGTH - 450)]):
        assert torch.equal(layer.cut(steps), whole), steps


def test_a_token_has_the_same_bits_beside_other_sequences(case: Case) -> None:
    one, other = Layer.of(case), Layer.of(case, seed=1)
    other.sinks = one.sinks
    runs = [(other, Run(40, 33)), (one, Run(200, 1)), (one, Run(530, 7)), (other, Run(511, 2))]
    assert torch.equal(together(runs), torch.cat([layer.attended(run) for layer, run in runs]))


def test_what_lies_behind_the_last_token_is_never_read(case: Case) -> None:
    layer = Layer.of(case)
    run = Run(100, 20)
    expected = layer.attended(run)
    layer.keys[:, :, run.end :] = layer.values[:, :, run.end :] = float("nan")
    assert torch.equal(layer.attended(run), expected)


def test_the_pattern_is_that_of_the_mask_of_transformers() -> None:
    embedded = torch.zeros(1, 3, 8)

    def pattern(create: Any, config: Any) -> Any:
        config._attn_implementation = NAME
        return create(config=config, inputs_embeds=embedded, attention_mask=None, past_key_values=None)

    assert pattern(create_causal_mask, LlamaConfig()) == Pattern()
    assert pattern(create_sliding_window_causal_mask, Gemma3TextConfig(sliding_window=7)) == Pattern(window=7)
    assert pattern(create_chunked_causal_mask, Llama4TextConfig(attention_chunk_size=7)) == Pattern(chunk=7)


def test_a_mask_of_another_form_is_refused() -> None:
    with pytest.raises(NotInvariant, match="mask of its own"):
        pattern_of(mask_function=lambda _b, _h, query, key: (key <= query) | (key == 3))


@pytest.mark.parametrize("name", ["position_bias", "indices"])
def test_an_argument_that_changes_the_result_is_refused(name: str) -> None:
    layer = Layer.of(CASES["grouped"])
    with computing(Step((Run(0, 1),))), pytest.raises(NotInvariant, match=name):
        attend(MODULE, layer.queries[None, :, :1], layer.keys, layer.values, Pattern(), **{name: torch.zeros(1)})  # type: ignore[arg-type]


def test_without_a_step_it_is_refused() -> None:
    layer = Layer.of(CASES["grouped"])
    with pytest.raises(NotInvariant, match="without a step"):
        attend(MODULE, layer.queries[None, :, :1], layer.keys, layer.values, Pattern())


def test_without_an_operator_for_its_numbers_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotInvariant, match="float64"):
        Layer.of(Case(dtype=torch.float64)).attended(Run(0, 1))
    monkeypatch.setattr(library, "_chosen", "torch")
    with pytest.raises(NotInvariant, match="bfloat16"):
        Layer.of(CASES["grouped"]).attended(Run(0, 1))


@pytest.mark.parametrize("change", ["dtype", "key_dim", "fewer values", "heads"])
def test_memory_of_another_form_is_refused(change: str) -> None:
    layer = Layer.of(CASES["grouped"])
    match change:
        case "dtype":
            layer.keys = layer.keys.float()
        case "key_dim":
            layer.keys = layer.keys[..., :8]
        case "fewer values":
            layer.values = layer.values[:, :, :TILE]
        case "heads":
            layer.keys = layer.keys.repeat(1, 2, 1, 1)[:, :3]
            layer.values = layer.values.repeat(1, 2, 1, 1)[:, :3]
    with pytest.raises(NotInvariant, match="memory of another form"):
        layer.attended(Run(LENGTH - 2, 2))


def test_only_the_last_rows_may_be_cut_from_a_mask() -> None:
    everything = slice(None)
    assert Pattern(window=5)[:, :, -3:, :] == Pattern(window=5, last=3)
    for part in ((everything, everything, slice(3, None), everything), (everything, everything, slice(-3, None))):
        with pytest.raises(NotInvariant, match="part of a mask"):
            Pattern()[part]
