"""Ends the thoughts of a reply: their closing tag replaces the tokens that the model would sample."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

from msgspec import Struct


class ThoughtBudget(Struct, frozen=True, kw_only=True):
    """The ends of a reply's thoughts that the model does not write.

    Thoughts end after `max_tokens` tokens, if that is not None, and once in place of one of `end_ids`, the tokens that
    end a reply. `closing` are the tokens that end a thought; they count too. `new_watch` makes a function for one
    reply, which takes its text in pieces and returns whether the reply is in a thought; for "", whether the prompt
    opened one.
    """

    max_tokens: int | None
    closing: tuple[int, ...]
    new_watch: Callable[[], Callable[[str], bool]]
    end_ids: Collection[int] = ()


class ThoughtLimit:
    """The budget of one reply. Ask `in_place_of` about each token, and behind it call `record`."""

    def __init__(self, budget: ThoughtBudget) -> None:
        self._budget = budget
        self._left = None if budget.max_tokens is None else budget.max_tokens - len(budget.closing)
        self._unseen = [""]
        """The text that the watch has not seen. Without a limit it sees the reply only where that ends."""
        self._is_open = False
        self._forced: list[int] = []
        self._is_closed = False
        """True after a forced end, until the watch sees that the thought is over."""
        self._may_go_on = True

    def in_place_of(self, token: int) -> int:
        """Returns the token to take for a sampled one: the next that closes the thought, if the tokens of thoughts are
        used up, or if the sampled one ends the reply inside a thought for the first time."""
        is_end = self._may_go_on and token in self._budget.end_ids
        is_used_up = self._left is not None and self._left <= 0 and not self._is_closed
        if not self._forced and (is_end or is_used_up) and self._is_in_thought():
            self._forced, self._is_closed = list(self._budget.closing), True
            self._may_go_on = self._may_go_on and not is_end
        return self._forced[0] if self._forced else token

    def record(self, text: str) -> None:
        """Records a token by the text that it completed."""
        del self._forced[:1]
        self._unseen.append(text)
        if self._left is None:
            return
        if self._is_in_thought():
            self._left -= 1
        else:
            self._is_closed = False

    @cached_property
    def _watch(self) -> Callable[[str], bool]:
        return self._budget.new_watch()

    def _is_in_thought(self) -> bool:
        if self._unseen:
            self._is_open = self._watch("".join(self._unseen))
            self._unseen.clear()
        return self._is_open
