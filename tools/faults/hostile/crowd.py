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

from tests.daemon.server.hostile_requests import CHAT
from tools.faults.hostile.bad_clients import CLOSED, Caller, End
from tools.faults.hostile.requests import KINDS
from tools.measuring.prompts import AGENT_PROMPT

_TURNS, _TURN_SHARE, _REPLY_TOKENS = 8, 5, 8
"""Turns of a conversation, the part of the system message's length that each adds, and the tokens of its reply."""
_PATIENCE_S = 60.0
"""Seconds without a byte after which a good client gives up."""
_HEALTH_EVERY_S = 0.1
_PAUSE_S, _NICE = 1.0, 19
"""Seconds until a bad client begins again, and its niceness, so that the cost of sending stays small."""

Messages: TypeAlias = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a good client. Without a token `ttft_s` is None, and `failure` then says why. `kept_tokens` of the
    prompt are saved, according to the daemon."""

    client: int
    started: float
    ended: float
    ttft_s: float | None
    failure: str
    messages: Messages
    kept_tokens: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Attacked:
    """The end of one connection of a bad client."""

    kind: str
    seconds: float
    end: End


@dataclass(frozen=True)
class Health:
    """An answer of `/health`."""

    ended: float
    seconds: float
    status: int


Seen: TypeAlias = Turn | Attacked | Health


def good_key(client: int) -> str:
    return f"good-client-key-{client:04}"


def bad_key(kind: str) -> str:
    return f"bad-client-key-{list(KINDS).index(kind):04}"


async def _good_client(
    number: int, client: httpx.AsyncClient, think_s: float, prompt_chars: int, seen: Queue[Seen]
) -> None:
    """An agent: a long prompt of its own, and turns with time to think between them."""
    rng, text = random.Random(number), AGENT_PROMPT.read_text(encoding="utf-8")
    turn_chars = prompt_chars // _TURN_SHARE
    await asyncio.sleep(rng.uniform(0, think_s))
    while True:
        messages = [{"role": "system", "content": f"You are agent number {number}. {text[:prompt_chars]}"}]
        for turn in range(_TURNS):
            start = rng.randrange(len(text) - turn_chars)
            messages = [*messages, {"role": "user", "content": f"{turn}: {text[start : start + turn_chars]}"}]
            said = await _ask(number, client, messages, seen)
            # So that they do not ask in step.
            await asyncio.sleep(rng.uniform(0.5, 1.5) * think_s)
            if said is None:
                break
            messages = [*messages, {"role": "assistant", "content": said}]


async def _ask(number: int, client: httpx.AsyncClient, messages: Messages, seen: Queue[Seen]) -> str | None:
    """Returns the reply, None if it did not come."""
    # No end before the last token.
    body = {"messages": messages, "max_tokens": _REPLY_TOKENS, "temperature": 0, "logit_bias": {"2": -100}}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    started, ttft_s, text, last, counts = time.monotonic(), None, "", "", dict[str, int]()
    try:
        async with (
            asyncio.timeout(2 * _PATIENCE_S),
            client.stream("POST", CHAT, json=body, headers={"Authorization": f"Bearer {good_key(number)}"}) as answer,
        ):
            async for line in answer.aiter_lines():
                chunk: dict[str, Any] = json.loads(line[6:]) if line.startswith("data: {") else {}
                for choice in chunk.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        text += piece
                        ttft_s = ttft_s or time.monotonic() - started
                if usage := chunk.get("usage"):
                    cache = chunk["prefix_cache"]
                    kept_tokens = cache["boundary"] if cache["saved"] in ("queued", "stored") else 0
                    counts = {"prompt_tokens": usage["prompt_tokens"], "kept_tokens": kept_tokens}
                last = line or last
        is_whole = last == "data: [DONE]" and answer.status_code == 200
        failure = "" if is_whole and ttft_s is not None else f"{answer.status_code} {last[:200]}"
    except (httpx.HTTPError, TimeoutError) as error:
        failure = f"{type(error).__name__}: {error}"
    seen.put(
        Turn(
            client=number,
            started=started,
            ended=time.monotonic(),
            ttft_s=ttft_s,
            failure=failure,
            messages=messages,
            **counts,
        )
    )
    return None if failure else text


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone, killed or not."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by another process"

    def end() -> None:
        parent.join()
        os._exit(1)

    Thread(target=end, daemon=True).start()


def run_good(port: int, number: int, think_s: float, prompt_chars: int, seen: Queue[Seen]) -> None:
    """Runs the process of the good clients until it is ended."""
    _end_with_parent()

    async def run() -> None:
        limits = httpx.Limits(max_connections=number, max_keepalive_connections=number)
        timeout = httpx.Timeout(_PATIENCE_S)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=timeout, limits=limits) as client:
            await asyncio.gather(*(_good_client(i, client, think_s, prompt_chars, seen) for i in range(number)))

    asyncio.run(run())


def run_bad(port: int, kinds: Sequence[str], ready: Event, begin: Event, settle_s: float, seen: Queue[Seen]) -> None:
    """Runs a process of bad clients, one for each of `kinds`, which begin one after the other within `settle_s`."""
    _end_with_parent()
    os.nice(_NICE)
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
            seen.put(Attacked(kind, time.monotonic() - started, end))
            await asyncio.sleep(_PAUSE_S)

    async def run() -> None:
        await asyncio.gather(*(again_and_again(kind, settle_s * i / len(kinds)) for i, kind in enumerate(kinds)))

    asyncio.run(run())


def run_health(port: int, seen: Queue[Seen]) -> None:
    """Runs the process that asks `/health` repeatedly, each time through a new connection."""
    _end_with_parent()
    while True:
        time.sleep(_HEALTH_EVERY_S)
        started, status = time.monotonic(), 0
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            status = 0
        finally:
            connection.close()
        ended = time.monotonic()
        seen.put(Health(ended, ended - started, status))
