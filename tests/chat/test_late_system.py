"""System messages behind others: as the template has them, or as the user's where it refuses or drops them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diskprefix.chat.late_system import has_late_system, late_system_as_user
from diskprefix.chat.messages import CacheMark, Conversation, Message, Role, TextPart
from tests.chat.rendering import rendered, renderer_of, tokenizer_with

_WRITE = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
WRITES = f"{{% for message in messages %}}{_WRITE}{{% endfor %}}"
DROPS = (
    "{% for message in messages %}{% if loop.first or message.role != 'system' %}"
    f"{_WRITE}{{% endif %}}{{% endfor %}}"
)
REFUSES = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    f"{{{{ raise_exception('System message must be at the beginning.') }}}}{{% endif %}}{_WRITE}{{% endfor %}}"
)


def conversation(*said: tuple[Role, str]) -> Conversation:
    return Conversation(
        messages=[
            Message(role=role, content=(TextPart(text, f"messages.{k}.content"),), path=f"messages.{k}")
            for k, (role, text) in enumerate(said)
        ]
    )


def spoken(found: Conversation) -> list[tuple[str, list[str]]]:
    return [(m.role, [part.text for part in m.content if isinstance(part, TextPart)]) for m in found.messages]


LATE = conversation(("system", "S"), ("user", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("system", "e"))


@pytest.mark.parametrize(
    ("roles", "is_late"),
    [
        ([], False),
        (["user"], False),
        (["system", "developer", "user", "assistant"], False),
        (["user", "system"], True),
        (["system", "user", "developer", "user"], True),
    ],
)
def test_a_system_message_is_late_behind_one_of_another_role(roles: list[Role], is_late: bool) -> None:
    assert has_late_system(conversation(*((role, "x") for role in roles)).messages) is is_late


def test_late_system_messages_are_the_users_in_their_place_and_joined_with_those_beside_them() -> None:
    assert spoken(late_system_as_user(LATE)) == [
        ("system", ["S"]),
        ("user", ["a", "b", "c"]),
        ("assistant", ["d"]),
        ("user", ["e"]),
    ]


def test_messages_of_the_user_that_no_system_message_stands_between_stay_apart() -> None:
    found = late_system_as_user(conversation(("user", "a"), ("user", "b"), ("assistant", "c"), ("system", "d")))
    assert spoken(found) == [("user", ["a"]), ("user", ["b"]), ("assistant", ["c"]), ("user", ["d"])]


@pytest.mark.parametrize("marked", [0, 1])
def test_a_mark_stays_on_the_message_that_its_message_is_part_of(marked: int) -> None:
    messages = list(conversation(("user", "a"), ("system", "b")).messages)
    messages[marked] = replace(messages[marked], mark=CacheMark(300.0))
    [found] = late_system_as_user(Conversation(messages=messages)).messages
    assert found.mark == CacheMark(300.0)


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (WRITES, ["system", "user", "system", "user", "assistant", "system"]),
        (DROPS, ["system", "user", "assistant", "user"]),
        (REFUSES, ["system", "user", "assistant", "user"]),
    ],
    ids=["writes", "drops", "refuses"],
)
def test_a_prompt_has_every_system_message(tmp_path: Path, template: str, roles: list[str]) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    renderer = renderer_of(tokenizer)
    text = renderer.text_of(LATE)
    assert [line.removeprefix("<|im_start|>") for line in text.splitlines() if line.startswith("<|im_start|>")] == roles
    assert tokenizer.decode(rendered(renderer, LATE).token_ids.tolist()) == text
    assert [word for word in "Sabcde" if f"\n{word}" in text] == list("Sabcde")
