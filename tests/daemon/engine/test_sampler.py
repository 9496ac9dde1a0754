"""Tokens that are drawn from logits: by the formulas of transformers and OpenAI, with numbers that a seed decides."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation import logits_process as theirs

from diskprefix.daemon.engine.request import SamplingParams
from diskprefix.daemon.engine.sampler import Sampler
from diskprefix.errors import InvalidRequest, NonFiniteLogits
from diskprefix.tokens import Logits


def scores(values: list[float]) -> Logits:
    return np.array(values, np.float32)


LOGITS = scores([0.0, 1.0, 2.0, 3.0, 2.5])
NAN, INFINITY = float("nan"), float("inf")


def sampler(prompt: tuple[int, ...] = (1, 2, 3), choice: int = 0, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), np.array(prompt, np.int32), choice)


def draws(count: int, logits: Logits = LOGITS, **params: Any) -> list[int]:
    chosen = sampler(**params)
    return [chosen.sample(logits) for _ in range(count)]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1}, {"logit_bias": {3: 100.0}}, {"top_k": 1}])
def test_a_suppressed_token_never_comes_and_the_models_logits_stay(params: dict[str, Any]) -> None:
    logits = LOGITS.copy()
    chosen = Sampler(SamplingParams(**params), np.array([3], np.int32), suppressed=np.array([3, 4]))
    assert 3 in draws(50, **params)
    found = {chosen.sample(logits) for _ in range(50)}
    assert found
    assert not found & {3, 4}
    assert np.array_equal(logits, LOGITS)


@pytest.mark.parametrize(
    ("params", "logits", "expected"),
    [
        ({}, LOGITS, [3, 3, 3]),
        ({}, scores([1.0, 2.0, 2.0]), [1]),
        ({"logit_bias": {3: -100.0}}, LOGITS, [4]),
        ({"logit_bias": {0: 100.0}}, LOGITS, [0]),
        ({"repetition_penalty": 2.0}, LOGITS, [4]),
        ({"repetition_penalty": 1.5, "prompt": (0,)}, LOGITS + 3, [3, 4]),
        ({"presence_penalty": 0.5}, scores([0.0, 0.0, 0.0, 1.0, 0.0]), [3, 3]),
        ({"frequency_penalty": 0.6}, scores([0.0, 0.0, 0.0, 1.0, 0.0]), [3, 3, 0]),
        ({}, scores([-INFINITY, 1.0, -INFINITY]), [1, 1]),
    ],
)
def test_temperature_zero_takes_the_likeliest_with_biases_and_penalties(
    params: dict[str, Any], logits: Logits, expected: list[int]
) -> None:
    """Of equal ones the first. Repetitions count in the prompt too, presence and frequency in the reply alone."""
    assert draws(len(expected), logits, temperature=0, **params) == expected


@pytest.mark.parametrize("seed", [-1, 2**63, 0, 7])
def test_a_seed_repeats_and_choices_differ(seed: int) -> None:
    first = draws(50, seed=seed)
    assert first == draws(50, seed=seed)
    assert first != draws(50, seed=8)
    assert first != draws(50, seed=seed, choice=1)


def test_sampling_follows_the_distribution_of_what_the_model_does_not_exclude() -> None:
    counts = np.bincount(draws(4000, seed=1), minlength=5) / 4000
    assert np.abs(counts - np.exp(LOGITS) / np.exp(LOGITS).sum()).max() < 0.03
    assert draws(5, scores([-INFINITY, 1.0, -INFINITY])) == [1] * 5


@pytest.mark.parametrize(
    ("params", "allowed"),
    [({"top_k": 2}, {3, 4}), ({"top_p": 0.4}, {3}), ({"min_p": 0.55}, {3, 4}), ({"temperature": 0.01}, {3})],
)
def test_the_cuts_leave_only_likely_tokens(params: dict[str, Any], allowed: set[int]) -> None:
    assert set(draws(300, seed=3, **params)) == allowed


def test_logprobs_are_the_models_own() -> None:
    chosen = sampler(logprobs=2, temperature=0, logit_bias={0: 100.0})
    (item,) = chosen.logprobs(LOGITS, chosen.sample(LOGITS))
    assert item.token_id == 0
    assert item.logprob == pytest.approx(float(np.log(np.exp(LOGITS) / np.exp(LOGITS).sum())[0]))
    assert [top.token_id for top in item.top] == [3, 4]
    assert sampler(logprobs=0).logprobs(LOGITS, 1)[0].top == ()
    assert sampler().logprobs(LOGITS, 1) == ()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "wrong", [[0.0, NAN, 2.0, 3.0, 2.5], [0.0, INFINITY, 2.0, 3.0, 2.5], [-INFINITY] * 5, [NAN] * 5], ids=str
)
def test_logits_that_are_not_finite_are_the_models_fault(wrong: list[float], temperature: float) -> None:
    with pytest.raises(NonFiniteLogits, match=r"^the model computed logits that are not finite [^\n]+$"):
        sampler(temperature=temperature).sample(scores(wrong))


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
        sampler((0, 1, 2, 3, 4), **params).sample(LOGITS)


# Against the formulas that the sampler had from transformers.


def hard_logits(kind: str, vocab: int) -> Logits:
    """Random logits: `excluded` has only a few that are finite, `huge` ones overflow where they are subtracted."""
    random = np.random.default_rng(vocab)
    values = random.normal(0, 3, vocab).astype(np.float32)
    if kind == "ties":
        return np.round(values)
    if kind == "equal":
        return np.zeros(vocab, np.float32)
    if kind == "huge":
        return values * np.float32(3e36)
    if kind == "excluded":
        values[random.random(vocab) < 0.7] = -np.inf
    return values


KINDS = ["normal", "ties", "equal", "huge", "excluded"]


def their_scores(params: SamplingParams, logits: Logits, prompt: npt.NDArray[Any], reply: list[int]) -> torch.Tensor:
    """What temperature and cuts apply to, [1, vocab]."""
    scores = torch.from_numpy(logits)[None]
    known = torch.from_numpy(np.concatenate([prompt, np.array(reply, np.int64)]))[None]
    if params.logit_bias:
        biased = [[[token], bias] for token, bias in params.logit_bias.items()]
        scores = theirs.SequenceBiasLogitsProcessor(biased)(known, scores)
    if params.repetition_penalty != 1:
        scores = theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(known, scores)
    counts = torch.bincount(torch.tensor(reply, dtype=torch.int64), minlength=len(logits))
    return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {3: -1.5, 0: 7.0}},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.3},
        {"logit_bias": {5: 2.0}, "repetition_penalty": 0.8, "presence_penalty": 1.1, "frequency_penalty": 0.4},
    ],
    ids=str,
)
def test_bias_and_penalties_have_the_bits_of_transformers(params: dict[str, Any], kind: str) -> None:
    logits, prompt = hard_logits(kind, 300), np.array([5, 1, 5, 299, 7, 1000])
    chosen, reply = sampler(tuple(prompt), temperature=0, **params), list[int]()
    for _ in range(20):
        expected = their_scores(SamplingParams(**params), logits, prompt, reply)
        before = logits.copy()
        reply.append(chosen.sample(logits))
        assert reply[-1] == int(expected.argmax())
        assert np.array_equal(logits, before)
        assert np.array_equal(chosen._scores(logits, None), their_scores(chosen._params, logits, prompt, reply)[0])


def their_probabilities(params: SamplingParams, logits: Logits) -> npt.NDArray[np.float64]:
    scores, ids = torch.from_numpy(logits)[None], torch.zeros((1, 1), dtype=torch.int64)
    if params.temperature != 1:
        scores = theirs.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = theirs.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = theirs.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = theirs.MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].double().softmax(dim=-1).numpy()


def give_numbers(patch: pytest.MonkeyPatch, numbers: list[int]) -> None:
    given = iter(numbers)
    patch.setattr(
        "diskprefix.daemon.engine.sampler.Philox", lambda **_: SimpleNamespace(random_raw=lambda: next(given))
    )


CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_p": 0.0},
    {"top_p": 0.6789},
    {"top_p": 0.9765},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 60, "top_p": 0.8765, "min_p": 0.05},
]


@pytest.mark.cases(10)
@pytest.mark.parametrize("vocab", [7, 1000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", CUTS, ids=str)
def test_each_token_has_the_share_of_the_numbers_that_its_probability_says(
    params: dict[str, Any], kind: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evenly spaced numbers stand for all. A cut leaves the very tokens that transformers leaves; of tokens with equal
    scores, as many: torch sorts them in any order."""
    count = 1500
    give_numbers(monkeypatch, [(2 * i + 1) * 2**63 // count for i in range(count)])
    logits = hard_logits(kind, vocab)
    drawn = np.bincount(draws(count, logits, **params), minlength=vocab).astype(np.float64)
    expected = their_probabilities(SamplingParams(**params), logits) * count
    drawn, expected = (values[np.lexsort((values, logits))] for values in (drawn, expected))
    assert np.abs(drawn - expected).max() <= 1.01
    assert not drawn[expected == 0].any()


@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.75])
def test_of_equally_likely_tokens_a_cut_leaves_the_first_ones(top_p: float) -> None:
    left = set(draws(200, np.zeros(4, np.float32), seed=1, top_p=top_p))
    assert left == set(range(max(1, int(4 * top_p))))


@pytest.mark.parametrize("vocab", [5, 600, 5000])
def test_the_least_and_the_largest_number_draw_no_excluded_token(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    give_numbers(monkeypatch, [0, 2**64 - 1])
    logits = hard_logits("normal", vocab)
    logits[[0, 1, -2, -1]] = -INFINITY
    assert draws(2, logits) == [2, vocab - 3]


@pytest.mark.parametrize("is_one_reply", [True, False])
def test_the_draws_of_a_reply_and_of_neighbouring_seeds_are_as_independent_as_chance(is_one_reply: bool) -> None:
    """Chi squared of single tokens and of pairs of neighbours: above the bound once in a thousand seeds."""
    logits, count = np.log(scores([1, 2, 3, 4])), 6000
    tokens = draws(count, logits, seed=11)
    if not is_one_reply:
        tokens = [sampler(seed=seed).sample(logits) for seed in range(count)]
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    for seen, of_all, bound in (
        (np.bincount(tokens, minlength=4), shares, 16.27),
        (np.bincount(np.array(tokens[::2]) * 4 + tokens[1::2], minlength=16), np.outer(shares, shares).ravel(), 37.70),
    ):
        expected = of_all * seen.sum()
        assert ((seen - expected) ** 2 / expected).sum() < bound


def test_a_seed_has_these_tokens_after_every_restart_and_upgrade() -> None:
    assert draws(16, seed=7) == [4, 3, 3, 3, 1, 3, 3, 3, 0, 4, 4, 3, 3, 4, 3, 4]
    assert draws(16, seed=6, choice=1) == draws(16, seed=7)


def test_a_token_does_not_depend_on_other_rows_nor_on_draws_that_failed() -> None:
    rows = np.stack([hard_logits("normal", 1001) for _ in range(9)])
    rows[4] += 1
    alone, among = sampler(seed=3, top_p=0.9), sampler(seed=3, top_p=0.9)
    for row in rows:
        with pytest.raises(NonFiniteLogits):
            among.sample(np.full(1001, np.nan, np.float32))
        assert among.sample(row) == alone.sample(row.copy())


@pytest.mark.parametrize("kind", ["normal", "ties", "excluded"])
def test_log_probabilities_are_those_of_torch(kind: str) -> None:
    logits = hard_logits(kind, 1000)
    values = torch.from_numpy(logits).double().log_softmax(dim=-1)
    (item,) = sampler(logprobs=20).logprobs(logits, 5)
    assert item.logprob == pytest.approx(float(values[5]), abs=1e-5)
    assert [one.logprob for one in item.top] == pytest.approx(values.topk(20).values.tolist(), abs=1e-5)
    # Of equal ones the first.
    assert [one.token_id for one in item.top] == np.argsort(-logits, kind="stable")[:20].tolist()


def test_sampling_needs_no_framework() -> None:
    code = "import sys, diskprefix.daemon.engine.sampler; print(sys.modules.keys() & {'torch', 'transformers'})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
