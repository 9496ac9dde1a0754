"""Bodies that real agents sent in the middle of a task, with long texts cut: each of them is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.scripted import ScriptedEngine, scripted_app
from tools.real_agents.replies import Reply

BODIES = sorted((Path(__file__).parent / "bodies").glob("*.json"))
"""Written by `tools/agents --bodies`, and then made small and impersonal by hand."""
TURNS = [path for path in BODIES if path.stem.endswith("-turn")]
Served = tuple[httpx.Client, ScriptedEngine]


@pytest.fixture(scope="module")
def served(chat_model: Path) -> Iterator[Served]:
    engine = ScriptedEngine()
    engine.model_name, engine.max_positions = "coder", 131_072
    with scripted_app(chat_model, engine) as server, server.client() as client:
        yield client, engine


def sent(path: Path, served: Served) -> tuple[httpx.Response, str]:
    """The response to a body, and the prompt that was made of it."""
    recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    client, engine = served
    engine.requests.clear()
    response = client.post(recorded["path"], json=recorded["body"])
    assert response.status_code == 200, response.text
    [request] = engine.requests
    return response, engine.tokenizer.decode(request.prompt.token_ids)


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_what_an_agent_sends_is_answered(path: Path, served: Served) -> None:
    response, _ = sent(path, served)
    reply = Reply()
    reply.feed(response.content)
    reply.finish()
    assert "Hello" in response.text
    assert reply.has_token
    assert (reply.prompt_tokens, reply.errors) == (10, [])


@pytest.mark.parametrize("path", TURNS, ids=lambda path: path.stem)
def test_nothing_that_the_model_must_read_is_left_out(path: Path, served: Served) -> None:
    recorded = json.loads(path.read_text(encoding="utf-8"))["body"]
    _, prompt = sent(path, served)
    tools = [tool.get("function", tool)["name"] for tool in recorded["tools"] if _is_function(tool)]
    words = ["sums.py must print 5 and does not", "return a - b", "the sum is 5", "python3 sums.py", *tools]
    assert [word for word in words if word not in prompt] == []
    assert len(tools) >= 1


def _is_function(tool: dict[str, Any]) -> bool:
    return bool(tool.get("type", "function") == "function")
