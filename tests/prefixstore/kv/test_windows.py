"""Pages of layers with a window: those behind it go, and no bit of a run depends on that."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.numbers import Array
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.kv.sizes import MAX_TAKEN_BACK, num_pages
from diskprefix.runtime.grid.state_layout import made_up_tokens
from diskprefix.runtime.plan.planned import NotExact
from tests.exactness.architectures import tiny_model
from tests.modules import layout_of
from tests.steps import forward

BLOCK, LENGTH = 32, 900
AT_TOKENS = {
    "gemma3": torch.bfloat16,
    "gemma2": torch.bfloat16,
    "mistral": torch.float32,
    "gpt_oss": torch.bfloat16,
    "mimo_v2_flash": torch.float32,
    "llama4": torch.bfloat16,
    # Layers that share their keys with others.
    "gemma3n": torch.bfloat16,
}


@dataclass
class Model:
    model: PreTrainedModel
    layout: Layout
    ids: torch.Tensor

    def sequence(self, *, slides: bool = True) -> KVSequence:
        """In pages of its own, of which without `slides` one has the whole sequence."""
        return KVSequence(PagePool(self.layout, block_size=BLOCK if slides else LENGTH))

    def run(self, sequence: KVSequence, steps: Sequence[int]) -> list[torch.Tensor]:
        """Runs the next tokens in such steps. Returns the logits of each."""
        found = []
        for num_tokens in steps:
            start = sequence.num_tokens
            found.append(forward(self.model, sequence, self.ids[:, start : start + num_tokens])[-1])
        return found


@cache
def made(name: str) -> Model:
    model = tiny_model(name, AT_TOKENS[name])
    layout, _ = layout_of(model, identity=name)
    assert layout.exact_at == "token"
    assert any(group.window for group in layout.groups)
    return Model(model, layout, made_up_tokens(model, 5, LENGTH))


@pytest.fixture
def gemma() -> Model:
    return made("gemma3")


def random_steps(rng: random.Random, num_tokens: int) -> list[int]:
    steps: list[int] = []
    while (left := num_tokens - sum(steps)) > 0:
        steps.append(min(left, rng.choice((1, 1, 2, 5, 33, 100, 200, 256, 256))))
    return steps


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def spoilt(pool: PagePool) -> PagePool:
    """All free pages hold what is no number, as another sequence may have left it."""
    taken = pool.take_pages([number for number in range(len(pool.layout.groups)) for _ in range(40)])
    assert taken is not None
    for page in taken:
        page.rows.fill(0xFF)
    pool.release_pages(taken)
    return pool


@pytest.mark.parametrize("name", AT_TOKENS)
def test_a_run_in_pages_that_slide_has_the_bits_of_one_that_keeps_all(name: str) -> None:
    model, steps = made(name), random_steps(random.Random(name), LENGTH)
    slides, keeps = KVSequence(spoilt(model.sequence().pool)), model.sequence(slides=False)
    assert same(model.run(slides, steps), model.run(keeps, steps))
    first = slides.complete_from
    assert first >= LENGTH // 2
    assert slides.content(first) == keeps.content(first)
    for table in slides.tables:
        there = sum(page is not None for page in table.pages)
        assert there <= num_pages(LENGTH, BLOCK, table.group.window)


def test_a_sequence_is_gone_on_from_where_its_window_is_there(gemma: Model) -> None:
    source, keeps = gemma.sequence(), gemma.sequence(slides=False)
    for one in (source, keeps):
        gemma.run(one, [256, 256, 200, 50])
    (window,) = {group.window for group in gemma.layout.groups if group.window}
    ends = [762, 762 - MAX_TAKEN_BACK]
    for number in range(3):
        sequence = KVSequence(source.pool)
        assert sequence.begin_with(source.prefix())
        first = sequence.complete_from + window - 1
        assert [sequence.continues_at(count) for count in (*ends, first, first - 1)] == [True, True, True, False]
        end = (*ends, first)[number]
        keeps.truncate(end)
        sequence.truncate(end)
        assert same(gemma.run(sequence, [3, 60]), gemma.run(keeps, [3, 60]))
    too_early = KVSequence(source.pool)
    assert too_early.begin_with(source.prefix())
    too_early.truncate(first - 1)
    with pytest.raises(NotExact, match="does not keep"):
        gemma.run(too_early, [3])


@pytest.mark.parametrize(("in_memory_tokens", "end"), [(0, 420), (400, 420), (0, 831), (200, 831), (830, 831)])
def test_a_restore_takes_pages_for_what_it_loads(gemma: Model, in_memory_tokens: int, end: int) -> None:
    cold, sequence = gemma.sequence(slides=False), KVSequence(spoilt(gemma.sequence().pool))
    gemma.run(cold, random_steps(random.Random(3), end))
    gemma.run(sequence, random_steps(random.Random(4), in_memory_tokens))
    for number, group in enumerate(gemma.layout.groups):
        start = group.first_needed(end) // BLOCK * BLOCK
        sequence.prepare_restore(number, start, end)
        for position in range(max(start, in_memory_tokens), end):
            (page,) = cold.tables[number].pages
            assert page is not None

            def write(out: Any, content: Array = page.tensor[:, :, position]) -> None:
                out[...] = np.ascontiguousarray(content).view(np.uint8).reshape(out.shape)

            sequence.fill(position, 1, number, slice(None), write)
        if group.window:
            there = sum(page is not None for page in sequence.tables[number].pages)
            assert there <= num_pages(end, BLOCK, group.window)
    sequence.truncate(end)
    assert same(gemma.run(sequence, [3, 60, 1]), gemma.run(cold, [3, 60, 1]))
