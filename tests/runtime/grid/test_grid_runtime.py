"""The contiguous cache of the grid: its content is that of the pages, whoever was computed before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.grid.grid_runtime import GridRuntime
from diskprefix.runtime.grid.rehearsal import _check_repeats, rehearse
from diskprefix.runtime.grid.state_layout import Unsupported
from diskprefix.tokens import Logits
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, random_prompt

STEPS = (BLOCK, BLOCK, BLOCK, 7, 1, 1)
KINDS = ["llama", "gemma3", "gemma3n", "deepseek_v3", "qwen3_next", "mamba2", "falcon_h1", "inkling_text"]


def made(name: str) -> tuple[GridRuntime, PagePool]:
    model = tiny_model(name, torch.bfloat16)
    layout = rehearse(model)
    assert not layout.unsupported
    return GridRuntime(model, layout), PagePool(layout, block_size=BLOCK)


def step(runtime: GridRuntime, sequence: KVSequence, num_tokens: int, seed: int) -> Logits:
    ids = random_prompt(seed, sum(STEPS)).astype(np.int64)
    start = sequence.num_tokens
    return runtime.run([Rows(sequence, ids[start : start + num_tokens])]).logits[0]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", KINDS)
def test_sequences_that_take_turns_have_the_bits_of_each_alone(name: str) -> None:
    """Also when one begins again, and when a step failed in its midst."""
    runtime, pool = made(name)
    alone = {}
    for seed in (1, 2):
        sequence = KVSequence(pool)
        alone[seed] = [step(runtime, sequence, count, seed) for count in STEPS], sequence.content(0)
    both = {seed: KVSequence(pool) for seed in (1, 2)}
    for number, count in enumerate(STEPS):
        for seed, sequence in both.items():
            if number == 2:
                with pytest.raises(RuntimeError, match="fails"), failing(runtime):
                    step(runtime, sequence, count, seed)
                assert sequence.num_tokens == 2 * BLOCK
            assert np.array_equal(step(runtime, sequence, count, seed), alone[seed][0][number]), (number, seed)
    for seed, sequence in both.items():
        assert sequence.content(0) == alone[seed][1]


@contextmanager
def failing(runtime: GridRuntime) -> Iterator[None]:
    """Within it, a step fails behind its layers."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the head fails")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime._model.get_output_embeddings(), "forward", fail)
        yield


def test_the_cache_is_kept_while_one_sequence_goes_on_and_not_behind_other_changes() -> None:
    runtime, pool = made("llama")
    sequence = KVSequence(pool)
    step(runtime, sequence, BLOCK, 1)
    kept = runtime._cache
    step(runtime, sequence, BLOCK, 1)
    assert runtime._cache is kept
    expected = step(runtime, sequence, 5, 1)
    assert runtime._cache is kept
    sequence.truncate(2 * BLOCK)
    assert np.array_equal(step(runtime, sequence, 5, 1), expected)
    assert runtime._cache is not kept


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_a_device_whose_rows_have_other_bits_the_second_time_is_found(noise: float) -> None:
    """cuDNN's attention on an H200 did that, now and then, for the only row of a step behind thousands of tokens."""
    model = tiny_model("llama", torch.bfloat16)
    layout, torn = rehearse(model), iter([*[0.0] * 60, noise, *[0.0] * 60])

    def tear(_module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output + next(torn) if arguments[0].shape[1] == 1 else output

    with model.get_input_embeddings().register_forward_hook(tear):
        if noise:
            with pytest.raises(Unsupported, match="give the same rows other bits from run to run"):
                _check_repeats(model, layout)
        else:
            _check_repeats(model, layout)
