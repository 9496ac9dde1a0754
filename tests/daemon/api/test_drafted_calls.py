"""A call that a model drafts in its thought, over each API: no client gets it if anything else follows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from diskprefix.daemon.api.anthropic_writer import MessageWriter
from diskprefix.daemon.api.dialect import Head, ReplyWriter
from diskprefix.daemon.api.openai_chat import ChatWriter
from diskprefix.daemon.api.reply import ReplyEvent, ReplyReader, whole_reply
from diskprefix.daemon.api.responses_writer import OutputItems, ResponseWriter
from diskprefix.daemon.engine.request import Event, FinishEvent, TextEvent
from diskprefix.daemon.ollama.ollama_dialect import OllamaWriter
from tests.daemon.chat.output.replies import format_named, tool
from tests.daemon.server.scripted import done

HEAD = Head(id="id-1", created=1, model="m", fingerprint="fp", prompt_tokens=10, request_id="req_1")
TOOLS = [tool("get_weather", city={"type": "string"}), tool("look", place={"type": "string"})]
DRAFT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "Rome"}}\n</tool_call>'
LOOK = ("look", {"place": "Rome"})
THOUGHT = f"I could write\n{DRAFT}\nBut wait."
REPLIES = {
    "an answer": (f"{THOUGHT}\n</think>\n\nDone", THOUGHT, "Done", []),
    "a call": (f"{THOUGHT}\n</think>\n\n{CALL}", THOUGHT, "", [LOOK]),
    "nothing, after other text": (f"{THOUGHT}\n</think>\n", THOUGHT, "", []),
    "nothing, after another call": (f"{THOUGHT} Rather\n{CALL}\n</think>\n", f"{THOUGHT} Rather", "", [LOOK]),
    "nothing": (f"I look.\n{DRAFT}\n</think>\n", "I look.", "", [("get_weather", {"city": "Oslo"})]),
}


class Got(NamedTuple):
    """What a client has of a reply. `reason` is why the reply ended, in the words of the API."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    reason: str


def of_chat(bodies: list[Any]) -> Got:
    reasoning, content, reason = "", "", ""
    calls: list[list[str]] = []
    for choice in (choice for body in bodies for choice in body["choices"]):
        said = choice.get("delta") or choice.get("message") or {}
        reasoning += said.get("reasoning_content") or ""
        content += said.get("content") or ""
        reason = choice.get("finish_reason") or reason
        for call in said.get("tool_calls") or ():
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call.get("index", -1)][1] += call["function"].get("arguments") or ""
    return Got(reasoning, content, [(name, json.loads(text)) for name, text in calls], reason)


def of_messages(bodies: list[Any]) -> Got:
    if bodies[0]["type"] == "message":
        blocks, reason = bodies[0]["content"], bodies[0]["stop_reason"]
    else:
        blocks = [dict(body["content_block"]) for body in bodies if body["type"] == "content_block_start"]
        for body in (body for body in bodies if body["type"] == "content_block_delta"):
            block, delta = blocks[body["index"]], body["delta"]
            kind = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
            if name := kind.get(delta["type"]):
                block[name] = block.get(name, "") + delta[name]
        reason = next(body["delta"]["stop_reason"] for body in bodies if body["type"] == "message_delta")
    called = [block for block in blocks if block["type"] == "tool_use"]
    calls = [(block["name"], json.loads(block.get("partial_json") or json.dumps(block["input"]))) for block in called]
    thinking, text = ("".join(block.get(kind, "") for block in blocks) for kind in ("thinking", "text"))
    return Got(thinking, text, calls, reason)


def of_responses(bodies: list[Any]) -> Got:
    items = (bodies[-1].get("response") or bodies[-1])["output"]
    parts = {
        kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    }
    calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    streamed = [body["item"] for body in bodies if body.get("type") == "response.output_item.done"]
    assert not streamed or [item["type"] for item in streamed] == [item["type"] for item in items]
    return Got(parts["reasoning"], parts["message"], calls, "tool_calls" if calls else "stop")


def of_ollama(bodies: list[Any]) -> Got:
    said = [body["message"] for body in bodies]
    thinking, content = ("".join(message.get(kind, "") for message in said) for kind in ("thinking", "content"))
    called = [call["function"] for message in said for call in message.get("tool_calls", ())]
    return Got(thinking, content, [(call["name"], call["arguments"]) for call in called], "")


Api = tuple[Callable[[], ReplyWriter], Callable[[list[Any]], Got], dict[bool, str]]
APIS: dict[str, Api] = {
    "chat": (
        lambda: ChatWriter(HEAD, include_usage=False, with_logprobs=False),
        of_chat,
        {True: "tool_calls", False: "stop"},
    ),
    "messages": (lambda: MessageWriter(HEAD), of_messages, {True: "tool_use", False: "end_turn"}),
    "responses": (
        lambda: ResponseWriter(HEAD, {}, OutputItems("id-1")),
        of_responses,
        {True: "tool_calls", False: "stop"},
    ),
    "ollama": (lambda: OllamaWriter(HEAD, 100, is_chat=True), of_ollama, {True: "", False: ""}),
}


def events_of(pieces: Iterable[str]) -> Iterator[ReplyEvent]:
    reader = ReplyReader(lambda: format_named("hermes").parser(TOOLS, "<think>\n"), "call_")
    events: list[Event] = [*(TextEvent(0, piece, (1,)) for piece in pieces), FinishEvent(0, "stop"), done()]
    for event in events:
        yield from reader.read(event)


def streamed(writer: ReplyWriter, pieces: Iterable[str]) -> list[Any]:
    sent = [*writer.begin(), *(event for read in events_of(pieces) for event in writer.events(read))]
    lines = b"".join(event.encode() for event in sent).decode().splitlines()
    texts = (line.removeprefix("data:").strip() for line in lines if not line.startswith(("event:", ":")))
    return [json.loads(text) for text in texts if text not in ("", "[DONE]")]


@pytest.mark.parametrize("case", REPLIES)
@pytest.mark.parametrize("api", APIS)
def test_a_call_in_a_thought_is_sent_only_if_nothing_but_its_end_follows(api: str, case: str) -> None:
    new_writer, joined, reasons = APIS[api]
    text, reasoning, content, calls = REPLIES[case]
    wanted = Got(reasoning, content, calls, reasons[bool(calls)])
    assert joined([new_writer().whole(whole_reply([*events_of([text])]))]) == wanted
    for at in range(len(text)):
        assert joined(streamed(new_writer(), [text[:at], text[at:]])) == wanted, text[:at]
    assert joined(streamed(new_writer(), text)) == wanted
