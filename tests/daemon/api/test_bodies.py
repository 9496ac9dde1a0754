"""Bodies that real agents sent in the middle of a task, with long texts cut: each of them is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon.server.agent_model import call, saying, thought
from tests.daemon.server.scripted import ScriptedEngine, say_hello, scripted_app
from tools.real_agents.replies import Reply

FOLDER = Path(__file__).parent / "bodies"
BODIES = sorted(FOLDER.glob("*.json"))
"""Written by `tools/agents --bodies`, and then made small and impersonal by hand."""
Served = tuple[httpx.Client, ScriptedEngine]


@pytest.fixture(scope="module")
def served(agent_model: Path, engine: ScriptedEngine) -> Iterator[Served]:
    engine.model_name, engine.max_positions = "coder", 131_072
    with scripted_app(agent_model, engine) as server, server.client() as client:
        yield client, engine


def recorded(path: Path) -> tuple[str, dict[str, Any]]:
    request = json.loads(path.read_text(encoding="utf-8"))
    return request["path"], request["body"]


def sent(served: Served, path: str, body: dict[str, Any]) -> tuple[httpx.Response, str]:
    client, engine = served
    engine.requests.clear()
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    [request] = engine.requests
    return response, engine.tokenizer.decode(request.prompt.token_ids)


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_recorded_agent_bodies_are_answered_without_lost_text(path: Path, served: Served) -> None:
    served[1].script = say_hello
    route, body = recorded(path)
    response, prompt = sent(served, route, body)
    reply = Reply()
    reply.feed(response.content)
    reply.finish()
    assert "Hello" in response.text
    assert reply.has_token
    assert (reply.prompt_tokens, reply.errors) == (10, [])
    if path.stem.endswith("-turn"):
        tools = [tool.get("function", tool)["name"] for tool in body["tools"] if _is_function(tool)]
        words = ["sums.py must print 5 and does not", "return a - b", "the sum is 5", "python3 sums.py", *tools]
        assert [word for word in words if word not in prompt] == []
        assert len(tools) >= 1


def _is_function(tool: dict[str, Any]) -> bool:
    return bool(tool.get("type", "function") == "function")


def test_claude_code_gets_its_events_marks_and_token_counts(served: Served) -> None:
    path, body = recorded(FOLDER / "claude-code-turn.json")
    response, prompt = sent(served, path, body)
    assert response.headers["request-id"].startswith("req_")
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    places = [prompt.index(text) for text in ('"Bash"', "You are a Claude agent", "sums.py must", "Available agent")]
    assert places == sorted(places), "tools, system, user, system in its place"
    [request] = served[1].requests
    assert len(request.prompt.marks) == 3
    assert request.prompt.marks[-1].position < len(request.prompt.token_ids)
    counted = served[0].post("/v1/messages/count_tokens?beta=true", json=body).json()
    assert counted == {"input_tokens": len(request.prompt.token_ids)}


def test_codex_gets_items_that_it_sends_back_without_their_ids(served: Served) -> None:
    path, body = recorded(FOLDER / "codex-turn.json")
    engine = served[1]
    engine.script = saying(thought("hm") + call("exec_command", cmd="ls"))
    answer, prompt = sent(served, path, body)
    data = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    finished = [event["item"] for event in data if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in finished] == ["reasoning", "function_call"]
    assert finished[0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "web_search" not in prompt
    assert not engine.cache.noted, "the response is not stored"
    items = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in finished]
    output = {"type": "function_call_output", "call_id": finished[1]["call_id"], "output": "42"}
    _, longer = sent(served, path, body | {"input": [*body["input"], *items, output]})
    assert longer.startswith(prompt.removesuffix("<|im_start|>assistant\n"))
    assert longer.endswith("<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
