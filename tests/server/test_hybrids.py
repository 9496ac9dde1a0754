"""A model with recurrent layers over HTTP: after a kill, the next turns of conversations compute what is new."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from diskprefix.tokens import LEAST_TOKENS
from tests.exactness.architectures import OVERRIDES, shrink
from tests.server.chat_model import VOCAB_SIZE, write_tokenizer
from tests.server.daemon_process import DaemonProcess, reply_to, running_daemon

SYSTEM = "You are a careful assistant that answers questions about rivers, mountains and cities. " * 2
TOPICS = "rivers", "mountains", "the cities between them"
LETTERS = "BFGHJKQUVWXZ"
"""They are not in what the tokenizer was trained on: a text of them has the tokens that were sampled."""


def write_hybrid(folder: Path) -> Path:
    """Writes a Lfm2 with short convolutions and attention, in bfloat16, and a tokenizer with a chat template."""
    torch.manual_seed(7)
    config = shrink("lfm2", **OVERRIDES["lfm2"] | {"vocab_size": VOCAB_SIZE})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


class Talk:
    """A conversation. `num_known` tokens of it have state: those of the last prompt and its reply, but the last one."""

    def __init__(self, topic: str, bias: dict[str, float]) -> None:
        self.topic, self.bias, self.num_known = topic, bias, 0
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]

    def ask(self, daemon: DaemonProcess, **cache: Any) -> dict[str, Any]:
        body = {"messages": self.messages, "max_tokens": 21, "seed": 5, "logprobs": True, "logit_bias": self.bias}
        with daemon.client() as client:
            return reply_to(client, body, **cache)

    def say(self, daemon: DaemonProcess, question: str) -> dict[str, Any]:
        self.messages.append({"role": "user", "content": f"{question} {self.topic}"})
        reply = self.ask(daemon)
        self.num_known = reply["usage"]["total_tokens"] - 1
        self.messages.append(reply["choices"][0]["message"])
        return reply


def together(daemon: DaemonProcess, talks: list[Talk], question: str) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(talks)) as clients:
        return list(clients.map(lambda talk: talk.say(daemon, question), talks))


def test_the_next_turns_after_a_kill_compute_what_is_new(tmp_path: Path) -> None:
    model = write_hybrid(tmp_path / "hybrid")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    talks = [Talk(topic, {str(tokenizer.token_to_id(letter)): 100.0 for letter in LETTERS}) for topic in TOPICS]
    flags: dict[str, Any] = {"block_size": 64, "kv_cache_min_tokens": 64, "disk_prefix_cache": "auto:30"}
    with running_daemon(model, tmp_path / "kv", **flags) as daemon:
        for question in ("Name three of", "And where do they begin:"):
            together(daemon, talks, question)
        daemon.wait_saved()
        daemon.stop(signal.SIGKILL)
    known = [talk.num_known for talk in talks]
    with running_daemon(model, tmp_path / "kv", **flags) as daemon:
        replies = together(daemon, talks, "And where do they end:")
        for talk, reply, num_known in zip(talks, replies, known, strict=True):
            assert reply["prefix_cache"]["restored"] >= num_known - LEAST_TOKENS
            assert reply["prefix_cache"]["source"] == "disk"
            talk.messages.pop()
            cold = talk.ask(daemon, scope="off")
            assert cold["prefix_cache"]["restored"] == 0
            assert cold["usage"]["prompt_tokens"] == reply["usage"]["prompt_tokens"]
            assert cold["choices"] == reply["choices"]
