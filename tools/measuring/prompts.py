"""Prompts of words of one token each, and a text of this project."""

from __future__ import annotations

import random
from pathlib import Path

ROOT = Path(__file__).parents[2]
AGENT_PROMPT = ROOT / "tools" / "prompts" / "agent_system.txt"
"""The system message of an agent, written for this project."""
WORDS = (ROOT / "tools" / "prompts" / "words.txt").read_text(encoding="utf-8").split()
"""Each word, with the blank before it, is one token of the embedded model."""
NEW_TOKENS = 23
"""The number of words that `extended` adds."""


def prompt_text(num_tokens: int, run: int | str) -> str:
    """Returns English words of one token each, in an order that depends on the arguments alone."""
    choose = random.Random(f"{num_tokens}-{run}")
    return "".join(f" {word}" for word in choose.choices(WORDS, k=num_tokens))


def extended(prompt: str) -> str:
    return prompt + "".join(f" {word}" for word in WORDS[:NEW_TOKENS])
