"""Kills real daemons while they answer, save and evict, and checks the answers of the daemons that follow."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from tests.faults.crash.check import Finding, verify
from tests.faults.crash.phases import Round
from tests.server.chat_model import write_chat_model
from tests.server.daemon_process import DaemonProcess, serve_flags

Body = dict[str, Any]

NUM_PROMPTS = 40
SYSTEM_WORDS = 720
BLOCK_SIZE = 64
WORDS = ("You", "are", "patient", "rivers", "cities", "weather", "add")
NEW_PER_ROUND = 2
BURST = 8
AGAIN = 4
_LONGEST_MOMENT_S = 0.15
_BEGIN_TIMEOUT_S = 120.0


@dataclass(eq=False)
class _Cache:
    """A folder that daemons use one after the other. `keeps`: the budget is so large that nothing is evicted."""

    folder: Path
    budget: str
    keeps: bool
    saved: list[int] = field(default_factory=list)
    """Prompts that a daemon said were on disk."""
    sent: list[int] = field(default_factory=list)


class ServerPhase:
    """Kills of `diskprefix serve` with a tiny model, on a roomy store and on one that is always full."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        folder.mkdir(parents=True)
        self._rng = rng
        self._model = write_chat_model(folder / "model")
        self._prompts = [_body(number) for number in range(NUM_PROMPTS)]
        self._cold: list[Any] = []
        self._answered: list[int] = []
        """By the daemon that is running."""
        self._caches = [
            _Cache(folder / "roomy", "1GiB", keeps=True),
            _Cache(folder / "full", "16MiB", keeps=False),
        ]
        self._folder = folder

    def rounds(self, kills: int) -> Iterator[Round]:
        self._cold = self._answers_without_cache()
        # The full store twice as often: there every save is an eviction too.
        order = [self._caches[index % 3 > 0] for index in range(kills)]
        for index, cache in enumerate(order):
            finding = Finding()
            done = self._round(cache, finding)
            if cache not in order[index + 1 :]:
                with self._daemon(cache) as daemon, daemon.wait_ready().client() as client:
                    self._ask_again(client, cache, finding)
            yield replace(done, restored=finding.restored, failures=tuple(finding.failures))

    def _answers_without_cache(self) -> list[Any]:
        """Returns the answers of a daemon without the cache to every prompt."""
        with self._daemon(_Cache(self._folder / "cold", "64MiB", keeps=True), disk_prefix_cache="off") as daemon:
            daemon.wait_ready()
            with daemon.client() as client:
                replies = [_ask(client, body) for body in self._prompts]
            assert all(reply["prefix_cache"]["restored"] == 0 for reply in replies)
        return [reply["choices"] for reply in replies]

    def _round(self, cache: _Cache, finding: Finding) -> Round:
        """Adds every failure to `finding`."""
        moment_s = self._rng.uniform(0.0, _LONGEST_MOMENT_S)
        self._answered.clear()
        with self._daemon(cache) as daemon:
            daemon.wait_ready()
            with daemon.client() as client:
                self._ask_again(client, cache, finding)
                self._save(daemon, client, cache, finding)
                evicted = int(client.get("/props").json()["full_cache"]["state"]["evicted_blocks"])
            answered = len(self._answered)
            self._kill_in_a_burst(daemon, cache, moment_s, finding)
        verify(cache.folder, finding)
        return Round(
            phase="servers",
            moment_s=moment_s,
            doing=self._doing(len(self._answered) - answered, daemon.log),
            restored=0,
            failures=(),
            evicted=evicted,
        )

    def _doing(self, answered_of_burst: int, log: str) -> str | None:
        """Returns what a daemon was doing when it was killed, according to its answers and its log."""
        if answered_of_burst < BURST:
            return "answering"
        return "saving" if log.count("] wrote ") + log.count("] not saved") < len(self._answered) else None

    def _daemon(self, cache: _Cache, **changes: str) -> DaemonProcess:
        same = {"block_size": str(BLOCK_SIZE), "kv_cache_min_free": "0", "kv_cache_budget": cache.budget}
        return DaemonProcess(*serve_flags(self._model, cache.folder, log_level="debug", **(same | changes)))

    def _ask_again(self, client: httpx.Client, cache: _Cache, finding: Finding) -> None:
        """Returns prompts that were sent to earlier daemons, saved or not."""
        saved = self._rng.sample(cache.saved, min(AGAIN, len(cache.saved)))
        sent = self._rng.sample(cache.sent, min(AGAIN, len(cache.sent)))
        for number in saved + sent:
            restored = self._ask(client, number, finding)
            if restored:
                finding.restored += 1
            elif cache.keeps and number in saved:
                finding.fail(f"prompt {number} was saved and is not restored")

    def _save(self, daemon: DaemonProcess, client: httpx.Client, cache: _Cache, finding: Finding) -> None:
        numbers = self._rng.sample(range(NUM_PROMPTS), NEW_PER_ROUND)
        for number in numbers:
            self._ask(client, number, finding)
        daemon.wait_saved()
        cache.saved += numbers

    def _ask(self, client: httpx.Client, number: int, finding: Finding) -> int:
        """Returns how many tokens were restored."""
        reply = _ask(client, self._prompts[number])
        self._answered.append(number)
        if reply["choices"] != self._cold[number]:
            finding.fail(f"prompt {number} is answered otherwise than without the cache: {json.dumps(reply)[:300]}")
        return int(reply["prefix_cache"]["restored"])

    def _kill_in_a_burst(self, daemon: DaemonProcess, cache: _Cache, moment_s: float, finding: Finding) -> None:
        """Send several prompts at once, and kill the daemon some time after the first answer."""
        numbers = self._rng.sample(range(NUM_PROMPTS), BURST)
        begun = threading.Event()

        def send(number: int) -> None:
            with contextlib.suppress(httpx.TransportError), daemon.client() as client:
                self._ask(client, number, finding)
                begun.set()

        senders = [threading.Thread(target=send, args=(number,)) for number in numbers]
        for sender in senders:
            sender.start()
        if not begun.wait(_BEGIN_TIMEOUT_S):
            finding.fail(f"no answer at all; the log ends with: {daemon.log[-500:]}")
        time.sleep(moment_s)
        daemon.stop(signal.SIGKILL)
        for sender in senders:
            sender.join()
        cache.sent += numbers


def _body(number: int) -> Body:
    """A chat whose system message is the prompt's own from its first word on."""
    words = random.Random(number).choices(
        ("You", "are", "patient", "rivers", "cities", "weather", "add"), k=SYSTEM_WORDS
    )
    return {
        "messages": [
            {"role": "system", "content": f"{number}: " + " ".join(words)},
            {"role": "user", "content": "Tell me about rivers."},
        ],
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 5,
    }


def _ask(client: httpx.Client, body: Body) -> Any:
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()
