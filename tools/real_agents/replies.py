"""Reads the streamed replies of each API: the first token, its calls, and how much of the prompt was restored."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """The part of a stream or of a JSON body that has been read."""

    prompt_tokens: int = 0
    restored: int = 0
    calls: list[str] = field(default_factory=list)
    has_token: bool = False
    errors: list[str] = field(default_factory=list)
    cache: dict[str, Any] = field(default_factory=dict)
    """What the daemon says in `prefix_cache`."""
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of a stream of server-sent events, or of a JSON body, which is one line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take_line(line)

    def finish(self) -> None:
        self._take_line(self._rest)
        self._rest = b""

    def _take_line(self, line: bytes) -> None:
        text = line.removeprefix(b"data:").strip()
        if not text.startswith(b"{"):
            return
        event = json.loads(text)
        self._take_usage(event)
        self.cache |= event.get("prefix_cache") or (event.get("response") or {}).get("prefix_cache") or {}
        _take_chat(self, event)
        _take_messages(self, event)
        _take_responses(self, event)
        if event.get("error"):
            self.errors.append(json.dumps(event["error"])[:300])

    def _take_usage(self, event: dict[str, Any]) -> None:
        for holder in (event, event.get("message"), event.get("response")):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if not usage:
                continue
            if "prompt_tokens" in usage:
                self.prompt_tokens = usage["prompt_tokens"]
                self.restored = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            elif "input_tokens_details" in usage:
                self.prompt_tokens = usage["input_tokens"]
                self.restored = usage["input_tokens_details"]["cached_tokens"]
            elif "cache_read_input_tokens" in usage and usage["cache_read_input_tokens"] is not None:
                self.restored = usage["cache_read_input_tokens"]
                written = usage.get("cache_creation_input_tokens") or 0
                self.prompt_tokens = usage.get("input_tokens", 0) + self.restored + written


def _take_chat(reply: Reply, event: dict[str, Any]) -> None:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice.get("message") or {}
        for call in delta.get("tool_calls") or ():
            if name := call.get("function", {}).get("name"):
                reply.calls.append(name)
        reply.has_token |= any(delta.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls"))


def _take_messages(reply: Reply, event: dict[str, Any]) -> None:
    if event.get("type") == "content_block_start":
        reply.has_token = True
        blocks = [event["content_block"]]
    else:
        blocks = event.get("content") or [] if event.get("type") == "message" else []
    reply.calls += [block["name"] for block in blocks if block["type"] == "tool_use"]


def _take_responses(reply: Reply, event: dict[str, Any]) -> None:
    if event.get("type") == "response.output_item.added":
        reply.has_token = True
    elif event.get("type") == "response.output_item.done" and event["item"]["type"].endswith("_call"):
        # A search for tools has a type of its own.
        reply.calls.append(event["item"].get("name") or event["item"]["type"].removesuffix("_call"))
