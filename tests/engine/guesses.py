"""Requests and checks of the tests of guesses: those from the prompt, and those of a draft model."""

from __future__ import annotations

from typing import Any

from diskprefix.engine.request import FinishEvent, GenerateRequest, TextEvent
from diskprefix.tokens import TokenIds
from tests.engine.driving import WORDS, Client, request

POSITIONS = 1024
REPLY = 40


def asked_of(text: TokenIds) -> dict[str, GenerateRequest]:
    """Requests with this prompt whose replies are chosen in different ways."""
    return {
        "greedy": request(text, max_tokens=REPLY),
        "sampled": request(text, max_tokens=REPLY, temperature=1.0, seed=3),
        "several": request(text, max_tokens=REPLY, n=3, temperature=1.0, seed=1),
        "constraint": request(text, max_tokens=REPLY, temperature=1.0, seed=2, constraint=WORDS),
    }


def said(client: Client) -> list[Any]:
    """All that a client is told of each token and of each end, by choice."""
    assert client.done
    events = [event for event in client.events if isinstance(event, TextEvent | FinishEvent)]
    return sorted(events, key=lambda event: event.choice)


def some_are_wrong(client: Client) -> bool:
    timings = client.done.timings
    return 0 < timings.accepted_tokens < timings.drafted_tokens
