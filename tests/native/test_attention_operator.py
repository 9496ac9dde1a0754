"""The compiled attention: right, and the same bits for a row in every company, for each variant of this CPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from diskprefix.native import library
from diskprefix.native.attention_operator import attention
from diskprefix.native.library import Operators
from tests.native.variants import WITH_PAIRS, of_this_cpu

TOKENS = 530
"""More than two tiles of keys."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Layer:
    """A sequence with its keys and values. Behind its end there is nothing finite."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, *sizes: int, dtype: torch.dtype, seed: int = 0, has_sinks: bool = False, **pattern: Any) -> Layer:
        """`sizes`: heads, groups, key_dim, value_dim."""
        heads, groups, key_dim, value_dim = sizes
        generator = torch.Generator().manual_seed(seed)
        query, keys, values = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((heads, TOKENS, key_dim), (groups, TOKENS + 90, key_dim), (groups, TOKENS + 90, value_dim))
        )
        keys[:, TOKENS:] = values[:, TOKENS:] = float("nan")
        sinks = torch.randn(heads, generator=generator) if has_sinks else None
        return cls(query, keys, values, sinks=sinks, **pattern)

    def cut(self, operators: Operators, steps: list[int]) -> torch.Tensor:
        found, start = [], 0
        for num_rows in steps:
            found.append(self.attended(operators, [(self, start, num_rows)]))
            start += num_rows
        return torch.cat(found)

    def attended(self, operators: Operators, runs: list[tuple[Layer, int, int]]) -> torch.Tensor:
        return attention(
            operators,
            torch.cat([layer.query[:, start : start + count] for layer, start, count in runs], dim=1),
            [(start, count, 0, layer.keys, layer.values) for layer, start, count in runs],
            scale=self.query.shape[-1] ** -0.5,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def plain(self) -> torch.Tensor:
        """By the textbook, in float64."""
        group = len(self.query) // len(self.keys)
        keys, values = (memory[:, :TOKENS].double().repeat_interleave(group, 0) for memory in (self.keys, self.values))
        scores = self.query.double() @ keys.transpose(1, 2) * self.query.shape[-1] ** -0.5
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        queries, positions = torch.arange(TOKENS).unsqueeze(1), torch.arange(TOKENS)
        first = queries - self.window + 1 if self.window else queries - queries % (self.chunk or TOKENS)
        scores = scores.masked_fill((positions > queries) | (positions < first), float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.double().view(-1, 1, 1).expand(-1, TOKENS, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        return (torch.softmax(scores, dim=-1)[..., :TOKENS] @ values).transpose(0, 1)


ERRORS = {torch.float32: 3e-6, torch.bfloat16: 0.03, torch.float16: 2e-3}


@cache
def layers(name: str, dtype: torch.dtype) -> tuple[Layer, torch.Tensor]:
    """A layer, and its attention by the textbook."""
    layer = {
        "groups of three": lambda: Layer.of(9, 3, 64, 64, dtype=dtype),
        "groups of seven": lambda: Layer.of(14, 2, 64, 64, dtype=dtype),
        "one group of many heads": lambda: Layer.of(40, 1, 16, 16, dtype=dtype),
        "window": lambda: Layer.of(4, 2, 32, 32, dtype=dtype, window=300),
        "chunks": lambda: Layer.of(4, 2, 32, 32, dtype=dtype, chunk=270),
        "soft cap and sinks": lambda: Layer.of(4, 2, 32, 32, dtype=dtype, softcap=2.0, has_sinks=True),
        "keys of three vectors and values of two and a half": lambda: Layer.of(6, 2, 96, 80, dtype=dtype),
        "values of another size, which fill no vector": lambda: Layer.of(4, 4, 27, 18, dtype=dtype),
    }[name]()
    return layer, layer.plain()


NAMES = (
    *("groups of three", "groups of seven", "one group of many heads", "window", "chunks", "soft cap and sinks"),
    *("keys of three vectors and values of two and a half", "values of another size, which fill no vector"),
)
OF_ALL_VARIANTS = NAMES[::3]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def random_steps(seed: int) -> list[int]:
    chosen, steps = random.Random(seed), list[int]()
    while sum(steps) < TOKENS:
        steps.append(min(TOKENS - sum(steps), chosen.choice((1, 1, 2, 3, 5, 16, 17, 33, 64, 130, 200))))
    return steps


def names_for(variant: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns the layers that a variant is tested with: fewer where its code is that of a variant before it."""
    has_own_code = variant in WITH_PAIRS and dtype == torch.bfloat16
    return NAMES if has_own_code or variant == of_this_cpu()[0] else OF_ALL_VARIANTS


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
def test_it_is_attention_with_the_same_bits_in_every_step(name: str, dtype: torch.dtype, operators: Operators) -> None:
    layer, plain = layers(name, dtype)
    whole = layer.cut(operators, [TOKENS])
    assert (whole.double() - plain).abs().max() < ERRORS[dtype]
    for steps in (random_steps(1), [256, 256, TOKENS - 512], [TOKENS - 20, *[1] * 20]):
        assert bits(layer.cut(operators, steps)) == bits(whole), steps


def test_a_row_has_the_same_bits_beside_other_sequences(operators: Operators) -> None:
    one, other = (Layer.of(6, 2, 32, 32, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    runs = [(other, 40, 1), (one, 520, 1), (other, 255, 130), (one, 10, 33)]
    expected = torch.cat([layer.attended(operators, [run]) for run in runs for layer in run[:1]])
    assert bits(one.attended(operators, runs)) == bits(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 200])
def test_the_number_of_threads_changes_no_bit(num_rows: int, dtype: torch.dtype, operators: Operators) -> None:
    layer = Layer.of(9, 3, 64, 64, dtype=dtype)
    found = set()
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found.add(bits(layer.attended(operators, [(layer, TOKENS - num_rows, num_rows)])))
    assert len(found) == 1


def test_memory_may_begin_where_the_window_does(operators: Operators) -> None:
    layer = Layer.of(4, 2, 32, 32, dtype=torch.bfloat16, window=50)
    expected = layer.attended(operators, [(layer, 520, 10)])
    moved = [(520, 10, 256, layer.keys[:, 256:], layer.values[:, 256:])]
    query, scale = layer.query[:, 520:530], 32**-0.5
    assert bits(attention(operators, query, moved, scale=scale, window=50)) == bits(expected)


@pytest.mark.parametrize("dims", [(0, 1), (1, 2)])
def test_rows_may_lie_anywhere_in_memory(dims: tuple[int, int], operators: Operators) -> None:
    layer = Layer.of(4, 2, 32, 32, dtype=torch.float32)
    query, keys, values = (
        memory.transpose(*dims).contiguous().transpose(*dims) for memory in (layer.query, layer.keys, layer.values)
    )
    moved = replace(layer, query=query, keys=keys, values=values)
    assert bits(moved.cut(operators, [TOKENS])) == bits(layer.cut(operators, [TOKENS]))


def test_scores_of_any_size_give_finite_weights(operators: Operators) -> None:
    layer = Layer.of(4, 2, 32, 32, dtype=torch.float32)
    layer.keys.mul_(1e18)
    assert (layer.cut(operators, [TOKENS]).double() - layer.plain()).abs().max() < 1e-5


def test_there_is_one_pool_of_threads() -> None:
    library.choose("auto")
    operators = library.operators()
    assert operators is not None
    layer = Layer.of(9, 3, 64, 64, dtype=torch.bfloat16)
    torch.set_num_threads(2)
    torch.ones(1 << 20).mul_(2)
    before = len(list(Path("/proc/self/task").iterdir()))
    layer.cut(operators, [TOKENS])
    # Those of a larger team, of another test, may end meanwhile.
    assert len(list(Path("/proc/self/task").iterdir())) <= before
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1
