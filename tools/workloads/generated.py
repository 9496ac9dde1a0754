"""Workloads drawn from a seed, for what published data lack: times of people, loops, teams, long sessions.

Messages are random tokens between markers. Sizes are in tokens, and `(low, high)` includes both ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from typing import TypeAlias

import numpy as np

from diskprefix.prefixstore.simulate.trace import Trace
from diskprefix.tokens import TokenIds, as_token_ids
from tools.workloads.conversation import TurnTokens, trace_of_tokens

_BEGIN, _END, _SYSTEM, _USER, _ASSISTANT = 1, 2, 3, 4, 5
_NOTHING = as_token_ids([])
_OPENING = as_token_ids([_BEGIN, _ASSISTANT])

Sizes: TypeAlias = tuple[int, int]


class _Source:
    """Random sizes, pauses and messages of one workload."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def size(self, sizes: Sizes) -> int:
        return int(self.random.integers(sizes[0], sizes[1], endpoint=True))

    def pause_s(self, median_s: float, spread: float = 1.0) -> float:
        """Returns seconds with a logarithmic normal distribution, as pauses of people have."""
        return float(median_s * np.exp(spread * self.random.standard_normal()))

    def text(self, sizes: Sizes) -> TokenIds:
        return self.random.integers(10_000, 49_000, self.size(sizes), dtype=np.int32)

    def message(self, role: int, sizes: Sizes) -> TokenIds:
        return np.concatenate([as_token_ids([_BEGIN, role]), self.text(sizes), as_token_ids([_END])])


def _conversation(
    source: _Source, start: float, system: TokenIds | None, *, turns: Sizes, user: Sizes, reply: Sizes, median_s: float
) -> Iterator[TurnTokens]:
    """Yields the turns of a conversation, with a pause after each."""
    messages = [] if system is None else [system]
    when = start
    for _ in range(source.size(turns)):
        messages.append(source.message(_USER, user))
        words = np.concatenate([source.text(reply), as_token_ids([_END])])
        yield TurnTokens(when, tuple(messages), _OPENING, words, system is not None)
        messages.append(np.concatenate([_OPENING, words]))
        when += source.pause_s(median_s)


def _by_time(conversations: list[Iterator[TurnTokens]]) -> list[TurnTokens]:
    return list(heapq.merge(*conversations, key=lambda turn: turn.when))


def many_people(seed: int = 1) -> list[TurnTokens]:
    """200 conversations of people over eight hours, with pauses of minutes, after one of three system messages."""
    source = _Source(seed)
    systems = [source.message(_SYSTEM, (800, 2500)) for _ in range(3)]
    starts = np.sort(source.random.uniform(0, 8 * 3600, 200)).tolist()
    return _by_time(
        [
            _conversation(
                _Source(seed * 1000 + number), start, systems[number % 3],
                turns=(2, 14), user=(30, 500), reply=(80, 700), median_s=90.0,
            )
            for number, start in enumerate(starts)
        ]
    )  # fmt: skip


def presets_in_a_loop(seed: int = 2) -> list[TurnTokens]:
    """29 system messages in turn, each time with another question, 12 times."""
    source = _Source(seed)
    systems = [source.message(_SYSTEM, (2000, 9000)) for _ in range(29)]
    turns = []
    for number, system in enumerate(systems * 12):
        messages = (system, source.message(_USER, (40, 300)))
        turns.append(TurnTokens(number * 20.0, messages, _OPENING, source.text((20, 100)), True))
    return turns


def short_chats(seed: int = 3) -> list[TurnTokens]:
    """800 chats without a system message, one after the other and two at a time."""
    starts = np.cumsum(np.random.default_rng(seed).exponential(40.0, 800)).tolist()
    return _by_time(
        [
            _conversation(
                _Source(seed * 1000 + number), start, None,
                turns=(1, 6), user=(8, 120), reply=(30, 250), median_s=20.0,
            )
            for number, start in enumerate(starts)
        ]
    )  # fmt: skip


def team_of_agents(seed: int = 4) -> list[TurnTokens]:
    """20 tasks: an agent that plans calls workers of five kinds, each with tools of its own, in fresh conversations."""
    source = _Source(seed)
    planner_system = source.message(_SYSTEM, (9000, 9000))
    workers = [source.message(_SYSTEM, (3000, 7000)) for _ in range(5)]
    turns: list[TurnTokens] = []
    when = 0.0
    for _ in range(20):
        planner = [planner_system, source.message(_USER, (200, 800))]
        for _ in range(source.size((3, 7))):
            words = np.concatenate([source.text((100, 400)), as_token_ids([_END])])
            turns.append(TurnTokens(when, tuple(planner), _OPENING, words, True))
            when += source.pause_s(10.0, 0.5)
            messages = [workers[int(source.random.integers(5))], source.message(_USER, (100, 400))]
            for _ in range(source.size((3, 12))):
                call = np.concatenate([source.text((30, 200)), as_token_ids([_END])])
                turns.append(TurnTokens(when, tuple(messages), _OPENING, call, True))
                messages += [np.concatenate([_OPENING, call]), source.message(_USER, (100, 2500))]
                when += source.pause_s(6.0, 0.5)
            planner += [np.concatenate([_OPENING, words]), source.message(_USER, (200, 900))]
        when += source.pause_s(600.0)
    return turns


def long_sessions(seed: int = 5) -> list[TurnTokens]:
    """Three sessions at a time that grow to 120,000 tokens, nine in all. A turn adds a call and its result."""
    lanes: list[Iterator[TurnTokens]] = []
    system = _Source(seed).message(_SYSTEM, (12_000, 12_000))
    for lane in range(3):
        source = _Source(seed * 1000 + lane)

        def sessions(source: _Source = source, lane: int = lane) -> Iterator[TurnTokens]:
            when = 100.0 * lane
            for _ in range(3):
                messages = [system, source.message(_USER, (300, 2000))]
                while sum(map(len, messages)) < 120_000:
                    call = np.concatenate([source.text((50, 400)), as_token_ids([_END])])
                    yield TurnTokens(when, tuple(messages), _OPENING, call, True)
                    messages += [np.concatenate([_OPENING, call]), source.message(_USER, (200, 4000))]
                    when += source.pause_s(15.0, 0.8)
                when += source.pause_s(900.0)

        lanes.append(sessions())
    return _by_time(lanes)


def questions_about_documents(seed: int = 6) -> list[TurnTokens]:
    """600 questions about 80 documents, some of which are asked about far more often."""
    source = _Source(seed)
    system = source.message(_SYSTEM, (600, 600))
    documents = [source.message(_USER, (2000, 20_000)) for _ in range(80)]
    weights = 1 / np.arange(1, 81) ** 0.8
    turns = []
    when = 0.0
    for number in source.random.choice(80, 600, p=weights / weights.sum()).tolist():
        messages = (system, documents[number], source.message(_USER, (20, 120)))
        turns.append(TurnTokens(when, messages, _OPENING, source.text((30, 300)), True))
        when += source.pause_s(30.0)
    return turns


def one_off(seed: int = 7) -> list[TurnTokens]:
    """400 prompts that never come again, and every fourth request is the next turn of one of two conversations."""
    source = _Source(seed)
    talks = [
        _conversation(_Source(seed * 1000 + n), 0.0, source.message(_SYSTEM, (2000, 2000)),
                      turns=(60, 60), user=(50, 600), reply=(50, 500), median_s=1.0)
        for n in range(2)
    ]  # fmt: skip
    turns = []
    for number in islice(count(), 480):
        if number % 4 == 3:
            turns.append(next(talks[number // 4 % 2])._replace(when=number * 8.0))
            continue
        messages = (source.message(_SYSTEM, (100, 600)), source.message(_USER, (500, 6000)))
        turns.append(TurnTokens(number * 8.0, messages, _OPENING, _NOTHING, True))
    return turns


_GENERATORS: Mapping[str, Callable[[], list[TurnTokens]]] = {
    "many-people": many_people,
    "presets-in-a-loop": presets_in_a_loop,
    "short-chats": short_chats,
    "team-of-agents": team_of_agents,
    "long-sessions": long_sessions,
    "documents": questions_about_documents,
    "one-off": one_off,
}
GENERATED = tuple(_GENERATORS)


def generated(name: str) -> Trace:
    """Returns the workload `name` of `GENERATED`."""
    return trace_of_tokens(name, _GENERATORS[name]())
