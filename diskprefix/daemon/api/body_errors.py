"""The errors of pydantic in the words of the APIs."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from pydantic import ValidationError

from diskprefix.errors import GOT
from diskprefix.printable import shown

REFUSED = "refused"
"""The type of errors whose message must not repeat the wrong value."""
_SHOWN_CHARS = 60
_PYTHONS_WORD = re.compile(r"(?<=^Input should be )(?:True|False)$")


class FieldError(NamedTuple):
    """The first error of a value. `at` is the path of the field in it, "" for the value itself."""

    at: str
    problem: str
    type: str


def first_error(error: ValidationError) -> FieldError:
    """Returns the first error of a value. The tags of unions, such as `~list`, are left out of its path."""
    first: Any = error.errors(include_url=False)[0]
    at = shown(".".join(str(part) for part in first["loc"] if not str(part).startswith("~")))
    return FieldError(at, _explain(first), first["type"])


_DOORS = {
    "messages": "/v1/chat/completions, /v1/messages or /api/chat",
    "prompt": "/v1/completions or /api/generate",
    "input": "/v1/responses or /v1/embeddings",
}
"""The routes for bodies with a field of this name."""


def _right_door(error: Any) -> str:
    """Returns the routes for a body of another API, in which the missing field has another name; "" for others."""
    *within, missing = error["loc"]
    if within or missing not in _DOORS or not isinstance(error["input"], dict):
        return ""
    sent = [name for name in _DOORS if name in error["input"]]
    return f"; a body with {sent[0]} is for {_DOORS[sent[0]]}" if sent else ""


def _explain(error: Any) -> str:
    """Returns pydantic's message in the words of this API, with the beginning of the wrong value."""
    match error["type"]:
        case "json_invalid":
            return str(error.get("ctx", {}).get("error", error["msg"]))
        case "missing":
            return f"is required{_right_door(error)}"
        case "extra_forbidden":
            return "is not a known field"
        case "none_required":
            return "is not supported"
        case "too_short" | "string_too_short" if not error["input"]:
            return "must not be empty"
        case "too_long":
            return f"must have at most {error['ctx']['max_length']} items (got {error['ctx']['actual_length']})"
    if error["type"] == REFUSED:
        return str(error["msg"])
    message = (
        _PYTHONS_WORD.sub(lambda match: match[0].lower(), str(error["msg"]))
        .replace("Input should be", "must be")
        .replace("String should", "must")
        .replace("valid array", "list")
    )
    return f"{message[:1].lower()}{message[1:]}{GOT}{_shown(error['input'])})"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return shown(json.dumps(value, ensure_ascii=False), _SHOWN_CHARS)
