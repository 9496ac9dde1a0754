"""Conversations in the ChatML format, as traces for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np

from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest
from diskprefix.tokens import TokenIds, as_token_ids
from diskprefix.values import Prompt
from tools.models.real import DEFAULT, fetched, print_report

PAUSE_S = 5.0
"""Seconds between two requests of a workload without times."""
LANES = 4
"""The number of conversations at the same time."""
_BEGIN, _END = "<|im_start|>", "<|im_end|>\n"


class Message(NamedTuple):
    role: str
    text: str


class Turn(NamedTuple):
    """A request and its reply, which is empty if unknown. `when` is None for one at every `PAUSE_S`. The first message
    has the system message with the tools, if there is one. `is_raw`: the only message is the whole prompt."""

    messages: Sequence[Message]
    reply: str = ""
    when: float | None = None
    is_raw: bool = False


class TurnTokens(NamedTuple):
    """A request: when it comes, its messages, each with the marker of its beginning, and its reply with the marker of
    its end. `has_system`: the first message is a system message."""

    when: float
    messages: Sequence[TokenIds]
    opening: TokenIds
    reply: TokenIds
    has_system: bool


def trace_of_tokens(name: str, turns: Sequence[TurnTokens]) -> Trace:
    """Returns a trace of turns, in order. Prompts are put together when they are replayed."""

    def replay() -> Iterator[TraceRequest]:
        for turn in turns:
            # A prompt is safe to cut one past the marker of a message.
            ends = np.cumsum([len(message) for message in turn.messages]).tolist()
            boundaries = [at + 1 for at in ends] if len(turn.opening) else []
            system_end = boundaries[0] if turn.has_system and boundaries else 0
            question_end = boundaries[-1] if boundaries else 0
            prompt = Prompt(np.concatenate([*turn.messages, turn.opening]), tuple(boundaries), system_end, question_end)
            yield TraceRequest(when=turn.when, prompt=prompt, reply=turn.reply)

    return Trace(name, len(turns), replay)


def trace_of_turns(name: str, turns: Sequence[Turn]) -> Trace:
    """Returns a trace of turns with texts."""
    encode = encoder()
    nothing, opening = as_token_ids([]), encode(f"{_BEGIN}assistant\n")
    tokens = []
    for number, turn in enumerate(turns):
        messages = turn.messages
        texts = [m.text if turn.is_raw else f"{_BEGIN}{m.role}\n{m.text}{_END}" for m in messages]
        tokens.append(
            TurnTokens(
                when=number * PAUSE_S if turn.when is None else turn.when,
                messages=[encode(text) for text in texts],
                opening=nothing if turn.is_raw else opening,
                reply=encode(turn.reply + _END) if turn.reply and not turn.is_raw else nothing,
                has_system=not turn.is_raw and messages[0].role == "system",
            )
        )
    return trace_of_tokens(name, tokens)


def in_turns(conversations: Sequence[Sequence[Turn]], lanes: int = LANES) -> list[Turn]:
    """Returns the first request of each of `lanes` conversations, then the second of each, and so on."""
    taken = []
    for start in range(0, len(conversations), lanes):
        rounds = zip_longest(*conversations[start : start + lanes])
        taken += [turn for turn in chain.from_iterable(rounds) if turn is not None]
    return taken


@cache
def encoder() -> Callable[[str], TokenIds]:
    """Returns a function that gives the tokens of a text, with markers as special tokens."""
    import tokenizers

    known: Any = tokenizers.Tokenizer.from_file(str(fetched(DEFAULT, print_report) / "tokenizer.json"))

    @cache
    def encode(text: str) -> TokenIds:
        return as_token_ids(known.encode(text, add_special_tokens=False).ids)

    return encode
