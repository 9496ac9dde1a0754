"""What agents and clients of other servers send, and what their histories keep, is served by each API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.json_values import whole_characters
from tests.server.scripted import ScriptedEngine, scripted_app
from tests.server.test_bad_requests import JSON, ROUTES, USER

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
        prompts.append([one.prompt.token_ids.tolist() for one in engine.requests] or said)
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
    found = getattr(engine.requests[-1].sampling, read[0])
    assert (found, type(found)) == (read[1], type(read[1]))


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
    """A call and its empty result in Anthropic's form."""
    call = {"type": "tool_use", "id": "1", "name": "read", "input": arguments}
    answer = {"type": "tool_result", "tool_use_id": "1", "content": None}
    return [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]


def items(arguments: Any) -> list[dict[str, Any]]:
    """A call and its empty result as items."""
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
def test_what_says_nothing_is_read_as_nothing(
    client: httpx.Client, engine: ScriptedEngine, path: str, fields: dict[str, Any], prompt: str
) -> None:
    served(client, path, **fields)
    assert engine.last_prompt == prompt + SAID
