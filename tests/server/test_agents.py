"""The official `openai` client with tools and thoughts, over a scripted model that writes prepared replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from diskprefix.server import generation
from tests.server.agent_model import call, saying, thought
from tests.server.scripted import AppServer, ScriptedEngine, real_app, scripted_app

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": PARAMETERS}}
    for name in ("read", "write")
]
MESSAGES: list[Any] = [{"role": "user", "content": "What does a.py print?"}]
REPLY = thought("I must look.") + "I look.\n" + call("read", path="a.py") + "\n" + call("write", path='b "2".py')
CALLS = [("read", {"path": "a.py"}), ("write", {"path": 'b "2".py'})]


@pytest.fixture(scope="module")
def server(agent_model: Path, engine: ScriptedEngine) -> Iterator[AppServer]:
    with scripted_app(agent_model, engine) as running:
        yield running


@pytest.fixture
def client(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAI]:
    # The scripted model says all at once. What waits is not joined, as if the client kept up with it.
    monkeypatch.setattr(generation, "_is_continued", lambda *_: False)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "scripted", "messages": MESSAGES, "tools": TOOLS} | fields)


def called(message: Any) -> list[tuple[str, Any]]:
    return [(item.function.name, json.loads(item.function.arguments)) for item in message.tool_calls or []]


def test_a_reply_has_content_reasoning_and_calls(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(REPLY)
    reply = ask(client)
    [choice] = reply.choices
    assert called(choice.message) == CALLS
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == choice.message.reasoning == "I must look."
    assert choice.finish_reason == "tool_calls"
    ids = [item.id for item in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(found.startswith("call_") for found in ids)
    assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens


def deltas_of(chunks: list[ChatCompletionChunk]) -> list[Any]:
    return [choice.delta for chunk in chunks for choice in chunk.choices]


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_a_stream_has_the_parts_in_order_and_never_half_a_tag(
    client: OpenAI, engine: ScriptedEngine, piece: int
) -> None:
    engine.script = saying(REPLY, piece=piece)
    chunks = list(ask(client, stream=True))
    deltas = deltas_of(chunks)
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (content, reasoning) == ("I look.", "I must look.")
    assert not any(char in (delta.content or "") for delta in deltas for char in "<>{}")
    calls = [item for delta in deltas for item in delta.tool_calls or []]
    begins = [item for item in calls if item.id is not None]
    assert [(item.index, item.function.name, item.type) for item in begins] == [
        (0, "read", "function"),
        (1, "write", "function"),
    ]
    assert calls.index(begins[0]) == 0, "the name comes first"
    arguments = ["".join(item.function.arguments for item in calls if item.index == index) for index in (0, 1)]
    assert [json.loads(text) for text in arguments] == [wanted for _, wanted in CALLS]
    assert all(item.function.name is None for item in calls if item.id is None)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert deltas[0].role == "assistant"
    kinds = [kind_of(delta) for delta in deltas]
    assert sorted(kinds, key=["begin", "reasoning", "content", "call", "end"].index) == kinds


def kind_of(delta: Any) -> str:
    if delta.role == "assistant" and not (delta.content or delta.tool_calls or hasattr(delta, "reasoning")):
        return "begin"
    if delta.tool_calls:
        return "call"
    return "reasoning" if hasattr(delta, "reasoning_content") else "content" if delta.content else "end"


def test_arguments_are_streamed_as_they_come(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(call("write", path="x" * 400), piece=10)
    texts = [
        item.function.arguments
        for delta in deltas_of(list(ask(client, stream=True)))
        for item in delta.tool_calls or []
    ]
    assert max(map(len, texts)) < 200
    assert json.loads("".join(texts)) == {"path": "x" * 400}


def test_the_stream_helper_assembles_calls(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(REPLY)
    with client.chat.completions.stream(model="scripted", messages=MESSAGES, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert called(message) == CALLS
    assert message.content == "I look."
    assert "tool_calls.function.arguments.delta" in events


def test_without_parallel_calls_the_reply_has_the_first_one(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(REPLY)
    assert called(ask(client, parallel_tool_calls=False).choices[0].message) == CALLS[:1]


def test_each_choice_has_calls_of_its_own(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(call("read", path="a"), "no call", call("write", path="b"))
    choices = ask(client, n=3).choices
    assert [called(choice.message) for choice in choices] == [[("read", {"path": "a"})], [], [("write", {"path": "b"})]]
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    assert choices[0].message.content is None


@pytest.mark.parametrize("fields", [{"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}])
def test_where_no_tool_is_offered_a_call_is_text(client: OpenAI, engine: ScriptedEngine, fields: Any) -> None:
    text = call("read", path="a.py")
    engine.script = saying(text)
    message = ask(client, **fields).choices[0].message
    assert (message.content, message.tool_calls) == (text, None)


def test_the_client_sends_back_what_it_got(client: OpenAI, engine: ScriptedEngine) -> None:
    """Calls, results and reasoning become a prompt again."""
    engine.script = saying(REPLY)
    message = ask(client).choices[0].message
    results = [{"role": "tool", "tool_call_id": item.id, "content": "done"} for item in message.tool_calls]
    assert ask(client, messages=[*MESSAGES, message.model_dump(), *results]).usage.prompt_tokens > 0
    text = engine.last_prompt
    assert call("read", path="a.py") in text
    assert "<think>\nI must look.\n</think>" in text
    assert text.count("<tool_response>\ndone\n</tool_response>") == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "write"}}])
def test_a_call_that_is_asked_for_constrains_the_reply(client: OpenAI, engine: ScriptedEngine, choice: Any) -> None:
    engine.script = saying(call("write", path="b"))
    assert called(ask(client, tool_choice=choice).choices[0].message) == [("write", {"path": "b"})]
    constraint = engine.requests[-1].constraint
    assert constraint is not None
    assert constraint.kind == "lark"
    assert ("read" in constraint.source) is (choice == "required")


def test_thinking_is_turned_off_by_the_effort_none(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("hello")
    for effort, is_closed in (("none", True), ("low", False)):
        ask(client, reasoning_effort=effort)
        text = engine.last_prompt
        assert text.endswith("<think>\n\n</think>\n\n") is is_closed


def test_a_reply_that_was_begun_goes_on(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(" prints 2.")
    reply = ask(client, messages=[*MESSAGES, {"role": "assistant", "content": "a.py"}])
    assert reply.choices[0].message.content == " prints 2."
    assert engine.last_prompt.endswith("<|im_start|>assistant\na.py")


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITY_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": CITY | {"additionalProperties": False}}}
    for name in ("weather", "population")
]


@pytest.fixture(scope="module")
def daemon(agent_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    """A real engine over random weights: it writes what it must, and nothing sensible besides."""
    with real_app(agent_model, tmp_path_factory.mktemp("kv"), kv_cache_gate="off") as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_of_random_weights_calls_the_tool_that_it_must_call(daemon: AppServer, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "population"}}
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        for choice, names in (("required", {"weather", "population"}), (named, {"population"})):
            for seed in range(3):
                fields: dict[str, Any] = {"model": "agent", "messages": MESSAGES, "tools": CITY_TOOLS, "seed": seed}
                fields |= {"tool_choice": choice, "parallel_tool_calls": False, "reasoning_effort": "none"}
                if stream:
                    with client.chat.completions.stream(**fields) as events:
                        reply = events.get_final_completion().choices[0]
                else:
                    reply = client.chat.completions.create(**fields).choices[0]
                [(name, arguments)] = called(reply.message)
                assert name in names
                assert arguments in ({"city": "Oslo"}, {"city": "Rome"})
                assert (reply.message.content or "", reply.finish_reason) == ("", "tool_calls")


def test_a_reply_of_a_schema_or_a_call_is_one_of_both(daemon: AppServer) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": CITY_TOOLS[0]["function"]["parameters"]},
    }
    fields: dict[str, Any] = {"model": "agent", "messages": MESSAGES, "tools": CITY_TOOLS, "response_format": form}
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        for choice in client.chat.completions.create(**fields, n=8, seed=1, reasoning_effort="none").choices:
            texts = [arguments for _, arguments in called(choice.message)] or [json.loads(choice.message.content or "")]
            assert all(text in ({"city": "Oslo"}, {"city": "Rome"}) for text in texts)


class City(BaseModel):
    city: Literal["Oslo", "Rome"]


def test_the_parse_helper_gets_an_object_of_its_class(daemon: AppServer) -> None:
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.parse(
            model="agent", messages=MESSAGES, response_format=City, reasoning_effort="none", seed=5
        )
        assert isinstance(reply.choices[0].message.parsed, City)
        tool = openai.pydantic_function_tool(City, name="weather")
        forced = client.chat.completions.parse(
            model="agent",
            messages=MESSAGES,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            reasoning_effort="none",
            seed=5,
        )
        [item] = forced.choices[0].message.tool_calls or []
        assert isinstance(item.function.parsed_arguments, City)


@pytest.fixture
def claude(daemon: AppServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        yield client


def message_of(client: Anthropic, *, stream: bool, **fields: Any) -> Any:
    fields = {"model": "agent", "messages": MESSAGES, "max_tokens": 200, "thinking": {"type": "disabled"}} | fields
    messages: Any = client.messages
    if not stream:
        return messages.create(**fields)
    with messages.stream(**fields) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"weather", "population"}), ({"type": "tool", "name": "population"}, {"population"})],
    ids=["any", "tool"],
)
def test_anthropics_client_gets_the_call_that_it_forces(
    claude: Anthropic, stream: bool, choice: Any, names: set[str]
) -> None:
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in CITY_TOOLS]
    choice |= {"disable_parallel_tool_use": True}
    message = message_of(claude, stream=stream, tools=tools, tool_choice=choice)
    [block] = message.content
    assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
    assert block.name in names
    assert block.input in ({"city": "Oslo"}, {"city": "Rome"})


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_gets_json_of_the_schema_that_it_sends(claude: Anthropic, stream: bool) -> None:
    form = {"type": "json_schema", "schema": CITY | {"additionalProperties": False}}
    message = message_of(claude, stream=stream, output_config={"format": form})
    [block] = message.content
    assert (block.type, message.stop_reason) == ("text", "end_turn")
    assert json.loads(block.text) in ({"city": "Oslo"}, {"city": "Rome"})


def test_a_prompt_without_a_reply_warms_the_cache(claude: Anthropic) -> None:
    system = [{"type": "text", "text": "Rivers. " * 40, "cache_control": {"type": "ephemeral"}}]
    warm = message_of(claude, stream=False, max_tokens=0, system=system)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert warm.usage.cache_creation_input_tokens > 0
    other = [{"role": "user", "content": "Name one."}]
    reply = message_of(claude, stream=False, max_tokens=1, system=system, messages=other)
    # The whole system prompt, and the beginning of the message.
    assert reply.usage.cache_read_input_tokens > 0.8 * warm.usage.cache_creation_input_tokens


def test_props_and_the_model_card_tell_how_the_model_writes(server: AppServer) -> None:
    with server.client() as client:
        assert client.get("/props").json()["model"]["output_format"] == "hermes"
        [card] = client.get("/v1/models").json()["data"]
    assert {"tool_use", "reasoning"} <= set(card["capabilities"])


THINK = {"max_tokens": 40}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": MESSAGES, "reasoning": THINK}),
        ("responses", {"input": "What?", "reasoning": THINK}),
        (
            "messages",
            {"messages": MESSAGES, "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 40}},
        ),
    ],
)
def test_a_budget_for_thinking_ends_the_thought(
    server: AppServer, engine: ScriptedEngine, path: str, fields: dict[str, Any]
) -> None:
    engine.script = saying("hello")
    httpx.post(f"{server.url}/v1/{path}", json={"model": "scripted"} | fields).raise_for_status()
    budget = engine.requests[-1].thought_budget
    assert budget is not None
    assert (budget.max_tokens, engine.tokenizer.decode(budget.closing)) == (40, "</think>")
    see = budget.new_watch()
    assert [see(piece) for piece in ["", "<think>", "hm", "</think>", "a"]] == [False, False, True, False, False]


def test_a_thought_of_a_real_model_has_as_many_tokens_as_it_may(daemon: AppServer) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
    body = {"model": "agent", "messages": begun, "max_tokens": 30, "seed": 1, "reasoning": {"max_tokens": 12}}
    reply = httpx.post(f"{daemon.url}/v1/chat/completions", json=body | {"logprobs": True}).json()
    [choice] = reply["choices"]
    written = [token["token"] for token in choice["logprobs"]["content"]]
    assert "".join(written[:12]).endswith("</think>")
    assert "</think>" not in "".join(written[:11])
    assert choice["message"]["reasoning"]
    assert choice["message"]["content"]
