"""The tools of a request in the order in which the model gets them: some come in the middle of the conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from diskprefix.chat.messages import CacheMark, JsonObject, Message, withdrawn_by


class OfferedTool(Struct, frozen=True):
    """A tool in the form of OpenAI's chat API, and the path of the schema of its arguments. A `deferred` tool is
    offered from the message on that names it, and not before."""

    tool: JsonObject
    path: str
    mark: CacheMark | None = None
    deferred: bool = False

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def tool_fields(tools: Iterable[OfferedTool], messages: Sequence[Message]) -> dict[str, Any]:
    """Returns the fields of a `Conversation` about its tools: first those that are offered from the beginning, then
    those that `messages` name. Deferred tools that none names are not offered. Those that `messages` take back stay in
    the prompt."""
    first = [tool for tool in tools if not tool.deferred]
    deferred: dict[str, OfferedTool] = {}
    names = {tool.name for tool in first}
    for tool in tools:
        if tool.deferred and tool.name not in names:
            deferred.setdefault(tool.name, tool)
    leading = next((index for index, message in enumerate(messages) if not message.is_system), len(messages))
    late: list[OfferedTool] = []
    for index, message in enumerate(messages):
        coming = [deferred.pop(name) for name in dict.fromkeys(message.new_tools) if name in deferred]
        # What comes with the system prompt is there from the beginning.
        (first if index < leading else late).extend(coming)
    offered = [*first, *late]
    return {
        "tools": [tool.tool for tool in offered] or None,
        "tool_marks": tuple((index, tool.mark) for index, tool in enumerate(first) if tool.mark is not None),
        "tool_paths": [tool.path for tool in offered],
        "late": frozenset(tool.name for tool in late),
        "withdrawn": frozenset(withdrawn_by(messages)),
    }
