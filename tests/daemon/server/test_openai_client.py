"""The official `openai` client, unchanged: against the real daemon, and over prepared calls and thoughts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from diskprefix.daemon.server import generation
from tests.daemon.server.agent_model import call, saying, thought
from tests.daemon.server.daemon_process import DaemonProcess
from tests.daemon.server.scripted import AppServer, ScriptedEngine

MODEL = "tiny-chat"
RIVERS: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name three rivers and tell me where each of them begins."},
]
NO_END = {"0": -100, "2": -100}
"""Keeps the tokens that end a reply away, so that a random model speaks as long as it may."""


@pytest.fixture
def real(daemon: DaemonProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: OpenAI, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(**{"model": MODEL, "messages": RIVERS, "temperature": 0, "logit_bias": NO_END} | fields)


def test_a_stream_says_what_the_whole_reply_says(real: OpenAI) -> None:
    whole = chat(real, max_tokens=12, n=2)
    chunks = list(chat(real, max_tokens=12, n=2, stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert (last.choices, last.usage.completion_tokens, whole.usage.completion_tokens) == ([], 24, 24)
    assert last.model_extra["prefix_cache"]["restored"] == last.usage.prompt_tokens
    assert last.model_extra["timings"]["ttft_ms"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_choices_of_several_prompts_are_those_of_each_alone(real: OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": MODEL, "n": 2, "seed": 3, "max_tokens": 4, "logit_bias": NO_END}
    prompts: Any = ["Name three rivers", [5, 6, 7], "And three lakes"]
    alone = [real.completions.create(prompt=prompt, **fields) for prompt in prompts]
    wanted = [choice.text for reply in alone for choice in reply.choices]
    texts = [""] * len(wanted)
    if stream:
        options: Any = {"include_usage": True}
        chunks = list(real.completions.create(prompt=prompts, stream=True, stream_options=options, **fields))
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.text
        usage = chunks[-1].usage
    else:
        reply = real.completions.create(prompt=prompts, **fields)
        assert reply.object == "text_completion"
        assert [choice.index for choice in reply.choices] == list(range(6))
        texts, usage = [choice.text for choice in reply.choices], reply.usage
    assert texts == wanted
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone if each.usage is not None)


def test_a_completion_defaults_to_16_tokens(real: OpenAI) -> None:
    def reply(**fields: Any) -> Any:
        return real.completions.create(model=MODEL, prompt=["a", "b"], logit_bias=NO_END, **fields)

    assert reply().usage.completion_tokens == 32
    none = reply(max_tokens=0, n=2)
    assert none.usage.completion_tokens == 0
    assert [(choice.text, choice.finish_reason) for choice in none.choices] == [("", "length")] * 4
    chunks = list(reply(max_tokens=0, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == ["length", "length"]


@pytest.mark.parametrize("num_alternatives", [0, 2])
def test_the_log_probabilities_of_a_completion_have_the_token_itself(real: OpenAI, num_alternatives: int) -> None:
    reply = real.completions.create(
        model=MODEL, prompt="a", max_tokens=8, logprobs=num_alternatives, seed=1, logit_bias=NO_END
    )
    logprobs: Any = reply.choices[0].logprobs
    assert len(logprobs.tokens) == 8
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob
        assert num_alternatives <= len(top) <= num_alternatives + 1


PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": PARAMETERS}}
    for name in ("read", "write")
]
MESSAGES: list[Any] = [{"role": "user", "content": "What does a.py print?"}]
REPLY = thought("I must look.") + "I look.\n" + call("read", path="a.py") + "\n" + call("write", path='b "2".py')
CALLS = [("read", {"path": "a.py"}), ("write", {"path": 'b "2".py'})]


@pytest.fixture
def client(agent: AppServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAI]:
    # The scripted model says all at once. What waits is not joined, as if the client kept up with it.
    monkeypatch.setattr(generation, "_is_continued", lambda *_: False)
    with OpenAI(base_url=f"{agent.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "scripted", "messages": MESSAGES, "tools": TOOLS} | fields)


def called(message: Any) -> list[tuple[str, Any]]:
    return [(item.function.name, json.loads(item.function.arguments)) for item in message.tool_calls or []]


def test_a_client_sends_content_reasoning_and_calls_back(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(REPLY)
    reply = ask(client)
    [choice] = reply.choices
    message = choice.message
    assert called(message) == CALLS
    assert message.content == "I look."
    assert message.reasoning_content == message.reasoning == "I must look."
    assert choice.finish_reason == "tool_calls"
    assert len({item.id for item in message.tool_calls if item.id.startswith("call_")}) == 2
    assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens
    results = [{"role": "tool", "tool_call_id": item.id, "content": "done"} for item in message.tool_calls]
    ask(client, messages=[*MESSAGES, message.model_dump(), *results])
    text = engine.last_prompt
    assert call("read", path="a.py") in text
    assert "<think>\nI must look.\n</think>" in text
    assert text.count("<tool_response>\ndone\n</tool_response>") == 2


def deltas_of(chunks: list[ChatCompletionChunk]) -> list[Any]:
    return [choice.delta for chunk in chunks for choice in chunk.choices]


def kind_of(delta: Any) -> str:
    if delta.role == "assistant" and not (delta.content or delta.tool_calls or hasattr(delta, "reasoning")):
        return "begin"
    if delta.tool_calls:
        return "call"
    return "reasoning" if hasattr(delta, "reasoning_content") else "content" if delta.content else "end"


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


def test_streamed_arguments_are_assembled_by_the_official_helper(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("I write." + call("write", path="x" * 400), piece=10)
    calls = [item for delta in deltas_of(list(ask(client, stream=True))) for item in delta.tool_calls or []]
    assert max(len(item.function.arguments) for item in calls) < 200
    with client.chat.completions.stream(model="scripted", messages=MESSAGES, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert called(message) == [("write", {"path": "x" * 400})]
    assert message.content == "I write."
    assert "tool_calls.function.arguments.delta" in events


NAMED = {"type": "function", "function": {"name": "write"}}


@pytest.mark.parametrize(
    ("fields", "has_call", "constrained_to"),
    [
        ({"tools": openai.NOT_GIVEN}, False, None),
        ({"tool_choice": "none"}, False, {"read", "write"}),
        ({"tool_choice": "required"}, True, {"read", "write"}),
        ({"tool_choice": NAMED}, True, {"write"}),
    ],
    ids=["no tools", "none", "required", "named"],
)
def test_required_calls_constrain_and_forbidden_calls_are_text(
    client: OpenAI, engine: ScriptedEngine, fields: Any, has_call: bool, constrained_to: set[str] | None
) -> None:
    text = call("write", path="b")
    engine.script = saying(text)
    message = ask(client, **fields).choices[0].message
    assert called(message) == ([("write", {"path": "b"})] if has_call else [])
    assert message.content == (None if has_call else text)
    constraint = engine.requests[-1].constraint
    if constrained_to is None:
        assert constraint is None
    else:
        assert constraint is not None
        assert constraint.kind == "lark"
        assert {name for name in ("read", "write") if name in constraint.source} == constrained_to


def test_choices_without_parallel_calls_have_the_first_one_of_their_own(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(REPLY, "no call", call("write", path="b"))
    choices = ask(client, n=3, parallel_tool_calls=False).choices
    assert [called(choice.message) for choice in choices] == [CALLS[:1], [], [("write", {"path": "b"})]]
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": MESSAGES, "reasoning": {"max_tokens": 40}}),
        ("responses", {"input": "What?", "reasoning": {"max_tokens": 40}}),
        ("messages", {"messages": MESSAGES, "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 40}}),
    ],
)
def test_a_budget_for_thinking_ends_the_thought(
    agent: AppServer, engine: ScriptedEngine, path: str, fields: dict[str, Any]
) -> None:
    engine.script = saying("hello")
    httpx.post(f"{agent.url}/v1/{path}", json={"model": "scripted"} | fields).raise_for_status()
    budget = engine.requests[-1].thought_budget
    assert budget is not None
    assert (budget.max_tokens, engine.tokenizer.decode(budget.closing)) == (40, "</think>")
    see = budget.new_watch()
    assert [see(piece) for piece in ["", "<think>", "hm", "</think>", "a"]] == [False, False, True, False, False]


def test_props_and_the_model_card_tell_how_the_model_writes(agent: AppServer) -> None:
    with agent.client() as http:
        assert http.get("/props").json()["model"]["output_format"] == "hermes"
        [card] = http.get("/v1/models").json()["data"]
    assert {"tool_use", "reasoning"} <= set(card["capabilities"])


class City(BaseModel):
    city: Literal["Oslo", "Rome"]


@pytest.fixture
def random(agent_daemon: AppServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{agent_daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_parse_helper_gets_an_object_of_its_class(random: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "agent", "messages": MESSAGES, "reasoning_effort": "none", "seed": 5}
    reply = random.chat.completions.parse(**fields, response_format=City)
    assert isinstance(reply.choices[0].message.parsed, City)
    tool = openai.pydantic_function_tool(City, name="weather")
    forced: Any = random.chat.completions.parse(
        **fields, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    [item] = forced.choices[0].message.tool_calls
    assert isinstance(item.function.parsed_arguments, City)
