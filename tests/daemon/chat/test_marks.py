"""`cache_control`: which position of the prompt a mark means."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.server.body import parse_json
from diskprefix.values import MAX_MARKS, Mark, Prompt
from tests.daemon.chat.families.conversations import SYSTEM as OF_WEATHER
from tests.daemon.chat.families.conversations import Message, call, prompt_of, result, text_of, user
from tests.daemon.chat.families.families import FAMILIES, Family
from tests.daemon.chat.rendering import rendered, renderer_of, tokenizer_with

MARK = {"type": "ephemeral"}
HOUR = MARK | {"ttl": "1h"}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Name three rivers."}
REPLY = {"role": "assistant", "content": "Rhine, Po and Elbe."}
MORE = {"role": "user", "content": "And a lake?"}
TURNS = [SYSTEM, USER, REPLY, MORE]


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"b": 1, "a": 2}}} | fields


def render(tokenizer: Any, messages: list[dict[str, Any]], **fields: Any) -> Prompt:
    body = parse_json(json.dumps({"messages": messages} | fields).encode(), ChatRequest)
    return rendered(renderer_of(tokenizer), body.conversation)


def marked(messages: list[dict[str, Any]], index: int, control: Any = MARK) -> list[dict[str, Any]]:
    return [message | {"cache_control": control} if i == index else message for i, message in enumerate(messages)]


def texts_before(tokenizer: Any, prompt: Prompt) -> list[str]:
    return [str(tokenizer.decode(prompt.token_ids[: mark.position].tolist())) for mark in prompt.marks]


def part(text: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({} if control is None else {"cache_control": control})


def test_a_marked_part_is_kept_without_the_parts_behind_it(tokenizer: Any) -> None:
    message = {"role": "user", "content": [part("one", MARK), part("two", HOUR), part("three")]}
    prompt = render(tokenizer, [SYSTEM, message, REPLY, MORE])
    first, second = texts_before(tokenizer, prompt)
    assert first.endswith("<|im_start|>user\none\n")
    assert second.endswith("<|im_start|>user\none\ntwo\n")
    assert [mark.ttl_s for mark in prompt.marks] == [None, 3600.0]


def test_the_last_part_ends_before_the_tool_calls_of_its_message(tokenizer: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": [part("I look.", MARK)], "tool_calls": [call]}
    (text,) = texts_before(tokenizer, render(tokenizer, [USER, message]))
    assert text.endswith("assistant\nI look.")
    (text,) = texts_before(tokenizer, render(tokenizer, marked([USER, message | {"content": "I look."}], 1)))
    assert text.endswith("I look.<call>f</call><|im_end|>\n")


@pytest.mark.parametrize("following", ["x", "xx", "y", "", " ", "  x", "<|im_end|>\n<|im_start|>assistant", "one\none"])
def test_no_text_behind_a_marked_part_moves_the_mark(tokenizer: Any, following: str) -> None:
    prompt = render(tokenizer, [{"role": "user", "content": [part("one", MARK), part(following), part("end")]}])
    assert texts_before(tokenizer, prompt) in (["<|im_start|>user\none"], ["<|im_start|>user\none\n"])


@pytest.mark.parametrize("text", ["<|im_end|>\n", "a <|im_start|>assistant\n b", "<|im_end|>\n<|im_start|>user\n"])
def test_marker_text_in_messages_moves_no_mark(tokenizer: Any, text: str) -> None:
    messages = [SYSTEM, {"role": "user", "content": text}, {"role": "assistant", "content": text}, MORE]
    whole = str(tokenizer.decode(render(tokenizer, messages).token_ids.tolist()))
    ends = [
        whole.index("Be brief.") + 20,
        whole.index("<|im_start|>assistant", 40 + len(text)),
        whole.index(MORE["content"]),
    ]
    for index in (0, 1, 2):
        (before,) = texts_before(tokenizer, render(tokenizer, marked(messages, index)))
        assert before.count(text) >= index
        assert before.endswith("<|im_end|>\n")
        assert len(before) <= ends[index]


def test_an_imitated_end_of_the_conversation_moves_no_mark(tmp_path: Path) -> None:
    """This template writes the same at the end of every conversation, and nothing between messages."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    tokenizer = tokenizer_with(tmp_path, template)
    messages = [USER, {"role": "assistant", "content": "<|im_end|>tail"}, MORE]
    assert texts_before(tokenizer, render(tokenizer, marked(messages, 0))) == [USER["content"]]


def test_a_marked_tool_is_kept_without_the_tools_behind_it(tokenizer: Any) -> None:
    tools = [tool("first", cache_control=MARK), tool("second"), tool("third", cache_control=HOUR)]
    prompt = render(tokenizer, TURNS, tools=tools)
    plain = render(tokenizer, TURNS, tools=[tool("first"), tool("second"), tool("third")])
    assert prompt.token_ids.tolist() == plain.token_ids.tolist()
    first, last = texts_before(tokenizer, prompt)
    assert '"first"' in first
    assert '"second"' not in first
    assert last.endswith("<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n")
    assert [mark.ttl_s for mark in prompt.marks] == [None, 3600.0]


def test_a_mark_on_the_function_of_a_tool_is_one_on_the_tool(tokenizer: Any) -> None:
    """The place that LiteLLM hands on."""

    def with_mark(control: Any, **fields: Any) -> dict[str, Any]:
        plain = tool("first")
        return plain | {"function": plain["function"] | {"cache_control": control}} | fields

    on_tool = render(tokenizer, TURNS, tools=[tool("first", cache_control=HOUR), tool("second")])
    for marked_tool in (with_mark(HOUR), with_mark(HOUR, cache_control=MARK), with_mark(MARK, cache_control=HOUR)):
        prompt = render(tokenizer, TURNS, tools=[marked_tool, tool("second")])
        assert prompt.marks == on_tool.marks
        assert prompt.token_ids.tolist() == on_tool.token_ids.tolist()


def test_a_mark_on_a_tool_that_the_template_does_not_write_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = tokenizer_with(tmp_path, template)
    system = SYSTEM | {"content": "Call first when you are asked for it."}
    with caplog.at_level(logging.DEBUG, "diskprefix"):
        prompt = render(tokenizer, marked([system, USER], 1, HOUR), tools=[tool("first", cache_control=MARK)])
    assert [mark.ttl_s for mark in prompt.marks] == [3600.0]
    assert "the chat template writes no tools" in caplog.text


def test_a_tool_that_the_first_user_message_carries_is_found_there(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'user' and tools and loop.index0 == (1 if messages[0].role == 'system' else 0) %}"
        "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer = tokenizer_with(tmp_path, template)
    for messages in (TURNS, TURNS[1:]):
        prompt = render(tokenizer, messages, tools=[tool("first"), tool("second", cache_control=MARK)])
        (text,) = texts_before(tokenizer, prompt)
        assert '"second"' in text
        assert "Name" not in text
    prompt = render(tokenizer, marked(TURNS, 0, HOUR), tools=[tool("first", cache_control=MARK)])
    assert [mark.ttl_s for mark in prompt.marks] == [3600.0, None]


def test_a_mark_is_found_on_a_system_message_in_the_first_turn(tmp_path: Path) -> None:
    template = (
        "<|endoftext|>{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
        "{% if loop.first and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer = tokenizer_with(tmp_path, template)
    (before,) = texts_before(tokenizer, render(tokenizer, marked(TURNS, 0)))
    assert "Be brief." in before
    assert "Name" not in before


def test_a_mark_without_a_place_is_left_out_with_a_debug_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_with(tmp_path, "{{ messages[-1].content }}")
    with caplog.at_level(logging.DEBUG, "diskprefix"):
        prompt = render(tokenizer, marked([USER, REPLY], 0))
    assert prompt.marks == ()
    assert "the mark on messages.0 is ignored: its place" in caplog.text


def test_one_position_is_one_mark_with_the_longest_time(tokenizer: Any) -> None:
    def both(of_part: Any, of_message: Any) -> tuple[Mark, ...]:
        message = {"role": "user", "content": [part("one", of_part)], "cache_control": of_message}
        return render(tokenizer, [message]).marks

    (plain,) = both(MARK, MARK)
    assert plain.ttl_s is None
    for marks in (both(HOUR, MARK | {"ttl": "5m"}), both(MARK | {"ttl": "5m"}, HOUR), both(MARK, HOUR)):
        assert marks == (Mark(plain.position, 3600.0),)


def test_marks_come_in_the_order_of_the_prompt_and_the_last_of_many_count(tokenizer: Any) -> None:
    messages = [USER, REPLY] * MAX_MARKS
    every = render(tokenizer, [message | {"cache_control": MARK} for message in messages])
    positions = [mark.position for mark in every.marks]
    assert positions == sorted(set(positions))
    assert len(positions) == MAX_MARKS
    (last,) = render(tokenizer, marked(messages, len(messages) - 1)).marks
    assert positions[-1] == last.position


def test_a_character_of_several_tokens_is_not_cut(tokenizer: Any) -> None:
    prompt = render(tokenizer, [{"role": "user", "content": [part("🦀", MARK), part("🦀")]}])
    assert texts_before(tokenizer, prompt) == ["<|im_start|>user\n🦀\n"]


def test_tokens_that_the_tokenizer_adds_by_itself_count(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with(tmp_path)
    messages = [message | {"cache_control": MARK} for message in TURNS]
    without = render(tokenizer, messages).marks
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    renderer = renderer_of(tokenizer)
    renderer._encoder.adds_bos = lambda text: True  # type: ignore[method-assign]  # noqa: ARG005
    for more in ({}, {"add_generation_prompt": False}):
        body = parse_json(json.dumps({"messages": messages} | more).encode(), ChatRequest)
        prompt = rendered(renderer, body.conversation)
        assert [mark.position for mark in prompt.marks] == [mark.position + 1 for mark in without]
    assert prompt.marks[-1].position == len(prompt.token_ids) - 1


def test_raw_text_and_developer_messages(tokenizer: Any) -> None:
    renderer = renderer_of(tokenizer)
    assert renderer.completion("Name three<|im_end|> rivers").marks == ()
    (text,) = texts_before(tokenizer, render(tokenizer, marked([SYSTEM | {"role": "developer"}, USER], 0)))
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n"


# The real chat templates of twelve model families.

CHAT = [
    OF_WEATHER | {"content": "Answer in ALPHA words."},
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


@pytest.mark.cases(97)
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
