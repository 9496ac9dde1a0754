"""Our JSON against the specifications: each reply and each event is read strictly by the types that are generated from
OpenAI's and Anthropic's OpenAPI documents, those of the official clients, and by the types of Open Responses.

The clients themselves read leniently: they take a reply that lacks a field, or has null in its place.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import anthropic.types as anthropic
import httpx
import ollama
import openai.types.chat as openai_chat
import openai.types.responses as openai_responses
import pytest
from openai.types import Completion
from pydantic import BaseModel, TypeAdapter, ValidationError

from diskprefix.folders import cache_home
from tests.daemon.chat.families.sources import Package, SourcesMissing, download
from tests.daemon.server.agent_model import call, saying, thought
from tests.daemon.server.scripted import ScriptedEngine, scripted_app

USER = {"role": "user", "content": "What's the weather like in San Francisco?"}
SCHEMA = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
FUNCTION = {"name": "get_weather", "description": "Get the current weather for a location", "parameters": SCHEMA}
REPLY = thought("It rains.") + "Hello there." + call("get_weather", location="San Francisco")

CHAT = {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}], "logprobs": True, "n": 2}
COMPLETION = {"prompt": ["a", "b"], "n": 2, "logprobs": 2}
MESSAGE = {
    "messages": [USER],
    "max_tokens": 99,
    "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
    "thinking": {"type": "adaptive"},
}
RESPONSES: dict[str, dict[str, Any]] = {
    # The requests of Open Responses' own compliance tests that a model for text can serve.
    "basic": {"input": [{"type": "message", "role": "user", "content": "Say hello in exactly 3 words."}]},
    "tools": {"input": [USER | {"type": "message"}], "tools": [{"type": "function", **FUNCTION}]},
    "turns": {
        "input": [
            {"type": "message", "role": "user", "content": "My name is Alice."},
            {"type": "message", "role": "assistant", "content": "Hello Alice! How can I help you today?"},
            {"type": "message", "role": "user", "content": "What is my name?"},
        ]
    },
    # Every field that a response repeats.
    "all": {
        "input": "Hello.",
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "get_weather"}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "metadata": {"a": "b"},
        "presence_penalty": 1,
        "safety_identifier": "s",
        "max_tool_calls": 1,
        "max_output_tokens": 5,
    },
    "format": {"input": "Hello.", "text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}},
}


@pytest.fixture(scope="module")
def client(agent_model: Path) -> Iterator[httpx.Client]:
    engine = ScriptedEngine(saying(*[REPLY] * 4))
    with scripted_app(agent_model, engine) as server, server.client() as client:
        yield client


def events(answer: httpx.Response) -> list[str]:
    data = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
    return [text for text in data if text != "[DONE]"]


def read(kind: Any, *texts: str) -> list[Any]:
    assert texts
    return [TypeAdapter(kind).validate_json(text, strict=True) for text in texts]


@pytest.mark.parametrize(
    ("route", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, openai_chat.ChatCompletion),
        ("/v1/completions", COMPLETION, Completion),
        ("/v1/messages", MESSAGE, anthropic.Message),
        ("/api/chat", CHAT | {"stream": False}, ollama.ChatResponse),
        ("/api/generate", {"prompt": "a", "stream": False}, ollama.GenerateResponse),
        ("/v1/messages/count_tokens", MESSAGE, anthropic.MessageTokensCount),
        *(("/v1/responses", body, openai_responses.Response) for body in RESPONSES.values()),
    ],
)
def test_a_whole_reply_is_of_the_type_of_its_api(
    client: httpx.Client, route: str, body: dict[str, Any], kind: type[BaseModel]
) -> None:
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    read(kind, answer.text)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("route", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, openai_chat.ChatCompletionChunk),
        ("/v1/messages", MESSAGE, anthropic.RawMessageStreamEvent),
        *(("/v1/responses", body, openai_responses.ResponseStreamEvent) for body in RESPONSES.values()),
    ],
)
def test_each_event_of_a_stream_is_of_the_type_of_its_api(
    client: httpx.Client, route: str, body: dict[str, Any], kind: Any
) -> None:
    texts = events(client.post(route, json=body | {"stream": True}))
    read(kind, *(text for text in texts if json.loads(text).get("type") != "ping"))


def test_completion_chunks_have_openais_type_except_open_reasons(client: httpx.Client) -> None:
    """OpenAI's document has the field required and not null, and its server sends null until a choice ends."""
    texts = events(client.post("/v1/completions", json=COMPLETION | {"stream": True}))
    is_open = [json.loads(text)["choices"][0]["finish_reason"] is None for text in texts]
    assert any(is_open)
    read(Completion, *(text for text, open_end in zip(texts, is_open, strict=True) if not open_end))
    for text in (text for text, open_end in zip(texts, is_open, strict=True) if open_end):
        with pytest.raises(ValidationError) as caught:
            read(Completion, text)
        assert [error["loc"] for error in caught.value.errors()] == [("choices", 0, "finish_reason")]


OPEN_RESPONSES = Package(
    "openresponses-types==2.4.0", "186406592bc115bf12d9ee88320f8051ab1ade0a8fa8941fd1e44b0be16684f1"
)
"""The types of Open Responses, as this package (Apache-2.0) generates them from the specification."""


@pytest.fixture(scope="module")
def types() -> Any:
    """pip downloads them at the first test that needs them, as it does the sources of `tests/daemon/chat/families`.
    Tests are skipped where they cannot be had."""
    folder = cache_home() / "test-specifications"
    wheel = folder / "openresponses_types-2.4.0-py3-none-any.whl"
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as work:
            try:
                download(OPEN_RESPONSES, Path(work)).replace(wheel)
            except SourcesMissing as error:
                pytest.skip(f"the types of Open Responses are not here: {error}")
    sys.path.append(str(wheel))
    return importlib.import_module("openresponses_types.types")


def event_type(types: Any, name: str) -> Any:
    kinds = {
        value: kind
        for kind_name, kind in vars(types).items()
        if kind_name.endswith("StreamingEvent")
        for value in _values(kind.model_fields["type"].annotation)
    }
    return kinds[name]


def _values(annotation: Any) -> list[str]:
    is_enum = isinstance(annotation, type) and issubclass(annotation, Enum)
    return [member.value for member in annotation] if is_enum else list(get_args(annotation))


# In the document of Open Responses, the `schema` of a format is null.
@pytest.mark.cases(2)
@pytest.mark.parametrize("name", sorted(RESPONSES.keys() - {"format"}))
def test_a_response_and_its_events_are_of_the_types_of_open_responses(
    client: httpx.Client, types: Any, name: str
) -> None:
    read(types.ResponseResource, client.post("/v1/responses", json=RESPONSES[name]).text)
    texts = events(client.post("/v1/responses", json=RESPONSES[name] | {"stream": True}))
    assert json.loads(texts[-1])["type"] == "response.completed"
    for text in texts:
        # OpenAI, and so we, have another name for events of raw reasoning.
        as_named = text.replace('"response.reasoning_text.', '"response.reasoning.')
        read(event_type(types, json.loads(as_named)["type"]), as_named)


def test_a_compacted_conversation_is_of_the_type_of_open_responses(client: httpx.Client, types: Any) -> None:
    answer = client.post("/v1/responses/compact", json={"model": None} | RESPONSES["turns"])
    read(types.CompactResource, answer.text)
