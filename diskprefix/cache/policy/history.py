"""The window of recent prompts of one root, in memory. The store keeps it across restarts."""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np

from diskprefix.tokens import TokenIds, common_prefix_length

_PROMPT_BYTES = 256
"""The memory of a prompt beside its tokens: an array, and its places in two queues."""

_MOST_OLDER = 1000
"""Prompts before the window that are compared."""


class History:
    """Recent prompts, newest last: at most `max_prompts`, with at most `max_tokens` tokens together. Of a longer prompt
    the first `max_tokens` are remembered. A group of prompts is a window of its own; the bounds are over all groups.
    Not thread-safe."""

    def __init__(self, max_prompts: int, max_tokens: int) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._windows: dict[bytes, deque[TokenIds]] = {}
        """The prompts of each group. Those without a group are under the empty name."""
        self._groups: deque[bytes] = deque()
        """The group of each prompt, in the order in which they were added."""
        self._num_tokens = 0

    def add(self, token_ids: TokenIds, group: bytes = b"") -> None:
        """Adds a copy of `token_ids`, shape (num_tokens,), int32, as the newest, and drops the oldest over the bounds.

        A prompt without tokens is not remembered.
        """
        # A copy, because the caller's array may be a view of a database page or of a buffer that is used again.
        prompt: TokenIds = np.array(token_ids[: self._max_tokens], dtype=np.int32)
        if not len(prompt):
            return
        prompt.setflags(write=False)
        self._windows.setdefault(group, deque()).append(prompt)
        self._groups.append(group)
        self._num_tokens += len(prompt)
        while len(self._groups) > self._max_prompts or self._num_tokens > self._max_tokens:
            oldest_group = self._groups.popleft()
            window = self._windows[oldest_group]
            self._num_tokens -= len(window.popleft())
            if not window:
                del self._windows[oldest_group]

    def recent(self, n: int, group: bytes = b"") -> tuple[TokenIds, ...]:
        """Returns the `n` newest prompts of a group, newest first; fewer if fewer are remembered. The arrays are
        read-only."""
        return tuple(islice(reversed(self._windows.get(group, ())), max(n, 0)))

    def similar(self, token_ids: TokenIds, n: int, group: bytes = b"") -> TokenIds | None:
        """Returns the prompt of a group that shares most with `token_ids`, if it is older than the `n` newest ones.
        Returns None if one of those shares as much. At most 1 000 older ones are compared.

        Requests beside a conversation, such as the turns of a sub-agent, may fill the window between two of its turns.
        """
        newest_first = self._windows.get(group, deque())
        common = max((common_prefix_length(token_ids, one) for one in self.recent(n, group)), default=0)
        found: TokenIds | None = None
        for earlier in islice(reversed(newest_first), n, n + _MOST_OLDER):
            # Few prompts have this token, so few are compared.
            if common < min(len(earlier), len(token_ids)) and earlier[common] == token_ids[common]:
                shared = common_prefix_length(token_ids, earlier)
                if shared > common:
                    found, common = earlier, shared
        return found

    @property
    def num_bytes(self) -> int:
        """The approximate size of all prompts in memory."""
        return 4 * self._num_tokens + _PROMPT_BYTES * len(self._groups)

    def __len__(self) -> int:
        """Returns the number of prompts of all groups."""
        return len(self._groups)
