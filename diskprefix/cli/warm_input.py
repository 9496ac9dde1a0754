"""What `diskprefix warm` is given: files of prompts, and the requests that they become."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown

Json: TypeAlias = dict[str, Any]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

_STDIN = "-"
_LINES, _JSON = (".jsonl", ".ndjson"), ".json"
NOT_OF_PROMPTS = (
    "model",
    "user",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "echo",
    "suffix",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "response_format",
    "modalities",
    "parallel_tool_calls",
)
"""Fields of a request that have no say in the prompt: what was sent to another model, for another kind of reply, is
warmed too."""


@dataclass(frozen=True)
class WarmItem:
    """A prompt as it was given: `where` it stands, as `file` or `file:line`, and whether its text is JSON."""

    where: str
    text: str
    is_json: bool

    def request(self, scope: str) -> tuple[str, Json]:
        """The route, and the body that has the whole prompt computed and kept under `scope`.

        Raises `InvalidRequest` for JSON that is neither a request body nor a list of messages.
        """
        if not self.is_json:
            return COMPLETION, _warming({"prompt": self.text}, scope)
        body = _body(_parsed(self.text))
        if ("messages" in body) == ("prompt" in body):
            which = "both of" if "prompt" in body else "neither of"
            raise InvalidRequest(f"it has {which} messages and prompt: a request body has one of them")
        return CHAT if "messages" in body else COMPLETION, _warming(body, scope)


def read_items(name: str) -> Iterator[WarmItem]:
    """The prompts in a file, or in standard input if it is named `-`. Raises `InvalidRequest`, and `OSError`.

    Of .jsonl each line is one, a .json holds one, other files are one as they stand. In standard input it is told by
    what is there: JSON, lines of JSON, or text.
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
        yield WarmItem(where, text, is_json=suffix == _JSON)
        return
    # Not splitlines: JSON may hold other separators of lines inside its strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield WarmItem(f"{where}:{number}", line, is_json=True)


def _suffix_of(text: str) -> str:
    """What a file of this content would be called."""
    if text.lstrip()[0] not in "{[":
        return ""
    if _is_json(text):
        return _JSON
    first_line = text.lstrip().split("\n", 1)[0]
    return _LINES[0] if _is_json(first_line) else ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InvalidRequest("it is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest(f"it is not valid JSON: {shown(str(error))}") from error


def _body(value: Any) -> Json:
    """A request body, also inside a line of OpenAI's batch format; messages alone become one."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return {"messages": value}
    if isinstance(value, dict):
        inner = value.get("body")
        return inner if isinstance(inner, dict) else value
    raise InvalidRequest("it is neither a request body nor a list of messages (several go into a .jsonl, one a line)")


def _warming(body: Json, scope: str) -> Json:
    """The shortest reply there is, and all of the prompt kept; what else has a say in the prompt stays."""
    kept = {name: value for name, value in body.items() if name not in NOT_OF_PROMPTS}
    cache = body.get("prefix_cache") or {}
    if isinstance(cache, dict):
        # What would contradict the scope, or keep nothing.
        cache = {name: value for name, value in cache.items() if name not in ("window", "save")} | {"scope": scope}
    return kept | {"max_tokens": 1, "temperature": 0, "prefix_cache": cache}
