"""Real multi-turn conversations through the real daemon: a turn restores all earlier turns that are still a prefix."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length
from tests.server.chat_model import write_chat_model
from tests.server.daemon_process import DaemonProcess, serve_flags

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
    folder = write_chat_model(tmp_path_factory.mktemp("models") / "long-chat")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    return folder


class Chat:
    """A daemon that can be killed between turns, and the client's side of what it should have restored."""

    def __init__(self, model: Path, cache: Path, block_size: int) -> None:
        self._flags = serve_flags(model, cache, block_size=block_size, kv_cache_min_tokens=block_size)
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


def replay(chat: Chat, conversations: list[Messages]) -> None:
    """Every turn of every conversation; the daemon is killed in the middle of each."""
    for conversation in conversations:
        requests = list(turns(conversation))
        assert len(requests) >= 2
        for i, messages in enumerate(requests):
            if i == len(requests) // 2:
                chat.kill_and_restart()
            with chat.daemon.client() as client:
                reply, common = chat.turn(client, messages)
            # The model is exact at every token.
            assert reply["prefix_cache"]["restored"] == common
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == common


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
    chat = Chat(model, tmp_path / "kv", block_size)
    try:
        replay(chat, conversations)
    finally:
        chat.daemon.__exit__(None, None, None)
