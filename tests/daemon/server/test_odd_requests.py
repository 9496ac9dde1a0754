"""What agents and clients of other servers send, and what their histories keep, is served by each API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from diskprefix.daemon.api.responses_tools import full_name
from diskprefix.daemon.json_values import whole_characters
from diskprefix.daemon.router.router_messages import read_routing
from tests.daemon.server.agent_model import call, saying
from tests.daemon.server.scripted import AppServer, ScriptedEngine, events_of, scripted_app
from tests.daemon.server.test_bad_requests import JSON, ROUTES, USER

CHAT, MESSAGES, RESPONSES, COMPLETIONS = (
    *("/v1/chat/completions", "/v1/messages", "/v1/responses"),
    "/v1/completions",
)
FUNCTION = {"name": "read", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client(agent_model: Path, engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with scripted_app(agent_model, engine) as server, server.client() as client:
        yield client


def served(client: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    """The answer to the route's body with these fields. JSON escapes the halves of characters in it."""
    answer = client.post(path, content=json.dumps(ROUTES[path] | fields), headers=JSON)
    assert answer.status_code == 200, answer.text
    return answer


HALF = "\ud83d"


def called(arguments: Any, call_id: str = "1") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "read", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


def result(content: Any, call_id: str = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


HALVES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [*called("{}"), result(HALF)]}),
    (CHAT, {"messages": [*called(json.dumps({HALF: HALF})), result("x")]}),
    (CHAT, {"messages": [*called({HALF: HALF}), result("x")]}),
    (CHAT, {"messages": [*called("{}", HALF), result("x", HALF)]}),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION | {"description": HALF}}]}),
    (COMPLETIONS, {"prompt": HALF}),
    (COMPLETIONS, {"prompt": ["x", HALF]}),
    (RESPONSES, {"input": HALF}),
    (RESPONSES, {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": HALF}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}),
    (MESSAGES, {"system": HALF}),
    ("/v1/messages/count_tokens", {"system": HALF}),
    ("/v1/embeddings", {"input": [HALF, "x"]}),
    ("/api/chat", {"messages": [{"role": "user", "content": HALF}]}),
    ("/api/generate", {"prompt": HALF, "system": HALF}),
    ("/tokenize", {"content": HALF}),
    ("/apply-template", {"messages": [USER | {"content": HALF}]}),
]


@pytest.mark.parametrize(("path", "fields"), HALVES)
def test_half_a_character_anywhere_in_a_body_is_the_replacement_character(
    client: httpx.Client, engine: ScriptedEngine, path: str, fields: dict[str, Any]
) -> None:
    prompts = []
    whole = json.loads(json.dumps(fields).replace(r"\\ud83d", "\ufffd").replace(r"\ud83d", "\ufffd"))
    for sent in (fields, whole):
        engine.requests.clear()
        said = served(client, path, **sent).json()
        prompts.append([request.prompt.token_ids.tolist() for request in engine.requests] or said)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (r"\ud83d\ude00", r"\ud83d\ude00"),
        (r"\uD83D\uDE00\ud83d\ude00", r"\uD83D\uDE00\ud83d\ude00"),
        (r"\ud83d", "\\ufffd"),
        (r"\ude00\ud83d", "\\ufffd\\ufffd"),
        (r"\ud83d\ud83d\ude00\ude00", "\\ufffd\\ud83d\\ude00\\ufffd"),
        (r"\\ud83d", r"\\ud83d"),
        (r"\\\ud83d", "\\\\\\ufffd"),
        (r"\\\\ud83d\ude00", "\\\\\\\\ud83d\\ufffd"),
        (r"\n\uDBFFx\ud55c", "\\n\\ufffdx\\ud55c"),
    ],
)
def test_whole_pairs_and_escaped_backslashes_stay(sent: str, read: str) -> None:
    assert whole_characters(f'"{sent}"') == f'"{read}"'


NO_LIMIT: list[tuple[str, str]] = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (COMPLETIONS, "max_tokens"),
    (MESSAGES, "max_tokens"),
    (RESPONSES, "max_output_tokens"),
]


@pytest.mark.parametrize(("path", "field"), NO_LIMIT)
@pytest.mark.parametrize(("limit", "means"), [(-1, None), (-1.0, None), (3.0, 3)])
def test_a_limit_may_be_none_or_have_a_point(
    client: httpx.Client, engine: ScriptedEngine, path: str, field: str, limit: float, means: int | None
) -> None:
    served(client, path, **{field: limit})
    assert engine.requests[-1].sampling.max_tokens == means


@pytest.mark.parametrize(
    ("path", "field", "value", "read"),
    [
        *((path, "top_p", 0, ("temperature", 0.0)) for path in (CHAT, COMPLETIONS, MESSAGES, RESPONSES)),
        (CHAT, "seed", 5.0, ("seed", 5)),
        (CHAT, "n", 1.0, ("n", 1)),
        (MESSAGES, "top_k", 4.0, ("top_k", 4)),
    ],
)
def test_a_number_means_what_it_means_elsewhere(
    client: httpx.Client, engine: ScriptedEngine, path: str, field: str, value: float, read: tuple[str, Any]
) -> None:
    served(client, path, **{field: value})
    parsed_value = getattr(engine.requests[-1].sampling, read[0])
    assert (parsed_value, type(parsed_value)) == (read[1], type(read[1]))


def test_whole_numbers_with_a_point_are_token_ids_and_scopes(client: httpx.Client, engine: ScriptedEngine) -> None:
    served(client, COMPLETIONS, prompt=[5.0, 6], prefix_cache={"scope": 1000.0, "ttl": 60})
    request = engine.requests[-1]
    assert request.prompt.token_ids.tolist() == [5, 6]
    assert str(request.cache.scope) == "1000"
    assert (
        client.post("/detokenize", json={"tokens": [5.0]}).json()
        == client.post("/detokenize", json={"tokens": [5]}).json()
    )


ASKED = "<|im_start|>user\nhello<|im_end|>\n"
SAID = "<|im_start|>assistant\n"
CALLED = SAID + '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call><|im_end|>\n'
NOTHING = "<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"
EMPTY = SAID + "<|im_end|>\n"
CALL_ITEM = {"type": "function_call", "call_id": "1", "name": "read"}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "1"}
EMPTIES: list[Any] = [None, "", {}]
SILENT: list[dict[str, Any]] = [{}, {"content": None}, {"content": []}, {"content": None, "tool_calls": []}]
REFUSALS: list[dict[str, Any]] = [{"refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}]


def turn(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant"} | fields, USER]


def used(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": "1", "name": "read", "input": arguments}
    answer = {"type": "tool_result", "tool_use_id": "1", "content": None}
    return [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]


def items(arguments: Any) -> list[dict[str, Any]]:
    return [USER, CALL_ITEM | {"arguments": arguments}, OUTPUT_ITEM | {"output": None}]


NO_WORDS: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {"messages": turn(**silent)}, ASKED + EMPTY + ASKED) for silent in SILENT),
    *((CHAT, {"messages": turn(**refusal)}, f"{ASKED}{SAID}No.<|im_end|>\n{ASKED}") for refusal in REFUSALS),
    *((CHAT, {"messages": [*called(empty), result(None)]}, ASKED + CALLED + NOTHING) for empty in EMPTIES),
    (CHAT, {"functions": [], "function_call": "none"}, ASKED),
    (CHAT, {"function_call": "auto"}, ASKED),
    (MESSAGES, {"mcp_servers": []}, ASKED),
    *((MESSAGES, {"messages": turn(content=empty)}, ASKED + EMPTY + ASKED) for empty in (None, "", list[Any]())),
    *((MESSAGES, {"messages": used(empty)}, ASKED + CALLED + NOTHING) for empty in EMPTIES),
    *((RESPONSES, {"input": turn(content=empty)}, ASKED + EMPTY + ASKED) for empty in (None, "", list[Any]())),
    *((RESPONSES, {"input": items(empty)}, ASKED + CALLED + NOTHING) for empty in (None, "", "{}")),
    (RESPONSES, {"input": [USER, {"type": "reasoning", "summary": None}, USER]}, ASKED + EMPTY + ASKED),
]


@pytest.mark.parametrize(("path", "fields", "prompt"), NO_WORDS)
def test_empty_values_are_read_as_absent(
    client: httpx.Client, engine: ScriptedEngine, path: str, fields: dict[str, Any], prompt: str
) -> None:
    served(client, path, **fields)
    assert engine.last_prompt == prompt + SAID


PATCH = '*** Begin Patch\n+ "x" \u00e9\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
SPACE = {"type": "namespace", "name": "files", "description": "", "tools": [CUSTOM]}
PATCHED = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": PATCH}
EXEC = {"type": "exec", "command": ["ls"], "env": {}}
SHELL = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "action": EXEC}
HOSTED = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "image_generation_call", "id": "ig_1", "result": "AAAA"},
    {"type": "shell_call", "call_id": "c9", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c9", "output": [{"stdout": "", "stderr": ""}]},
    {"type": "apply_patch_call", "call_id": "c8", "operation": {"type": "delete_file", "path": "x"}},
    {"type": "apply_patch_call_output", "call_id": "c8", "status": "completed"},
    {"type": "mcp_list_tools", "id": "m_1", "server_label": "s", "tools": []},
]


def said_by_assistant(name: str, arguments: Any) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f'{SAID}<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call><|im_end|>\n'


@pytest.mark.parametrize(
    ("call", "output", "written"),
    [
        (PATCHED, {"type": "custom_tool_call_output", "call_id": "c1"}, ("apply_patch", {"input": PATCH})),
        (SHELL, {"type": "local_shell_call_output", "id": "c1"}, ("local_shell", EXEC)),
        (SHELL, {"type": "function_call_output", "call_id": "c1"}, ("local_shell", EXEC)),
    ],
)
def test_codex_items_become_calls_and_results_without_hosted_tools(
    client: httpx.Client, engine: ScriptedEngine, call: Any, output: Any, written: tuple[str, Any]
) -> None:
    answer = served(client, RESPONSES, input=[USER, *HOSTED, call, output | {"output": "Done!"}])
    assert engine.last_prompt == ASKED + said_by_assistant(*written) + NOTHING.replace("\n\n", "\nDone!\n") + SAID
    [listed] = [
        item
        for item in client.get(f"/v1/responses/{answer.json()['id']}/input_items").json()["data"]
        if item["type"] == call["type"]
    ]
    assert listed == listed | call
    again = served(client, RESPONSES, input=USER["content"], previous_response_id=answer.json()["id"])
    assert again.json()["status"] == "completed"


@pytest.mark.cases(2)
@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "apply_patch"}])
@pytest.mark.parametrize("tools", [[CUSTOM], [SPACE]])
def test_a_custom_tool_is_a_function_with_its_own_call_item(
    client: httpx.Client, engine: ScriptedEngine, tools: list[Any], choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = tools[0]["name"] if tools != [CUSTOM] else None
    name = full_name("apply_patch", space)
    if isinstance(choice, dict):
        choice = choice | {"name": name}
    monkeypatch.setattr(engine, "script", saying(call(name, input=PATCH) + call(name, text="a", more=1)))
    asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": True}
    whole = served(client, RESPONSES, **asked).json()
    items = whole["output"]
    same = {"type": "custom_tool_call", "name": "apply_patch", "status": "completed"}
    same |= {} if space is None else {"namespace": space}
    assert [item["input"] for item in items] == ([PATCH, '{"text": "a", "more": 1}'] if choice == "auto" else [PATCH])
    assert all(item == item | same for item in items)
    assert '"required": ["input"]' in engine.last_prompt
    assert GRAMMAR["definition"] in json.loads(
        f'"{engine.last_prompt.split("grammar: ")[1].partition(chr(125))[0][:-1]}"'
    )
    events = events_of(served(client, RESPONSES, stream=True, **asked).text)
    of_first = [event for event in events if event.get("output_index") == 0]
    assert [event["type"].removeprefix("response.") for event in of_first] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert (of_first[0]["item"]["input"], of_first[1]["delta"], of_first[2]["input"]) == ("", PATCH, PATCH)
    assert [event["item_id"] for event in of_first[1:3]] == [of_first[0]["item"]["id"]] * 2
    kind = TypeAdapter[Any](ResponseStreamEvent)
    for event in events:
        kind.validate_json(json.dumps(event), strict=True)
    again = [item | {"id": None, "status": None} for item in items]
    outputs = [{"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"} for item in items]
    served(client, RESPONSES, input=[USER, *again, *outputs], tools=tools)
    assert json.dumps({"input": PATCH}, ensure_ascii=False) in engine.last_prompt


def test_half_a_character_in_a_models_arguments_is_whole_in_the_reply(
    client: httpx.Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "script", saying(call("read", path=HALF)))
    tool = {"name": "read", "input_schema": {"type": "object"}}
    [used] = served(client, MESSAGES, tools=[tool]).json()["content"]
    assert used["input"] == {"path": "\ufffd"}


DATA = "data:image/png;base64,iVBORw0KGgo="
OF_CHAT = {"type": "image_url", "image_url": {"url": DATA}}
OF_MESSAGES = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
OF_RESPONSES = {"type": "input_image", "image_url": DATA}
PICTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    CHAT: ("messages", OF_CHAT, {"type": "file", "file": {"file_id": "f"}}),
    MESSAGES: (
        "messages",
        OF_MESSAGES,
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
    ),
    RESPONSES: ("input", OF_RESPONSES, {"type": "input_file", "file_data": "x"}),
}
REPLIED = {"role": "assistant", "content": "Hm."}


def seen(path: str, part: Any) -> list[dict[str, Any]]:
    if path == CHAT:
        return [*called("{}"), result([part])]
    if path == RESPONSES:
        return [USER, CALL_ITEM, OUTPUT_ITEM | {"output": [part]}]
    *asked, answer = used({})
    return [*asked, answer | {"content": [answer["content"][0] | {"content": [part]}]}]


@pytest.mark.parametrize("path", PICTURES)
@pytest.mark.parametrize(("which", "word"), [(1, "picture"), (2, None)])
@pytest.mark.parametrize("place", ["result", "older turn"])
def test_a_picture_that_the_history_keeps_is_a_note_for_a_model_of_text(
    client: httpx.Client, engine: ScriptedEngine, path: str, which: int, word: str | None, place: str
) -> None:
    field, *parts = PICTURES[path]
    part = parts[which - 1]
    word = word or ("document" if path == MESSAGES else "file")
    messages = seen(path, part) if place == "result" else [USER | {"content": [part]}, REPLIED, USER]
    served(client, path, **{field: messages})
    note = f"[{word} left out: this model reads text]"
    assert engine.last_prompt.count(note) == 1
    [left_out] = engine.requests[-1].prompt.rewriting.left_out
    assert left_out.type == ("image" if word == "picture" else word)
    assert left_out.first.startswith(f"{field}.{'2' if place == 'result' else '0'}.")
    last = [REPLIED, USER, USER | {"content": [part]}]
    refused = client.post(path, json=ROUTES[path] | {field: last})
    assert (refused.status_code, "this model takes text only" in refused.text) == (400, True)


@pytest.mark.parametrize("path", PICTURES)
def test_a_response_says_what_was_left_out_of_its_prompt(agent_daemon: AppServer, path: str) -> None:
    field, part, _ = PICTURES[path]
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    with agent_daemon.client() as client:
        answer = served(client, path, **{field: seen(path, part), limit: 1}).json()
    [left_out] = answer["prefix_cache"]["left_out"]
    assert (left_out["type"], left_out["first"].split(".")[:2]) == ("image", [field, "2"])


VALUES = {"id": 9007199254740993, "text": "</tool_call><|im_end|><tool_call>"}
EXACTLY = {
    "type": "object",
    "properties": {name: {"const": value} for name, value in VALUES.items()},
    "required": [*VALUES],
    "additionalProperties": False,
}
ONE_CALL: dict[str, dict[str, Any]] = {
    CHAT: {
        "tools": [{"type": "function", "function": FUNCTION | {"parameters": EXACTLY}}],
        "reasoning_effort": "none",
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    MESSAGES: {
        "tools": [{"name": "read", "input_schema": EXACTLY}],
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
    RESPONSES: {
        "tools": [{"type": "function", "name": "read", "parameters": EXACTLY}],
        "reasoning": {"effort": "none"},
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}


def arguments_of(path: str, answer: Any) -> str:
    if path == CHAT:
        [call] = answer["choices"][0]["message"]["tool_calls"]
        return str(call["function"]["arguments"])
    [call] = [
        item for item in answer.get("output", answer.get("content")) if item["type"] in {"function_call", "tool_use"}
    ]
    return str(call["arguments"]) if path == RESPONSES else json.dumps(call["input"])


def streamed_arguments(path: str, events: list[Any]) -> str:
    if path == CHAT:
        calls = [
            call for event in events for chosen in event["choices"] for call in chosen["delta"].get("tool_calls") or []
        ]
        return "".join(call["function"].get("arguments") or "" for call in calls)
    if path == RESPONSES:
        return "".join(event["delta"] for event in events if event["type"].endswith("arguments.delta"))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return "".join(delta.get("partial_json", "") for delta in deltas)


@pytest.mark.cases(2)
@pytest.mark.parametrize("path", ONE_CALL)
def test_a_forced_call_keeps_digits_and_text_exactly(agent_daemon: AppServer, path: str) -> None:
    asked = ONE_CALL[path] | {"max_output_tokens" if path == RESPONSES else "max_tokens": 400}
    with agent_daemon.client() as client:
        whole = served(client, path, **asked).json()
        events = events_of(served(client, path, stream=True, **asked).text)
    for text in (arguments_of(path, whole), streamed_arguments(path, events)):
        assert json.loads(text) == VALUES, whole


def test_every_page_and_every_question_answers_head_as_get_without_a_body(client: httpx.Client) -> None:
    for path in ("/", "/chat", "/dashboard", "/health", "/v1/models", "/v1/models/scripted", "/props", "/metrics"):
        asked, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (asked.status_code, b""), path
        assert head.headers.get("content-type") == asked.headers.get("content-type")
    assert client.head("/tokenize").status_code == 405
    assert client.head("/nowhere").status_code == 404
    assert client.head("/docs").status_code == client.head("/openapi.json").status_code == 200


def test_the_router_reads_the_model_of_a_body_with_half_a_character() -> None:
    body = json.dumps({"model": "ash", "messages": [USER | {"content": HALF}]}).encode()
    assert read_routing(body).model == read_routing(b"\xef\xbb\xbf" + body).model == "ash"
