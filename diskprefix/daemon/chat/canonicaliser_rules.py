"""Reads and applies the entries of `policies/canonicalisers.toml`: a part of a conversation, a pattern, an action."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.daemon.chat.messages import CacheMark, ContentPart, Conversation, Message, TextPart
from diskprefix.daemon.chat.tool_order import ToolOrder

Changed: TypeAlias = tuple[Conversation, Sequence[str]]
_PATTERNS = {"pattern": "(?!)", "lines": "", "seen": "(?!)"}  # The defaults: nothing, every line, no line.


class Canonicaliser(Struct, frozen=True, kw_only=True):
    """An entry of the file, which explains the fields."""

    name: str
    client: str
    part: Literal["first text", "system prompt", "system messages", "tools"]
    action: Literal["drop", "zero", "move to end", "sort keys", "sort tools"]
    pattern: re.Pattern[str]
    lines: re.Pattern[str]
    seen: re.Pattern[str]
    order: Sequence[str] = ("*",)

    def is_in(self, line: str) -> bool:
        """Returns whether a line of a rendered prompt holds text that this canonicaliser changes."""
        return bool(self.seen.search(line) or (self.lines.search(line) and self.pattern.search(line)))

    def apply(self, conversation: Conversation, tool_order: ToolOrder) -> Changed:
        """Returns the changed conversation, and the paths of the changes in the client's body."""
        match self.action:
            case "sort tools":
                return _with_sorted_tools(conversation, tool_order)
            case "sort keys":
                return _with_sorted_keys(conversation, {key: rank for rank, key in enumerate(self.order)})
            case "move to end":
                return self._moved_to_end(conversation)
        reach = {"first text": 1, "system prompt": conversation.num_leading}.get(self.part, len(conversation.messages))
        messages, paths = list[Message](), list[str]()
        for index, message in enumerate(conversation.messages):
            end = 0 if index >= reach or not message.is_system else 1 if self.part == "first text" else None
            parts = [(part, self._rewritten(part)) for part in message.content[:end]]
            changed = [old.path for old, new in parts if new is not old]
            content = [*(new for _, new in parts if new is not None), *message.content[len(parts) :]]
            if content or not changed:
                messages.append(replace(message, content=content) if changed else message)
            paths += changed
        return (replace(conversation, messages=messages), paths) if paths and messages else (conversation, ())

    def _rewritten(self, part: ContentPart) -> ContentPart | None:
        """Returns a part after `drop` or `zero`: the same object if unchanged, None if no text is left."""
        if not isinstance(part, TextPart):
            return part
        if self.action == "drop":
            text = self.pattern.sub("", part.text)
        else:
            lines = part.text.split("\n")
            text = "\n".join(self.pattern.sub(_zeros, line) if self.lines.search(line) else line for line in lines)
        changed = replace(part, text=text) if text else None
        return part if text == part.text else changed

    def _moved_to_end(self, conversation: Conversation) -> Changed:
        others = list(conversation.messages[conversation.num_leading :])
        stay, moved, marks = list[Message](), list[ContentPart](), list[CacheMark | None]()
        for message in conversation.messages[: conversation.num_leading]:
            head, rest = ([], message.content) if moved else self._cut(message.content, is_first=not stay)
            moved += rest
            marks += [part.mark for part in rest if isinstance(part, TextPart)]
            if head or not rest:
                stay.append(replace(message, content=head) if rest else message)
            else:
                marks.append(message.mark)
        if not moved or not others:
            return conversation, ()
        if later := [mark for mark in marks if mark is not None]:
            stay[-1] = replace(stay[-1], mark=stay[-1].mark or later[-1])
        content = [replace(part, mark=None) if isinstance(part, TextPart) else part for part in moved]
        index = len(others) - (others[-1].role == "assistant")
        others.insert(index, Message(role="system", content=content, path=moved[0].path))
        return replace(conversation, messages=[*stay, *others]), [part.path for part in moved]

    def _cut(self, parts: Sequence[ContentPart], *, is_first: bool) -> tuple[list[ContentPart], list[ContentPart]]:
        """Returns the parts before the first match, and the rest. A match at the beginning of the system prompt does
        not count."""
        for index, part in enumerate(parts):
            if isinstance(part, TextPart) and (match := self.pattern.search(part.text)):
                head, rest = part.text[: match.start()].rstrip("\n"), part.text[match.start() :]
                if index or head or not is_first:
                    before = [replace(part, text=head, mark=None)] if head else []
                    return [*parts[:index], *before], [replace(part, text=rest), *parts[index + 1 :]]
        return [*parts], []


def read_canonicalisers(path: Path) -> tuple[Canonicaliser, ...]:
    """Returns the canonicalisers in a file, in the order of the file."""

    def compiled(entry: Mapping[str, Any]) -> dict[str, re.Pattern[str]]:
        texts = {key: "|".join(entry.get(key, [default])) for key, default in _PATTERNS.items()}
        return {key: re.compile(text, re.MULTILINE) for key, text in texts.items()}

    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return tuple(Canonicaliser(name=name, **(entry | compiled(entry))) for name, entry in entries.items())


def _zeros(match: re.Match[str]) -> str:
    return match[1] + re.sub(r"\d", "0", match[2])


def _with_sorted_keys(conversation: Conversation, ranks: Mapping[str, int]) -> Changed:
    old, paths = conversation.tools or [], conversation.tool_paths
    new = [_sorted(tool, ranks) for tool in old]
    changed = [index for index in range(len(old)) if _keys(new[index]) != _keys(old[index])]
    if not changed:
        return conversation, ()
    return replace(conversation, tools=new), [paths[i] if i < len(paths) else f"tools.{i}" for i in changed]


def _keys(value: Any) -> Any:
    """Returns the keys in their order, for comparison: dicts with different orders are equal."""
    if isinstance(value, dict):
        return [(key, _keys(item)) for key, item in value.items()]
    return [_keys(item) for item in value] if isinstance(value, list) else None


def _sorted(value: Any, ranks: Mapping[str, int]) -> Any:
    if isinstance(value, list):
        return [_sorted(item, ranks) for item in value]
    if not isinstance(value, dict):
        return value
    keys = sorted(value, key=lambda key: (ranks.get(key, ranks["*"]), key))
    inside = ((key, value[key]) for key in keys)
    return {
        key: _sorted_properties(item, value.get("required"), ranks)
        if key == "properties" and isinstance(item, dict)
        else _sorted(item, ranks)
        for key, item in inside
    }


def _sorted_properties(properties: Mapping[str, Any], required: Any, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Returns the properties of an object: the required ones in their order, then the others by name."""
    listed = required if isinstance(required, list) else []
    first = [name for name in listed if isinstance(name, str) and name in properties]
    return {name: _sorted(properties[name], ranks) for name in dict.fromkeys([*first, *sorted(properties)])}


def _with_sorted_tools(conversation: Conversation, tool_order: ToolOrder) -> Changed:
    tools, paths = conversation.tools or [], conversation.tool_paths
    order = tool_order.indices(conversation.tool_names)
    if order == [*range(len(tools))]:
        return conversation, ()
    paths = [paths[index] for index in order] if len(paths) == len(tools) else paths
    return replace(conversation, tools=[tools[index] for index in order], tool_paths=paths), ["tools"]
