"""Tools that come in the middle of a conversation are written where they came, and the prompt before stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from diskprefix.daemon.chat.replay import Replayed
from diskprefix.daemon.server import prepare
from diskprefix.values import Prompt
from tests.daemon.server.agent_model import call, saying
from tests.daemon.server.scripted import AppServer, ScriptedEngine, events_of, real_app, scripted_app
from tests.daemon.server.test_bad_requests import ROUTES, USER

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
SAID = "<|im_start|>assistant\n"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "Where to look."}}}


@pytest.fixture(scope="module")
def client(agent_model: Path, engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with scripted_app(agent_model, engine) as server, server.client() as client:
        yield client


def prompt_of(client: httpx.Client, engine: ScriptedEngine, path: str, **fields: Any) -> list[int]:
    engine.requests.clear()
    answer = client.post(path, json=ROUTES[path] | fields)
    assert answer.status_code == 200, answer.text
    ids: list[int] = engine.requests[0].prompt.token_ids.tolist()
    return ids


def tool(path: str, name: str, **fields: Any) -> dict[str, Any]:
    if path == MESSAGES:
        return {"name": name, "description": f"Does {name}.", "input_schema": SCHEMA} | fields
    return {"type": "function", "name": name, "description": f"Does {name}.", "parameters": SCHEMA} | fields


SEARCH: dict[str, Any] = {
    MESSAGES: {"name": "ToolSearch", "input_schema": SCHEMA},
    RESPONSES: {"type": "tool_search", "execution": "client", "description": "Searches.", "parameters": SCHEMA},
}
BY_SERVER = {MESSAGES: {"type": "tool_search_tool_bm25_20251119", "name": "s"}, RESPONSES: {"type": "tool_search"}}
FIELD = {MESSAGES: "messages", RESPONSES: "input"}


def offered(path: str) -> list[dict[str, Any]]:
    deferred = [tool(path, f"tool_{number}", defer_loading=True) for number in range(30)]
    return [tool(path, "read"), *deferred, SEARCH[path]]


def found(path: str, name: str) -> list[dict[str, Any]]:
    """A search, and what it has found."""
    if path == RESPONSES:
        search = {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"path": "x"}}
        definition = tool(path, name, defer_loading=True)
        return [search, {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": [definition]}]
    use = {"type": "tool_use", "id": "1", "name": "ToolSearch", "input": {"path": "x"}}
    references = [{"type": "tool_reference", "tool_name": name}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": references}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("path", FIELD)
def test_deferred_tools_cost_nothing_until_a_search_finds_them(
    client: httpx.Client, engine: ScriptedEngine, path: str
) -> None:
    tools = offered(path)
    few = [one for one in tools if not one.get("defer_loading")]
    asked = {FIELD[path]: [USER], "tools": tools}
    before = prompt_of(client, engine, path, **asked)
    assert before == prompt_of(client, engine, path, **asked | {"tools": few})
    history = [USER, *found(path, "tool_7")]
    after = prompt_of(client, engine, path, **asked | {FIELD[path]: history})
    text = engine.last_prompt
    assert '"name": "tool_7"' in text
    assert '"name": "tool_8"' not in text
    # All but the end of the beginning of a reply, in whose place the search stands.
    assert after[: len(before) - 1] == before[:-1]
    longer = [*history, *found(path, "tool_9"), *found(path, "tool_7")]
    again = prompt_of(client, engine, path, **asked | {FIELD[path]: longer})
    assert again[: len(after) - 1] == after[:-1]
    assert engine.last_prompt.count('"name": "tool_7"') == 1, "a tool is written once"


@pytest.mark.parametrize("path", FIELD)
def test_deferred_tools_are_offered_at_once_if_no_search_runs_here(
    client: httpx.Client, engine: ScriptedEngine, path: str
) -> None:
    tools = [tool(path, "read"), tool(path, "tool_7", defer_loading=True), BY_SERVER[path]]
    prompt_of(client, engine, path, tools=tools)
    assert '"name": "tool_7"' in engine.last_prompt


@pytest.mark.parametrize("path", FIELD)
def test_deferred_tools_are_offered_if_no_other_could_find_them(
    client: httpx.Client, engine: ScriptedEngine, path: str
) -> None:
    prompt_of(client, engine, path, tools=[tool(path, f"tool_{number}", defer_loading=True) for number in (7, 8)])
    assert all(f'"name": "tool_{number}"' in engine.last_prompt for number in (7, 8))


def said_in(path: str, reply: dict[str, Any]) -> list[Any]:
    """What a client adds to its history."""
    match path:
        case "/v1/chat/completions":
            return [reply["choices"][0]["message"]]
        case "/v1/messages":
            return [{"role": "assistant", "content": reply["content"]}]
        case "/v1/responses":
            return list(reply["output"])
    return [reply["message"]]


SHORT: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": 8},
    MESSAGES: {},
    RESPONSES: {"max_output_tokens": 8},
    OLLAMA: {"options": {"num_predict": 8}},
}


class Chat:
    """A client that sends its whole conversation with each question, and the tools that it has then."""

    def __init__(self, server: AppServer, path: str, **fields: Any) -> None:
        self._server, self._path, self._fields = server, path, fields
        self.history: list[Any] = []
        self.prompt: Prompt

    def ask(self, *names: str, text: Any = "hello", **fields: Any) -> str:
        """Asks a text, or content in the form of the API. Returns the text of the prompt."""
        self.history.append({"role": "user", "content": text})
        listed = FIELD.get(self._path, "messages")
        body = {listed: self.history, "tools": [in_form(self._path, name) for name in names]}
        with rendered() as prompts, self._server.client() as client:
            sent = ROUTES[self._path] | SHORT[self._path] | body | self._fields | fields
            answer = client.post(self._path, json=sent)
            assert answer.status_code == 200, answer.text
        self.history += said_in(self._path, answer.json())
        self.id = answer.json().get("id")
        self.prompt = prompts[-1]
        return text_of(self._server, self.prompt)


@contextmanager
def rendered() -> Iterator[list[Prompt]]:
    """Collects the prompts of requests meanwhile."""
    prompts, render = list[Prompt](), prepare.render

    def noted(*args: Any) -> Replayed:
        replayed = render(*args)
        prompts.append(replayed.prompt)
        return replayed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "render", noted)
        yield prompts


def text_of(server: AppServer, prompt: Prompt) -> str:
    return str(server.engine.tokenizer.decode(prompt.token_ids.tolist()))


def in_form(path: str, name: str) -> dict[str, Any]:
    if path in FIELD:
        return tool(path, name)
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": SCHEMA}}


@pytest.mark.parametrize("path", SHORT)
def test_tools_that_a_client_adds_later_are_written_where_they_came(agent_daemon: AppServer, path: str) -> None:
    chat = Chat(agent_daemon, path)
    first = chat.ask("read", "write")
    second = chat.ask("read", "write")
    assert second.startswith(first)
    third = chat.ask("bash", "read", "grep", "write", text="And now?")
    assert third.startswith(second)
    question = third.removeprefix(second)
    assert [question.count(f'"name": "{name}"') for name in ("bash", "grep", "read", "write")] == [1, 1, 0, 0]
    assert question.index('"name": "grep"') < question.index("And now?")
    fourth = chat.ask("grep", "bash", "read", "write", "list")
    assert fourth.startswith(third)
    assert '"name": "list"' in fourth.removeprefix(third)
    fewer = chat.ask("read", "write", "list")
    assert '"name": "grep"' not in fewer
    assert fewer.startswith(second), "what was before the tools that are gone stays"
    with_all = chat.ask("read", "write", "list", "bash", "grep")
    assert with_all.startswith(fourth)


def test_the_tools_of_a_chat_are_known_to_its_tenant_if_it_replays(agent_daemon: AppServer) -> None:
    chat = Chat(agent_daemon, CHAT)
    chat.ask("read", text="What is known?")
    chat.ask("read")
    for others in ({"cache_salt": "other"}, {"prefix_cache": {"replay": False}}, {"prefix_cache": {"scope": "off"}}):
        other = Chat(agent_daemon, CHAT, **others)
        other.history = [*chat.history]
        prompt = other.ask("bash", "read")
        assert prompt.index('"name": "bash"') < prompt.index("What is known?")
    prompt = chat.ask("bash", "read")
    assert prompt.index('"name": "read"') < prompt.index("What is known?") < prompt.index('"name": "bash"')


@pytest.mark.parametrize(("path", "counting"), [(MESSAGES, "count_tokens"), (RESPONSES, "input_tokens")])
def test_late_tools_are_counted_as_they_are_written(agent_daemon: AppServer, path: str, counting: str) -> None:
    chat = Chat(agent_daemon, path)
    chat.ask("read")
    history = [*chat.history, USER]
    prompt = chat.ask("bash", "read", text=USER["content"])
    assert prompt.index('"name": "bash"') > prompt.index("hello")
    with agent_daemon.client() as client:
        counted = {FIELD[path]: history, "tools": [in_form(path, name) for name in ("bash", "read")]}
        assert client.post(f"{path}/{counting}", json=counted).json()["input_tokens"] == len(chat.prompt.token_ids)


def test_tools_are_at_the_beginning_of_a_chat_that_has_none_of_our_replies(agent_daemon: AppServer) -> None:
    chat = Chat(agent_daemon, CHAT)
    chat.history = [USER, {"role": "assistant", "content": "From another server."}]
    first = chat.ask("read")
    assert first.index('"name": "read"') < first.index("hello")
    # The other server's reply says nothing of tools; ours does.
    assert chat.ask("bash", "read").startswith(first)


def test_tools_come_late_while_responses_are_stored(agent_daemon: AppServer) -> None:
    chat, before = Chat(agent_daemon, RESPONSES), ""
    for names in (["read"], ["read"], ["bash", "read"], ["bash", "grep", "read"], ["bash", "grep", "read"]):
        continued = {"previous_response_id": chat.history[-1]["response"]} if chat.history else {}
        chat.history = []
        prompt = chat.ask(*names, **continued)
        assert prompt.startswith(before)
        before, chat.history = prompt, [{"response": chat.id}]


def test_all_tools_are_at_the_beginning_once_one_of_the_first_is_gone(agent_daemon: AppServer) -> None:
    """As of a client that chooses a few of many tools for each question: nothing of the prompt would stay."""
    chat = Chat(agent_daemon, CHAT)
    for names in (["read", "list"], ["read", "grep"], ["bash", "grep"], ["bash", "grep"]):
        prompt = chat.ask(*names, text="Which tools?")
        assert all(prompt.index(f'"name": "{name}"') < prompt.index("Which tools?") for name in names)
    chat.ask("list", "read", "bash", text="And now?")
    assert '"name": "bash"' in chat.ask("list", "read", "bash").partition("Which tools?")[2]


def test_the_first_tools_of_a_chat_may_come_late(agent_daemon: AppServer) -> None:
    chat = Chat(agent_daemon, CHAT)
    first = chat.ask(text="Without tools?")
    second = chat.ask("read", text="And with tools?")
    assert second.startswith(first)
    assert "<tool_call>" in second.removeprefix(first), "how to call them"


def test_marks_on_tools_stay_and_one_on_a_late_tool_moves_before_it(agent_daemon: AppServer) -> None:
    chat, mark = Chat(agent_daemon, MESSAGES), {"cache_control": {"type": "ephemeral"}}
    bash, read, write = (tool(MESSAGES, name) for name in ("bash", "read", "write"))
    chat.ask("read", "write", text="Marks?")
    chat.ask(tools=[read | mark, write])
    before = chat.prompt.marks
    assert len(before) == 1
    for tools in ([bash, read | mark, write], [read, bash | mark, write]):
        chat.ask(tools=tools)
        assert chat.prompt.marks == before


def test_a_chat_whose_tools_grow_is_restored_also_after_a_restart(agent_model: Path, tmp_path: Path) -> None:
    def asked(server: AppServer, history: list[Any], *names: str) -> dict[str, Any]:
        history.append({"role": "user", "content": "Go on. " * 5})
        body = {"messages": history, "tools": [in_form(CHAT, name) for name in names], "max_tokens": 8}
        with server.client() as http:
            reply: dict[str, Any] = http.post(CHAT, json=body | {"temperature": 0}).json()
        history += said_in(CHAT, reply)
        return reply

    history: list[Any] = [{"role": "system", "content": "Be brief. " * 20}]
    with real_app(agent_model, tmp_path / "kv") as server:
        replies = [asked(server, history, "read", "write") for _ in range(3)]
        replies.append(asked(server, history, "bash", "read", "write"))
    with real_app(agent_model, tmp_path / "kv") as server:
        replies += [asked(server, history, "grep", "bash", "read", "write") for _ in range(2)]
    for earlier, later in pairwise(replies):
        before = earlier["usage"]
        # The last sampled token has no state, and a reply that was cut off lacks its end.
        assert later["prefix_cache"]["restored"] >= before["prompt_tokens"] + before["completion_tokens"] - 2


@pytest.mark.parametrize("path", FIELD)
@pytest.mark.parametrize("is_found", [False, True])
def test_a_found_tool_may_be_called_and_a_deferred_one_not(client: httpx.Client, path: str, is_found: bool) -> None:
    choice = {"type": "tool", "name": "tool_7"} if path == MESSAGES else {"type": "function", "name": "tool_7"}
    history = [USER, *found(path, "tool_7")] if is_found else [USER]
    body = ROUTES[path] | {FIELD[path]: history, "tools": offered(path), "tool_choice": choice}
    assert client.post(path, json=body).status_code == (200 if is_found else 400)


def test_a_search_is_an_item_of_its_own(
    client: httpx.Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "script", saying(call("tool_search", path="x")))
    body = {"input": [USER], "tools": offered(RESPONSES)}
    [item] = client.post(RESPONSES, json=body).json()["output"]
    assert item == item | {"type": "tool_search_call", "execution": "client", "arguments": {"path": "x"}}
    events = events_of(client.post(RESPONSES, json=body | {"stream": True}).text)
    kind = TypeAdapter[Any](ResponseStreamEvent)
    for event in events:
        kind.validate_json(json.dumps(event), strict=True)
    assert [event["type"] for event in events if event.get("output_index") == 0] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    monkeypatch.undo()
    output = found(RESPONSES, "tool_7")[1] | {"call_id": item["call_id"]}
    prompt_of(client, engine, RESPONSES, input=[USER, item, output], tools=offered(RESPONSES))
    assert f'{SAID}<tool_call>\n{{"name": "tool_search", "arguments": {{"path": "x"}}}}' in engine.last_prompt


def test_tools_that_come_as_items_are_offered_where_they_stand(client: httpx.Client, engine: ScriptedEngine) -> None:
    more = [tool(RESPONSES, "grep"), {"type": "namespace", "name": "mcp", "tools": [tool(RESPONSES, "list")]}]
    item = {"type": "additional_tools", "role": "developer", "tools": more}
    at_once = prompt_of(client, engine, RESPONSES, input=[USER], tools=more)
    assert at_once == prompt_of(client, engine, RESPONSES, input=[item, USER])
    said = {"role": "assistant", "content": "Hm."}
    prompt_of(client, engine, RESPONSES, input=[USER, said, USER], tools=[tool(RESPONSES, "read")])
    same = engine.last_prompt.partition("Hm.<|im_end|>\n")[0]
    prompt_of(client, engine, RESPONSES, input=[USER, said, item, USER], tools=[tool(RESPONSES, "read")])
    assert engine.last_prompt.startswith(f"{same}Hm.<|im_end|>\n")
    assert '"name": "mcp__list"' in engine.last_prompt.split("Hm.")[1]


def test_the_namespace_functions_is_that_of_functions_without_one(
    client: httpx.Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codex sends its own tools so."""
    grep = tool(RESPONSES, "grep")
    item = {"type": "additional_tools", "tools": [{"type": "namespace", "name": "functions", "tools": [grep]}]}
    plain = prompt_of(client, engine, RESPONSES, input=[USER], tools=[grep])
    assert prompt_of(client, engine, RESPONSES, input=[item, USER]) == plain
    monkeypatch.setattr(engine, "script", saying(call("grep", path="x")))
    [called] = client.post(RESPONSES, json={"input": [item, USER]}).json()["output"]
    assert called == called | {"type": "function_call", "name": "grep", "namespace": "functions"}
    output = {"type": "function_call_output", "call_id": called["call_id"], "output": "x"}
    prompt_of(client, engine, RESPONSES, input=[item, USER, called, output])
    assert f'{SAID}<tool_call>\n{{"name": "grep", "arguments": {{"path": "x"}}}}' in engine.last_prompt


@pytest.mark.parametrize("tools", [[], [{"type": "web_search"}]])
def test_an_item_whose_tools_are_not_served_changes_no_prompt(
    client: httpx.Client, engine: ScriptedEngine, tools: list[Any]
) -> None:
    item = {"type": "additional_tools", "tools": tools}
    more = {"type": "additional_tools", "tools": [tool(RESPONSES, "grep")]}
    said = {"role": "assistant", "content": "Hm."}
    for history in ([USER], [USER, said, more, USER]):
        asked = prompt_of(client, engine, RESPONSES, input=history)
        assert prompt_of(client, engine, RESPONSES, input=[item, *history]) == asked
        assert prompt_of(client, engine, RESPONSES, input=[history[0], item, *history[1:]]) == asked
    alone = client.post(RESPONSES, json={"input": [item]})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "input")


def test_the_tools_that_another_server_has_found_are_offered(client: httpx.Client, engine: ScriptedEngine) -> None:
    references = {"tool_references": [{"type": "tool_reference", "tool_name": "tool_7"}]}
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "tool_search_tool_bm25", "input": {"query": "x"}},
        {"type": "tool_search_tool_result", "tool_use_id": "s", "content": references},
        {"type": "text", "text": "Found."},
    ]
    history = [USER, {"role": "assistant", "content": searched}, USER]
    prompt_of(client, engine, MESSAGES, messages=history, tools=offered(MESSAGES))
    assert engine.last_prompt.index('"name": "tool_7"') > engine.last_prompt.index("hello")


def test_a_stored_response_goes_on_with_its_tools(client: httpx.Client, engine: ScriptedEngine) -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [tool(RESPONSES, "grep")]}
    answer = client.post(RESPONSES, json={"input": [item, USER]}).json()
    stored = prompt_of(client, engine, RESPONSES, input=[USER], previous_response_id=answer["id"])
    assert stored == prompt_of(client, engine, RESPONSES, input=[item, USER, *answer["output"], USER])
    assert '"name": "grep"' in engine.last_prompt


def change(kind: str, name: str, **definition: Any) -> dict[str, Any]:
    """A block of a system message of Anthropic's API: a tool comes, or may no longer be called."""
    of_value = {"type": "tool_definition", "definition": tool(MESSAGES, name, **definition)}
    return {"type": kind, "tool": of_value if definition else {"type": "tool_reference", "name": name}}


HM = {"role": "assistant", "content": "Hm."}


def changed(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    """A history in which a system message changes the tools."""
    return [USER, HM, USER, {"role": "system", "content": [*blocks]}, HM, USER]


@pytest.mark.parametrize("by_value", [False, True])
def test_a_system_message_adds_a_tool_where_it_stands(
    client: httpx.Client, engine: ScriptedEngine, by_value: bool
) -> None:
    tools = [tool(MESSAGES, "read"), SEARCH[MESSAGES]]
    prompt_of(client, engine, MESSAGES, messages=[USER, HM, USER], tools=tools)
    before = engine.last_prompt.removesuffix(SAID)
    if not by_value:
        tools.insert(1, tool(MESSAGES, "grep", defer_loading=True))
    addition = change("tool_addition", "grep", **({"strict": False} if by_value else {}))
    asked = {"messages": changed(addition, {"type": "text", "text": "A server has connected."}), "tools": tools}
    prompt_of(client, engine, MESSAGES, **asked)
    assert engine.last_prompt.startswith(before)
    *_, there, _, _ = engine.last_prompt.split(SAID)
    assert '"name": "grep"' in there
    assert "A server has connected." in there
    assert engine.requests[-1].prompt.rewriting.left_out == ()
    choice = {"type": "tool", "name": "grep"}
    assert client.post(MESSAGES, json=ROUTES[MESSAGES] | asked | {"tool_choice": choice}).status_code == 200


def test_a_summary_brings_the_tools_that_came_before_it(client: httpx.Client, engine: ScriptedEngine) -> None:
    summary = {"type": "compaction", "content": "We did it.", "tool_changes": [change("tool_addition", "tool_7")]}
    history = [USER, {"role": "assistant", "content": [summary]}, USER]
    prompt_of(client, engine, MESSAGES, messages=history, tools=offered(MESSAGES))
    assert '"name": "tool_7"' in engine.last_prompt


def test_a_tool_that_is_taken_back_may_not_be_called(client: httpx.Client, engine: ScriptedEngine) -> None:
    tools = [tool(MESSAGES, name) for name in ("read", "grep")]
    prompt_of(client, engine, MESSAGES, messages=[USER, HM, USER], tools=tools)
    before = engine.last_prompt.removesuffix(SAID)
    removal, addition = (change(kind, "grep") for kind in ("tool_removal", "tool_addition"))
    forced = ROUTES[MESSAGES] | {"tools": tools, "tool_choice": {"type": "tool", "name": "grep"}}
    for blocks, status in ([removal], 400), ([removal, addition], 200), ([addition, removal], 400):
        prompt_of(client, engine, MESSAGES, messages=changed(*blocks), tools=tools)
        assert engine.last_prompt.startswith(before), "the tools of the beginning stay in the prompt"
        assert ("no longer" in engine.last_prompt) == (status == 400)
        answer = client.post(MESSAGES, json=forced | {"messages": changed(*blocks)})
        assert answer.status_code == status, answer.text
    later = [*changed(removal), {"role": "system", "content": [addition]}]
    prompt_of(client, engine, MESSAGES, messages=later, tools=tools)
    assert engine.last_prompt.index("no longer") < engine.last_prompt.index("again")
    assert client.post(MESSAGES, json=forced | {"messages": later}).status_code == 200


def test_the_only_tool_that_runs_here_may_come_late(client: httpx.Client, engine: ScriptedEngine) -> None:
    hosted = [{"type": "web_search_20260209", "name": "web_search"}]
    assert client.post(MESSAGES, json=ROUTES[MESSAGES] | {"tools": hosted}).status_code == 400
    history = changed(change("tool_addition", "grep", strict=False))
    prompt_of(client, engine, MESSAGES, messages=history, tools=hosted)
    assert "You may call these functions inside <tool_call>" in engine.last_prompt.split(SAID)[1]


def test_changes_of_tools_that_are_not_known_are_left_out(client: httpx.Client, engine: ScriptedEngine) -> None:
    toolset = {"type": "tool_addition", "tool": {"type": "mcp_toolset_reference", "server_name": "towns"}}
    hosted = {"type": "tool_definition", "definition": {"type": "web_search_20260209", "name": "web_search"}}
    blocks = [toolset, {"type": "tool_addition", "tool": hosted}]
    known = [change(kind, "nowhere") for kind in ("tool_addition", "tool_removal")]
    without = prompt_of(client, engine, MESSAGES, messages=[USER, HM, USER, HM, USER])
    assert prompt_of(client, engine, MESSAGES, messages=changed(*blocks, *known)) == without
    [left_out] = engine.requests[-1].prompt.rewriting.left_out
    assert (left_out.type, left_out.count) == ("tool_addition", 2)


@pytest.mark.parametrize("path", FIELD)
def test_the_newest_definition_of_a_tool_is_written_and_counts(
    client: httpx.Client, engine: ScriptedEngine, path: str
) -> None:
    """As Codex says of its later items: the newest definition counts."""
    schema = {"type": "object", "properties": {"depth": {"type": "integer"}}, "required": ["depth"]}
    anew = tool(path, "grep") | {"input_schema" if path == MESSAGES else "parameters": schema}
    history: list[Any] = [USER, HM, USER]
    prompt_of(client, engine, path, **{FIELD[path]: history}, tools=[tool(path, "grep")])
    before = engine.last_prompt.removesuffix(SAID)
    for definition in (tool(path, "grep"), anew, anew):
        of_value = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}
        item = {"type": "additional_tools", "tools": [definition]}
        history += [{"role": "system", "content": [of_value]} if path == MESSAGES else item, HM, USER]
    asked = {FIELD[path]: history, "tools": [tool(path, "grep")]}
    prompt_of(client, engine, path, **asked)
    assert engine.last_prompt.startswith(before)
    assert engine.last_prompt.count('"name": "grep"') == 2, "a definition is written once"
    choice = {"type": "tool", "name": "grep"} if path == MESSAGES else {"type": "function", "name": "grep"}
    prompt_of(client, engine, path, **asked, tool_choice=choice)
    constraint = engine.requests[-1].constraint
    assert constraint is not None
    assert constraint.source is not None
    assert "depth" in constraint.source
    assert "path" not in constraint.source


def test_a_system_message_without_content_is_no_message(client: httpx.Client, engine: ScriptedEngine) -> None:
    """It sets the effort of a turn."""
    without = prompt_of(client, engine, MESSAGES, messages=[USER, HM, USER])
    forms: list[dict[str, Any]] = [{}, {"content": []}, {"content": None}]
    for empty in forms:
        effort = {"role": "system", "output_config": {"effort": "low"}} | empty
        assert prompt_of(client, engine, MESSAGES, messages=[USER, HM, effort, USER]) == without


V1 = {"input_schema": {"type": "object", "properties": {"depth": {"type": "integer"}}}}
"""Another definition of a tool."""


def system(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": [*blocks]}


@pytest.mark.parametrize(
    ("first", "deferred"),
    [
        ([HM, USER, system(change("tool_addition", "grep"))], True),
        ([HM, USER, system(change("tool_removal", "grep")), HM, USER, system(change("tool_addition", "grep"))], False),
        (found(MESSAGES, "grep"), True),
    ],
    ids=["addition", "again", "search"],
)
def test_a_later_definition_of_a_tool_leaves_the_earlier_reference_to_it(
    client: httpx.Client, engine: ScriptedEngine, first: list[Any], deferred: bool
) -> None:
    tools = [tool(MESSAGES, "read"), tool(MESSAGES, "grep", defer_loading=deferred), SEARCH[MESSAGES]]
    history = [USER, *first, HM, USER]
    prompt_of(client, engine, MESSAGES, messages=history, tools=tools)
    before = engine.last_prompt.removesuffix(SAID)
    assert before.count('"name": "grep"') == 1
    longer = [*history, system(change("tool_addition", "grep", **V1)), HM, USER]
    prompt_of(client, engine, MESSAGES, messages=longer, tools=tools)
    assert engine.last_prompt.startswith(before)
    assert "depth" in engine.last_prompt.removeprefix(before)


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_definition_where_none_may_stand_is_not_that_of_a_later_one(
    client: httpx.Client, engine: ScriptedEngine, role: str
) -> None:
    wrong = {"role": role, "content": [{"type": "text", "text": "Hm."}, change("tool_addition", "grep", strict=True)]}
    right = [HM, USER, system(change("tool_addition", "grep", **V1)), HM, USER]
    prompt_of(client, engine, MESSAGES, messages=[USER, wrong, *right], tools=[tool(MESSAGES, "read")])
    assert engine.last_prompt.count('"name": "grep"') == 1
    assert "depth" in engine.last_prompt


@pytest.mark.parametrize("by_value", [False, True])
def test_a_tool_that_is_taken_back_before_it_is_known_changes_nothing(
    client: httpx.Client, engine: ScriptedEngine, by_value: bool
) -> None:
    tools = [tool(MESSAGES, "read"), tool(MESSAGES, "list" if by_value else "grep", defer_loading=True)]
    tools.append(SEARCH[MESSAGES])
    early = [USER, HM, USER, system({"type": "text", "text": "Go."}, change("tool_removal", "grep")), HM, USER]
    prompt_of(client, engine, MESSAGES, messages=early, tools=tools)
    before = engine.last_prompt.removesuffix(SAID)
    addition = change("tool_addition", "grep", **(V1 if by_value else {}))
    later = [*early, system(addition), HM, USER]
    prompt_of(client, engine, MESSAGES, messages=later, tools=tools)
    assert engine.last_prompt.startswith(before)
    assert "again" not in engine.last_prompt
    prompt_of(client, engine, MESSAGES, messages=[*later, system(change("tool_removal", "grep")), USER], tools=tools)
    assert "no longer" in engine.last_prompt.split('"name": "grep"')[1]


UNREAD_CALL = {
    MESSAGES: {"type": "mcp_tool_use", "id": "m1", "name": "look", "server_name": "towns", "input": {}},
    RESPONSES: {"type": "tool_search_call", "call_id": "m1", "execution": "client", "arguments": 7},
}


def test_a_tool_beside_a_result_that_is_left_out_is_offered(
    agent_daemon: AppServer,
) -> None:
    chat = Chat(agent_daemon, MESSAGES)
    first = chat.ask("read", text="What is lost?")
    called = [{"type": "text", "text": "I look."}, UNREAD_CALL[MESSAGES]]
    chat.history += [{"role": "user", "content": "Look!"}, {"role": "assistant", "content": called}]
    result = [{"type": "tool_result", "tool_use_id": "m1", "content": "Seen."}]
    prompt = chat.ask("read", "grep", text=result)
    assert prompt.startswith(first)
    assert "Seen." not in prompt
    assert '"name": "grep"' in prompt.removeprefix(first)
    assert chat.ask("read", "grep").startswith(prompt)


def test_a_tool_of_a_search_that_is_left_out_is_offered_there(client: httpx.Client, engine: ScriptedEngine) -> None:
    _, output = found(RESPONSES, "tool_7")
    history = [USER, UNREAD_CALL[RESPONSES], output | {"call_id": "m1"}, HM, USER]
    prompt_of(client, engine, RESPONSES, input=history, tools=offered(RESPONSES))
    assert [left_out.type for left_out in engine.requests[-1].prompt.rewriting.left_out] == [
        "tool_search_call",
        "tool_result",
    ]
    assert engine.last_prompt.count('"name": "tool_7"') == 1
    assert engine.last_prompt.index("hello") < engine.last_prompt.index('"name": "tool_7"')
    assert engine.last_prompt.index('"name": "tool_7"') < engine.last_prompt.index("Hm.")
