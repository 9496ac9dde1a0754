"""A plan keeps a state for thousands of tokens as the equations of the papers do, with steps as small as trained ones.

`tools/bench files` compares the same with llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.files.parameters import set_step_limits
from tests.exactness.architectures import VOCAB, tiny_model
from tests.runtime.plan.recurrent_reference import in_float64
from tests.runtime.plan.test_plan import RECURRENT, exact, oracle
from tests.slow_decays import remember
from tests.steps import run

NUM_TOKENS = 2000
UNLIMITED = [0.0, float("inf")]
FLOOR = [0.001, float("inf")]
"""The limits that transformers gives Nemotron-H."""
STATE_SPACES = ("mamba2", "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1")


def remembering(name: str, **fields: Any) -> PreTrainedModel:
    model = tiny_model(name, torch.float32, **fields)
    remember(model)
    return model


def prompt() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


def of_plan(model: PreTrainedModel) -> torch.Tensor:
    sequence = KVSequence(PagePool(exact(model), block_size=256))
    (logits,) = run(model, [Rows(sequence, prompt()[0].numpy(), NUM_TOKENS)])
    return logits


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest error of a token's logits, [tokens, vocab], relative to their spread."""
    spread = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
    return float(((found.double() - expected).norm(dim=1) / spread).max())


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", RECURRENT.split())
def test_a_plan_remembers_as_the_equations_of_the_papers_do(name: str) -> None:
    model = remembering(name)
    assert error(of_plan(model), oracle(in_float64(model), prompt())) < 1e-4


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", STATE_SPACES)
def test_the_comparison_sees_a_floor_under_the_steps(name: str) -> None:
    model = remembering(name, time_step_limit=FLOOR)
    found = of_plan(model)
    assert error(found, oracle(in_float64(model), prompt())) < 1e-4
    model.config.time_step_limit = UNLIMITED
    assert error(found, oracle(in_float64(model), prompt())) > 5e-3


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_modules_have_no_floor_either(name: str) -> None:
    """transformers' own modules compute where there is no plan: on GPUs, in float16, and all of Zamba2."""
    model = remembering(name, time_step_min=0.001)
    mixers = [one for one in model.modules() if hasattr(one, "time_step_limit")]
    assert {one.time_step_limit[0] for one in mixers} == {0.001}
    expected = oracle(in_float64(model), prompt())
    assert error(oracle(model, prompt()), expected) > 5e-3
    set_step_limits(model)
    assert error(oracle(model, prompt()), expected) < 1e-4


@pytest.mark.parametrize("limits", [None, UNLIMITED])
def test_a_null_time_step_limit_means_no_limit(limits: Any) -> None:
    model = remembering("falcon_h1", time_step_limit=limits)
    assert error(of_plan(model), oracle(in_float64(model), prompt())) < 1e-4
