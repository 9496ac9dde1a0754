"""What is counted of the replies, and told with them, without a server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from diskprefix.server.metrics import ServerMetrics
from diskprefix.server.protocols.figures import TimingsReply, figures_reply
from tests.server.scripted import done


def test_guessed_tokens_are_told_and_counted() -> None:
    plain = done(completion_tokens=50)
    guessed = replace(plain, timings=replace(plain.timings, drafted_tokens=40, accepted_tokens=30))
    told = figures_reply(guessed, None)["timings"]
    assert (told["drafted_tokens"], told["accepted_tokens"]) == (40, 30)
    assert TimingsReply(**told).accepted_tokens == 30
    metrics = ServerMetrics()
    for _ in range(2):
        metrics.count_generation(guessed)
    metrics.count_generation(plain)
    text = asyncio.run(metrics.render(None)).decode()
    assert 'diskprefix_tokens_total{kind="drafted"} 80.0' in text
    assert 'diskprefix_tokens_total{kind="accepted"} 60.0' in text


def test_a_reply_without_guesses_says_nothing_of_them() -> None:
    assert not {"drafted_tokens", "accepted_tokens"} & figures_reply(done(), None)["timings"].keys()
