"""Marks on the real chat templates of twelve model families."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.families.conversations import SYSTEM, Message, call, prompt_of, result, text_of, user
from tests.chat.families.families import FAMILIES, Family

CHAT = [
    SYSTEM | {"content": "Answer in ALPHA words."},
    user("Ask BRAVO now."),
    {"role": "assistant", "content": "Say CHARLIE.", "reasoning_content": "Hm."},
    user("Ask DELTA now."),
    {"role": "assistant", "content": "Say ECHO.", "reasoning_content": "Hm again."},
    user("Ask FOXTROT now."),
]
LOOP = [
    *CHAT[:4],
    call("ECHO", "abcdefgh1") | {"reasoning_content": "I look."},
    result("FOXTROT", "abcdefgh1"),
    call("GOLF", "abcdefgh2") | {"reasoning_content": "Once more."},
    result("HOTEL", "abcdefgh2"),
]
WORDS = ("ALPHA", "BRAVO", "CHARLIE", "DELTA", "ECHO", "FOXTROT", "GOLF", "HOTEL")

MOVES_THE_SYSTEM_MESSAGE = ("mistral-nemo",)
"""It writes system message and tools before the last message of the user."""


def before_the_mark(family: Family, messages: list[Message], index: int, **options: Any) -> str | None:
    marked = [m | {"cache_control": {"type": "ephemeral"}} if i == index else m for i, m in enumerate(messages)]
    prompt, plain = (prompt_of(family, listed, **options) for listed in (marked, messages))
    assert prompt.token_ids.tolist() == plain.token_ids.tolist()
    return text_of(family, prompt, prompt.marks[0].position) if prompt.marks else None


CASES = [
    pytest.param(family, with_tools, index, id=f"{family.name} {'loop' if with_tools else 'chat'} {index}")
    for family in FAMILIES
    for with_tools in (False, True)[: 1 + family.takes_tools]
    for index in range(0 if family.takes_system else 1, len(LOOP if with_tools else CHAT))
]


@pytest.mark.parametrize(("family", "with_tools", "index"), CASES)
def test_a_mark_ends_behind_its_message_and_before_the_next(family: Family, with_tools: bool, index: int) -> None:
    messages = LOOP if with_tools else CHAT
    text = before_the_mark(family, messages, index, tools=with_tools)
    if family.name in MOVES_THE_SYSTEM_MESSAGE:
        # Of what moves, the prompt up to the mark has nothing, and later turns have the rest of it elsewhere.
        assert text is None or not any(word in text for word in WORDS[index + 1 :])
        return
    assert text is not None
    assert WORDS[index] in text
    assert not any(word in text for word in WORDS[index + 1 :])
