"""The window of recent prompts of one root, in memory. The store keeps it across restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import numpy as np

from diskprefix.tokens import TokenIds


class History:
    """Recent prompts, newest last, at most `max_prompts` of them and `max_tokens` tokens together.

    A prompt longer than `max_tokens` is remembered by its first `max_tokens` tokens: a common prefix that long is still
    found, and one long prompt does not leave the window empty. Not thread-safe: one thread adds and reads.
    """

    def __init__(self, max_prompts: int, max_tokens: int) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._prompts: deque[TokenIds] = deque()
        self._num_tokens = 0

    @classmethod
    def from_prompts(cls, prompts: Iterable[TokenIds], *, max_prompts: int, max_tokens: int) -> History:
        """The window after `prompts` were added in their order, oldest first."""
        history = cls(max_prompts, max_tokens)
        for token_ids in prompts:
            history.add(token_ids)
        return history

    def add(self, token_ids: TokenIds) -> None:
        """Remember a copy of `token_ids`, shape (num_tokens,), int32, as the newest; forget the oldest over the bounds.

        A prompt without tokens says nothing about any other and is not remembered.
        """
        # A copy, because the caller's array may be a view of a database page or of a buffer that is used again.
        prompt: TokenIds = np.array(token_ids[: self._max_tokens], dtype=np.int32)
        if not len(prompt):
            return
        prompt.setflags(write=False)
        self._prompts.append(prompt)
        self._num_tokens += len(prompt)
        while len(self._prompts) > self._max_prompts or self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._prompts.popleft())

    def recent(self, n: int) -> tuple[TokenIds, ...]:
        """The `n` newest prompts, newest first; fewer if fewer are remembered. The arrays are read-only."""
        return tuple(islice(reversed(self._prompts), max(n, 0)))

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def __len__(self) -> int:
        return len(self._prompts)
