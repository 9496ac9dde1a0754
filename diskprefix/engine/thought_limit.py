"""Ends the thought of a reply in time: its closing tag replaces the tokens that the model would sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ThoughtBudget:
    """The most tokens of a reply's thoughts.

    `closing` are the tokens that end a thought; they count too. `new_watch` makes a function for one reply, which takes
    each piece of its text and returns whether the reply is in a thought; for "", whether the prompt opened one.
    """

    max_tokens: int
    closing: tuple[int, ...]
    new_watch: Callable[[], Callable[[str], bool]]


class ThoughtLimit:
    """The budget of one reply. Before each token ask for `forced`, behind it call `record`."""

    def __init__(self, budget: ThoughtBudget) -> None:
        self._closing = budget.closing
        self._left = budget.max_tokens - len(budget.closing)
        self._watch = budget.new_watch()
        self._is_open = self._watch("")
        self._forced: list[int] = []
        self._is_closed = False
        """True after a forced end, until the watch sees that the thought is over."""

    @property
    def forced(self) -> int | None:
        """The token that must come next; None for any."""
        if self._is_open and self._left <= 0 and not self._is_closed:
            self._forced, self._is_closed = list(self._closing), True
        return self._forced[0] if self._forced else None

    def record(self, text: str) -> None:
        """Records a token by the text that it completed."""
        del self._forced[:1]
        self._is_open = self._watch(text)
        if self._is_open:
            self._left -= 1
        else:
            self._is_closed = False
