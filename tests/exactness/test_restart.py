"""The promise, across real processes that die of SIGKILL: bit for bit the answer of a cold run."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from diskprefix.cli import cli
from tests import forked
from tests.exactness import restart_worker
from tests.server.daemon_process import DaemonProcess, cache_states, clean_environment, serve_flags

Request = dict[str, Any]


def run_in_a_process(folder: Path, dtype: str, requests: list[Request], name: str, **changes: Any) -> Any:
    """`changes` are further values of the worker's plan."""
    plan, out = folder / f"{name}.json", folder / f"{name}.npz"
    plan.write_text(json.dumps({"folder": str(folder / "kv"), "dtype": dtype, "requests": requests} | changes))
    assert forked.run(restart_worker.main, str(plan), str(out)) == -signal.SIGKILL
    return np.load(out)


def chat(model: Path, system: str, question: str, scope: str | int) -> Request:
    return {
        "model": model.name,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 5,
        "prefix_cache": {"scope": scope},
    }


def ask(client: httpx.Client, body: Request, **changes: Any) -> Request:
    reply = client.post("/v1/chat/completions", json=body | changes)
    assert reply.status_code == 200, reply.text
    answer: Request = reply.json()
    return answer


OFF = {"prefix_cache": {"scope": "off"}}


def inspected(folder: Path) -> list[Request]:
    """Returns the list of `diskprefix inspect --json`."""
    command = [sys.executable, "-m", "diskprefix", "inspect", "--kv-cache-dir", str(folder), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert shown.returncode == 0, shown.stderr
    entries: list[Request] = json.loads(shown.stdout)["entries"]
    return entries


KILLS = 3
BODIES_PER_KILL = 8


def save_until_killed(daemon: DaemonProcess, bodies: list[Request], delay_s: float) -> list[tuple[Request, Request]]:
    """Sends all bodies at once and kills the daemon `delay_s` after it has begun to save. Answers what was answered."""
    answered: list[tuple[Request, Request]] = []
    begun = threading.Event()

    def send(body: Request) -> None:
        with contextlib.suppress(httpx.TransportError), daemon.client() as client:
            answered.append((body, ask(client, body)))
            begun.set()

    senders = [threading.Thread(target=send, args=(body,)) for body in bodies]
    for sender in senders:
        sender.start()
    assert begun.wait(60)
    # Not waiting for anything: this is where in the saving the daemon dies.
    threading.Event().wait(delay_s)
    daemon.stop(signal.SIGKILL)
    for sender in senders:
        sender.join(60)
    return answered


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["1GiB", "16MiB"], ids=["roomy", "full"])
def test_a_daemon_that_is_killed_while_it_saves_starts_again_and_says_the_same(
    chat_model: Path, tmp_path: Path, budget: str
) -> None:
    """A few kills at seeded random moments; the store is the same all along, the prompts of each round are new. In a
    full store, each save is an eviction too."""
    rng = random.Random(11)
    cache = tmp_path / "kv"
    expected: dict[str, Any] = {}
    earlier: list[Request] = []
    restored = evicted = 0
    for round_ in range(KILLS + 1):
        daemon = DaemonProcess(*serve_flags(chat_model, cache, kv_cache_budget=budget))
        with daemon, daemon.wait_ready().client() as client:
            inspected(cache)
            for body in earlier:
                reply = ask(client, body)
                assert reply["choices"] == expected[json.dumps(body)]
                restored += reply["prefix_cache"]["restored"]
            if round_ == KILLS:
                break
            earlier = [
                chat(chat_model, f"{round_}.{i}: You are patient. " * 120, "Tell me about rivers.", "full")
                for i in range(BODIES_PER_KILL)
            ]
            expected |= {json.dumps(body): ask(client, body, **OFF)["choices"] for body in earlier}
            # A slow disk may keep nothing of the others.
            ask(client, earlier[0])
            daemon.wait_saved()
            evicted += cache_states(client)[0]["evicted_blocks"]
            for body, reply in save_until_killed(daemon, earlier[1:], rng.uniform(0, 0.15)):
                assert reply["choices"] == expected[json.dumps(body)]
        assert all(entry["num_tokens"] > 0 for entry in inspected(cache))
        assert cli.main(["verify", "--kv-cache-dir", str(cache)], standalone_mode=False) == 0
    assert restored > 0
    assert (evicted > 0) == (budget == "16MiB")
