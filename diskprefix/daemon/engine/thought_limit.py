"""Ends the thoughts of a reply: the closing tag of the thought replaces the tokens that the model would sample."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

from msgspec import Struct


class ThoughtBudget(Struct, frozen=True, kw_only=True):
    """The rules for ending a reply's thoughts when the model does not end them itself.

    A thought ends after `max_tokens` tokens, if that is not None. The first of `end_ids` (the tokens that end a reply)
    inside a thought also ends the thought instead of the reply. `closing` are the tokens that end a thought; they count
    too. `new_watch` makes a function for one reply. The function takes the reply's text in pieces and returns whether
    the reply is in a thought; for "", whether the prompt opened a thought.
    """

    max_tokens: int | None
    closing: tuple[int, ...]
    new_watch: Callable[[], Callable[[str], bool]]
    end_ids: Collection[int] = ()


class ThoughtLimit:
    """The budget of one reply. Call `in_place_of` for each sampled token, then `record_text`."""

    def __init__(self, budget: ThoughtBudget) -> None:
        self._budget = budget
        self._left = None if budget.max_tokens is None else budget.max_tokens - len(budget.closing)
        self._unseen = [""]
        """The text that the watch has not seen yet. Without a limit, the watch sees the reply only when the reply would
        end."""
        self._is_open = False
        self._forced: list[int] = []
        self._is_closed = False
        """True after a forced end, until the watch sees that the thought has ended."""
        self._may_go_on = True

    def in_place_of(self, token: int) -> int:
        """Returns the token to use in place of a sampled token. This is the next closing token if the budget is used
        up, or if the sampled token would end the reply inside a thought for the first time; otherwise the sampled token
        itself."""
        is_end = self._may_go_on and token in self._budget.end_ids
        is_used_up = self._left is not None and self._left <= 0 and not self._is_closed
        if not self._forced and (is_end or is_used_up) and self._is_in_thought():
            self._forced, self._is_closed = list(self._budget.closing), True
            self._may_go_on = self._may_go_on and not is_end
        return self._forced[0] if self._forced else token

    def record_text(self, text: str) -> None:
        """Records the text that the token completed."""
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
