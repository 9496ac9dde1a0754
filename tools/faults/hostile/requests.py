"""Requests that are made to stop a server, each a kind of bad client with a name.

A kind is a function: from who calls, it returns what its clients do again and again. Bodies are made once, before.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from asyncio import gather
from collections.abc import Callable
from itertools import count
from typing import Any

from tools.faults.hostile.bad_clients import BadManners, Behaviour, Caller, End

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
_MIB = 1 << 20
_HELLO = [{"role": "user", "content": "hi"}]
_STREAM_TOKENS = 24
_PARALLEL = 8

Kind = Callable[[Caller], Behaviour]
KINDS: dict[str, Kind] = {}
"""The kinds by name. Clients get them in this order."""


def kind(name: str) -> Callable[[Kind], Kind]:
    def add(function: Kind) -> Kind:
        KINDS[name] = function
        return function

    return add


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": _HELLO, "max_tokens": 1} | fields).encode()


def _asking(
    caller: Caller, body: bytes, path: str = CHAT, *, patience_s: float | None = None, host: str = "localhost"
) -> Behaviour:
    request = caller.request(path, body, host=host)
    return lambda: caller.ask(request, patience_s=patience_s)


def _schema(schema: dict[str, Any]) -> bytes:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _patterns(number: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^a{{{i}}}.*b{{{i}}}$": {"type": "string"} for i in range(number)}}


@kind("allOf of 39 patterns")
def _all_of(caller: Caller) -> Behaviour:
    patterns = [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(39)]
    return _asking(caller, _schema({"allOf": patterns}), patience_s=3)


def _text_of(text: str, num_bytes: int) -> bytes:
    return chat(messages=[{"role": "user", "content": text * (num_bytes // len(text))}])


def _many(before: str, part: str, after: str) -> bytes:
    """Returns 31 MiB of one part."""
    return (before + ",".join([part] * (31 * _MIB // (len(part) + 1))) + after).encode()


@kind("31 MiB of arrays")
def _arrays(caller: Caller) -> Behaviour:
    before = json.dumps({"messages": _HELLO, "max_tokens": 1})[:-1] + ', "chat_template_kwargs": {"a": ['
    return _asking(caller, _many(before, "[]", "]}}"))


@kind("31 MiB of parts")
def _parts(caller: Caller) -> Behaviour:
    before = '{"max_tokens": 1, "messages": [{"role": "user", "content": ['
    return _asking(caller, _many(before, '{"type":"text","text":"x"}', "]}]}"))


def _nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@kind("deep JSON")
def _deep(caller: Caller) -> Behaviour:
    before = json.dumps({"messages": _HELLO, "max_tokens": 1})[:-1] + ', "chat_template_kwargs": '
    return _asking(caller, (before + _nested(100_000) + "}").encode())


@kind("deep arguments")
def _deep_arguments(caller: Caller) -> Behaviour:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": _nested(10_000)}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return _asking(caller, chat(messages=[*_HELLO, said, {"role": "tool", "tool_call_id": "c", "content": "1"}]))


@kind("infinite numbers")
def _infinite(caller: Caller) -> Behaviour:
    numbers = ",".join(["1" * 400] * 20_000 + ["1e999"])
    return _asking(caller, (chat()[:-1].decode() + ', "chat_template_kwargs": {"a": [' + numbers + "]}}").encode())


def _function(name: str, description: str = "") -> dict[str, Any]:
    return {"type": "function", "name": name, "description": description, "parameters": {"type": "object"}}


def _respond(**fields: Any) -> bytes:
    return json.dumps({"input": "hi", "max_output_tokens": 1} | fields).encode()


@kind("large tools in an echo")
def _echo(caller: Caller) -> Behaviour:
    tools = [_function(f"f{i}", "d" * 29_000) for i in range(1024)]
    return _asking(caller, _respond(tools=tools, tool_choice="none", stream=True), RESPONSES)


@kind("stored responses")
def _stored(caller: Caller) -> Behaviour:
    """Stores responses that are small on disk and large in an answer, and reads eight of them at a time."""
    keep = caller.request(RESPONSES, _respond(tools=[_function("f", "d" * (3 * _MIB))], tool_choice="none"))
    ids: list[str] = []

    async def run() -> End:
        if len(ids) < _PARALLEL:
            end = await caller.ask(keep)
            if b'"id":"resp_' in end.answer:
                ids.append("resp_" + end.answer.partition(b'"id":"resp_')[2].partition(b'"')[0].decode())
            return end
        heads = [caller.head(f"{RESPONSES}/{one}", method="GET") for one in ids[:_PARALLEL]]
        ends = await gather(*(caller.ask(head) for head in heads))
        return max(ends, key=lambda end: end.how)

    return run


@kind("new salts")
def _salts(caller: Caller) -> Behaviour:
    """Every eighth prompt is long enough to be saved."""
    numbers = count()

    async def run() -> End:
        number = next(numbers)
        content = "A river. " * (300 if number % 8 == 0 else 3)
        wanted = {"salt": f"salt {number}", "scope": "full"}
        return await caller.ask(
            caller.request(CHAT, chat(messages=[{"role": "user", "content": content}], prefix_cache=wanted))
        )

    return run


@kind("odd names of functions")
def _odd_names(caller: Caller) -> Behaviour:
    names = count()

    async def run() -> End:
        name = ("MIME_TYPE", "ARGUMENTS", "VALUE", "INDEX")[next(names) % 4]
        function = {"name": name, "parameters": {"type": "object", "properties": {name: {"type": "string"}}}}
        tools = [{"type": "function", "function": function}]
        forced = {"type": "function", "function": {"name": name}}
        return await caller.ask(caller.request(CHAT, chat(tools=tools, tool_choice=forced, max_tokens=16)))

    return run


def _png(width: int, height: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head, rows = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), zlib.compress(bytes(1 + 3 * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@kind("image of 1 × 6000")
def _image(caller: Caller) -> Behaviour:
    """A model that takes no images answers with a 400."""
    url = "data:image/png;base64," + base64.b64encode(_png(1, 6000)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return _asking(caller, chat(messages=[{"role": "user", "content": content}]))


KINDS |= {
    "2 000 patterns": lambda caller: _asking(caller, _schema(_patterns(2000)), patience_s=3),
    "300 patterns": lambda caller: _asking(caller, _schema(_patterns(300))),
    "nested pattern, n 16": lambda caller: _asking(
        caller,
        chat(structured_outputs={"json": {"type": "string", "pattern": "((a{100}){100}){100}"}}, n=16, max_tokens=32),
    ),
    "16 MiB of digits": lambda caller: _asking(caller, _text_of("1" * 299 + "x", 16 * _MIB)),
    "32 MiB of digits": lambda caller: _asking(caller, _text_of("1" * 299 + "x", 32 * _MIB - 1024)),
    "31 MiB of blanks": lambda caller: _asking(caller, _text_of(" ", 31 * _MIB)),
    "31 MiB of messages": lambda caller: _asking(
        caller, _many('{"max_tokens": 1, "messages": [', '{"role":"user","content":"x"}', "]}")
    ),
    "31 MiB to tokenize": lambda caller: _asking(
        caller, json.dumps({"content": "hello there " * (31 * _MIB // 12)}).encode(), "/tokenize"
    ),
    "31 MiB of a model's name": lambda caller: _asking(caller, chat(model="x" * (31 * _MIB))),
    "log probabilities, n 16": lambda caller: _asking(
        caller, chat(n=16, logprobs=True, top_logprobs=20, max_tokens=500, logit_bias={"2": -100})
    ),
    "wrong host": lambda caller: _asking(caller, chat(), host="rebound.example"),
    "tools that are skipped": lambda caller: _asking(
        caller, _respond(tools=[{"type": f"hosted_{i}_" + "x" * 1000} for i in range(1000)]), RESPONSES
    ),
}


def _manners(name: str, behave: Callable[[BadManners], Behaviour]) -> None:
    def of(caller: Caller) -> Behaviour:
        content = [{"role": "user", "content": "Tell me of a river. " * 4}]
        # No end before the last token.
        fields = {"max_tokens": _STREAM_TOKENS, "temperature": 0, "logit_bias": {"2": -100}}
        stream = chat(messages=content, stream=True, logprobs=True, top_logprobs=20, **fields)
        large = caller.request(CHAT, _text_of("hello there ", _MIB))
        return behave(BadManners(caller, caller.request(CHAT, stream), large))

    KINDS[name] = of


SLOW_READER = "slow reader"
"""The slowest client that is allowed: its streams must not be cut off."""
_manners(SLOW_READER, lambda client: client.slow_reader)
_manners("reader of single bytes", lambda client: client.reader_of_bytes)
_manners("reader that stops", lambda client: client.stopped_reader)
_manners("slow writer of a head", lambda client: client.slow_head)
_manners("slow writer of a body", lambda client: client.slow_body)
_manners("silent connection", lambda client: client.silent)
_manners("half a head", lambda client: client.half_a_head)
_manners("half a body", lambda client: client.half_a_body)
_manners("256 unfinished bodies", lambda client: client.unfinished_bodies)
_manners("opens and closes", lambda client: client.open_and_close)
_manners("hangs up in a stream", lambda client: client.hang_up)
