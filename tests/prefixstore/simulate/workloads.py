"""Workloads drawn from a seed: prompts that look like chats, with random tokens for their texts.

Each message begins with `BEGIN` and ends with `END`. Sizes are in tokens; `(low, high)` includes both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest
from diskprefix.tokens import TokenIds, as_token_ids, raw_boundaries
from diskprefix.values import Prompt

BEGIN, END = 1, 2
_NEWLINE, _SYSTEM, _USER, _ASSISTANT = 198, 9690, 4093, 520
_MEAN_PAUSE_S = 5.0

Sizes = tuple[int, int]


class _Source:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def size(self, sizes: Sizes) -> int:
        return int(self.random.integers(sizes[0], sizes[1], endpoint=True))

    def message(self, role: int, sizes: Sizes) -> TokenIds:
        text = self.random.integers(10_000, 49_000, self.size(sizes), dtype=np.int32)
        return np.concatenate([as_token_ids([BEGIN, role, _NEWLINE]), text, as_token_ids([END, _NEWLINE])])


def _trace(name: str, num_requests: int, seed: int, chats: Callable[[_Source], Iterator[list[TokenIds]]]) -> Trace:
    """Makes a trace of the first `num_requests` chats, each a list of messages, with random pauses."""

    def replay() -> Iterator[TraceRequest]:
        pauses = np.random.default_rng([seed, 1]).exponential(_MEAN_PAUSE_S, num_requests)
        for when, messages in zip(np.cumsum(pauses).tolist(), chats(_Source(seed)), strict=False):
            token_ids = np.concatenate([*messages, as_token_ids([BEGIN, _ASSISTANT, _NEWLINE])])
            # As with a real template, the boundary is one past the marker of the next message.
            prompt = Prompt(token_ids, raw_boundaries(token_ids, (BEGIN, END)), system_end=len(messages[0]) + 1)
            yield TraceRequest(when=when, prompt=prompt)

    return Trace(name, num_requests, replay)


def shared_anchor(seed: int = 0, num_requests: int = 200) -> Trace:
    def chats(source: _Source) -> Iterator[list[TokenIds]]:
        system = source.message(_SYSTEM, (1500, 1500))
        while True:
            yield [system, source.message(_USER, (50, 800))]

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
    reminder: Sizes | None = None,
) -> Trace:
    """Conversations with one system message. A random one grows in each request, and an ended one is replaced. A
    `reminder` follows the newest message only: the next prompt does not have it in that place."""

    def chats(source: _Source) -> Iterator[list[TokenIds]]:
        anchor = source.message(_SYSTEM, system)
        behind = [source.message(_USER, reminder)] if reminder else []
        talks = [([anchor], source.size(turns)) for _ in range(conversations)]
        while True:
            at = int(source.random.integers(conversations))
            messages, left = talks[at] if talks[at][1] else ([anchor], source.size(turns))
            asked = [*messages, source.message(_USER, user)]
            talks[at] = [*asked, source.message(_ASSISTANT, reply)], left - 1
            yield [*asked, *behind]

    return _trace(name, num_requests, seed, chats)


def retrieval(seed: int = 0, num_requests: int = 200) -> Trace:
    def chats(source: _Source) -> Iterator[list[TokenIds]]:
        anchor = source.message(_SYSTEM, (1000, 1000))
        library = [source.message(_USER, (200, 800)) for _ in range(30)]
        weights = 1 / np.arange(1, 31)
        while True:
            ranked = source.random.choice(30, 4, replace=False, p=weights / weights.sum()).tolist()
            yield [anchor, *(library[i] for i in ranked), source.message(_USER, (20, 100))]

    return _trace("retrieval", num_requests, seed, chats)


def one_off(seed: int = 0, num_requests: int = 200, *, system: Sizes = (100, 2000), user: Sizes = (200, 4000)) -> Trace:
    def chats(source: _Source) -> Iterator[list[TokenIds]]:
        while True:
            yield [source.message(_SYSTEM, system), source.message(_USER, user)]

    return _trace("one-off", num_requests, seed, chats)


def thinking(
    *, keeps: bool = False, questions: int = 5, calls: int = 15, system: int = 8000, pause_s: float = 10.0
) -> Trace:
    """An agent whose model thinks: questions with loops of calls, each with a thought of 250 tokens, a call of 80 and a
    result of 700. Unless the template `keeps` thoughts, the next question drops those of the loop before. The history
    is computed ahead after each reply. A result comes after a second, a question after `pause_s`."""
    source, thought = _Source(1), 250

    def text(size: int) -> TokenIds:
        return source.random.integers(10_000, 49_000, size, dtype=np.int32)

    def message(role: int, *parts: TokenIds) -> TokenIds:
        return np.concatenate([as_token_ids([BEGIN, role]), *parts, as_token_ids([END])])

    def prompt(messages: list[TokenIds], opening: list[int], num_asked: int) -> Prompt:
        token_ids = np.concatenate([*messages, as_token_ids(opening)])
        ends = np.cumsum([len(message) for message in messages]) + 1
        boundaries = raw_boundaries(token_ids, (BEGIN, END))
        return Prompt(token_ids, boundaries, int(ends[0]), int(ends[num_asked - 1]))

    def replay() -> Iterator[TraceRequest]:
        messages, when = [message(_SYSTEM, text(system))], 0.0
        for _ in range(questions):
            messages.append(message(_USER, text(60)))
            shorter, num_asked = list(messages), len(messages)
            for _ in range(calls):
                said = [text(thought), text(80)]
                reply = np.concatenate([*said, as_token_ids([END])])
                yield TraceRequest(when, prompt(messages, [BEGIN, _ASSISTANT], num_asked), reply=reply)
                messages.append(message(_ASSISTANT, *said))
                shorter.append(message(_ASSISTANT, *(said if keeps else said[1:])))
                yield TraceRequest(when, prompt(shorter, [BEGIN], num_asked), is_ahead=True)
                result = message(_USER, text(700))
                messages.append(result)
                shorter.append(result)
                when += 1.0
            messages, when = shorter, when + pause_s

    return Trace("thinking", 2 * questions * calls, replay)


CATALOG: dict[str, Callable[..., Trace]] = {
    "shared-anchor": shared_anchor,
    "interleaved": interleaved,
    "retrieval": retrieval,
    "moving-reminder": partial(
        interleaved, name="moving-reminder", conversations=2, turns=(8, 20), reminder=(120, 120)
    ),
    "one-off": one_off,
}
"""The workloads by name. Each takes `seed` and `num_requests`."""
