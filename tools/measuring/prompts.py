"""Prompts of exact lengths: words of one token each, and texts of this project."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.measuring.live_server import LiveServerError

ROOT = Path(__file__).parents[2]
AGENT_PROMPT = ROOT / "tools" / "prompts" / "agent_system.md"
"""The system message of an agent, written for this project."""
WORDS = (ROOT / "tools" / "prompts" / "words.txt").read_text(encoding="utf-8").split()
"""Each word, with the blank before it, is one token of the embedded model."""
NEW_TOKENS = 23
"""The number of words that `extended` adds, and of tokens that `Prompts.longer` has more."""
MOST_CHARS_A_TOKEN = 8
"""More than the average token of any tokenizer, so that only a part of the text must be tokenized."""


def prompt_text(num_tokens: int, run: int | str) -> str:
    """Returns English words of one token each, in an order that depends on the arguments alone."""
    choose = random.Random(f"{num_tokens}-{run}")
    return "".join(f" {word}" for word in choose.choices(WORDS, k=num_tokens))


def extended(prompt: str) -> str:
    return prompt + "".join(f" {word}" for word in WORDS[:NEW_TOKENS])


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts of exact lengths, cut from this project's own texts."""

    tokenizer: Any

    def prompt(self, num_tokens: int, run: int) -> list[int]:
        """Returns a prompt whose first words depend on the arguments, so that no two prompts share a block."""
        return self._ids(num_tokens, run)[:num_tokens]

    def longer(self, num_tokens: int, run: int) -> list[int]:
        """Returns the same prompt, continued by `NEW_TOKENS` tokens."""
        return self._ids(num_tokens, run)[: num_tokens + NEW_TOKENS]

    def _ids(self, num_tokens: int, run: int) -> list[int]:
        heading = f"Reading number {run + 1}, of {num_tokens} tokens.\n\n"
        text = heading + _corpus()[: MOST_CHARS_A_TOKEN * num_tokens]
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        if len(ids) < num_tokens + NEW_TOKENS:
            raise LiveServerError(f"the project's texts are {len(ids)} tokens long, too short for {num_tokens}")
        return ids


def _corpus() -> str:
    prose = [ROOT / "README.md", AGENT_PROMPT, ROOT / "CHANGELOG.md"]
    files = [*prose, *sorted((ROOT / "diskprefix").rglob("*.py"))]
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)
