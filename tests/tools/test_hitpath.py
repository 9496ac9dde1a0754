"""The hit path benchmark: its prompts, and how it names growth."""

from __future__ import annotations

import json

import pytest

from tools.programs.hitpath import MESSAGE_CHARS, conversation, growth


def test_growth_is_the_power_of_the_length() -> None:
    assert growth((1_000, 3.0), (4_000, 12.0)) == pytest.approx(1.0)
    assert growth((1_000, 3.0), (4_000, 48.0)) == pytest.approx(2.0)
    assert growth((1_000, 0.0), (4_000, 0.0)) == 0.0


@pytest.mark.parametrize("num_chars", [1, MESSAGE_CHARS, 5 * MESSAGE_CHARS + 7, 10_000_000])
def test_a_conversation_has_as_many_characters_and_ends_with_the_user(num_chars: int) -> None:
    messages = json.loads(conversation(num_chars))["messages"]
    assert sum(len(message["content"]) for message in messages if message["content"] != "And?") == num_chars
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
