"""The promise, across real daemons that die of SIGKILL: bit for bit the answer of a cold run; and a turn of a
conversation restores all earlier turns that are still a prefix."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from diskprefix.daemon.cli import cli
from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import DaemonProcess, cache_states, clean_environment, serve_flags
from tests.runtimes import restorable

Request = dict[str, Any]


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


# Conversations.

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

Messages = list[dict[str, Any]]

OWN: list[Messages] = [
    [
        {"role": "system", "content": "You look after a small library. " + "Rule: be brief and kind. " * 40},
        {"role": "user", "content": f"Question {topic}: which shelf holds it?"},
        {"role": "assistant", "content": "Shelf seven, by the window. " * 6},
        {"role": "user", "content": "And who wrote it?"},
        {"role": "assistant", "content": "Nobody knows. " * 20},
        {"role": "user", "content": "Thank you <|im_start|>system, goodbye."},
        {"role": "assistant", "content": "Goodbye."},
    ]
    for topic in ("maps", "birds")
]


def plain(messages: Messages) -> Messages:
    """Roles and texts alone: the traces hold fields of their own."""
    return [{"role": m["role"], "content": m.get("content") or ""} for m in messages]


def tau_bench(count: int) -> list[Messages]:
    file = DATA / "tau-bench" / "gpt-4o-airline.share.json"
    if not file.is_file():
        pytest.skip("the tau-bench traces are not on this machine")
    return [plain(item["traj"]) for item in json.loads(file.read_text())[:count]]


def swe_agent(count: int) -> list[Messages]:
    files = sorted((DATA / "swe-agent").rglob("*.traj"), key=lambda file: (file.stat().st_size, file))[:count]
    if not files:
        pytest.skip("the swe-agent traces are not on this machine")
    return [plain(json.loads(file.read_text())["history"]) for file in files]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "long-chat", positions=32768)


class Conversing:
    """A daemon that can be killed between turns, and the client's side of what it should have restored."""

    def __init__(self, model: Path, cache: Path, block_size: int) -> None:
        self._flags = serve_flags(model, cache, block_size=block_size, kv_cache_min_tokens=block_size)
        self.block_size = block_size
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.daemon = DaemonProcess(*self._flags).wait_ready()
        self.sent: list[TokenIds] = []

    def kill_and_restart(self) -> None:
        self.daemon.wait_saved()
        self.daemon.stop(signal.SIGKILL)
        self.daemon.__exit__(None, None, None)
        self.daemon = DaemonProcess(*self._flags).wait_ready()

    def turn(self, client: httpx.Client, messages: Messages) -> tuple[dict[str, Any], int]:
        """Send a turn; answer the reply, and the tokens that the earlier turns have in common with it."""
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompt = as_token_ids(ids)
        body = {"model": "long-chat", "messages": messages, "max_tokens": 1, "temperature": 0}
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        common = max((common_prefix_length(prompt, other) for other in self.sent), default=0)
        self.sent.append(prompt)
        return reply.json(), common


def turns(conversation: Messages) -> Iterator[Messages]:
    """What a client sends at each turn: everything before each message of the assistant."""
    for i, message in enumerate(conversation):
        if message["role"] == "assistant" and i > 0 and any(m["role"] == "user" for m in conversation[:i]):
            yield conversation[:i]


def replay(chat: Conversing, conversations: list[Messages]) -> None:
    """Every turn of every conversation; the daemon is killed in the middle of each."""
    for conversation in conversations:
        requests = list(turns(conversation))
        assert len(requests) >= 2
        for i, messages in enumerate(requests):
            if i == len(requests) // 2:
                chat.kill_and_restart()
            with chat.daemon.client() as client:
                reply, common = chat.turn(client, messages)
            restored = restorable(common, chat.block_size)
            assert reply["prefix_cache"]["restored"] == restored
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == restored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "block_size"),
    [(lambda: OWN, 64), (lambda: tau_bench(2), 256), (lambda: swe_agent(2), 256)],
    ids=["own", "tau-bench", "swe-agent"],
)
def test_a_turn_restores_all_of_the_earlier_turns_that_is_still_a_prefix(
    model: Path, tmp_path: Path, source: Callable[[], list[Messages]], block_size: int
) -> None:
    conversations = source()
    chat = Conversing(model, tmp_path / "kv", block_size)
    try:
        replay(chat, conversations)
    finally:
        chat.daemon.__exit__(None, None, None)
