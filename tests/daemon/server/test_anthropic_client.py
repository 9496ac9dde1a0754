"""The official `anthropic` client, unchanged: over prepared replies, and against the real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from msgspec.structs import replace

from diskprefix.daemon.engine.request import FinishEvent, GenerateRequest, ProgressEvent, TextEvent
from tests.daemon.server.agent_model import call, pieces, thought
from tests.daemon.server.chat_model import POSITIONS
from tests.daemon.server.daemon_process import DaemonProcess
from tests.daemon.server.scripted import CHOSEN, AppServer, Emit, ScriptedEngine, done

MODEL = "scripted"
MESSAGES: list[Any] = [{"role": "user", "content": "What does a.py print?"}]
TOOL: Any = {
    "name": "read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
CALLING = thought("I look.") + "Let me see.\n" + call("read", path="a.py")
ANSWERING = "It prints 1."


def answering(*replies: str, stop: str | None = None) -> Callable[..., None]:
    """An engine that gives one of `replies` to each request, and the last one to all that follow."""
    waiting = list(replies)

    def script(_request: GenerateRequest, emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
        texts = pieces(waiting.pop(0) if len(waiting) > 1 else waiting[0], 10)
        emit(ProgressEvent(10, 4, 4, 8, 0.5))
        for text in texts:
            emit(TextEvent(0, text, (1,)))
        emit(FinishEvent(0, "stop", stop))
        kept = replace(CHOSEN, selected=8, aligned=8)
        emit(done(len(texts), cached_tokens=4, selection=kept, saved="queued"))

    return script


@pytest.fixture
def client(agent: AppServer, engine: ScriptedEngine) -> Iterator[Anthropic]:
    engine.script = answering(CALLING)
    with Anthropic(base_url=agent.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Anthropic, **fields: Any) -> Any:
    create: Any = client.messages.create
    return create(**{"model": MODEL, "max_tokens": 64, "messages": MESSAGES} | fields)


def test_a_message_has_thought_text_and_call(client: Anthropic) -> None:
    message = ask(client, tools=[TOOL])
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        MODEL,
        "tool_use",
    )
    thought, text, call = message.content
    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "I look.", message.id)
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "read", {"path": "a.py"})
    assert call.id.startswith("toolu_")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (2, 4, 4)
    assert usage.output_tokens == len(pieces(CALLING, 10))
    assert message.prefix_cache["restored"] == 4
    assert message.timings["ttft_ms"] == 5


@pytest.mark.parametrize("beta", [False, True])
def test_the_stream_helper_assembles_the_message_of_a_reply_without_stream(client: Anthropic, beta: bool) -> None:
    api: Any = client.beta.messages if beta else client.messages
    whole = api.create(model=MODEL, max_tokens=64, messages=MESSAGES, tools=[TOOL])
    with api.stream(model=MODEL, max_tokens=64, messages=MESSAGES, tools=[TOOL]) as stream:
        texts = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert texts == "Let me see."
    assert [without_ids(block) for block in message.content] == [without_ids(block) for block in whole.content]
    # How many tokens were those of the thought depends on which texts the client got as one.
    assert without_ids(message.usage) == without_ids(whole.usage)
    assert (message.stop_reason, message.stop_sequence) == (whole.stop_reason, whole.stop_sequence)


def without_ids(message: Any) -> dict[str, Any]:
    changing = ("id", "signature", "parsed_output", "output_tokens_details")
    return {name: value for name, value in message.to_dict().items() if name not in changing}


def test_the_tool_runner_calls_the_tool_and_hands_back_its_result(client: Anthropic, engine: ScriptedEngine) -> None:
    engine.script = answering(CALLING, ANSWERING)
    read_paths = []

    @beta_tool
    def read(path: str) -> str:
        """Reads a file."""
        read_paths.append(path)
        return "print(1)"

    last = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=64, messages=MESSAGES, tools=[read], betas=["context-1m-2025-08-07"]
    ).until_done()
    assert read_paths == ["a.py"]
    assert [block.to_dict()["text"] for block in last.content] == ["It prints 1."]
    assert last.stop_reason == "end_turn"
    prompt = engine.last_prompt
    assert call("read", path="a.py") in prompt
    assert "<tool_response>\nprint(1)\n</tool_response>" in prompt


def test_sampling_and_the_fields_of_the_cache_reach_the_engine(client: Anthropic, engine: ScriptedEngine) -> None:
    of_cache = {"prefix_cache": {"scope": "full", "ttl": "1h"}, "cache_salt": "alice"}
    ask(
        client,
        max_tokens=7,
        stop_sequences=["END", "\n\n"],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3} | of_cache,
    )
    ask(client)
    salted, plain = engine.requests[-2:]
    sampling = salted.sampling
    assert sampling.stop == ("END", "\n\n")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 3, 7)
    assert (str(salted.cache.scope), salted.cache.ttl_s, salted.constraint) == ("full", 3600.0, None)
    assert plain.cache.tenant != salted.cache.tenant


FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
ASKING: dict[str, dict[str, Any]] = {
    "stream": {"stream": True},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "any"}},
    "output_config.format.schema": {"output_config": {"format": FORMAT}},
    "structured_outputs.choice": {"extra_body": {"structured_outputs": {"choice": ["a"]}}},
}
"""What asks for a reply, by its param."""


@pytest.mark.parametrize(
    ("fields", "error_type", "param", "code"),
    [
        ({"max_tokens": -2}, "invalid_request_error", "max_tokens", None),
        ({"tool_choice": {"type": "any"}}, "invalid_request_error", "tool_choice", None),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "invalid_request_error",
            "messages.0.content.0.id",
            None,
        ),
        (
            {"messages": [{"role": "user", "content": "river " * 3000}]},
            "invalid_request_error",
            "messages",
            "context_length_exceeded",
        ),
        ({"model": "opus-5"}, "not_found_error", "model", "model_not_found"),
        *(({"max_tokens": 0} | fields, "invalid_request_error", param, None) for param, fields in ASKING.items()),
    ],
)
def test_a_request_that_is_refused_raises_the_clients_own_error(
    client: Anthropic, fields: dict[str, Any], error_type: str, param: str, code: str | None
) -> None:
    kind = anthropic.NotFoundError if error_type == "not_found_error" else anthropic.BadRequestError
    is_warming = fields.get("max_tokens") == 0
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            ask(client, **{"stream": stream} | fields)
        body: Any = caught.value.body
        named = "stream" if stream and is_warming else param
        assert (caught.value.type, body["error"]["details"]["param"]) == (error_type, named)
        assert ("cannot be combined with max_tokens: 0" in str(caught.value)) == is_warming
        assert (body["type"], body["request_id"]) == ("error", caught.value.request_id)
        assert code in (None, caught.value.error_code)


def test_models_have_the_form_of_the_api(client: Anthropic) -> None:
    [model] = client.models.list()
    assert model.to_dict() == client.models.retrieve(MODEL).to_dict()
    assert (model.id, model.type, model.max_input_tokens) == (MODEL, "model", POSITIONS)
    assert model.created_at.tzinfo is not None
    with pytest.raises(anthropic.NotFoundError, match="is not served here") as caught:
        client.models.retrieve("org/other")
    assert (caught.value.type, caught.value.error_code) == ("not_found_error", "model_not_found")


def test_tokens_are_counted_as_the_request_then_counts_them(daemon: DaemonProcess) -> None:
    fields: dict[str, Any] = {
        "model": "tiny-chat",
        "system": "Be brief.",
        "tools": [{**TOOL, "name": "counted"}],
        "messages": [*MESSAGES, {"role": "assistant", "content": "It prints"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(**fields).input_tokens
        for read in (0, counted):
            # A tenant of its own: prompts of other tests begin alike.
            with client.messages.stream(max_tokens=2, extra_body={"cache_salt": "counted"}, **fields) as stream:
                first = next(iter(stream))
                usage = stream.get_final_message().usage
            assert first.type == "message_start"
            assert first.message.usage.cache_read_input_tokens == usage.cache_read_input_tokens == read
            created = usage.cache_creation_input_tokens
            assert created is not None
            assert usage.input_tokens + read + created == counted
            assert (read == 0) == (created > 0)
            fewer = client.messages.count_tokens(**fields | {"tools": []}).input_tokens
            assert fewer < counted


def test_a_prompt_without_a_reply_warms_the_cache(agent_daemon: AppServer) -> None:
    system = [{"type": "text", "text": "Rivers. " * 40, "cache_control": {"type": "ephemeral"}}]
    with Anthropic(base_url=agent_daemon.url, api_key="none", max_retries=0) as client:
        warm = ask(client, model="agent", max_tokens=0, system=system)
        assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
        assert warm.usage.cache_creation_input_tokens > 0
        reply = ask(
            client, model="agent", max_tokens=1, system=system, messages=[{"role": "user", "content": "Name one."}]
        )
    # The whole system prompt, and the beginning of the message.
    assert reply.usage.cache_read_input_tokens > 0.8 * warm.usage.cache_creation_input_tokens
