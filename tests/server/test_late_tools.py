"""Tools that come in the middle of a conversation are written where they came, and the prompt before stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.agent_model import call, saying
from tests.server.scripted import ScriptedEngine, events_of, scripted_app
from tests.server.test_bad_requests import ROUTES, USER

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
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
