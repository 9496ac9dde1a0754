"""Guesses what followed the last tokens where they came before, in the prompt or the reply (prompt lookup). Text that
is edited, quoted or continued repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diskprefix.engine.drafting import Proposer
from diskprefix.engine.guesser import MOST_ROWS
from diskprefix.engine.running_request import Reply

LONGEST = 32
"""The most tokens that are compared."""
MOST_PLACES = 32
"""The most places that are compared, the latest ones."""
_ROOM = 1024
_BACK = np.arange(LONGEST)


class Guess(NamedTuple):
    """The guessed tokens. The `num_agreeing` tokens before them are the same in both places."""

    token_ids: list[int]
    num_agreeing: int


class Text:
    """The tokens of one sequence. They are searched anew for each guess, which takes less than a thousandth of a step:
    an index would have to be made of the whole prompt."""

    def __init__(self, token_ids: npt.NDArray[np.int32]) -> None:
        self._ids = np.append(token_ids, np.zeros(_ROOM, np.int32))
        self._length = len(token_ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens."""
        end = self._length + len(token_ids)
        if end > len(self._ids):
            self._ids = np.append(self._ids, np.zeros(end, np.int32))
        self._ids[self._length : end] = token_ids
        self._length = end

    def guess(self, most: int) -> Guess | None:
        """Returns what followed the last tokens before: `most` tokens, behind the longest match, and of several the
        latest. None if the last two tokens did not stand side by side before. A guess ends before a picture."""
        ids, end = self._ids, self._length
        if end < 3:
            return None
        (places,) = np.nonzero(ids[1 : end - 1] == ids[end - 1])
        places = places[ids[places] == ids[end - 2]][-MOST_PLACES:] + 1
        if not len(places):
            return None
        back = _BACK[:end]
        before = places[:, None] - back
        agrees = (ids[before] == ids[end - 1 - back]) & (before >= 0)
        lengths = np.where(agrees.all(1), len(back), agrees.argmin(1))
        best = int(lengths.max())
        found = int(places[lengths == best][-1])
        # A match that reaches the end repeats itself.
        period = end - 1 - found
        followed = ids[found + 1 : min(found + 1 + most, end)].tolist()
        token_ids = [followed[number % period] for number in range(most)]
        of_text = next((number for number, token in enumerate(token_ids) if token < 0), most)
        return Guess(token_ids[:of_text], best)


class NgramProposer(Proposer):
    """Proposes what came before. This takes no time worth measuring."""

    name, what = "ngram", "earlier text"
    _FIRST = (0.15, 0.4, 0.6, 0.8, 0.9)
    """By the length of the match."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[Reply, Text] = {}

    @classmethod
    def kind_of(cls, num_agreeing: int) -> int:
        """Returns the kind of a guess by the number of matching tokens before it: 2, 4, 8, 16, and 32 or more."""
        return min(num_agreeing.bit_length() - 2, len(cls._FIRST) - 1)

    def accept(self, reply: Reply) -> None:
        """Adds what was sampled to the text."""
        # Not earlier: a long prompt is copied, and the first token is sent before.
        if (text := self._texts.get(reply)) is None:
            text = self._texts[reply] = Text(reply.running.request.prompt.token_ids)
        text.extend(reply.token_ids[len(text) - reply.prompt_tokens :])

    def propose(self, replies: Sequence[Reply], num_decoding: int) -> None:
        """Searches the text of each reply."""
        del num_decoding
        for reply in replies:
            if (found := self._texts[reply].guess(MOST_ROWS)) is not None:
                kinds = [(self.kind_of(found.num_agreeing + number),) for number in range(len(found.token_ids))]
                reply.guesser.use(self.name, found.token_ids, kinds)

    def drop(self, reply: Reply, *, keep: bool) -> None:
        """Forgets the text."""
        del keep
        self._texts.pop(reply, None)
