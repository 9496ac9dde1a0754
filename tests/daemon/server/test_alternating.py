"""Templates whose turns must alternate, over HTTP: what agents send is served at each door, and counted as computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon.api.test_bodies import BODIES, recorded
from tests.daemon.chat.families.alternating import ALTERNATING
from tests.daemon.server.scripted import AppServer, ScriptedEngine, started_app

CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
CALLED = {"type": "tool_use", "id": "call_1", "name": "read", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "seen"}
ITEM = {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": "{}"}


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


CODEX_FIRST = [
    said("developer", "rules"),
    said("developer", "skills"),
    said("user", "surroundings"),
    said("user", "ask"),
]
REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "codex first": ("/v1/responses", {"input": CODEX_FIRST, "store": False}, "surroundings\n\nask"),
    "codex later": (
        "/v1/responses",
        {
            "input": [
                *CODEX_FIRST,
                ITEM,
                {"type": "function_call_output", "call_id": "call_1", "output": "seen"},
                said("user", "also"),
            ],
            "store": False,
        },
        "also",
    ),
    "claude code result and text": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [said("user", "ask"), said("assistant", [CALLED]), said("user", [RESULT, text("also")])],
        },
        "also",
    ),
    "claude code reminder": (
        "/v1/messages",
        {"max_tokens": 5, "messages": [said("user", "ask"), said("system", "reminder"), said("user", "also")]},
        "also",
    ),
    "chat denied": (
        "/v1/chat/completions",
        {"messages": [said("user", "ask"), said("assistant", None, tool_calls=[CALL]), said("user", "also")]},
        "also",
    ),
    "chat greeting": (
        "/v1/chat/completions",
        {"messages": [said("assistant", "Hello!"), said("user", "also")]},
        "also",
    ),
    "chat interrupted": (
        "/v1/chat/completions",
        {"messages": [said("user", "ask"), said("assistant", ""), said("user", "also")]},
        "also",
    ),
    "claude code interrupted": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                said("user", "ask"),
                said("assistant", [{"type": "thinking", "thinking": "hm", "signature": ""}]),
                said("user", "also"),
            ],
        },
        "also",
    ),
    "codex interrupted": (
        "/v1/responses",
        {
            "input": [
                *CODEX_FIRST,
                said("assistant", [{"type": "output_text", "text": ""}]),
                said("user", "also"),
            ],
            "store": False,
        },
        "also",
    ),
    "ollama interrupted": (
        "/api/chat",
        {
            "messages": [said("user", "ask"), said("assistant", "", thinking="hm"), said("user", "also")],
            "stream": False,
        },
        "also",
    ),
    "ollama": ("/api/chat", {"messages": [said("user", "ask"), said("user", "also")], "stream": False}, "ask\n\nalso"),
}


@pytest.fixture(scope="module", params=sorted(ALTERNATING))
def served(request: pytest.FixtureRequest, chat_model: Path) -> Iterator[AppServer]:
    engine = ScriptedEngine()
    engine.max_positions = 131_072

    def load(settings: Any, progress: Any) -> Any:
        loaded = engine.load(settings, progress)
        engine.tokenizer.chat_template = ALTERNATING[request.param]
        return loaded

    with started_app(chat_model, load) as server:
        server.wait_ready()
        yield server


@pytest.mark.cases(24)
@pytest.mark.parametrize("name", REQUESTS)
def test_agent_bodies_are_counted_as_they_are_computed(served: AppServer, name: str) -> None:
    path, body, words = REQUESTS[name]
    with served.client() as client:
        answer = client.post(path, json={"model": "scripted"} | body)
        assert answer.status_code == 200, answer.text
        assert words in served.engine.last_prompt
        num_tokens = len(served.engine.requests[-1].prompt.token_ids)
        if path == "/v1/messages":
            counted = client.post("/v1/messages/count_tokens", json=body)
            assert counted.json()["input_tokens"] == num_tokens
        if path == "/v1/chat/completions":
            assert applied(client, body) == served.engine.last_prompt


@pytest.mark.parametrize("file", BODIES, ids=lambda file: file.stem)
def test_recorded_tasks_of_agents_are_served_and_counted(served: AppServer, file: Path) -> None:
    path, body = recorded(file)
    words = ["sums.py must print 5", "the sum is 5"] if file.stem.endswith("-turn") else []
    with served.client() as client:
        answer = client.post(path, json=body | {"model": "scripted"})
        assert answer.status_code == 200, answer.text
        assert [text for text in words if text not in served.engine.last_prompt] == []
        if path.startswith("/v1/messages"):
            counted = client.post("/v1/messages/count_tokens", json=body | {"model": "scripted"}).json()
            assert counted == {"input_tokens": len(served.engine.requests[-1].prompt.token_ids)}


def applied(client: httpx.Client, body: dict[str, Any]) -> str:
    return str(client.post("/apply-template", json=body).json()["prompt"])
