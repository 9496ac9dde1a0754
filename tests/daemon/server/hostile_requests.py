"""Requests that once stopped a server or made it fail, each with a name, and the statuses that answer it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MIB = 1 << 20
_HELLO = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Hostile:
    """A request. `make` returns its body. It may take long with `patience_s`: the client hangs up then."""

    make: Callable[[], bytes]
    statuses: tuple[int, ...] = (400,)
    path: str = CHAT
    host: str = "localhost"
    patience_s: float | None = None


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": _HELLO, "max_tokens": 1} | fields).encode()


def respond(**fields: Any) -> bytes:
    return json.dumps({"input": "hi", "max_output_tokens": 1} | fields).encode()


def _schema(schema: dict[str, Any]) -> bytes:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _patterns(number: int) -> bytes:
    return _schema(
        {"type": "object", "patternProperties": {f"^a{{{i}}}.*b{{{i}}}$": {"type": "string"} for i in range(number)}}
    )


def _all_of() -> bytes:
    return _schema({"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(39)]})


def text_of(text: str, num_bytes: int) -> bytes:
    return chat(messages=[{"role": "user", "content": text * (num_bytes // len(text))}])


def _many(before: str, part: str, after: str) -> bytes:
    return (before + ",".join([part] * (31 * MIB // (len(part) + 1))) + after).encode()


def _with_kwargs(text: str) -> bytes:
    return chat()[:-1] + b', "chat_template_kwargs": ' + text.encode() + b"}"


def _odd_name(name: str) -> bytes:
    function = {"name": name, "parameters": {"type": "object", "properties": {name: {"type": "string"}}}}
    forced = {"type": "function", "function": {"name": name}}
    return chat(tools=[{"type": "function", "function": function}], tool_choice=forced, max_tokens=16)


def _many_marks() -> bytes:
    """Returns 5200 messages that take long to render, and are no large body."""
    marked = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": [marked] if i < 32 else "hello there"} for i in range(5200)
    ]
    return json.dumps({"messages": messages}).encode()


_MESSAGES = '{"max_tokens": 1, "messages": ['
REQUESTS: dict[str, Hostile] = {
    "allOf of 39 patterns": Hostile(_all_of, (200, 400), patience_s=3),
    "2 000 patterns": Hostile(lambda: _patterns(2000), (200, 400), patience_s=3),
    "300 patterns": Hostile(lambda: _patterns(300), (200, 400)),
    "nested pattern, n 16": Hostile(
        lambda: chat(
            structured_outputs={"json": {"type": "string", "pattern": "((a{100}){100}){100}"}}, n=16, max_tokens=32
        )
    ),
    "16 MiB of digits": Hostile(lambda: text_of("1" * 299 + "x", 16 * MIB)),
    "31 MiB of blanks": Hostile(lambda: text_of(" ", 31 * MIB)),
    "31 MiB of messages": Hostile(lambda: _many(_MESSAGES, '{"role":"user","content":"x"}', "]}")),
    "31 MiB of parts": Hostile(
        lambda: _many(_MESSAGES + '{"role": "user", "content": [', '{"type":"text","text":"x"}', "]}]}")
    ),
    "31 MiB of arrays": Hostile(lambda: _with_kwargs(_many('{"a": [', "[]", "]}").decode())),
    "31 MiB to tokenize": Hostile(
        lambda: json.dumps({"content": "hello there " * (31 * MIB // 12)}).encode(), path="/tokenize"
    ),
    "1 MB to tokenize": Hostile(
        lambda: json.dumps({"content": "hello there " * 83_000}).encode(), (200,), path="/tokenize"
    ),
    "5 200 messages to count": Hostile(_many_marks, (200, 400), path="/v1/messages/count_tokens"),
    "unloads the model": Hostile(lambda: chat(keep_alive=0), (200,)),
    "31 MiB of a model's name": Hostile(lambda: chat(model="x" * (31 * MIB)), (404,)),
    "infinite numbers": Hostile(lambda: _with_kwargs('{"a": [' + ",".join(["1" * 400] * 20_000 + ["1e999"]) + "]}")),
    "odd names of functions": Hostile(lambda: _odd_name("MIME_TYPE"), (200,)),
    "tools that are skipped": Hostile(
        lambda: respond(tools=[{"type": f"hosted_{i}_" + "x" * 1000} for i in range(1000)]), (200,), RESPONSES
    ),
    "log probabilities, n 16": Hostile(
        lambda: chat(n=16, logprobs=True, top_logprobs=20, max_tokens=500, logit_bias={"2": -100}), (200,), patience_s=3
    ),
}
