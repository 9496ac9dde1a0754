"""The guessed next tokens of a reply, and the rates at which guesses are right: in this reply, and in all replies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import mul

MAX_GUESSES = 32
"""The maximum number of guessed tokens in a step."""


class Rates:
    """The recent rates at which a proposer's guesses of each kind are right, in one reply or in all.

    A rate of a reply begins with the rate of all replies, or with the first assumption if that is lower: one reply that
    repeats much does not mean that the next one will. Without new guesses, the rates of a reply fade towards this
    start, and the rates of all replies towards the first assumption. So a proposer that did not pay is tried again.
    """

    _WEIGHT, _WEIGHT_OF_ALL, _FADING = 1 / 16, 1 / 64, 1 / 2048

    def __init__(self, first: Sequence[float], of_all: Rates | None = None) -> None:
        self._first, self._of_all = first, of_all
        self.values = list(self._usual)

    @property
    def _usual(self) -> Sequence[float]:
        return self._first if self._of_all is None else [*map(min, self._first, self._of_all.values)]

    def of_reply(self) -> Rates:
        """Returns new rates for a reply. `self` must be the rates of all replies."""
        return Rates(self._first, self)

    def record_guess(self, kind: int, *, is_right: bool) -> None:
        weight = self._WEIGHT_OF_ALL if self._of_all is None else self._WEIGHT
        self.values[kind] += weight * (is_right - self.values[kind])
        if self._of_all is not None:
            self._of_all.record_guess(kind, is_right=is_right)

    def fade(self) -> None:
        self.values = [
            value + self._FADING * (usual - value) for value, usual in zip(self.values, self._usual, strict=True)
        ]


class Guesser:
    """The guesses for one reply. `rates` are the reply's rates by the name of the proposer. Without any, the reply gets
    no guesses. `max_computed` is the number of tokens of the longest possible sequence without its last token. Tokens
    that are `suppressed` never come in a reply, so they are not guessed."""

    def __init__(
        self, max_computed: int = 0, rates: dict[str, Rates] | None = None, suppressed: Collection[int] = ()
    ) -> None:
        self.max_computed = max_computed
        self._suppressed = suppressed
        self.rates = rates or {}
        self.is_computing = False
        """True if the last step computed guesses."""
        self.proposer = ""
        """The name of the proposer of the current guesses."""
        self.token_ids: list[int] = []
        """The guessed next tokens."""
        self._kinds: Sequence[Sequence[int]] = []

    def set_guesses(self, proposer: str, token_ids: list[int], kinds: Sequence[Sequence[int]]) -> None:
        """Sets the guesses, up to the first one that cannot be right. `kinds` are the kinds of each guess: the rate of
        its first kind is its chance, and all its kinds count it."""
        end = next((at for at, token in enumerate(token_ids) if token in self._suppressed), len(token_ids))
        self.proposer, self.token_ids, self._kinds = proposer, token_ids[:end], kinds[:end]

    def drop_guesses(self) -> None:
        """Forgets the guesses."""
        self.token_ids, self._kinds = [], []

    def give_up(self, proposer: str) -> None:
        """Forgets a proposer and its guesses."""
        self.rates.pop(proposer, None)
        if proposer == self.proposer:
            self.drop_guesses()

    def chances(self) -> list[float]:
        """Returns, for each guessed token, the chance that it and all tokens before it are right."""
        if not self._kinds:
            return []
        values = self.rates[self.proposer].values
        return list(accumulate((values[kinds[0]] for kinds in self._kinds), mul))

    def record_token(self, token: int) -> None:
        """Records whether a sampled token was guessed. The guess need not have been computed."""
        if not self.token_ids:
            return
        is_right = self.token_ids[0] == token
        for kind in self._kinds[0]:
            self.rates[self.proposer].record_guess(kind, is_right=is_right)
        self.token_ids, self._kinds = (self.token_ids[1:], self._kinds[1:]) if is_right else ([], [])
