from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.engine.request import SamplingParams
from diskprefix.engine.sampler import Sampler
from diskprefix.errors import InvalidRequest, NonFiniteLogits

CPU = torch.device("cpu")
PROMPT = np.array([1, 2, 3], dtype=np.int32)


def sampler(prompt: Any = PROMPT, choice: int = 0, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), prompt, CPU, choice)


def draws(count: int, logits: torch.Tensor, **params: Any) -> list[int]:
    chosen = sampler(**params)
    return [chosen.sample(logits) for _ in range(count)]


LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, 2.5])


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(3, LOGITS, temperature=0) == [3, 3, 3]


def test_a_seed_repeats_and_choices_differ() -> None:
    first = draws(50, LOGITS, seed=7)
    assert first == draws(50, LOGITS, seed=7)
    assert first != draws(50, LOGITS, seed=8)
    assert first != draws(50, LOGITS, seed=7, choice=1)


@pytest.mark.parametrize("seed", [-1, 2**63, 0])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert draws(5, LOGITS, seed=seed) == draws(5, LOGITS, seed=seed)


def test_sampling_follows_the_distribution() -> None:
    counts = np.bincount(draws(4000, LOGITS, seed=1), minlength=5) / 4000
    assert np.abs(counts - LOGITS.softmax(-1).numpy()).max() < 0.03


@pytest.mark.parametrize(
    ("params", "allowed"),
    [({"top_k": 2}, {3, 4}), ({"top_p": 0.4}, {3}), ({"min_p": 0.55}, {3, 4}), ({"temperature": 0.01}, {3})],
)
def test_the_cuts_leave_only_likely_tokens(params: dict[str, Any], allowed: set[int]) -> None:
    assert set(draws(300, LOGITS, seed=3, **params)) == allowed


def test_logit_bias_forbids_and_forces() -> None:
    assert draws(1, LOGITS, temperature=0, logit_bias={3: -100.0}) == [4]
    assert draws(1, LOGITS, temperature=0, logit_bias={0: 100.0}) == [0]


def test_repetition_penalty_counts_the_prompt_and_the_reply() -> None:
    assert draws(1, LOGITS, temperature=0, repetition_penalty=2.0) == [4]
    assert draws(2, LOGITS + 3, temperature=0, repetition_penalty=1.5, prompt=np.array([0], dtype=np.int32)) == [3, 4]


def test_presence_and_frequency_count_the_reply_only() -> None:
    logits = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])
    assert draws(2, logits, temperature=0, presence_penalty=0.5) == [3, 3]
    assert draws(3, logits, temperature=0, frequency_penalty=0.6)[:2] == [3, 3]
    assert draws(3, logits, temperature=0, frequency_penalty=0.6)[2] != 3


def test_logprobs_are_the_models_own() -> None:
    chosen = sampler(logprobs=2, temperature=0, logit_bias={0: 100.0})
    token = chosen.sample(LOGITS)
    (item,) = chosen.logprobs(LOGITS, token)
    expected = LOGITS.log_softmax(-1)
    assert item.token_id == 0
    assert item.logprob == pytest.approx(float(expected[0]))
    assert [top.token_id for top in item.top] == [3, 4]
    assert sampler(logprobs=0).logprobs(LOGITS, 1)[0].top == ()
    assert sampler().logprobs(LOGITS, 1) == ()


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "wrong", [[0.0, NAN, 2.0, 3.0, 2.5], [0.0, INFINITY, 2.0, 3.0, 2.5], [-INFINITY] * 5, [NAN] * 5], ids=str
)
def test_logits_that_are_not_finite_are_the_models_fault(wrong: list[float], temperature: float) -> None:
    with pytest.raises(NonFiniteLogits, match=r"^the model computed logits that are not finite [^\n]+$"):
        sampler(temperature=temperature).sample(torch.tensor(wrong))


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1e-45},
        {"temperature": 1e-45},
        {"logit_bias": {4: INFINITY}},
        {"logit_bias": {4: NAN}, "temperature": 0},
        {"logit_bias": dict.fromkeys(range(5), -INFINITY)},
    ],
    ids=str,
)
def test_scores_that_are_not_finite_by_the_parameters_are_the_requests_fault(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="sampling parameters"):
        sampler(np.array([0, 1, 2, 3, 4], dtype=np.int32), **params).sample(LOGITS)


def test_tokens_that_the_model_excludes_are_not_chosen() -> None:
    logits = torch.tensor([-INFINITY, 1.0, -INFINITY, -INFINITY, -INFINITY])
    assert draws(5, logits) == draws(5, logits, temperature=0) == [1] * 5


def test_of_equal_scores_the_first_is_taken() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        logits = torch.randint(0, 4, (997,), generator=generator).float()
        assert draws(1, logits, temperature=0) == [int((logits == logits.max()).nonzero()[0])]
