"""Replies that clients send back are restored to their last token, over HTTP, with sampled tokens of a real engine."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.chat.encoder import Encoder, Encoding
from tests.server.chat_model import write_chat_model
from tests.server.daemon_process import DaemonProcess, reply_to, serve_flags
from tests.server.scripted import AppServer, real_app

CHAT = "/v1/chat/completions"
REPLY = 40


@pytest.fixture(scope="module")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    with real_app(chat_model, tmp_path_factory.mktemp("replay"), kv_memory_entries=0, kv_cache_gate="off") as server:
        yield server


class Talk:
    """A conversation about a topic of its own, so that tests do not find what others left."""

    def __init__(self, client: httpx.Client, topic: str) -> None:
        self.client = client
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"Tell me of {topic}, and where it begins."}]

    def say(self, *, options: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """Returns a reply of a model with random weights: no tokenizer gives its text the tokens that were sampled."""
        body = {"messages": self.messages, "max_tokens": REPLY, "seed": 5, **fields}
        return reply_to(self.client, body, **{"scope": "full"} | (options or {}))

    def hear(self, content: str, question: str = "And lakes?") -> None:
        self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": question}]


@pytest.fixture
def talk(server: AppServer, request: pytest.FixtureRequest) -> Iterator[Talk]:
    with server.client() as client:
        yield Talk(client, request.node.name)


def content_of(reply: dict[str, Any], choice: int = 0) -> str:
    return str(reply["choices"][choice]["message"]["content"])


def computed(reply: dict[str, Any]) -> int:
    """The tokens of prompt and reply that have state: the last token of a reply is never computed."""
    return int(reply["usage"]["total_tokens"] - 1)


def test_the_next_turn_restores_up_to_the_end_of_the_reply(talk: Talk) -> None:
    first = talk.say()
    talk.hear(content_of(first))
    second = talk.say()
    assert second["prefix_cache"]["restored"] == computed(first)
    assert second["prefix_cache"]["replayed"] == 1
    talk.hear(content_of(second), "And seas?")
    third = talk.say()
    assert third["prefix_cache"]["restored"] == computed(second)
    assert third["prefix_cache"]["replayed"] == 2


def test_a_streamed_reply_is_remembered_too(talk: Talk, server: AppServer) -> None:
    body = {"messages": talk.messages, "max_tokens": REPLY, "seed": 5, "stream": True}
    with server.client() as client:
        lines = client.post(CHAT, json=body | {"prefix_cache": {"scope": "full"}}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    talk.hear("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
    assert talk.say()["prefix_cache"]["replayed"] == 1


def test_a_reply_to_another_tenant_is_not_replayed(talk: Talk) -> None:
    talk.hear(content_of(talk.say(options={"salt": "alice"})))
    assert "replayed" not in talk.say(options={"salt": "bob"})["prefix_cache"]
    assert "replayed" not in talk.say()["prefix_cache"]
    assert talk.say(options={"salt": "alice"})["prefix_cache"]["replayed"] == 1


def test_without_replay_the_template_writes_every_reply_and_less_is_restored(talk: Talk) -> None:
    first = talk.say()
    talk.hear(content_of(first))
    second = talk.say(options={"replay": False})
    assert "replayed" not in second["prefix_cache"]
    assert second["prefix_cache"]["restored"] < computed(first)


@pytest.mark.parametrize("options", [{"replay": False}, {"save": False}, {"scope": "off"}], ids=str)
def test_a_request_that_keeps_nothing_leaves_no_reply_to_be_replayed(talk: Talk, options: dict[str, Any]) -> None:
    talk.hear(content_of(talk.say(options=options)))
    assert "replayed" not in talk.say()["prefix_cache"]


def test_a_request_that_only_restores_replays_what_others_left(talk: Talk) -> None:
    talk.hear(content_of(talk.say()))
    assert talk.say(options={"save": False})["prefix_cache"]["replayed"] == 1
    assert "replayed" not in talk.say(options={"scope": "off"})["prefix_cache"]


TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_CITIES = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "day": {"enum": ["today"]}}}
WEATHER = {"name": "get_weather", "parameters": _CITIES | {"required": ["city", "day"], "additionalProperties": False}}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    """A model with random weights that calls a tool when it is forced to."""
    model = write_chat_model(tmp_path_factory.mktemp("models") / "calling", chat_template=TOOL_TEMPLATE)
    with real_app(model, tmp_path_factory.mktemp("calls"), kv_memory_entries=0, kv_cache_gate="off") as server:
        yield server


def no_blanks(server: AppServer) -> dict[str, int]:
    tokenizer = server.engine.tokenizer
    return {str(token): -100 for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()}


def test_a_call_is_restored_in_another_formatting_and_lost_without_replay(calling: AppServer) -> None:
    with calling.client() as client:
        talk = Talk(client, "rain")
        tools: dict[str, Any] = {"tools": [{"type": "function", "function": WEATHER}], "max_tokens": 200}
        # JSON may have blanks without end between its parts, and random weights like them.
        first = talk.say(tool_choice="required", parallel_tool_calls=False, logit_bias=no_blanks(calling), **tools)
        message = first["choices"][0]["message"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        [call] = message["tool_calls"]
        arguments = dict(reversed(json.loads(call["function"]["arguments"]).items()))
        sent = call | {"function": call["function"] | {"arguments": json.dumps(arguments, indent=4)}}
        talk.messages += [
            {"role": "assistant", "content": message["content"], "tool_calls": [sent]},
            {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        ]
        without = talk.say(options={"replay": False, "save": False}, **tools)
        assert without["prefix_cache"]["restored"] < computed(first)
        second = talk.say(**tools)
        assert second["prefix_cache"]["replayed"] == 1
        assert second["prefix_cache"]["restored"] == computed(first)


def test_a_call_is_restored_in_anthropics_api_too(calling: AppServer) -> None:
    schema = WEATHER["parameters"]
    body = {"tools": [{"name": "get_weather", "input_schema": schema}], "prefix_cache": {"scope": "full"}}
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
    forced = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "logit_bias": no_blanks(calling)}
    with calling.client() as client:
        first = client.post("/v1/messages", json=body | forced | {"messages": messages, "max_tokens": 200}).json()
        [use] = [block for block in first["content"] if block["type"] == "tool_use"]
        sent = use | {"input": dict(reversed(use["input"].items()))}
        messages += [
            {"role": "assistant", "content": [sent]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}]},
        ]
        second = client.post("/v1/messages", json=body | {"messages": messages, "max_tokens": 8}).json()
    usage = first["usage"]
    read = sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))
    assert second["prefix_cache"]["replayed"] == 1
    assert second["usage"]["cache_read_input_tokens"] == read + usage["output_tokens"] - 1


def test_a_call_is_restored_in_the_responses_api_too(calling: AppServer) -> None:
    bias, cache = no_blanks(calling), {"scope": "full"}
    with calling.client() as client:
        body = {"tools": [{"type": "function", **WEATHER}], "logit_bias": bias, "prefix_cache": cache}
        items: list[Any] = [{"type": "message", "role": "user", "content": "How is the weather in Oslo?"}]
        forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
        first = client.post("/v1/responses", json=body | forced | {"input": items}).json()
        [call] = [item for item in first["output"] if item["type"] == "function_call"]
        arguments = json.dumps(json.loads(call["arguments"]), indent=2)
        items += [
            {"type": "function_call", "call_id": call["call_id"], "name": call["name"], "arguments": arguments},
            {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"},
        ]
        second = client.post("/v1/responses", json=body | {"input": items, "max_output_tokens": 8}).json()
        assert second["prefix_cache"]["replayed"] == 1
        assert second["prefix_cache"]["restored"] == first["usage"]["total_tokens"] - 1


def test_replies_are_replayed_after_the_daemon_was_killed(chat_model: Path, tmp_path: Path) -> None:
    flags = serve_flags(chat_model, tmp_path / "kv", block_size=16, kv_cache_min_tokens=16)
    with DaemonProcess(*flags).wait_ready() as daemon, daemon.client() as client:
        talk = Talk(client, "rivers")
        first = talk.say()
        daemon.wait_saved()
        daemon.stop(signal.SIGKILL)
    talk.hear(content_of(first))
    with DaemonProcess(*flags).wait_ready() as daemon, daemon.client() as client:
        after = Talk(client, "")
        after.messages = talk.messages
        second = after.say()
    assert second["prefix_cache"]["replayed"] == 1
    assert second["prefix_cache"]["restored"] == computed(first)


def test_long_texts_of_earlier_prompts_are_not_encoded_again(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.chat.encoder.PART_CHARS", 16)
    encoded: list[str] = []
    encode = Encoder._encoded

    def noted(self: Encoder, texts: Sequence[str]) -> list[Encoding]:
        encoded.extend(texts)
        return encode(self, texts)

    def encodes(**options: Any) -> bool:
        """Says whether the question is encoded for such a request."""
        encoded.clear()
        prompts.append(talk.say(options=options)["usage"]["prompt_tokens"])
        return any("where it begins" in text for text in encoded)

    monkeypatch.setattr(Encoder, "_encoded", noted)
    prompts: list[int] = []
    assert encodes(scope="off")
    assert encodes(save=False)
    assert encodes()
    assert not encodes()
    assert not encodes(save=False)
    assert not encodes(replay=False)
    assert encodes(scope="off")
    assert encodes(salt="another")
    assert len(set(prompts)) == 1
    body = {"prompt": talk.messages[0]["content"] + " Of lakes, too.", "max_tokens": 1}
    for known in (False, True):
        encoded.clear()
        reply_to(talk.client, body, "/v1/completions", scope="full")
        assert (body["prompt"] not in encoded) == known
