"""Samples tokens from logits, with transformers' logits processors and OpenAI's two penalties.

`draw` samples the tokens of several replies together. Each row has the bits that it has alone: what is computed
together is computed row by row, and each reply has its own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diskprefix.engine.constrained_reply import ConstrainedReply
from diskprefix.engine.request import SamplingParams, TokenLogprob
from diskprefix.errors import InvalidRequest, NonFiniteLogits
from diskprefix.tokens import Logits, TokenIds


@dataclass(frozen=True)
class PresenceFrequencyPenalty(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's penalties, for generated tokens only: `presence` once and `frequency` for each occurrence."""

    presence: float
    frequency: float
    prompt_tokens: int

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generated = input_ids[0, self.prompt_tokens :]
        counts = torch.bincount(generated, minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Sampler:
    """Chooses the tokens of one reply. `choice` is its index among the request's `n`."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: TokenIds,
        choice: int = 0,
        constraint: ConstrainedReply | None = None,
    ) -> None:
        self._constraint = constraint
        self._greedy = params.temperature == 0
        self._processors = _processors(params, len(prompt))
        self._num_logprobs = params.logprobs
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((params.seed + choice) % 2**63)
        self._ids = torch.from_numpy(prompt).long().unsqueeze(0) if self._processors else None

    def can_draw(self, num_rows: int) -> bool:
        """Returns whether the tokens of `num_rows` rows of logits can be drawn together: no draw depends on the token
        before, nor on a constraint."""
        return self._constraint is None and (num_rows == 1 or (self._greedy and self._ids is None))

    @property
    def is_complete(self) -> bool:
        """True if the constraint allows no further token."""
        return self._constraint is not None and self._constraint.is_complete

    @property
    def is_ready(self) -> bool:
        """True if `sample` returns at once, without waiting for the mask of the constraint."""
        return self._constraint is None or self._constraint.is_ready

    def sample(self, logits: Logits, forced: int | None = None, drawn: int | None = None) -> int:
        """Returns the next token for next-token `logits`, shape [vocab]. It is `forced`, if that is given and the
        constraint leaves the text free here. `drawn` is what `draw` has returned for these logits.

        Raises `NonFiniteLogits` for logits with NaN or +inf or with only -inf, and `InvalidRequest` if only the
        request's sampling parameters or its constraint make the scores so.
        """
        constraint = self._constraint
        if constraint is None or (forced is not None and constraint.is_free):
            # Sampled even if it is forced, and first: the logits may be refused, and a seed gives the numbers that
            # follow.
            token = _finite(draw([Ask(self, logits)])[0] if drawn is None else drawn, logits)
            if forced is not None and (constraint is None or constraint.accept(forced)):
                token = forced
            elif constraint is not None:
                token = self._sample_allowed(logits, constraint)
        else:
            token = self._sample_allowed(logits, constraint)
        if self._ids is not None:
            self._ids = torch.cat([self._ids, torch.tensor([[token]])], dim=-1)
        return token

    def _sample_allowed(self, logits: Logits, constraint: ConstrainedReply) -> int:
        forbidden = constraint.forbidden()
        while True:
            token = _finite(draw([Ask(self, logits, forbidden)])[0], logits)
            if constraint.accept(token):
                return token
            forbidden[token] = True

    def _scores(self, logits: Logits, forbidden: torch.Tensor | None) -> torch.Tensor:
        """Returns the scores that a token is chosen by, float32 [1, vocab]."""
        scores = torch.from_numpy(logits)[None]
        if forbidden is not None:
            # Bias and penalties, which come next, leave -inf as it is.
            scores = scores.masked_fill(forbidden, -torch.inf)
        return scores if self._ids is None else self._processors(self._ids, scores)

    def logprobs(self, logits: Logits, token: int) -> tuple[TokenLogprob, ...]:
        """Returns the model's own log probabilities of the chosen token and of the likeliest alternatives, without
        bytes; () if the request does not ask for them."""
        if self._num_logprobs is None:
            return ()
        values = torch.from_numpy(logits).log_softmax(dim=-1)
        best = values.topk(self._num_logprobs) if self._num_logprobs else None
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best else ()
        alternatives = tuple(TokenLogprob(i, b"", value) for i, value in top)
        return (TokenLogprob(token, b"", float(values[token]), alternatives),)


class Ask(NamedTuple):
    """Next-token logits, shape [vocab], of which a sampler is to draw a token. `forbidden`: bool of shape [vocab]."""

    sampler: Sampler
    logits: Logits
    forbidden: torch.Tensor | None = None


def draw(asks: Sequence[Ask]) -> list[int]:
    """Draws a token for each of `asks`, -1 where the scores are not finite. Such a draw consumes no random numbers."""
    greedy = [number for number, ask in enumerate(asks) if ask.sampler._greedy]
    others = [number for number, ask in enumerate(asks) if not ask.sampler._greedy]
    with _restoring_generators([asks[number].sampler._generator for number in others]) as put_back:
        tokens = _likeliest(_scores_of([asks[number] for number in greedy])) if greedy else []
        tokens += _drawn_from([asks[number] for number in others]) if others else []
        put_back([token < 0 for token in tokens[len(greedy) :]])
    drawn = dict(zip([*greedy, *others], tokens, strict=True))
    return [drawn[number] for number in range(len(asks))]


def _scores_of(asks: Sequence[Ask]) -> torch.Tensor:
    """Returns the scores of rows, float32 [rows, vocab]."""
    if any(ask.forbidden is not None or ask.sampler._ids is not None for ask in asks):
        return torch.cat([ask.sampler._scores(ask.logits, ask.forbidden) for ask in asks])
    return torch.from_numpy(asks[0].logits[None] if len(asks) == 1 else np.stack([ask.logits for ask in asks]))


def _likeliest(scores: torch.Tensor) -> list[int]:
    """Returns tokens, -1 where the highest score is not finite."""
    decisive, chosen = scores.max(dim=-1)
    tokens: list[int] = chosen.where(decisive.isfinite(), -1).tolist()
    return tokens


def _drawn_from(asks: Sequence[Ask]) -> list[int]:
    """Returns tokens drawn by their probabilities, -1 where a score is not finite."""
    probabilities = _scores_of(asks).softmax(dim=-1)
    # As `torch.multinomial` draws one token of a row.
    numbers = torch.empty_like(probabilities)
    for row, ask in zip(numbers, asks, strict=True):
        row.exponential_(generator=ask.sampler._generator)
    chosen = torch.div(probabilities, numbers, out=numbers).argmax(dim=-1)
    # Any probability will do: a score that is not finite makes all of them NaN.
    tokens: list[int] = chosen.where(probabilities[:, 0].isfinite(), -1).tolist()
    return tokens


@contextmanager
def _restoring_generators(generators: Sequence[torch.Generator]) -> Iterator[Callable[[Sequence[bool]], None]]:
    """Yields a function that restores the states of some generators. An error restores all."""
    states = [generator.get_state() for generator in generators]

    def put_back(which: Sequence[bool]) -> None:
        for generator, state, is_meant in zip(generators, states, which, strict=True):
            if is_meant:
                generator.set_state(state)

    try:
        yield put_back
    except BaseException:
        put_back([True] * len(states))
        raise


def _finite(token: int, logits: Logits) -> int:
    """Raises the errors of `Sampler.sample` if no token could be drawn from `logits`."""
    if token >= 0:
        return token
    if np.isfinite(logits.max()):
        raise InvalidRequest(
            "the sampling parameters leave no finite score for any token that may come next; choose penalties, biases "
            "and a temperature nearer to their defaults"
        )
    raise NonFiniteLogits(
        "the model computed logits that are not finite (NaN or infinity); its weights may be damaged, or its dtype too "
        "small: try --dtype bfloat16 or float32"
    )


def _processors(params: SamplingParams, prompt_tokens: int) -> LogitsProcessorList:
    """Returns the processors in vLLM's order: bias and penalties, temperature, cuts."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], float(b)] for token, b in params.logit_bias.items()]))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(PresenceFrequencyPenalty(params.presence_penalty, params.frequency_penalty, prompt_tokens))
    if params.temperature == 0:
        return processors
    if params.temperature != 1:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors
