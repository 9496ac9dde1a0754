"""Kills real daemons while they answer, save and evict, and checks the answers of the daemons that follow."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from diskprefix.errors import DiskPrefixError, NotReady
from tests.extras.front.test_front_processes import family, is_gone
from tests.faults.crash import worker
from tests.server.chat_model import write_chat_model
from tests.server.daemon_process import DaemonProcess, cache_states, serve_flags, wait_until

Body = dict[str, Any]

NUM_PROMPTS = 40
SYSTEM_WORDS = 720
BLOCK_SIZE = 64
WORDS = ("You", "are", "patient", "rivers", "cities", "weather", "add")
NEW_PER_ROUND = 2
BURST = 8
AGAIN = 4
_NAMES = ("ash", "birch")
_LONGEST_MOMENT_S = 0.15
_BEGIN_TIMEOUT_S = 120.0


@dataclass
class Finding:
    """The findings of a check. `restored` is the number of prompts of which something was restored."""

    restored: int = 0
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.failures.append(what)


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

    flags: tuple[str, ...] = ("--model",)
    """What is before the path of the model."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        folder.mkdir(parents=True)
        self._rng = rng
        self._prompts = [_body(number) for number in range(NUM_PROMPTS)]
        self._write_models(folder)
        self._cold: list[Any] = []
        self._caches = [
            _Cache(folder / "roomy", "1GiB", keeps=True),
            _Cache(folder / "full", "16MiB", keeps=False),
        ]
        self._folder = folder

    def rounds(self, kills: int) -> Iterator[Finding]:
        self._cold = self._answers_without_cache()
        # The full store twice as often: there every save is an eviction too.
        order = [self._caches[index % 3 > 0] for index in range(kills)]
        for index, cache in enumerate(order):
            finding = Finding()
            self._round(cache, finding)
            if cache not in order[index + 1 :]:
                with self._daemon(cache) as daemon, daemon.client() as client:
                    self._ask_again(client, cache, finding)
            yield finding

    def _answers_without_cache(self) -> list[Any]:
        """Returns the answers of a daemon without the cache to every prompt."""
        cache = _Cache(self._folder / "cold", "64MiB", keeps=True)
        with self._daemon(cache, disk_prefix_cache="off") as daemon, daemon.client() as client:
            replies = [_ask(client, body) for body in self._prompts]
            assert all(reply["prefix_cache"]["restored"] == 0 for reply in replies)
        return [reply["choices"] for reply in replies]

    def _round(self, cache: _Cache, finding: Finding) -> None:
        """Adds every failure to `finding`."""
        with self._daemon(cache) as daemon:
            with daemon.client() as client:
                self._ask_again(client, cache, finding)
                self._save(client, cache, finding)
            self._kill_in_a_burst(daemon, cache, self._rng.uniform(0.0, _LONGEST_MOMENT_S), finding)
        _verify(cache.folder, finding)

    def _daemon(self, cache: _Cache, **changes: str) -> DaemonProcess:
        same = {"block_size": str(BLOCK_SIZE), "kv_cache_budget": cache.budget}
        flags = serve_flags(self._models, cache.folder, **(same | changes))
        return DaemonProcess(*self.flags, *flags[1:])

    def _write_models(self, folder: Path) -> None:
        self._models = write_chat_model(folder / "model")

    def _kill(self, daemon: DaemonProcess) -> None:
        daemon.stop(signal.SIGKILL)

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

    def _save(self, client: httpx.Client, cache: _Cache, finding: Finding) -> None:
        numbers = self._rng.sample(range(NUM_PROMPTS), NEW_PER_ROUND)
        for number in numbers:
            self._ask(client, number, finding)
        wait_until(lambda: not any(state["pending_bytes"] for state in cache_states(client)), "all is saved")
        cache.saved += numbers

    def _ask(self, client: httpx.Client, number: int, finding: Finding) -> int:
        """Returns how many tokens were restored."""
        reply = _ask(client, self._prompts[number])
        if reply["choices"] != self._cold[number]:
            finding.fail(f"prompt {number} is answered otherwise than without the cache: {json.dumps(reply)[:300]}")
        return int(reply["prefix_cache"]["restored"])

    def _kill_in_a_burst(self, daemon: DaemonProcess, cache: _Cache, moment_s: float, finding: Finding) -> None:
        """Send several prompts at once, and kill the daemon some time after the first answer."""
        numbers = self._rng.sample(range(NUM_PROMPTS), BURST)
        begun = threading.Event()

        def send(number: int) -> None:
            with contextlib.suppress(httpx.TransportError), daemon.client() as client:
                try:
                    self._ask(client, number, finding)
                except httpx.HTTPStatusError as error:
                    # Between two workers.
                    if error.response.status_code != NotReady.http_status:
                        finding.fail(f"prompt {number}: {error.response.text}")
                else:
                    begun.set()

        senders = [threading.Thread(target=send, args=(number,)) for number in numbers]
        for sender in senders:
            sender.start()
        if not begun.wait(_BEGIN_TIMEOUT_S):
            finding.fail(f"no answer at all; the log ends with: {daemon.log[-500:]}")
        time.sleep(moment_s)
        self._kill(daemon)
        for sender in senders:
            sender.join()
        cache.sent += numbers


class StandbyPhase(ServerPhase):
    """The same with a front and a spare. Killed are all at once, the front, or the worker."""

    flags: tuple[str, ...] = ("--standby", "--model")

    def _kill(self, daemon: DaemonProcess) -> None:
        below = family(daemon.process.pid)
        whom = self._rng.choice(("all", "front", "workers"))
        if whom != "front":
            workers = {int(found[1]) for line in daemon.lines if (found := re.search(r"process (\d+) is for", line))}
            for pid in below if whom == "all" else workers & {*below}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        below += family(daemon.process.pid)
        daemon.stop(signal.SIGTERM if whom == "workers" else signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, below)), "all end", _BEGIN_TIMEOUT_S)


class SeveralPhase(StandbyPhase):
    """The same with two models behind one front, and one folder for both."""

    flags = ("--models-dir",)

    def _write_models(self, folder: Path) -> None:
        self._models = folder / "models"
        for seed, name in enumerate(_NAMES):
            write_chat_model(self._models / name, seed=seed)
        for number, body in enumerate(self._prompts):
            body["model"] = _NAMES[number % len(_NAMES)]


def _verify(folder: Path, finding: Finding) -> None:
    """Runs `diskprefix verify`."""
    try:
        code, text = worker.output("verify", "--json", "--kv-cache-dir", str(folder))
    except DiskPrefixError as error:
        finding.fail(f"verify: {error}")
        return
    report = json.loads(text)
    if code or not report["clean"]:
        finding.fail(f"verify: exit code {code}: {json.dumps(report['problems'])[:300]}")


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
    """Raises `httpx.HTTPStatusError`."""
    return client.post("/v1/chat/completions", json=body).raise_for_status().json()
