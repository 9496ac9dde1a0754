"""Agents whose conversations grow with several models in turn, behind a front whose processes are killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tools.measuring.live_server import LiveServer

_TURNS = 8
"""Turns of a conversation, before the agent begins another one with the model."""
_MAX_TOKENS = 8
_PAUSE_S, _KILL_S = 0.2, (4.0, 16.0)
_FRONT_SHARE = 0.25
"""The share of kills that is for the front."""
_LOST_S = 120.0
"""A turn that is not answered for so long is lost."""


@dataclass
class Talk:
    """A conversation with a model: what was said, and what was answered."""

    model: str
    salt: str
    replies: list[str] = field(default_factory=list)

    def body(self, number: int) -> dict[str, Any]:
        """Returns the request of a turn."""
        said = (f"{self.salt}: say more about river number {turn}, please. " * 3 for turn in range(number + 1))
        messages = [{"role": "user", "content": next(said)}]
        for reply in self.replies[:number]:
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": next(said)}]
        return {"messages": messages, "cache_salt": self.salt, "max_tokens": _MAX_TOKENS, "temperature": 0}


class SwappedModels:
    """Several agents that ask several models of one server, for some time. `kills` has processes killed meanwhile."""

    def __init__(self, server: LiveServer, models: Sequence[str], *, seed: int = 0) -> None:
        self._server, self._models, self._seed = server, models, seed
        self._url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        self._ended = threading.Event()
        self._talks: list[Talk] = []
        self._seconds: list[float] = []
        self._counts: Counter[str] = Counter()

    def run(self, agents: int, seconds: float, *, kills: bool) -> dict[str, Any]:
        """Returns the figures of the time, and leaves the conversations for `wrong`."""
        with ThreadPoolExecutor(agents + 1) as pool:
            work = [pool.submit(self._agent, number) for number in range(agents)]
            if kills:
                work.append(pool.submit(self._kill))
            self._ended.wait(seconds)
            self._ended.set()
        for one in work:
            one.result()
        log = self._server.log_path.read_text(encoding="utf-8", errors="replace")
        waits = sorted(self._seconds)
        return {
            "turns": len(waits),
            "lost": self._counts["lost"],
            "asked_again": self._counts["asked again"],
            "others_killed": self._counts["other"],
            "fronts_killed": self._counts["front"],
            "loads": log.count("diskprefix ready on"),
            "unloads": log.count("is being unloaded"),
            "wait_s": {name: waits[int(share * (len(waits) - 1))] for name, share in _SHARES.items()} if waits else {},
            "restored_part_of_prompts": self._counts["restored"] / max(1, self._counts["prompt"]),
        }

    def wrong(self, server: LiveServer, model: str) -> int:
        """Returns how many replies of a model differ from those of a server that has it alone."""
        url, wrong = f"http://127.0.0.1:{server.port}/v1/chat/completions", 0
        with httpx.Client(timeout=_LOST_S) as client:
            for talk in self._talks:
                for number, reply in enumerate(talk.replies if talk.model == model else ()):
                    answer = client.post(url, json=talk.body(number)).raise_for_status().json()
                    wrong += _text(answer) != reply
        return wrong

    def _agent(self, number: int) -> None:
        """Asks the models in turn, each in a conversation of its own."""
        rng = random.Random(f"{self._seed} {number}")
        talks = self._begun(number)
        current = {model: next(talks[model]) for model in self._models}
        while not self._ended.is_set():
            model = rng.choice(self._models)
            if len(current[model].replies) == _TURNS:
                current[model] = next(talks[model])
            self._turn(current[model])
            time.sleep(rng.uniform(0, _PAUSE_S))

    def _begun(self, number: int) -> dict[str, Iterator[Talk]]:
        def talks(model: str) -> Iterator[Talk]:
            while True:
                talk = Talk(model, f"agent {number}, talk {len(self._talks)}")
                self._talks.append(talk)
                yield talk

        return {model: talks(model) for model in self._models}

    def _turn(self, talk: Talk) -> None:
        """Asks until there is an answer, as clients do."""
        body, began = talk.body(len(talk.replies)) | {"model": talk.model}, time.monotonic()
        while time.monotonic() < began + _LOST_S:
            with suppress(httpx.TransportError):
                answer = httpx.post(self._url, json=body, timeout=_LOST_S)
                if answer.status_code == 200:
                    found = answer.json()
                    talk.replies.append(_text(found))
                    self._seconds.append(time.monotonic() - began)
                    self._counts["prompt"] += found["usage"]["prompt_tokens"]
                    self._counts["restored"] += found["prefix_cache"]["restored"]
                    return
                if answer.status_code not in (429, 503):
                    raise RuntimeError(f"{talk.model} answers {answer.status_code}: {answer.text[:300]}")
            self._counts["asked again"] += 1
            time.sleep(_PAUSE_S)
        self._counts["lost"] += 1

    def _kill(self) -> None:
        rng = random.Random(f"{self._seed} kills")
        while not self._ended.wait(rng.uniform(*_KILL_S)):
            if rng.random() < _FRONT_SHARE:
                self._server.kill()
                self._server.launch()
                self._counts["front"] += 1
                continue
            with suppress(OSError, IndexError):
                _, *below = family(self._server.process_id)
                os.kill(rng.choice(below), signal.SIGKILL)
                self._counts["other"] += 1


_SHARES = {"median": 0.5, "p95": 0.95, "longest": 1.0}


def family(pid: int) -> Iterator[int]:
    """Yields a process and those below it: of a front, the process that forks, and the workers."""
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        yield from family(int(child))


def _text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])
