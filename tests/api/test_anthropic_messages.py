"""Bodies of Anthropic's API in neutral words, and the errors of those that are refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from diskprefix.api import asked
from diskprefix.api.anthropic import CountTokensRequest, MessagesRequest
from diskprefix.chat.messages import CacheMark, Conversation, ImagePart, Message, TextPart, ToolCall, joined
from diskprefix.server.body import parse_json

USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("read", "write")]
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
MARK = {"cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}}


def body(**fields: Any) -> MessagesRequest:
    return parse_json(json.dumps({"max_tokens": 8, "messages": [USER]} | fields).encode(), MessagesRequest)


def conversation(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return body(messages=list(messages), **fields).conversation


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def result(content: Any = "print(1)", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


def said(message: Message) -> list[str]:
    return [part.text for part in message.content if isinstance(part, TextPart)]


def spoken(found: Conversation) -> list[tuple[str, list[str]]]:
    return [(message.role, said(message)) for message in found.messages]


@pytest.mark.parametrize("system", ["Be brief.", [text("Be"), text("brief.")]])
def test_the_system_prompt_is_the_first_message(system: Any) -> None:
    found = conversation(USER, system=system)
    assert [message.role for message in found.messages] == ["system", "user"]
    assert " ".join(said(found.messages[0])) == "Be brief."


@pytest.mark.parametrize("system", [None, "", []])
def test_without_a_system_prompt_the_user_speaks_first(system: Any) -> None:
    assert spoken(conversation(USER, system=system)) == [("user", ["hello"])]


def test_a_system_message_stays_where_it_is() -> None:
    found = conversation(USER, {"role": "system", "content": "Now in French."}, USER, system="Be brief.")
    assert spoken(found) == [
        ("system", ["Be brief."]),
        ("user", ["hello"]),
        ("system", ["Now in French."]),
        ("user", ["hello"]),
    ]


def test_messages_of_one_role_that_follow_each_other_are_one() -> None:
    found = conversation(USER, user(text("there")), assistant(text("hi")), assistant(CALL), user(result()), USER)
    assert spoken(found) == [
        ("user", ["hello", "there"]),
        ("assistant", ["hi"]),
        ("tool", ["print(1)"]),
        ("user", ["hello"]),
    ]
    assert found.messages[1].tool_calls == (ToolCall("toolu_1", "read", {"path": "a.py"}),)


def test_each_tool_result_is_a_message_of_its_own_in_its_place() -> None:
    blocks = [text("before"), result(), result([text("one"), text("two")]), text("after")]
    found = conversation(USER, assistant(CALL), user(*blocks))
    assert spoken(found)[2:] == [
        ("user", ["before"]),
        ("tool", ["print(1)"]),
        ("tool", ["one", "two"]),
        ("user", ["after"]),
    ]
    assert {message.tool_call_id for message in found.messages if message.role == "tool"} == {"toolu_1"}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (result(is_error=True), ["Error:", "print(1)"]),
        (result(None, is_error=True), ["Error:"]),
        (result(None), []),
        (result(""), [""]),
        (result([{"type": "tool_reference", "tool_name": "grep"}]), ["grep"]),
    ],
)
def test_what_the_model_reads_of_a_result(sent: dict[str, Any], read: list[str]) -> None:
    assert said(conversation(USER, assistant(CALL), user(sent)).messages[2]) == read


def test_thoughts_are_reasoning_and_redacted_ones_are_left_out() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "msg_1"}
    redacted = {"type": "redacted_thinking", "data": "EqQB"}
    [_, found, _] = conversation(USER, assistant(redacted, thought, text("so")), USER).messages
    assert (found.reasoning, said(found)) == ("hm", ["so"])


@pytest.mark.parametrize(
    ("source", "uri", "path"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "aGk="}, "data:image/png;base64,aGk=", "data"),
        ({"type": "url", "url": "https://example.com/a.png"}, "https://example.com/a.png", "url"),
    ],
)
def test_images_keep_the_path_of_what_may_be_wrong_with_them(source: Any, uri: str, path: str) -> None:
    image = {"type": "image", "source": source}
    for found, place in (
        (conversation(user(text("see"), image)), "messages.0.content.1"),
        (conversation(user(result([image]))), "messages.0.content.0.content.0"),
    ):
        assert found.messages[0].content[-1] == ImagePart(uri, place, f"{place}.source.{path}")


def test_documents_of_text_and_search_results_are_text() -> None:
    document = {
        "type": "document",
        "title": "a.txt",
        "source": {"type": "text", "media_type": "text/plain", "data": "A"},
    }
    nested = {"type": "document", "source": {"type": "content", "content": [text("B")]}}
    found = {"type": "search_result", "title": "C", "source": "https://c", "content": [text("D")]}
    assert said(conversation(user(document, nested, found)).messages[0]) == ["a.txt", "A", "B", "C", "https://c", "D"]


@pytest.mark.parametrize("ttl", [None, "5m", "1h"])
def test_marks_are_those_of_the_blocks(ttl: str | None) -> None:
    mark = {"cache_control": {"type": "ephemeral"} | ({} if ttl is None else {"ttl": ttl})}
    neutral = CacheMark({None: None, "5m": 300.0, "1h": 3600.0}[ttl])
    found = conversation(
        user(text("a", **mark), text("b")),
        assistant(CALL | mark),
        user(result() | mark),
        system=[text("s", **mark)],
        tools=[TOOLS[0], SEARCH, TOOLS[1] | mark],
    )
    system, first, call, answer = found.messages
    assert [part.mark for part in (*system.content, *first.content) if isinstance(part, TextPart)] == [
        neutral,
        neutral,
        None,
    ]
    assert (system.mark, first.mark, call.mark, answer.mark) == (None, None, neutral, neutral)
    assert found.tool_marks == ((1, neutral),), "counted without the tool that is left out"


def test_a_mark_on_the_body_is_one_on_its_last_message() -> None:
    assert [message.mark for message in conversation(USER, assistant(CALL), user(result()), **MARK).messages] == [
        None,
        None,
        CacheMark(),
    ]


def test_a_mark_may_say_more_than_is_known() -> None:
    """Claude Code sends a `scope`."""
    mark = {"type": "ephemeral", "scope": "global"}
    [message] = conversation(user(text("a", cache_control=mark))).messages
    assert message.content == (TextPart("a", "messages.0.content.0.text", CacheMark()),)


def test_tools_have_the_form_that_templates_expect() -> None:
    described = TOOLS[0] | {"description": "Reads.", "type": "custom", "strict": True, "eager_input_streaming": True}
    found = conversation(USER, tools=[described, TOOLS[1]])
    assert found.tools == [
        {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "write", "parameters": SCHEMA}},
    ]
    assert list(found.tools[0]["function"]["parameters"]["properties"]) == ["b", "a"], "in the client's order"


def test_tools_that_anthropic_runs_are_left_out_beside_others(caplog: pytest.LogCaptureFixture) -> None:
    asked._told.clear()
    with caplog.at_level(logging.INFO, "diskprefix"):
        for _ in range(2):
            found = conversation(USER, tools=[SEARCH, *TOOLS])
    assert [tool["function"]["name"] for tool in found.tools or ()] == ["read", "write"]
    assert found.tool_paths == ["tools.1.input_schema", "tools.2.input_schema"]
    assert [record.getMessage() for record in caplog.records] == [
        "[server] tools of these types are left out, Anthropic's servers run them: web_search_20250305"
    ]


@pytest.mark.parametrize(
    ("sent", "thinking"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, None),
        ({"type": "between_tools"}, None),
    ],
)
def test_thinking_is_switched_where_the_client_says_so(sent: Any, thinking: bool | None) -> None:
    assert body(thinking=sent).conversation.thinking is thinking


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        (USER, "reply"),
        ({"role": "assistant", "content": "The best answer is ("}, "continue"),
        (assistant(text("The best answer is (")), "continue"),
        ({"role": "assistant", "content": ""}, "reply"),
        (assistant(text("I look."), CALL), "reply"),
        (assistant({"type": "thinking", "thinking": "hm", "signature": ""}), "reply"),
    ],
)
def test_the_reply_goes_on_with_the_text_of_a_last_assistant_message(last: Any, ending: str) -> None:
    assert conversation(USER, last).ending == ending


def test_what_a_local_model_needs_not_know_is_accepted() -> None:
    fields = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "betas": ["x"],
        "speed": "standard",
        "diagnostics": {},
        "mcp_servers": None,
        "something_new": 1,
    }
    assert body(**fields).conversation == body().conversation


def test_the_effort_is_that_of_the_output() -> None:
    found = body(output_config={"effort": "high", "task_budget": None})
    assert found.conversation.reasoning_effort == "high"


def test_tokens_are_counted_without_max_tokens() -> None:
    sent = json.dumps({"messages": [USER]}).encode()
    assert parse_json(sent, CountTokensRequest).conversation == body().conversation


def test_a_long_run_of_messages_is_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined one after the other, each copies all those before it: nine seconds for 30 MiB."""
    joins = []
    monkeypatch.setattr(
        "diskprefix.api.anthropic_content.joined",
        lambda run: joins.append(len(run)) or joined(run),  # type: ignore[func-returns-value]
    )
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]}
    found = conversation({"role": "user", "content": "hi"}, *[thought] * 50, {"role": "user", "content": "go on"})
    assert joins == [1, 50, 1]
    assert found.messages[1].reasoning == "\n".join(["hm"] * 50)
