"""Samples tokens from logits, with transformers' logits processors and OpenAI's two penalties."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
from diskprefix.errors import DiskPrefixError, InvalidRequest, NonFiniteLogits
from diskprefix.tokens import TokenIds


@dataclass(frozen=True)
class PresenceFrequencyPenalty(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's penalties, for generated tokens only: `presence` once and `frequency` for each occurrence."""

    presence: float
    frequency: float
    prompt_tokens: int

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt_tokens :], minlength=scores.shape[-1])[: scores.shape[-1]]
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Sampler:
    """Chooses the tokens of one reply. `choice` is its index among the request's `n`."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: TokenIds,
        device: torch.device,
        choice: int = 0,
        constraint: ConstrainedReply | None = None,
    ) -> None:
        self._constraint = constraint
        self._greedy = params.temperature == 0
        self._processors = _processors(params, len(prompt))
        self._num_logprobs = params.logprobs
        self._generator = torch.Generator(device=device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((params.seed + choice) % 2**63)
        self._ids = torch.from_numpy(prompt).to(device, torch.long).unsqueeze(0) if self._processors else None

    @property
    def is_complete(self) -> bool:
        """True if the constraint allows no further token."""
        return self._constraint is not None and self._constraint.is_complete

    @property
    def is_ready(self) -> bool:
        """True if `sample` returns at once, without waiting for the mask of the constraint."""
        return self._constraint is None or self._constraint.is_ready

    def sample(self, logits: torch.Tensor, forced: int | None = None) -> int:
        """Returns the next token for next-token `logits`, shape [vocab]. It is `forced`, if that is given and the
        constraint leaves the text free here.

        Raises `NonFiniteLogits` for logits with NaN or +inf or with only -inf, and `InvalidRequest` if only the
        request's sampling parameters or its constraint make the scores so.
        """
        constraint = self._constraint
        if forced is not None and (constraint is None or constraint.is_free):
            # Sampled all the same, and first: the logits may be refused, and a seed gives the numbers that follow.
            chosen = self._sample(logits)
            if constraint is None or constraint.accept(forced):
                chosen = torch.full_like(chosen, forced)
            else:
                chosen = self._sample_allowed(logits, constraint)
        else:
            chosen = self._sample(logits) if constraint is None else self._sample_allowed(logits, constraint)
        if self._ids is not None:
            self._ids = torch.cat([self._ids, chosen], dim=-1)
        return int(chosen)

    def _sample_allowed(self, logits: torch.Tensor, constraint: ConstrainedReply) -> torch.Tensor:
        forbidden = constraint.forbidden().to(logits.device)
        chosen = self._sample(logits, forbidden)
        while not constraint.accept(int(chosen)):
            forbidden[int(chosen)] = True
            chosen = self._sample(logits, forbidden)
        return chosen

    def _sample(self, logits: torch.Tensor, forbidden: torch.Tensor | None = None) -> torch.Tensor:
        """Returns a token, int64 of shape [1, 1]. `forbidden`: bool of shape [vocab]."""
        scores = logits.float().unsqueeze(0)
        if forbidden is not None:
            # Bias and penalties, which come next, leave -inf as it is.
            scores = scores.masked_fill(forbidden, -torch.inf)
        if self._ids is not None:
            scores = self._processors(self._ids, scores)
        if self._greedy:
            decisive, chosen = scores.max(dim=-1, keepdim=True)
        else:
            probabilities = scores.softmax(dim=-1)
            # Any probability will do: a score that is not finite makes all of them NaN.
            decisive = probabilities[:, :1]
        # On a GPU, `multinomial` would end the device instead of raising.
        if not math.isfinite(decisive):
            raise _explained(logits)
        if not self._greedy:
            chosen = torch.multinomial(probabilities, 1, generator=self._generator)
        return chosen

    def logprobs(self, logits: torch.Tensor, token: int) -> tuple[TokenLogprob, ...]:
        """Returns the model's own log probabilities of the chosen token and of the likeliest alternatives, without
        texts; () if the request does not ask for them."""
        if self._num_logprobs is None:
            return ()
        values = logits.float().log_softmax(dim=-1)
        best = values.topk(self._num_logprobs) if self._num_logprobs else None
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best else ()
        alternatives = tuple(TokenLogprob(i, "", value) for i, value in top)
        return (TokenLogprob(token, "", float(values[token]), alternatives),)


def _explained(logits: torch.Tensor) -> DiskPrefixError:
    values = logits.float()
    if values.max().isfinite():
        return InvalidRequest(
            "the sampling parameters leave no finite score for any token that may come next; choose penalties, biases "
            "and a temperature nearer to their defaults"
        )
    return NonFiniteLogits(
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
