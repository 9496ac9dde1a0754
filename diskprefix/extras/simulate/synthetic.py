"""Workloads generated from a seed, to try settings without recorded data.

Prompts look like chats: a system message, turns, and the beginning of a reply. Each message begins with `BEGIN` and
ends with `END`, the markers of SmolLM2. The text is random tokens. The same arguments always give the same trace. Sizes
are in tokens and uniformly distributed; `(low, high)` includes both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np

from diskprefix.extras.simulate.trace import Trace, TraceRequest
from diskprefix.nouns import Prompt
from diskprefix.tokens import TokenIds, as_token_ids, raw_boundaries

BEGIN, END = 1, 2
_NEWLINE, _SYSTEM, _USER, _ASSISTANT = 198, 9690, 4093, 520
_TEXT_IDS = 10_000, 49_000
_MEAN_PAUSE_S = 5.0

Sizes: TypeAlias = tuple[int, int]
_Chat: TypeAlias = tuple[tuple[TokenIds, ...], int]
"""A request: its messages, the system message first, and the length of the reply."""


class _Source:
    """Draws texts and sizes."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def size(self, sizes: Sizes) -> int:
        return int(self.random.integers(sizes[0], sizes[1], endpoint=True))

    def message(self, role: int, sizes: Sizes) -> TokenIds:
        text = self.random.integers(*_TEXT_IDS, self.size(sizes), dtype=np.int32)
        return np.concatenate([as_token_ids([BEGIN, role, _NEWLINE]), text, as_token_ids([END, _NEWLINE])])

    def one_of(self, count: int) -> int:
        return int(self.random.integers(count))


def _trace(name: str, num_requests: int, seed: int, chats: Callable[[_Source], Iterator[_Chat]]) -> Trace:
    """Makes a trace of the first `num_requests` chats, with random pauses."""

    def replay() -> Iterator[TraceRequest]:
        pauses = np.random.default_rng([seed, 1]).exponential(_MEAN_PAUSE_S, num_requests)
        for when, (messages, reply_tokens) in zip(np.cumsum(pauses).tolist(), chats(_Source(seed)), strict=False):
            token_ids = np.concatenate([*messages, as_token_ids([BEGIN, _ASSISTANT, _NEWLINE])])
            # As with a real template, the boundary is one past the marker of the next message.
            prompt = Prompt(token_ids, raw_boundaries(token_ids, (BEGIN, END)), system_end=len(messages[0]) + 1)
            yield TraceRequest(when=when, prompt=prompt, output_tokens=reply_tokens)

    return Trace(name, num_requests, replay)


def shared_anchor(seed: int = 0, num_requests: int = 200) -> Trace:
    """Makes requests with a common system message, each with one message of its own."""

    def chats(source: _Source) -> Iterator[_Chat]:
        system = source.message(_SYSTEM, (1500, 1500))
        while True:
            yield (system, source.message(_USER, (50, 800))), source.size((50, 400))

    return _trace("shared-anchor", num_requests, seed, chats)


def interleaved(
    seed: int = 0,
    num_requests: int = 200,
    *,
    name: str = "interleaved",
    system: Sizes = (2000, 2000),
    user: Sizes = (50, 800),
    reply: Sizes = (50, 400),
    conversations: int = 4,
    turns: Sizes = (4, 16),
    edited: float = 0.0,
    reminder: Sizes | None = None,
) -> Trace:
    """Makes conversations with a common system message. A random one grows in each request, and an ended one is
    replaced by a new one.

    In a share `edited` of the requests, an earlier message has a new text. A `reminder` follows the newest message
    only: the next prompt does not have it in that place.
    """

    def chats(source: _Source) -> Iterator[_Chat]:
        anchor = source.message(_SYSTEM, system)
        behind = (source.message(_USER, reminder),) if reminder else ()
        for conversation in _by_turns(source, anchor, conversations, turns):
            if edited and source.random.random() < edited:
                conversation.edit(user)
            messages, reply_tokens = conversation.next(user, reply)
            yield (*messages, *behind), reply_tokens

    return _trace(name, num_requests, seed, chats)


_long_talks = partial(interleaved, conversations=2, turns=(8, 20))
moving_reminder = partial(_long_talks, name="moving-reminder", reminder=(120, 120))
edits = partial(_long_talks, name="edits", edited=0.2)


class _Conversation:
    def __init__(self, source: _Source, system: TokenIds, turns: Sizes) -> None:
        self.turns_left = source.size(turns)
        self._source = source
        self._messages = [system]

    def next(self, user: Sizes, reply: Sizes) -> _Chat:
        """Returns the request of the next turn. The turn after that contains its reply."""
        self._messages.append(self._source.message(_USER, user))
        chat_messages = tuple(self._messages)
        answer = self._source.message(_ASSISTANT, reply)
        self._messages.append(answer)
        self.turns_left -= 1
        return chat_messages, len(answer)

    def edit(self, sizes: Sizes) -> None:
        """Replaces one of the user's messages, if there is one."""
        asked = len(self._messages) // 2
        if asked:
            self._messages[2 * self._source.one_of(asked) + 1] = self._source.message(_USER, sizes)


def _by_turns(source: _Source, system: TokenIds, conversations: int, turns: Sizes) -> Iterator[_Conversation]:
    """Yields the conversation of each turn, drawn at random. Replaces a conversation without turns left."""
    open_ones = [_Conversation(source, system, turns) for _ in range(conversations)]
    while True:
        at = source.one_of(conversations)
        if open_ones[at].turns_left == 0:
            open_ones[at] = _Conversation(source, system, turns)
        yield open_ones[at]


def retrieval(
    seed: int = 0,
    num_requests: int = 200,
    *,
    system: Sizes = (1000, 1000),
    document: Sizes = (200, 800),
    question: Sizes = (20, 100),
    documents: int = 30,
    found: int = 4,
) -> Trace:
    """Makes requests with some documents, each a message of its own, and a question. Documents are drawn by Zipf's
    law."""

    def chats(source: _Source) -> Iterator[_Chat]:
        anchor = source.message(_SYSTEM, system)
        library = [source.message(_USER, document) for _ in range(documents)]
        weights = 1 / np.arange(1, documents + 1)
        weights /= weights.sum()
        while True:
            ranked = source.random.choice(documents, found, replace=False, p=weights).tolist()
            messages = anchor, *(library[i] for i in ranked), source.message(_USER, question)
            yield messages, source.size((50, 300))

    return _trace("retrieval", num_requests, seed, chats)


def one_off(seed: int = 0, num_requests: int = 200, *, system: Sizes = (100, 2000), user: Sizes = (200, 4000)) -> Trace:
    """Makes prompts without common prefixes, so that all writes are in vain."""

    def chats(source: _Source) -> Iterator[_Chat]:
        while True:
            yield (source.message(_SYSTEM, system), source.message(_USER, user)), source.size((50, 400))

    return _trace("one-off", num_requests, seed, chats)


CATALOG: dict[str, Callable[..., Trace]] = {
    "shared-anchor": shared_anchor,
    "interleaved": interleaved,
    "retrieval": retrieval,
    "moving-reminder": moving_reminder,
    "edits": edits,
    "one-off": one_off,
}
"""The generators by the name of their trace. Each takes `seed` and `num_requests`."""
