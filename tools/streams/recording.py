"""The streams of a real daemon, byte by byte as they came, one of each route that streams."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.daemon.server.agent_model import TEMPLATE, thought
from tests.daemon.server.chat_model import write_chat_model, write_tokenizer
from tools.measuring.answers import LiveServerError
from tools.measuring.live_server import LiveServer

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE = "/v1/messages", "/api/chat", "/api/generate"
INFILL = "/infill"
THOUGHT = "Öl → 思"
TEXT = 'Süß 世界 🌍\u2028"\\\t<&'
"""Characters of one to four bytes, one that ends a line for some clients, and those that JSON and HTML escape."""
CALLS = (("read", r'{"path": "ß\n\u20ac🌍"}'), ("write", r'{"n": [1.50, null]}'))
"""Names, and arguments as the model writes them."""
CHAT_REPLY = f"{thought(THOUGHT)}{TEXT}" + "".join(
    f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in CALLS
)
QUESTION: Any = [{"role": "user", "content": "Name three rivers."}]
_PATH: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": _PATH}}
    for name in ("read", "write")
]
_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION, "tools": _TOOLS, **_USAGE},
    COMPLETIONS: {"prompt": "Name three rivers.", "max_tokens": 200, **_USAGE},
    RESPONSES: {
        "input": "Name three rivers.",
        "tools": [{"type": "function", **tool["function"]} for tool in _TOOLS],
        "stream": True,
    },
    MESSAGES: {
        "messages": QUESTION,
        "max_tokens": 1000,
        "tools": [{"name": tool["function"]["name"], "input_schema": _PATH} for tool in _TOOLS],
        "stream": True,
    },
    OLLAMA_CHAT: {"messages": QUESTION, "tools": _TOOLS},
    OLLAMA_GENERATE: {"prompt": "Name three rivers."},
    INFILL: {"input_prefix": "Name three", "input_suffix": " rivers.", "prompt": "", "stream": True},
}
"""The request that is recorded, by the route's path."""
WITH_CALLS = (CHAT, RESPONSES, MESSAGES, OLLAMA_CHAT)
"""Routes whose replies have the calls as such."""
_OF_A_GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_OK, _END = b"HTTP/1.1 200 ", b"\r\n0\r\n\r\n"
_TIMEOUT_S = 60.0
_READ_BYTES = 1 << 16


def record_all(workspace: Path) -> dict[str, bytes]:
    """Returns the response to each request of `BODIES`, with status line and headers. Raises `LiveServerError`."""
    model = write_chat_model(workspace / "model", runtime="diskprefix")
    write_tokenizer(model, chat_template=TEMPLATE, more_special_tokens=_OF_A_GAP, more_texts=[CHAT_REPLY] * 4)
    flags = ("--model", str(model), "--kv-cache-gate", "off", "--speculative", "off")
    with LiveServer(
        kv_cache_dir=workspace / "kv",
        log_path=workspace / "server.log",
        flags=flags,
        module="tools.streams.prepared_daemon",
    ) as server:
        server.start()
        return {path: recorded(server.port, path, body, server.token) for path, body in BODIES.items()}


def recorded(port: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    """Returns the bytes of the response to one request, to the end of its last chunk. Raises `LiveServerError`."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()] + [f"Content-Length: {len(content)}", "", ""]
    response = b""
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
        connection.sendall("\r\n".join(lines).encode() + content)
        while not response.endswith(_END) and _OK.startswith(response[: len(_OK)]):
            data = connection.recv(_READ_BYTES)
            if not data:
                break
            response += data
    if not response.startswith(_OK) or not response.endswith(_END):
        raise LiveServerError(f"the stream of {path} is not one: {response[:500]!r}")
    return response
