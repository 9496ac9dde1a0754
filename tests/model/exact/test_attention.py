"""Attention of our own, as models call it: the masks and arguments that it takes. Its numbers are in tests/native."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
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


def random_steps(seed: int, length: int = LENGTH) -> list[int]:
    chosen, steps = random.Random(seed), list[int]()
    while sum(steps) < length:
        steps.append(min(length - sum(steps), chosen.choice((1, 1, 2, 3, 9, 31, 33, 64, 130, 200))))
    return steps


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
    layer = Layer.of(Case())
    with computing(Step((Run(0, 1),))), pytest.raises(NotInvariant, match=name):
        attend(MODULE, layer.queries[None, :, :1], layer.keys, layer.values, Pattern(), **{name: torch.zeros(1)})  # type: ignore[arg-type]


def test_without_a_step_it_is_refused() -> None:
    layer = Layer.of(Case())
    with pytest.raises(NotInvariant, match="without a step"):
        attend(MODULE, layer.queries[None, :, :1], layer.keys, layer.values, Pattern())


def test_without_an_operator_for_its_numbers_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotInvariant, match="float64"):
        Layer.of(Case(dtype=torch.float64)).attended(Run(0, 1))
    monkeypatch.setattr(library, "_chosen", "torch")
    with pytest.raises(NotInvariant, match="bfloat16"):
        Layer.of(Case()).attended(Run(0, 1))


@pytest.mark.parametrize("change", ["dtype", "key_dim", "fewer values", "heads"])
def test_memory_of_another_form_is_refused(change: str) -> None:
    layer = Layer.of(Case())
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
