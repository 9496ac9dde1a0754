"""Replies of a vLLM with our tier before and after SIGKILL, compared byte for byte."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tools.connector.server import Reply, Server
from tools.measuring.prompts import prompt_text

_TOKENS, _NEW_TOKENS = 700, 32
_AT_ONCE = 8
"""A reply under VLLM_BATCH_INVARIANT does not depend on those beside it."""


@dataclass(frozen=True)
class Restart:
    """Of `num_replies`, `same_text` have the tokens of before, and `same_bits` their log-probabilities too. `restored`
    prompt tokens came from a tier."""

    num_replies: int
    same_text: int
    same_bits: int
    restored: int


def restarted(server: Server, num_replies: int) -> Restart:
    """Starts a server, asks, kills it, starts it and asks the same. Raises `EngineError`."""
    server.start()
    before = _replies(server, num_replies)
    server.settle()
    server.kill()
    server.start()
    after = _replies(server, num_replies)
    restored = server.count("external_prefix_cache_hits_total")
    server.kill()
    pairs = list(zip(before, after, strict=True))
    same_text = [one for one in pairs if one[0].tokens == one[1].tokens]
    return Restart(num_replies, len(same_text), sum(a.logprobs == b.logprobs for a, b in same_text), restored)


def _replies(server: Server, number: int) -> list[Reply]:
    with ThreadPoolExecutor(_AT_ONCE) as clients:
        return list(clients.map(lambda run: server.ask(prompt_text(_TOKENS, run), _NEW_TOKENS), range(number)))
