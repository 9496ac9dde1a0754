"""Samples tokens from logits.

A row of logits is sampled alone, so its token depends on nothing else in the step. Sums over groups and buckets give
the place of a cut or a draw. Only the scores at this place are sorted, or added up one by one.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt
from numpy.random import Philox

from diskprefix.daemon.engine.constraints.constrained_reply import ConstrainedCalls, ConstrainedReply
from diskprefix.daemon.engine.constraints.constraint_grammar import Forbidden
from diskprefix.daemon.engine.exponential import exponential, natural_logarithm
from diskprefix.daemon.engine.request import SamplingParams, TokenLogprob
from diskprefix.daemon.engine.thought_limit import ThoughtLimit
from diskprefix.errors import InvalidRequest, NonFiniteLogits
from diskprefix.tokens import Logits, TokenIds

GROUP = 256
"""The number of neighbouring values in a group. Maxima or sums of groups are computed first."""
BUCKETS, BUCKETS_PER_UNIT = 2048, 16
"""The scores of a bucket differ by less than 1/16. The last bucket has all scores that are more than 127.9 below the
highest one: their probability is 0 in float32."""

_NONE: npt.NDArray[np.int64] = np.empty(0, np.int64)


class Sampler:
    """Chooses the tokens of one reply. `choice` is its index among the request's `n`. The tokens `suppressed` never
    come."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: TokenIds,
        choice: int = 0,
        constraint: ConstrainedReply | ConstrainedCalls | None = None,
        suppressed: npt.NDArray[np.int64] = _NONE,
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._suppressed = suppressed
        bias = params.logit_bias
        self._bias = np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float32)
        self._penalises = bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
        # `unique` imports another part of numpy at its first call.
        self._ids = np.unique(prompt).astype(np.int64) if self._penalises else _NONE
        """The tokens that penalties count: first each token of the prompt once, then the tokens of the reply."""
        self._prompt_tokens = len(self._ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        # Philox computes its n-th number from its key and n alone: neighbouring seeds are independent, and the n-th
        # draw has the n-th number. numpy keeps the raw numbers equal in all versions, but not the numbers of a
        # `Generator`.
        self._numbers = Philox(key=(seed + choice) % 2**64)

    @property
    def is_complete(self) -> bool:
        """True if the constraint allows no further token."""
        return self._constraint is not None and self._constraint.is_complete

    @property
    def is_ready(self) -> bool:
        """True if `sample` returns immediately, without waiting for the mask of the constraint."""
        return self._constraint is None or self._constraint.is_ready

    def sample(self, logits: Logits, limit: ThoughtLimit | None = None) -> int:
        """Returns the next token for next-token `logits`, shape [vocab]. If the constraint leaves the text free here, a
        `limit` may replace the token.

        Raises `NonFiniteLogits` for logits with NaN or +inf or with only -inf, and `InvalidRequest` if the logits are
        finite but the request's sampling parameters or its constraint leave no finite score. Then no random number is
        used.
        """
        constraint = self._constraint
        forbidden = None if constraint is None else constraint.forbidden()
        # A token is sampled even if the limit forces another one: the logits must be checked, and the later random
        # numbers of a seed must stay the same.
        token = self._choose(logits, forbidden)
        if limit is not None and (constraint is None or constraint.is_free):
            token = limit.in_place_of(token)
        # Bound: each round forbids one more token, and without any left `_choose` raises an error.
        while constraint is not None and not constraint.accept_token(token):
            forbidden = np.zeros(len(logits), np.bool_) if forbidden is None else forbidden
            forbidden[token] = True
            token = self._choose(logits, forbidden)
        if self._penalises:
            self._ids = np.append(self._ids, token)
        return token

    def prepare(self) -> None:
        """Prepares the constraint while the prompt is computed."""
        if isinstance(self._constraint, ConstrainedCalls):
            self._constraint.prepare()

    def record_text(self, text: str) -> None:
        """Records the text that the sampled token completed."""
        if isinstance(self._constraint, ConstrainedCalls):
            self._constraint.record_text(text)

    def logprobs(self, logits: Logits, token: int) -> tuple[TokenLogprob, ...]:
        """Returns the model's own log probabilities of the chosen token and of the likeliest alternatives, without
        bytes; () if the request does not ask for them."""
        num = self._params.logprobs
        return () if num is None else (log_probability(logits, token, num),)

    # Overflow of scores is expected and checked here, so numpy must not warn.
    @np.errstate(all="ignore")
    def _choose(self, logits: Logits, forbidden: Forbidden | None = None) -> int:
        scores = self._scores(logits, forbidden)
        # If there is a NaN, argmax returns it.
        best = int(scores.argmax())
        if np.isfinite(scores[best]):
            return best if self._params.temperature == 0 else self._draw(scores, scores[best])
        if np.isfinite(logits.max()):
            raise InvalidRequest(
                "the sampling parameters leave no finite score for any token that may come next; choose penalties, "
                "biases and a temperature nearer to their defaults"
            )
        raise NonFiniteLogits(
            "the model computed logits that are not finite (NaN or infinity); its weights may be damaged, or its dtype "
            "too small: try --dtype bfloat16 or float32"
        )

    def _scores(self, logits: Logits, forbidden: Forbidden | None) -> Logits:
        """Returns the scores before the cuts (top-k, top-p, min-p). Applies bias and penalties, then temperature, in
        vLLM's order."""
        params = self._params
        # Bias and penalties do not change -inf.
        scores: Logits = logits if forbidden is None else np.where(forbidden, np.float32(-np.inf), logits)
        if scores is logits and (params.logit_bias or self._penalises or len(self._suppressed)):
            scores = logits.copy()
        if len(self._suppressed):
            scores[self._suppressed] = -np.inf
        if params.logit_bias:
            tokens, bias = self._bias
            scores[tokens] += bias
        if params.repetition_penalty != 1:
            tokens = self._ids[self._ids < len(scores)]
            repeated, penalty = scores[tokens], params.repetition_penalty
            scores[tokens] = np.where(repeated < 0, repeated * penalty, repeated / penalty)
        if params.presence_penalty or params.frequency_penalty:
            tokens, counts = np.unique(self._ids[self._prompt_tokens :], return_counts=True)
            penalties = params.frequency_penalty * counts.astype(np.float32)
            scores[tokens] = scores[tokens] - penalties - params.presence_penalty
        if params.temperature not in (0, 1):
            scores = scores / params.temperature
        return scores

    def _draw(self, scores: Logits, highest: np.float32) -> int:
        params, kept = self._params, None
        if 0 < params.top_k < len(scores):
            kept = _at_least_highest(scores, params.top_k)
            scores = scores[kept]
        weights = exponential(scores - highest)
        if params.top_p < 1:
            _cut(weights, scores, highest, params.top_p)
        if params.min_p > 0:
            weights *= weights >= params.min_p
        drawn = _index_at(weights, (self._numbers.random_raw() >> 11) * 2.0**-53)
        return drawn if kept is None else int(kept[drawn])


def log_probability(logits: Logits, token: int, num: int) -> TokenLogprob:
    """Returns the log probability of a token by `logits`, shape [vocab], with the log probabilities of the `num`
    likeliest tokens. Raises `NonFiniteLogits` for NaN and +inf."""
    highest = logits.max()
    if not np.isfinite(highest):
        raise NonFiniteLogits("the model computed logits that are not finite (NaN or infinity)")
    log_sum = natural_logarithm(float(exponential(logits - highest).sum(dtype=np.float64)))
    best = _at_least_highest(logits, num) if num else np.empty(0, np.int64)
    best = best[np.argsort(-logits[best], kind="stable")][:num]
    chosen, *top = (
        TokenLogprob(candidate, b"", float(logits[candidate]) - float(highest) - log_sum)
        for candidate in (token, *best.tolist())
    )
    return TokenLogprob(token, b"", chosen.logprob, tuple(top))


def _at_least_highest(values: Logits, num: int) -> npt.NDArray[np.int64]:
    """Returns the indices of the `num` highest values, and of all values equal to the lowest of these, in ascending
    order."""
    num = min(num, len(values))
    maxima = np.maximum.reduceat(values, np.arange(0, len(values), GROUP))
    # At least `num` values are as high as the `num`-th highest maximum.
    floor = np.partition(maxima, -num)[-num] if num <= len(maxima) else -np.inf
    indices = np.flatnonzero(values >= floor)
    is_high: npt.NDArray[np.bool_] = values[indices] >= np.partition(values[indices], -num)[-num]
    return indices[is_high]


def _cut(weights: Logits, scores: Logits, highest: np.float32, top_p: float) -> None:
    """Keeps the weights of the fewest most likely tokens, at least one, whose sum is `top_p` of the total. Sets all
    others to 0. Of tokens with equal scores, the first ones are kept."""
    buckets = np.minimum((highest - scores) * BUCKETS_PER_UNIT, BUCKETS - 1).astype(np.intp)
    ends = np.bincount(buckets, weights).cumsum()
    wanted = top_p * ends[-1]
    bucket = int(ends.searchsorted(wanted))
    weights *= buckets <= bucket
    inside = np.flatnonzero(buckets == bucket)
    inside = inside[np.argsort(-scores[inside], kind="stable")]
    ends_inside = weights[inside].cumsum(dtype=np.float64) + (ends[bucket - 1] if bucket else 0)
    weights[inside[ends_inside.searchsorted(wanted) + 1 :]] = 0


def _index_at(weights: Logits, share: float) -> int:
    """Returns the index of the weight at `share`, in [0, 1), of the cumulative sum. This weight is not 0."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), GROUP), dtype=np.float64)
    group, rest = _position(sums, share * sums.sum())
    return group * GROUP + _position(weights[group * GROUP :][:GROUP], rest)[0]


def _position(weights: npt.NDArray[np.floating], at: float) -> tuple[int, float]:
    """Returns the index of the weight at position `at` of the cumulative sum, and the distance from the beginning of
    this weight to `at`."""
    ends = weights.cumsum(dtype=np.float64)
    # A sum in another order may be larger because of rounding.
    index = int(ends.searchsorted(min(at, np.nextafter(ends[-1], 0)), "right"))
    return index, at - (float(ends[index - 1]) if index else 0.0)
