"""Reads files of prompts and turns them into requests, for `diskprefix warm`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown

Json: TypeAlias = dict[str, Any]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

_STDIN = "-"
_LINES, _JSON = (".jsonl", ".ndjson"), ".json"
_OF_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "logprobs", "top_logprobs"}
_OF_SAMPLING |= {"repetition_penalty", "presence_penalty", "frequency_penalty"}
_OF_REPLIES = {"stream", "stream_options", "n", "best_of", "echo", "suffix", "stop", "max_tokens"}
_OF_REPLIES |= {"max_completion_tokens", "response_format", "structured_outputs", "modalities", "audio"}
_OF_REPLIES |= {"parallel_tool_calls", "web_search_options", "return_progress"}
NOT_OF_PROMPTS = {"model"} | _OF_SAMPLING | _OF_REPLIES
"""Fields that do not change the prompt. They are left out, so bodies for another model or kind of reply work, too."""


class WarmItem(Struct, frozen=True):
    """One prompt of a file. `where` is `file` or `file:line`. `is_json`: the text is JSON. `is_system`: a text that is
    not JSON is the system message of a chat."""

    where: str
    text: str
    is_json: bool
    is_system: bool = False

    def request(self, scope: str) -> tuple[str, Json]:
        """Returns the route and the body of a request that computes the prompt and keeps it under `scope`. Raises
        `InvalidRequest` for JSON that is neither a request body nor a list of messages."""
        if not self.is_json and self.is_system:
            # Templates need a user message. Other chats share the prompt up to its text.
            messages = [{"role": "system", "content": self.text}, {"role": "user", "content": "Hello"}]
            return CHAT, _warming({"messages": messages}, scope)
        if not self.is_json:
            return COMPLETION, _warming({"prompt": self.text}, scope)
        try:
            body = body_in(json.loads(self.text))
        except RecursionError as error:
            raise InvalidRequest("it is nested too deeply") from error
        except ValueError as error:
            raise InvalidRequest(f"it is not valid JSON: {shown(str(error))}") from error
        if ("messages" in body) == ("prompt" in body):
            which = "both of" if "prompt" in body else "neither of"
            raise InvalidRequest(f"it has {which} messages and prompt; a request body has one of them")
        return CHAT if "messages" in body else COMPLETION, _warming(body, scope)


class AgentItem(Struct, frozen=True):
    """The first prompt of an agent, as a request with its `route` and `body`. `where` is the agent's name."""

    where: str
    route: str
    body: Json

    def request(self, scope: str) -> tuple[str, Json]:
        """Returns the route and the body of a request that computes the prompt and keeps it under `scope`."""
        own = {"max_tokens": 0} if self.route == MESSAGES else {"store": False} if self.route == RESPONSES else {}
        return self.route, _warming(self.body, scope) | own


def read_items(name: str, *, is_system: bool = False) -> Iterator[WarmItem]:
    """Yields the prompts of a file, or of standard input if the name is `-`. Raises `InvalidRequest` and `OSError`.

    A .jsonl file has a prompt on each line, a .json file has one, and any other file is the text of one. The kind of
    standard input follows from its content: JSON, lines of JSON, or text. For `is_system` see `WarmItem`.
    """
    raw = sys.stdin.buffer.read() if name == _STDIN else Path(name).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"it is not valid UTF-8 (byte {error.start})") from error
    if not text.strip():
        raise InvalidRequest("it is empty")
    where = "standard input" if name == _STDIN else name
    suffix = _suffix_of(text) if name == _STDIN else Path(name).suffix.lower()
    if suffix not in _LINES:
        yield WarmItem(where, text, is_json=suffix == _JSON, is_system=is_system)
        return
    # `splitlines` would also split at separators that are allowed inside JSON strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield WarmItem(f"{where}:{number}", line, is_json=True)


def _suffix_of(text: str) -> str:
    """Returns the suffix for this content: `.json`, `.jsonl`, or "" for text."""
    text = text.lstrip()
    for suffix, part in ((_JSON, text), (_LINES[0], text.split("\n", 1)[0])):
        try:
            json.loads(part)
        except RecursionError:
            # Nested JSON, which `request` refuses.
            return suffix
        except ValueError:
            continue
        return suffix if text[0] in "{[" else ""
    return ""


def _warming(body: Json, scope: str) -> Json:
    """Returns a body for the same prompt, kept under `scope`, without a reply: it gives way to requests with one."""
    prompt = {name: value for name, value in body.items() if name not in NOT_OF_PROMPTS}
    cache = body.get("prefix_cache") or {}
    if isinstance(cache, dict):
        # `window` and `save` would contradict the scope.
        cache = {name: value for name, value in cache.items() if name not in ("window", "save")} | {"scope": scope}
    return prompt | {"prompt_cache_options": {"prewarm": True}, "prefix_cache": cache}


def body_in(value: object) -> Json:
    """Returns the request body in a JSON value: the body itself, a line of OpenAI's batch format or a list of messages.
    Raises `InvalidRequest` for other values."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return {"messages": value}
    if isinstance(value, dict):
        inner = value.get("body")
        return inner if isinstance(inner, dict) else value
    raise InvalidRequest(
        "it is neither a request body nor a list of messages; put several into a .jsonl file, one on each line"
    )
