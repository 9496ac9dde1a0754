"""Changes a conversation before it is rendered: `place` for the template, `normalise` so that the cache finds it again.

Each normaliser was made for a client's real requests. The result depends on the conversation alone. The mode `report`
changes nothing: the reply says what would have changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from diskprefix.chat.messages import CacheMark, ContentPart, Conversation, JsonObject, Message, TextPart, joined
from diskprefix.errors import SettingsError
from diskprefix.nouns import Change, Rewriting

if TYPE_CHECKING:
    from diskprefix.chat.draft import PromptDraft
    from diskprefix.chat.template import ChatTemplate

Mode: TypeAlias = Literal["off", "report", "on"]


@dataclass(frozen=True)
class Normaliser:
    """A change of conversations. `apply` returns the changed conversation and the paths of the changes in the client's
    body. `is_in` returns whether a line of a rendered prompt holds text that it changes."""

    name: str
    apply: Callable[[Conversation], tuple[Conversation, Sequence[str]]]
    is_in: Callable[[str], bool]


_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)


def _without_billing_header(conversation: Conversation) -> tuple[Conversation, Sequence[str]]:
    """Removes the first line of Claude Code's system prompt, `x-anthropic-billing-header: … cch=00c6e;`. Its end
    differs in every request, or with every first question."""
    first = conversation.messages[0]
    part = first.content[0] if _is_system(first) and first.content else None
    match = _BILLING.match(part.text) if isinstance(part, TextPart) else None
    if match is None or not isinstance(part, TextPart):
        return conversation, ()
    text = part.text[match.end() :]
    content = [replace(part, text=text), *first.content[1:]] if text else list(first.content[1:])
    is_empty = not content and len(conversation.messages) > 1
    messages = [] if is_empty else [replace(first, content=content)]
    return replace(conversation, messages=[*messages, *conversation.messages[1:]]), [part.path]


_COUNT = r"<total_tokens>\d{1,12} tokens left</total_tokens>[ \t]*"
_TOTAL_TOKENS = re.compile(rf"\A(?:{_COUNT}(?:(?:\r?\n){{1,2}}|\Z))+|(?:\r?\n){{1,2}}{_COUNT}(?=\r?\n|\Z)")
_IS_COUNT = re.compile(rf"{_COUNT}\r?(?:$|[<\[])")
"""A line of a rendered prompt: the template may end the message there."""


def _without_total_tokens(conversation: Conversation) -> tuple[Conversation, Sequence[str]]:
    """Removes lines `<total_tokens>14999436 tokens left</total_tokens>` from system messages, and messages with nothing
    else. Claude Code writes one after most results of tools, and takes old ones away. Some proxies gather them in the
    system prompt. The number is the budget of another model."""
    messages, paths = list[Message](), list[str]()
    for message in conversation.messages:
        content = [_without_total_tokens_in(part) for part in message.content] if _is_system(message) else []
        changed = [new for new, old in zip(content, message.content, strict=False) if new is not old]
        paths += [part.path for part in changed]
        kept = [part for part in content if part not in changed or (isinstance(part, TextPart) and part.text)]
        if not changed or kept:
            messages.append(replace(message, content=kept) if changed else message)
    return (replace(conversation, messages=messages), paths) if paths and messages else (conversation, ())


def _without_total_tokens_in(part: ContentPart) -> ContentPart:
    text = _TOTAL_TOKENS.sub("", part.text) if isinstance(part, TextPart) else ""
    return replace(part, text=text) if isinstance(part, TextPart) and text != part.text else part


_NUDGE = re.compile(
    r"^(?:<system-reminder>[^<]*+(?:<(?!/?system-reminder>)[^<]*+)*+</system-reminder>[ \t\r]*$"
    r"|The (?:task tools haven't|TodoWrite tool hasn't) been used recently\. If you're working on tasks that would "
    r"benefit from tracking progress, consider using\b"
    r"|The date has changed\. Today's date is now \d[^\n]{1,40}\. DO NOT mention this to the user\b"
    r"|(?:## )?Plan mode is active\. The user (?:does not|indicated that they do not) want you to execute yet\b"
    r"|(?:## )?Exited Plan Mode[ \t\r]*\n\s{0,4}You have exited plan mode\b)",
    re.MULTILINE,
)
_NUDGE_HEADS = ("<system-reminder>", "## Exited Plan Mode", "Exited Plan Mode")
"""Lines of their own at the beginning of a nudge."""


def _with_nudges_at_the_end(conversation: Conversation) -> tuple[Conversation, Sequence[str]]:
    """Moves the system prompt from its first nudge on to the end of the conversation, before a reply to continue.
    Claude Code writes nudges between the messages. Proxies gather them behind the system prompt, which grows so. The
    last mark behind the cut is then one at the cut."""
    leading = [*takewhile(_is_system, conversation.messages)]
    others = list(conversation.messages[len(leading) :])
    stay, moved, marks = list[Message](), list[ContentPart](), list[CacheMark | None]()
    for message in leading:
        head, tail = ([], message.content) if moved else _cut_at_nudge(message.content, is_first=not stay)
        moved += tail
        marks += [part.mark for part in tail if isinstance(part, TextPart)]
        if head or not tail:
            stay.append(replace(message, content=head) if tail else message)
        else:
            marks.append(message.mark)
    if not moved or not others:
        return conversation, ()
    if behind := [mark for mark in marks if mark is not None]:
        stay[-1] = replace(stay[-1], mark=stay[-1].mark or behind[-1])
    index = len(others) - (others[-1].role == "assistant")
    content = [replace(part, mark=None) if isinstance(part, TextPart) else part for part in moved]
    others.insert(index, Message(role="system", content=content, path=moved[0].path))
    return replace(conversation, messages=[*stay, *others]), [part.path for part in moved]


def _cut_at_nudge(parts: Sequence[ContentPart], *, is_first: bool) -> tuple[list[ContentPart], list[ContentPart]]:
    """Returns the parts before the first nudge, and the others. What begins the system prompt was not moved there."""
    for index, part in enumerate(parts):
        match = _NUDGE.search(part.text) if isinstance(part, TextPart) else None
        if isinstance(part, TextPart) and match and (index or match.start() or not is_first):
            head, tail = part.text[: match.start()].rstrip("\n"), part.text[match.start() :]
            before = [replace(part, text=head, mark=None)] if head else []
            return [*parts[:index], *before], [replace(part, text=tail), *parts[index + 1 :]]
    return [*parts], []


def _begins_nudge(line: str) -> bool:
    return line.strip() in _NUDGE_HEADS or bool(_NUDGE.search(line))


_CLOCK_LINE = re.compile(r"\b(?:current|now|today|todays|date|time|timestamp|datetime|clock)\b|^\W*\d", re.IGNORECASE)
_CLOCK = re.compile(r"(?<![\d:.])([01]?\d|2[0-3])((?::[0-5]\d){1,2}(?:\.\d+)?)(?![\d:])")


def _with_full_hours(conversation: Conversation) -> tuple[Conversation, Sequence[str]]:
    """Sets minutes and seconds to zero in lines of the system prompt about a time or a date, so that it changes once an
    hour only. For clients such as AnythingLLM (`The current date and time is Saturday, November 21, 2026 5:04 AM.`)."""
    messages, paths = list(conversation.messages), []
    for index, message in enumerate(takewhile(_is_system, conversation.messages)):
        content = [_with_full_hours_in(part) if isinstance(part, TextPart) else part for part in message.content]
        paths += [new.path for new, old in zip(content, message.content, strict=True) if new is not old]
        messages[index] = replace(message, content=content)
    return (replace(conversation, messages=messages), paths) if paths else (conversation, ())


def _with_full_hours_in(part: TextPart) -> TextPart:
    lines = part.text.split("\n")
    text = "\n".join(_CLOCK.sub(_full_hour, line) if _CLOCK_LINE.search(line) else line for line in lines)
    return part if text == part.text else replace(part, text=text)


def _full_hour(match: re.Match[str]) -> str:
    return match[1] + re.sub(r"\d", "0", match[2])


_KEY_ORDER = ("type", "function", "name", "title", "description", "strict", "parameters", "enum", "const", "default")
_LAST_KEYS = ("properties", "required", "items", "additionalProperties", "$defs")


def _with_ordered_keys(conversation: Conversation) -> tuple[Conversation, Sequence[str]]:
    """Sorts the keys in the schemas of tools: keywords in their usual order, properties by `required`, then by name.
    For clients that write schemas from hash tables, with another order in each process or request."""
    tools = [_ordered(tool) for tool in conversation.tools or []]
    changed = [index for index, tool in enumerate(tools) if _keys(tool) != _keys((conversation.tools or [])[index])]
    if not changed:
        return conversation, ()
    return replace(conversation, tools=tools), [_tool_path(conversation, index) for index in changed]


def _ordered(value: Any) -> Any:
    if isinstance(value, list):
        return [_ordered(item) for item in value]
    if not isinstance(value, dict):
        return value
    ordered = {key: _ordered(value[key]) for key in sorted(value, key=_keyword_order)}
    properties, required = value.get("properties"), value.get("required")
    if isinstance(properties, dict):
        first = [name for name in required if name in properties] if isinstance(required, list) else []
        names = dict.fromkeys([*first, *sorted(properties)])
        ordered["properties"] = {name: _ordered(properties[name]) for name in names}
    return ordered


def _keyword_order(key: str) -> tuple[int, str]:
    if key in _KEY_ORDER:
        return _KEY_ORDER.index(key), ""
    if key in _LAST_KEYS:
        return len(_KEY_ORDER) + 1 + _LAST_KEYS.index(key), ""
    return len(_KEY_ORDER), key


def _keys(value: Any) -> Any:
    """Returns the keys in their order, for comparison: dicts with different orders are equal."""
    if isinstance(value, dict):
        return [(key, _keys(item)) for key, item in value.items()]
    return [_keys(item) for item in value] if isinstance(value, list) else None


def _with_ordered_tools(conversation: Conversation) -> tuple[Conversation, Sequence[str]]:
    """Sorts tools by name, for clients that list tools in the order in which their tool servers answer. Marks keep
    their index: a mark on the last tool still covers all of them."""
    tools = sorted(conversation.tools or [], key=_tool_name)
    moved = [i for i, (new, old) in enumerate(zip(tools, conversation.tools or [], strict=True)) if new is not old]
    if not moved:
        return conversation, ()
    paths = conversation.tool_paths
    if len(paths) == len(tools):
        places = sorted(range(len(tools)), key=lambda index: _tool_name((conversation.tools or [])[index]))
        paths = [paths[place] for place in places]
    return replace(conversation, tools=tools, tool_paths=paths), ["tools"]


def _tool_name(tool: JsonObject) -> str:
    return str(tool.get("function", {}).get("name", ""))


def _tool_path(conversation: Conversation, index: int) -> str:
    return conversation.tool_paths[index] if index < len(conversation.tool_paths) else f"tools.{index}"


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _is_of_tools(line: str) -> bool:
    return '"' in line or line.lstrip().startswith("<")


def _has_clock(line: str) -> bool:
    return bool(_CLOCK_LINE.search(line) and _CLOCK.search(line))


NORMALISERS = (
    Normaliser("billing-header", _without_billing_header, lambda line: bool(_BILLING.match(line))),
    Normaliser("total-tokens", _without_total_tokens, lambda line: bool(_IS_COUNT.match(line))),
    Normaliser("hoisted-nudges", _with_nudges_at_the_end, _begins_nudge),
    Normaliser("clock", _with_full_hours, _has_clock),
    Normaliser("schema-keys", _with_ordered_keys, _is_of_tools),
    Normaliser("tool-order", _with_ordered_tools, _is_of_tools),
)
_BY_NAME = {normaliser.name: normaliser for normaliser in NORMALISERS}
DEFAULT_MODES: Mapping[str, Mode] = dict.fromkeys(_BY_NAME, "report")


@dataclass(frozen=True)
class Normalisers:
    """All normalisers with their modes."""

    modes: Mapping[str, Mode] = field(default_factory=lambda: DEFAULT_MODES)

    @classmethod
    def parse(cls, text: str, *, param: str) -> Normalisers:
        """Returns the normalisers of `NAME=MODE,…`; a MODE alone is that of all others. Raises `SettingsError`."""
        items = [item.strip() for item in text.split(",")]
        named: dict[str, Mode] = {}
        rest: list[Mode] = []
        for item in items:
            name, equals, mode = (piece.strip().lower() for piece in item.rpartition("="))
            is_known = mode in get_args(Mode) and (name in _BY_NAME if equals else True)
            if not is_known or name in named or (not equals and rest):
                raise SettingsError(
                    f"{param}: {item[:40]!r} is not a normaliser with its mode, or is there twice; write NAME=MODE,… "
                    f"or a MODE for all; names: {', '.join(_BY_NAME)}; modes: {', '.join(get_args(Mode))}"
                )
            if equals:
                named[name] = cast(Mode, mode)
            else:
                rest.append(cast(Mode, mode))
        return cls(dict.fromkeys(_BY_NAME, rest[0] if rest else "report") | named)

    @property
    def is_off(self) -> bool:
        return all(mode == "off" for mode in self.modes.values())

    def apply(self, conversation: Conversation) -> tuple[Conversation, Rewriting]:
        """Returns the conversation to render, and the changes that were made or would have been made."""
        changes: list[Change] = []
        would_change: list[str] = []
        for normaliser in NORMALISERS:
            if (mode := self.modes[normaliser.name]) == "off":
                continue
            changed, paths = normaliser.apply(conversation)
            if mode == "on":
                conversation = changed
                changes += [Change(normaliser.name, path) for path in paths]
            elif paths:
                would_change.append(normaliser.name)
        return conversation, Rewriting(changes=tuple(changes), would_change=tuple(would_change))


def menders(line: str, rewriting: Rewriting) -> list[str]:
    """Returns the names of the normalisers that would change a line of this prompt if they were on."""
    return [name for name in rewriting.would_change if _BY_NAME[name].is_in(line)]


def place(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Gives system messages behind others to the user, unless the template writes those."""
    if not has_late_system(draft.conversation.messages) or template.writes_late_system:
        return draft
    return replace(draft, conversation=late_system_as_user(draft.conversation))


def normalise(normalisers: Normalisers, draft: PromptDraft) -> PromptDraft:
    """Undoes or reports what the client changes from request to request."""
    conversation, rewriting = normalisers.apply(draft.conversation)
    return replace(draft, conversation=conversation).with_prompt(rewriting=rewriting)


def has_late_system(messages: Sequence[Message]) -> bool:
    """Returns whether a system message stands behind a message of another role."""
    are_system = list(map(_is_system, messages))
    return not all(are_system[: sum(are_system)])


def late_system_as_user(conversation: Conversation) -> Conversation:
    """Returns the conversation with each late system message given to the user, in its place. It is joined with
    adjacent messages of the user, because many templates want user and assistant to alternate."""
    runs: list[list[Message]] = []
    """Each run becomes one message."""
    can_join, is_leading = False, True
    for message in conversation.messages:
        is_leading = is_leading and _is_system(message)
        is_late = _is_system(message) and not is_leading
        said = replace(message, role="user") if is_late else message
        if runs and said.role == runs[-1][0].role == "user" and (is_late or can_join):
            runs[-1].append(said)
        else:
            runs.append([said])
        can_join = is_late
    return replace(conversation, messages=[joined(run) for run in runs])


_LABEL = re.compile(r"\W*[A-Za-z][\w .'/-]{0,40}[:=]")
_KEY = re.compile(r"([A-Za-z][\w.-]{0,40}(?==|\":))")
_SHAPE_CHARS = 100


def shape_of(line: str) -> str:
    """Returns a line with only its label and its keys (`key=`, `"key":`); all other digits are 0, letters are a. The
    result is written to the log, and a prompt may hold secrets."""
    line = " ".join(line[: 4 * _SHAPE_CHARS].split())
    label = _LABEL.match(line)
    end = label.end() if label else 0
    # Values and keys in turn.
    pieces = _KEY.split(line[end:])
    pieces[::2] = [re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "0", value)) for value in pieces[::2]]
    text = "".join(char for char in line[:end] + "".join(pieces) if char.isprintable())
    return text if len(text) <= _SHAPE_CHARS else f"{text[: _SHAPE_CHARS - 1]}…"
