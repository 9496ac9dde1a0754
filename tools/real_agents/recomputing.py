"""Computes recorded replies again, in a new daemon that restores nothing, and compares the logits of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tools.measuring.answers import LiveServerError
from tools.measuring.live_server import ANSWER_DEADLINE_S, LiveServer
from tools.real_agents.records import Recorded, recorded


@dataclass(frozen=True)
class Recomputed:
    """The replies and tokens that were computed again, and the replies in which the logits of a token differ."""

    replies: int
    tokens: int
    different: list[str]


def recomputed(chosen: Sequence[Recorded], server: LiveServer, records: Path) -> Recomputed:
    """Asks a running daemon with prepared replies, whose records are in `records`, for each reply. Raises
    `LiveServerError` if it does not answer."""
    different = []
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=ANSWER_DEADLINE_S) as client:
        for each in chosen:
            body = {"model": each.model, "prompt": each.prompt, "max_tokens": len(each.digests)}
            answer = client.post("/v1/completions", json=body | {"prefix_cache": {"scope": "off"}})
            if answer.status_code != 200:
                raise LiveServerError(f"a recorded prompt is answered with {answer.status_code}: {answer.text[:300]}")
            assert answer.json()["prefix_cache"]["restored"] == 0
            again = recorded(records)[-1]
            assert again.prompt == each.prompt
            if again.digests != each.digests:
                different.append(_difference(each, again))
    return Recomputed(len(chosen), sum(len(each.digests) for each in chosen), different)


def _difference(first: Recorded, again: Recorded) -> str:
    equal = [mine == theirs for mine, theirs in zip(first.digests, again.digests, strict=False)]
    at = equal.index(False) if False in equal else len(equal)
    return f"{first.model}, a prompt of {len(first.prompt):,} tokens: token {at} of the reply differs"
