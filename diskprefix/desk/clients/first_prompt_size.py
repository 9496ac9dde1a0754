"""The number of tokens of an agent's first prompt with a daemon's model, before the agent was ever started with it.

A prompt as long as the agent's is counted by the daemon, with its template and vocabulary: a template that writes no
tools leaves most of an agent's prompt out. For five agents and two models the number was 5 % below to 12 % above the
real one.
"""

from __future__ import annotations

import json
from typing import Any

from diskprefix.desk.shared.daemon_call import running_daemon
from diskprefix.desk.shared.recipes.recipe import FirstPromptSize, Served

_TEXT = (
    "Use this tool to read a file of the repository. The path must be absolute, and lines longer than 2000 characters "
    "are cut. Do not guess: call `git status --short` first, then answer briefly with file_path:line_number.\n"
    "- Never commit unless the user asks for it explicitly.\n"
)
"""Text of an agent's kind, of which a token has some 4.5 characters."""
_FIELD_CHARS = 60
_DESCRIBED = 0.6
"""The share of a tool's definition that its description has."""


def counted_tokens(size: FirstPromptSize, served: Served) -> int | None:
    """Returns the number of tokens of a prompt of this size; None if the daemon does not count it. Raises `NotReady` if
    no daemon answers."""
    body = {
        "model": served.model,
        "system": _text(size.system),
        "messages": [{"role": "user", "content": _text(max(size.user, 1))}],
        "tools": [_tool(number, size.tool_chars // size.tools) for number in range(size.tools)],
    }
    answer = running_daemon(served.url, served.key)("POST", "/v1/messages/count_tokens", body)
    return int(answer.body["input_tokens"]) if answer.status == 200 else None


def _tool(number: int, num_chars: int) -> dict[str, Any]:
    """Returns a definition that has as many characters in JSON."""
    fields: dict[str, Any] = {}
    schema = {"type": "object", "properties": fields}
    tool = {"name": f"tool_{number}", "description": _text(int(num_chars * _DESCRIBED)), "input_schema": schema}
    # Bound: each field has more characters than its description.
    while len(json.dumps(tool)) < num_chars - _FIELD_CHARS:
        fields[f"field_{len(fields)}"] = {"type": "string", "description": _text(_FIELD_CHARS)}
    return tool


def _text(num_chars: int) -> str:
    return (_TEXT * (num_chars // len(_TEXT) + 1))[:num_chars]
