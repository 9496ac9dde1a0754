"""Replies that clients send back are restored to their last token, over HTTP, with sampled tokens of a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.daemon.chat.encoder import Encoder
from diskprefix.daemon.chat.known_parts import Encoding
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import reply_to
from tests.daemon.server.scripted import AppServer, real_app
from tests.runtimes import REPLIES_LATER, not_by_llama

CHAT = "/v1/chat/completions"
REPLY = 40


@pytest.fixture(scope="module")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    with real_app(chat_model, tmp_path_factory.mktemp("replay"), kv_memory_keeps=False, kv_cache_gate="off") as server:
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


@not_by_llama(REPLIES_LATER)
def test_the_next_turn_restores_up_to_the_end_of_the_reply(talk: Talk) -> None:
    first = talk.say()
    talk.hear(content_of(first))
    without = talk.say(options={"replay": False, "save": False})
    assert "replayed" not in without["prefix_cache"]
    assert without["prefix_cache"]["restored"] < computed(first), "the template writes every reply"
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
    assert talk.say(options={"salt": "alice", "save": False})["prefix_cache"]["replayed"] == 1
    assert "replayed" not in talk.say(options={"salt": "alice", "scope": "off"})["prefix_cache"]


@pytest.mark.parametrize("options", [{"replay": False}, {"save": False}, {"scope": "off"}], ids=str)
def test_a_request_that_keeps_nothing_leaves_no_reply_to_be_replayed(talk: Talk, options: dict[str, Any]) -> None:
    talk.hear(content_of(talk.say(options=options)))
    assert "replayed" not in talk.say()["prefix_cache"]


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
    with real_app(model, tmp_path_factory.mktemp("calls"), kv_memory_keeps=False, kv_cache_gate="off") as server:
        yield server


def no_blanks(server: AppServer) -> dict[str, int]:
    tokenizer = server.engine.tokenizer
    return {str(token): -100 for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()}


FUNCTION = {"type": "function", "function": WEATHER}
APIS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        {"tools": [FUNCTION], "max_tokens": 200},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    "/v1/messages": (
        {"tools": [{"name": "get_weather", "input_schema": WEATHER["parameters"]}], "max_tokens": 200},
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    ),
    "/v1/responses": (
        {"tools": [{"type": "function", **WEATHER}], "max_output_tokens": 200},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
}
"""For each API the fields of a request that offers a tool, and those by which it must be called."""


def rewritten(arguments: str) -> str:
    return json.dumps(dict(reversed(json.loads(arguments).items())), indent=4)


def answered(path: str, reply: dict[str, Any]) -> list[Any]:
    """The call of a reply, as a client sends it back in another formatting, and its result."""
    if path == "/v1/responses":
        [call] = [item for item in reply["output"] if item["type"] == "function_call"]
        sent = {name: call[name] for name in ("type", "call_id", "name")} | {"arguments": rewritten(call["arguments"])}
        return [sent, {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}]
    if path == "/v1/messages":
        [use] = [block for block in reply["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}
        sent = use | {"input": json.loads(rewritten(json.dumps(use["input"])))}
        return [{"role": "assistant", "content": [sent]}, {"role": "user", "content": [result]}]
    message = reply["choices"][0]["message"]
    [call] = message["tool_calls"]
    sent = call | {"function": call["function"] | {"arguments": rewritten(call["function"]["arguments"])}}
    said = {"role": "assistant", "content": message["content"], "tool_calls": [sent]}
    return [said, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]


@pytest.mark.cases(2)
@not_by_llama(REPLIES_LATER)
@pytest.mark.parametrize("path", APIS)
def test_a_call_is_restored_in_another_formatting_and_lost_without_replay(calling: AppServer, path: str) -> None:
    fields, forced = APIS[path]
    said: list[Any] = [{"role": "user", "content": f"How is the weather by {path}?"}]
    name = "input" if path == "/v1/responses" else "messages"
    with calling.client() as client:
        # JSON may have blanks without end between its parts, and random weights like them.
        body = fields | forced | {"logit_bias": no_blanks(calling)}
        first = reply_to(client, body | {name: said}, path, scope="full")
        said += answered(path, first)
        without = reply_to(client, fields | {name: said}, path, scope="full", replay=False, save=False)
        second = reply_to(client, fields | {name: said}, path, scope="full")
    usage = first["usage"]
    computed = sum(usage[name] for name in usage if name.endswith("input_tokens") or name == "prompt_tokens")
    computed += usage.get("output_tokens") or usage["completion_tokens"]
    assert without["prefix_cache"]["restored"] < computed - 1
    assert (second["prefix_cache"]["replayed"], second["prefix_cache"]["restored"]) == (1, computed - 1)


def test_long_texts_of_earlier_prompts_are_not_encoded_again(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.daemon.chat.encoder.PART_CHARS", 16)
    encoded: list[str] = []
    encode = Encoder._encoded

    def noted(self: Encoder, texts: Sequence[str]) -> list[Encoding]:
        encoded.extend(texts)
        return encode(self, texts)

    def encodes(**options: Any) -> bool:
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
