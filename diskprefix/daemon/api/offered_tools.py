"""The tools of a request in the order in which the model gets them: some come in the middle of the conversation."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.daemon.chat.messages import CacheMark, JsonObject, Message, withdrawn_by


class OfferedTool(Struct, frozen=True):
    """A tool in the form of OpenAI's chat API, and the path of the schema of its arguments. A `deferred` tool is
    offered from the message on that names it, and not before; one that `comes_with_message` is defined there."""

    tool: JsonObject
    path: str
    mark: CacheMark | None = None
    deferred: bool = False
    comes_with_message: bool = False

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def tool_fields(tools: Iterable[OfferedTool], messages: Sequence[Message]) -> dict[str, Any]:
    """Returns `messages` and the fields of a `Conversation` about its tools: first those that are offered from the
    beginning, then those that `messages` name. Deferred tools that none names are not offered. Those that `messages`
    take back stay in the prompt. The tools that come with messages are in the order in which `messages` define them.

    The newest definition of a tool counts. Its text stands in the message that it came with, behind the earlier ones.
    """
    first: list[OfferedTool] = []
    deferred: dict[str, OfferedTool] = {}
    coming: defaultdict[str, deque[OfferedTool]] = defaultdict(deque)
    for tool in tools:
        if tool.comes_with_message:
            coming[tool.name].append(tool)
        elif tool.deferred:
            deferred.setdefault(tool.name, tool)
        else:
            first.append(tool)
    newest = {tool.name: tool for tool in first}
    deferred = {name: tool for name, tool in deferred.items() if name not in newest}
    leading = next((index for index, message in enumerate(messages) if not message.is_system), len(messages))
    late: list[OfferedTool] = []
    redefined: dict[str, JsonObject] = {}
    placed: list[Message] = []
    for index, message in enumerate(messages):
        again: list[JsonObject] = []
        for name, is_defined in message.new_tools:
            new = coming[name].popleft() if is_defined else deferred.get(name)
            if new is None:
                continue
            deferred.pop(name, None)
            if name not in newest:
                # What comes with the system prompt is there from the beginning.
                (first if index < leading else late).append(new)
            elif new.tool != newest[name].tool:
                again.append(new.tool)
                redefined[name] = new.tool
            newest[name] = new
        placed.append(replace(message, redefined=again) if again else message)
    offered = [*first, *late]
    return {
        "messages": placed,
        "tools": [tool.tool for tool in offered] or None,
        "tool_marks": tuple((index, tool.mark) for index, tool in enumerate(first) if tool.mark is not None),
        "tool_paths": [(newest[tool.name] if tool.name in redefined else tool).path for tool in offered],
        "late": frozenset(tool.name for tool in late),
        "withdrawn": frozenset(withdrawn_by(messages)),
        "redefined": redefined,
    }
