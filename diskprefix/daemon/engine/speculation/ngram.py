"""Guesses tokens from earlier text (prompt lookup): the tokens that followed the same last tokens earlier in the prompt
or the reply. Text that is edited, quoted or continued repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.speculation.drafting import Proposer
from diskprefix.daemon.engine.speculation.guesser import MAX_GUESSES

MAX_MATCH = 32
"""The maximum number of tokens that are compared at each place."""
MAX_PLACES = 32
"""The maximum number of places that are compared; the latest ones are used."""
_ROOM = 1024
_BACK = np.arange(MAX_MATCH)


class Guess(NamedTuple):
    """The guessed tokens. The `num_agreeing` tokens before them are equal at both places."""

    token_ids: list[int]
    num_agreeing: int


class Text:
    """The tokens of one sequence. Each guess searches all tokens, which takes less than a thousandth of a step. An
    index would first have to be built for the whole prompt."""

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

    def guess(self, num_tokens: int) -> Guess | None:
        """Returns `num_tokens` tokens that followed an earlier occurrence of the last tokens: the longest match, and of
        several equally long ones the latest. Returns None if the last two tokens did not occur together before. A guess
        ends before a picture."""
        ids, end = self._ids, self._length
        if end < 3:
            return None
        (places,) = np.nonzero(ids[1 : end - 1] == ids[end - 1])
        places = places[ids[places] == ids[end - 2]][-MAX_PLACES:] + 1
        if not len(places):
            return None
        back = _BACK[:end]
        before = places[:, None] - back
        agrees = (ids[before] == ids[end - 1 - back]) & (before >= 0)
        lengths = np.where(agrees.all(1), len(back), agrees.argmin(1))
        longest = int(lengths.max())
        place = int(places[lengths == longest][-1])
        # If the tokens after the match reach the end of the text, they are repeated.
        period = end - 1 - place
        followed = ids[place + 1 : min(place + 1 + num_tokens, end)].tolist()
        token_ids = [followed[number % period] for number in range(num_tokens)]
        picture = next((number for number, token in enumerate(token_ids) if token < 0), num_tokens)
        return Guess(token_ids[:picture], longest)


class NgramProposer(Proposer):
    """Proposes earlier text. This takes no time worth measuring."""

    name, what = "ngram", "earlier text"
    _FIRST = (0.15, 0.4, 0.6, 0.8, 0.9)
    """The rates by the length of the match."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[Reply, Text] = {}

    @classmethod
    def kind_of(cls, num_agreeing: int) -> int:
        """Returns the kind of a guess by the number of matching tokens before it: 2, 4, 8, 16, and 32 or more."""
        return min(num_agreeing.bit_length() - 2, len(cls._FIRST) - 1)

    def accept_tokens(self, reply: Reply) -> None:
        """Adds the sampled tokens to the text."""
        # Not in `begin_reply`: copying a long prompt would delay the first token.
        if (text := self._texts.get(reply)) is None:
            text = self._texts[reply] = Text(reply.running.request.prompt.token_ids)
        text.extend(reply.token_ids[len(text) - reply.prompt_tokens :])

    def propose(self, replies: Sequence[Reply], num_decoding: int) -> None:
        """Searches the text of each reply."""
        del num_decoding
        for reply in replies:
            if (guess := self._texts[reply].guess(MAX_GUESSES)) is not None:
                kinds = [(self.kind_of(guess.num_agreeing + number),) for number in range(len(guess.token_ids))]
                reply.guesser.set_guesses(self.name, guess.token_ids, kinds)

    def drop_reply(self, reply: Reply, *, keep: bool) -> None:
        """Forgets the text."""
        del keep
        self._texts.pop(reply, None)
