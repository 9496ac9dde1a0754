"""An answer of a server of OpenAI's API, as its client sees it arrive."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from diskprefix.errors import DiskPrefixError


class LiveServerError(DiskPrefixError):
    """A server did not start, did not answer, or answered something else than before. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One streamed reply. `at_s` are the client's seconds from the question (at `asked` on `time.perf_counter`) to each
    piece of text, a token or a few, or to the end of a reply that has none. `text` is empty where a program does not
    say it. `cache` and `timings` are what the daemon says, `logprobs` those of a chat's tokens."""

    prompt_tokens: int
    completion_tokens: int
    at_s: tuple[float, ...]
    text: str = ""
    asked: float = 0.0
    restored: int = 0
    cache: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    logprobs: Sequence[Mapping[str, Any]] = ()

    @property
    def ttft_s(self) -> float:
        return self.at_s[0]

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first one; None for a reply of one piece."""
        return (self.completion_tokens - 1) / (self.at_s[-1] - self.at_s[0]) if len(self.at_s) > 1 else None


def streamed(client: httpx.Client, path: str, body: Mapping[str, Any], max_tokens: int) -> Answer:
    """Sends a request to `path`, greedy, and reads the reply as it comes. Raises `LiveServerError`."""
    asked_for = {"max_tokens": max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    at_s: list[float] = []
    text, last, logprobs = "", dict[str, Any](), list[Any]()
    asked = time.perf_counter()
    try:
        with client.stream("POST", path, json={**body, **asked_for}) as response:
            if response.status_code != 200:
                response.read()
                raise LiveServerError(f"the server answered {response.status_code}: {response.text[:300]}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise LiveServerError(f"the server answered: {chunk['error']['message']}")
                choices = chunk.get("choices", [])
                logprobs += [
                    token for choice in choices for token in (choice.get("logprobs") or {}).get("content") or ()
                ]
                piece = "".join(
                    choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
                )
                # The first token of a reply without text ends it.
                if piece or (not at_s and any(choice.get("finish_reason") for choice in choices)):
                    at_s.append(time.perf_counter() - asked)
                    text += piece
                last |= {key: chunk[key] for key in ("usage", "prefix_cache", "timings") if chunk.get(key)}
    except httpx.HTTPError as error:
        raise LiveServerError(f"the connection to the server broke: {error}") from error
    if not at_s:
        raise LiveServerError("the server answered without a reply")
    usage, cache = last.get("usage") or {}, last.get("prefix_cache") or {}
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or len(at_s),
        at_s=tuple(at_s),
        text=text,
        asked=asked,
        restored=cache.get("restored", cached_tokens),
        cache=cache,
        timings=last.get("timings") or {},
        logprobs=logprobs,
    )
