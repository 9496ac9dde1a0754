"""What becomes of messages before a template writes them: late system messages, forms of calls, gaps to fill in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from diskprefix.daemon.chat.fill_in import FillIn, fill_in_tags
from diskprefix.daemon.chat.messages import (
    CacheMark,
    Conversation,
    Message,
    Role,
    TextPart,
    has_late_system,
    late_system_as_user,
)
from diskprefix.daemon.chat.template_input import MessageForm
from diskprefix.errors import InvalidRequest
from tests.daemon.chat.rendering import rendered, renderer_of, tokenizer_with

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


def spoken(parsed: Conversation) -> list[tuple[str, list[str]]]:
    return [(m.role, [part.text for part in m.content if isinstance(part, TextPart)]) for m in parsed.messages]


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


def test_late_system_messages_join_the_users_neighbouring_ones() -> None:
    in_place = [("system", ["S"]), ("user", ["a", "b", "c"]), ("assistant", ["d"]), ("user", ["e"])]
    assert spoken(late_system_as_user(LATE)) == in_place
    # Messages of the user that no system message stands between stay apart.
    apart = late_system_as_user(conversation(("user", "a"), ("user", "b"), ("assistant", "c"), ("system", "d")))
    assert spoken(apart) == [("user", ["a"]), ("user", ["b"]), ("assistant", ["c"]), ("user", ["d"])]


@pytest.mark.parametrize("marked", [0, 1])
def test_a_mark_stays_on_the_message_that_its_message_is_part_of(marked: int) -> None:
    messages = list(conversation(("user", "a"), ("system", "b")).messages)
    messages[marked] = replace(messages[marked], mark=CacheMark(300.0))
    [message] = late_system_as_user(Conversation(messages=messages)).messages
    assert message.mark == CacheMark(300.0)


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


@pytest.mark.parametrize(("template", "most"), [(WRITES, 2), (DROPS, 1), (REFUSES, 1)])
def test_leading_system_messages_are_joined_if_the_template_needs_it(tmp_path: Path, template: str, most: int) -> None:
    text = renderer_of(tokenizer_with(tmp_path, template)).text_of(
        conversation(("developer", "S"), ("developer", "T"), ("user", "a"))
    )
    assert text.count("<|im_start|>system") == most
    assert [word for word in "STa" if f"\n{word}" in text] == list("STa")


# The forms in which chat templates take messages. Which real template needs which is in `output/test_choose_format.py`.


def applied(form: MessageForm, call_id: str = "abcdefgh1", arguments: Any = None, content: str = "") -> Any:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments or {}}}
    spoken = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call_id, "content": "done"}
    before = [{**spoken, "tool_calls": [call]}, dict(result)]
    after = form.applied([spoken, result])
    assert [spoken, result] == before, "what the client sent stays as it is"
    return after


def test_a_short_id_links_one_call_with_its_result() -> None:
    ids = set()
    for sent in ("toolu_01-A", "toolu_01-B", "call_1"):
        spoken, result = applied(MessageForm(call_ids="short"), call_id=sent)
        assert spoken["tool_calls"][0]["id"] == result["tool_call_id"]
        ids.add(result["tool_call_id"])
    assert len(ids) == 3
    assert all(len(short) == 9 and short.isalnum() for short in ids)
    assert applied(MessageForm(call_ids="short"))[1]["tool_call_id"] == "abcdefgh1"


def test_an_id_with_the_name_of_its_call_counts_over_the_conversation() -> None:
    """Clients may use an id again in each turn, or send calls without one."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
    two = [{**call, "function": {"name": "g", "arguments": {}}}, {"type": "function", "function": call["function"]}]
    asked, asked_two = ({"role": "assistant", "content": "", "tool_calls": calls} for calls in ([call], two))
    result, unknown = ({"role": "tool", "tool_call_id": sent, "content": "done"} for sent in ("call_1", "call_2"))
    after = MessageForm(call_ids="named").applied([asked, result, asked_two, result, unknown])
    ids = [[sent["id"] for sent in message.get("tool_calls", ())] for message in after]
    assert ids == [["functions.f:0"], [], ["functions.g:1", "functions.f:2"], [], []]
    assert [message.get("tool_call_id") for message in after] == [
        *(None, "functions.f:0", None, "functions.g:1", "call_2")
    ]


def test_only_a_message_that_says_nothing_has_no_content() -> None:
    assert applied(MessageForm(null_content=True))[0]["content"] is None
    assert applied(MessageForm(null_content=True), content="I look.")[0]["content"] == "I look."


def test_a_result_gets_the_name_of_its_call_unless_it_has_one() -> None:
    assert "name" not in applied(MessageForm())[1]
    spoken, result = applied(MessageForm(named_results=True, call_ids="short"), call_id="call_1")
    assert (result["name"], "name" in spoken) == ("f", False)
    named = {"role": "tool", "tool_call_id": "call_1", "name": "g", "content": "done"}
    unknown = {"role": "tool", "tool_call_id": "call_2", "content": "done"}
    form = MessageForm(named_results=True)
    assert form.applied([applied(form, "call_1")[0], named, unknown]) == [applied(form, "call_1")[0], named, unknown]


TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}{{ message.tool_calls }}<|im_end|>\n"


@pytest.mark.parametrize(("after", "is_moved"), [("assistant", True), ("tool", True), ("nobody", False)])
def test_a_template_may_take_late_system_messages_in_some_places_only(
    tmp_path: Path, after: str, is_moved: bool
) -> None:
    """As Mistral's: "Unexpected role 'system' after role 'assistant'"."""
    refused = f"message.role == 'system' and ns.last == '{after}'"
    refusing = (
        "{% set ns = namespace(last='') %}{% for message in messages %}"
        f"{{% if {refused} %}}{{{{ raise_exception('no system here') }}}}{{% endif %}}"
        f"{{% set ns.last = message.role %}}{TURN}{{% endfor %}}"
    )
    renderer = renderer_of(tokenizer_with(tmp_path, refusing))
    body = conversation(("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"))
    text = renderer.text_of(body)
    assert ("user\nc\nd" in text) == is_moved
    assert ("system\nc" in text) != is_moved


# A gap to fill in, with the tags of the tokenizer.

GAP = FillIn("def f(", "):", "suffix", files=(("a.py", "x = 1"),), beginning="a")


@pytest.mark.parametrize(
    ("added", "text"),
    [
        (
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
            "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>a",
        ),
        (
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"],
            "<|file_sep|>a.py\nx = 1\n<|file_sep|><|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>a",
        ),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>def f(<｜fim▁hole｜>):<｜fim▁end｜>a"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]):[PREFIX]def f(a"),
    ],
)
def test_a_gap_is_written_with_the_tags_of_the_tokenizer(added: list[str], text: str) -> None:
    assert fill_in_tags(added, GAP).text_of(GAP) == text


def test_only_what_the_tokenizer_has_ends_a_reply() -> None:
    added = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
    assert fill_in_tags(added, GAP).ends == ("<|fim_pad|>",)


def test_a_model_that_was_not_trained_for_it_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="names no tokens for filling in") as caught:
        fill_in_tags(["<|fim_prefix|>", "<|fim_suffix|>", "<|im_end|>"], GAP)
    assert caught.value.param == "suffix"
