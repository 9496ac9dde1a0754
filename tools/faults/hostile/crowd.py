"""Clients in processes of their own: good ones, bad ones, and one that asks `/health`.

Each puts its observations into a queue. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from threading import Thread
from typing import Any, TypeAlias

import httpx

from tools.faults.hostile.bad_clients import CLOSED, Caller, End
from tools.faults.hostile.requests import CHAT, KINDS
from tools.measuring.prompts import AGENT_PROMPT

TURNS = 8
"""Turns of a conversation. The next conversation begins with the same system message."""
TURN_SHARE = 5
"""A turn adds this part of the system message's length: as much as a small file gives an agent."""
REPLY_TOKENS = 8
PATIENCE_S = 60.0
"""Seconds without a byte after which a good client gives up."""
HEALTH_EVERY_S = 0.1
PAUSE_S = 1.0
"""Seconds until a bad client begins again, so that the cost of sending stays small."""
NICE = 19
"""Niceness of the bad clients' processes."""

Messages: TypeAlias = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a good client. `ttft_s` is None if there was no token, and `failure` then says why."""

    client: int
    started: float
    ended: float
    ttft_s: float | None
    failure: str = ""
    cached_tokens: int = 0
    kept_tokens: int = 0
    """Length of the saved part of the prompt, according to the daemon."""
    prompt_tokens: int = 0
    messages: Messages | None = None


@dataclass(frozen=True)
class Attacked:
    """The end of one connection of a bad client."""

    kind: str
    ended: float
    seconds: float
    end: End


@dataclass(frozen=True)
class Health:
    """An answer of `/health`. `late_s` is the delay of the process that asks, because the machine is busy."""

    at: float
    seconds: float
    status: int
    late_s: float


Seen: TypeAlias = Turn | Attacked | Health


def good_key(client: int) -> str:
    return f"good-client-key-{client:04}"


def bad_key(kind: str) -> str:
    return f"bad-client-key-{list(KINDS).index(kind):04}"


def opening_of(client: int, prompt_chars: int) -> Messages:
    """Returns the system message of an agent: no two have the same beginning."""
    text = AGENT_PROMPT.read_text(encoding="utf-8")[:prompt_chars]
    return [{"role": "system", "content": f"You are agent number {client}. {text}"}]


@dataclass
class GoodClient:
    """An agent: a long prompt of its own, and turns with time to think between them."""

    number: int
    client: httpx.AsyncClient
    seen: Queue[Seen]
    think_s: float
    prompt_chars: int

    async def run(self) -> None:
        rng = random.Random(self.number)
        text, turn_chars = AGENT_PROMPT.read_text(encoding="utf-8"), self.prompt_chars // TURN_SHARE
        await asyncio.sleep(rng.uniform(0, self.think_s))
        while True:
            messages = opening_of(self.number, self.prompt_chars)
            for turn in range(TURNS):
                start = rng.randrange(len(text) - turn_chars)
                messages = [*messages, {"role": "user", "content": f"{turn}: {text[start : start + turn_chars]}"}]
                said = await self.ask(messages)
                # So that they do not ask in step.
                await asyncio.sleep(rng.uniform(0.5, 1.5) * self.think_s)
                if said is None:
                    break
                messages = [*messages, {"role": "assistant", "content": said}]

    async def ask(self, messages: Messages) -> str | None:
        """Returns the reply, None if it did not come."""
        started, reply = time.monotonic(), _Reply()
        try:
            failure = await asyncio.wait_for(self._stream(messages, started, reply), 2 * PATIENCE_S)
        except (httpx.HTTPError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"
        turn = Turn(
            client=self.number,
            started=started,
            ended=time.monotonic(),
            ttft_s=reply.ttft_s,
            failure=failure or ("" if reply.ttft_s is not None else "no token"),
            messages=messages,
            **reply.told,
        )
        self.seen.put(turn)
        return None if turn.failure else reply.text

    async def _stream(self, messages: Messages, started: float, reply: _Reply) -> str:
        # No end before the last token.
        body = {"messages": messages, "max_tokens": REPLY_TOKENS, "temperature": 0, "logit_bias": {"2": -100}}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        last, headers = "", {"Authorization": f"Bearer {good_key(self.number)}"}
        async with self.client.stream("POST", CHAT, json=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    reply.take(json.loads(line[6:]), time.monotonic() - started)
                last = line or last
        return "" if last == "data: [DONE]" and answer.status_code == 200 else f"{answer.status_code} {last[:200]}"


class _Reply:
    def __init__(self) -> None:
        self.text = ""
        self.ttft_s: float | None = None
        self.told: dict[str, int] = {}

    def take(self, chunk: dict[str, Any], elapsed_s: float) -> None:
        for choice in chunk.get("choices", ()):
            if piece := choice["delta"].get("content"):
                self.text += piece
                self.ttft_s = elapsed_s if self.ttft_s is None else self.ttft_s
        if chunk.get("usage"):
            usage, cache = chunk["usage"], chunk["prefix_cache"]
            self.told = {
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "kept_tokens": cache["boundary"] if cache["saved"] in ("queued", "stored") else 0,
            }


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone, killed or not."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by another process"

    def end() -> None:
        parent.join()
        os._exit(1)

    Thread(target=end, daemon=True).start()


def run_good(port: int, number: int, think_s: float, prompt_chars: int, seen: Queue[Seen]) -> None:
    """Runs the process of the good clients until it is ended."""
    end_with_parent()

    async def run() -> None:
        limits = httpx.Limits(max_connections=number, max_keepalive_connections=number)
        timeout = httpx.Timeout(PATIENCE_S)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:
            await asyncio.gather(*(GoodClient(i, client, seen, think_s, prompt_chars).run() for i in range(number)))

    asyncio.run(run())


def run_bad(port: int, kinds: Sequence[str], ready: Event, begin: Event, settle_s: float, seen: Queue[Seen]) -> None:
    """Runs a process of bad clients, one for each of `kinds`, which begin one after the other within `settle_s`."""
    end_with_parent()
    os.nice(NICE)
    behaviours = {kind: KINDS[kind](Caller(port, bad_key(kind))) for kind in set(kinds)}
    ready.set()
    begin.wait()

    async def again_and_again(kind: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            started = time.monotonic()
            try:
                end = await behaviours[kind]()
            except OSError as error:
                # As if there had been no answer.
                end = End(CLOSED, type(error).__name__.encode())
            ended = time.monotonic()
            seen.put(Attacked(kind, ended, ended - started, end))
            await asyncio.sleep(PAUSE_S)

    async def run() -> None:
        waits = [settle_s * i / len(kinds) for i in range(len(kinds))]
        await asyncio.gather(*(again_and_again(kind, wait) for kind, wait in zip(kinds, waits, strict=True)))

    asyncio.run(run())


def run_health(port: int, seen: Queue[Seen]) -> None:
    """Runs the process that asks `/health` repeatedly, each time through a new connection."""
    end_with_parent()
    due = time.monotonic()
    while True:
        due = max(due + HEALTH_EVERY_S, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        started, status = time.monotonic(), 0
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            status = 0
        finally:
            connection.close()
        seen.put(Health(started, time.monotonic() - started, status, started - due))
