"""The form in which a chat template takes messages. Templates differ in what of it they refuse or leave out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diskprefix.chat.content import text_for_template
from diskprefix.chat.messages import JsonObject

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""What Mistral's templates take for the id of a call."""


@dataclass(frozen=True)
class MessageForm:
    """What a template needs. Where it needs nothing, contents are texts, arguments objects, ids the client's.

    Arguments that are no JSON object become the argument `arguments`, where the template goes through the arguments.
    """

    parts_only: bool = False
    """A content is a list of parts."""
    null_content: bool = False
    """A message that only calls has no content, not an empty one."""
    text_arguments: bool = False
    """Arguments are JSON text."""
    objects_only: bool = False
    """Arguments are an object, whatever the model wrote."""
    short_ids: bool = False
    """Ids of calls are nine letters and digits."""

    def applied(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Returns `messages` in this form."""
        return [self._message(message) for message in messages]

    def _message(self, message: JsonObject) -> JsonObject:
        changed: JsonObject = {}
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = [self._call(call) for call in calls]
        if self.null_content and calls and not message["content"]:
            changed["content"] = None
        elif self.parts_only and isinstance(message["content"], str):
            changed["content"] = text_for_template(message["content"])
        if self.short_ids and "tool_call_id" in message:
            changed["tool_call_id"] = _short(message["tool_call_id"])
        return {**message, **changed}

    def _call(self, call: JsonObject) -> JsonObject:
        function = {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}
        ids = {"id": _short(call["id"])} if self.short_ids and "id" in call else {}
        return {**call, **ids, "function": function}

    def _arguments(self, arguments: Any) -> Any:
        if self.objects_only and not isinstance(arguments, dict):
            return {"arguments": arguments}
        if self.text_arguments and not isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False)
        return arguments


def _short(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.blake2b(call_id.encode()).hexdigest()[:9]
