"""The input of a chat template: messages, tools and variables, in the form that the template accepts."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from diskprefix.daemon.chat.client_text import Author, Change, StandIns
from diskprefix.daemon.chat.messages import Conversation, JsonObject, Message, TextPart, ToolCall
from diskprefix.daemon.json_values import count_values, whole_characters
from diskprefix.errors import InvalidRequest

log = logging.getLogger("diskprefix")

_MAX_LEVELS = 200
"""The most levels in the arguments of a call. Templates write them recursively."""
PART_SEPARATOR = "\n"
"""The separator of the text parts of a message."""
_AUTHORS: dict[str, Author] = {"system": "system", "developer": "system", "assistant": "reply"}
"""The authors of messages by role; the client wrote all others."""
_WORDS = ("content", "reasoning_content")
"""The fields that the author of a message wrote."""


class TemplateInput(NamedTuple):
    """The input of a chat template."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None
    variables: JsonObject
    path: str = "messages"
    """The path of the messages in the client's body."""
    stand_ins: StandIns | None = None
    """The stand-ins in its texts; None if it has none."""

    @property
    def leading_system(self) -> list[JsonObject]:
        """The system and developer messages before the first other message."""
        return list(takewhile(lambda message: message["role"] in ("system", "developer"), self.messages))


def message_for_template(message: Message, developer_is_known: bool, with_pictures: bool) -> JsonObject:
    """Returns `message` in the form that templates expect. Unless `developer_is_known`, `developer` becomes `system`.
    Content with images is a list of parts."""
    role = "system" if message.role == "developer" and not developer_is_known else message.role
    text = PART_SEPARATOR.join(part.text for part in message.texts)
    parts = [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
        for part in message.content
    ]
    rendered: JsonObject = {"role": role, "content": parts if with_pictures and message.pictures else text}
    if message.tool_calls:
        rendered["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    others = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning}
    return rendered | {name: value for name, value in others.items() if value is not None}


def visit_texts(template_input: TemplateInput, change: Change) -> TemplateInput:
    """Returns the input with each text of the client changed."""
    client = partial(change, "client")
    return template_input._replace(
        messages=[_changed_message(message, change) for message in template_input.messages],
        tools=changed_texts(template_input.tools, client),
        variables=changed_texts(template_input.variables, client),
    )


def _changed_message(message: JsonObject, change: Change) -> JsonObject:
    author = _AUTHORS.get(message["role"], "client")
    return {
        name: value if name == "role" else changed_texts(value, partial(change, author if name in _WORDS else "client"))
        for name, value in message.items()
    }


def changed_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a copy of `value` with its texts changed, except keys that are words: templates look for them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key if key.isalnum() else change(key): changed_texts(item, change) for key, item in value.items()}
    return [changed_texts(item, change) for item in value] if isinstance(value, list | tuple) else value


def variables_for_template(conversation: Conversation) -> JsonObject:
    """Returns the variables for a template, which ignores unknown ones."""
    effort, thinking = conversation.reasoning_effort, conversation.thinking
    if effort == "none":
        thinking = False
    known: JsonObject = {"reasoning_effort": effort, "enable_thinking": thinking, "thinking": thinking}
    return {name: value for name, value in known.items() if value is not None} | conversation.template_variables


def require_few_arguments(conversation: Conversation) -> None:
    """Raises `InvalidRequest` for too many values in arguments that are JSON text. Objects were counted in the body."""
    calls = (call for message in conversation.messages for call in message.tool_calls)
    texts = [call.arguments.encode("utf-8", "replace") for call in calls if isinstance(call.arguments, str)]
    if too_many := count_values(texts).too_many:
        problem = f"the arguments of calls, which are JSON text, have {too_many}"
        raise InvalidRequest.at(conversation.path, problem, "body_too_complex")


def _tool_call(call: ToolCall) -> JsonObject:
    """Returns a call with its arguments as an object, over which templates iterate, or as text that is not JSON."""
    arguments = call.arguments or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(whole_characters(arguments))
            arguments = arguments if _is_deep(parsed) else parsed
        except (ValueError, RecursionError):
            log.debug("the arguments of a tool call are not JSON; the template gets the text")
    rendered = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return rendered if call.id is None else {"id": call.id, **rendered}


def _is_deep(value: object) -> bool:
    """Returns whether a JSON value has more than `_MAX_LEVELS` levels."""
    level = [value]
    for _ in range(_MAX_LEVELS):
        if not level:
            return False
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [part for several in parts for part in several]
    return bool(level)


def text_for_template(text: str) -> list[JsonObject]:
    """Returns a text as a list of parts, for templates that accept only lists."""
    return [{"type": "text", "text": text}]


def texts_of(content: str | Sequence[JsonObject]) -> list[str]:
    """Returns the texts of a message's content."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def with_other_user_message(messages: Sequence[JsonObject], rest: Sequence[JsonObject]) -> list[JsonObject]:
    """Returns `messages` and a user message with another first character than `rest`, their real continuation."""
    return [*messages, {"role": "user", "content": other_first_character(rest[0]["content"] if rest else "")}]


def probe_of(template_input: TemplateInput) -> TemplateInput:
    """Returns the input with another user message after the leading system messages."""
    leading = template_input.leading_system
    return template_input._replace(messages=with_other_user_message(leading, template_input.messages[len(leading) :]))


def question_probes_of(template_input: TemplateInput) -> list[TemplateInput]:
    """Returns the input up to the user's last message, and this input followed by another reply and another question.
    Returns nothing if there is no such message."""
    messages = template_input.messages
    end = max((k for k, message in enumerate(messages, start=1) if message["role"] == "user"), default=0)
    if not end:
        return []
    reply = {"role": "assistant", "content": other_first_character(messages[end]["content"] if messages[end:] else "")}
    probes = messages[:end], with_other_user_message([*messages[:end], reply], ())
    return [template_input._replace(messages=probe) for probe in probes if len(probe) != len(messages)]


def other_first_character(content: str | Sequence[JsonObject]) -> str:
    """Returns a character with which the content's text does not begin, even without leading blanks."""
    return "y" if "".join(texts_of(content)).lstrip().startswith("x") else "x"


_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""The ids of calls that Mistral's templates accept."""
CallIds: TypeAlias = Literal["any", "short", "named"]
"""The ids of calls that a template takes: any; nine letters and digits; or `functions.NAME:INDEX`, counted from 0 over
the conversation, of templates that write only the id of a call (Kimi K2)."""


class MessageForm(Struct, frozen=True):
    """The form of messages that a template accepts. The default: contents are texts, arguments objects."""

    parts_only: bool = False
    """Contents are lists of parts."""
    null_content: bool = False
    """A message with calls and no text has the content None."""
    text_arguments: bool = False
    """Arguments are JSON text."""
    objects_only: bool = False
    """Arguments are always objects: others become the argument `arguments`."""
    call_ids: CallIds = "any"
    named_results: bool = False
    """Results of calls have the name of the tool."""

    def applied(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Returns the messages in this form. A result belongs to the last call before it that has its id."""
        called: dict[str, JsonObject] = {}
        num_calls, applied = 0, []
        for message in messages:
            sent = message.get("tool_calls", ())
            calls = [self._call(call, index) for index, call in enumerate(sent, start=num_calls)]
            called |= {call["id"]: ours for call, ours in zip(sent, calls, strict=True) if "id" in call}
            num_calls += len(calls)
            applied.append(self._message(message, calls, called.get(message.get("tool_call_id", ""))))
        return applied

    def _message(self, message: JsonObject, calls: list[JsonObject], answered: JsonObject | None) -> JsonObject:
        changed: JsonObject = {}
        if answered is not None and self.named_results:
            changed["name"] = message.get("name", answered["function"]["name"])
        if calls:
            changed["tool_calls"] = calls
        if self.null_content and calls and not message["content"]:
            changed["content"] = None
        elif self.parts_only and isinstance(message["content"], str):
            changed["content"] = text_for_template(message["content"])
        if "tool_call_id" in message:
            changed["tool_call_id"] = self._id(message["tool_call_id"]) if answered is None else answered["id"]
        return {**message, **changed}

    def _call(self, call: JsonObject, index: int) -> JsonObject:
        function = {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}
        if self.call_ids == "named":
            return {**call, "id": f"functions.{function['name']}:{index}", "function": function}
        ids = {"id": self._id(call["id"])} if "id" in call else {}
        return {**call, **ids, "function": function}

    def _id(self, call_id: str) -> str:
        if self.call_ids != "short" or _SHORT_ID.fullmatch(call_id):
            return call_id
        return hashlib.blake2b(call_id.encode()).hexdigest()[:9]

    def _arguments(self, arguments: Any) -> Any:
        if self.objects_only and not isinstance(arguments, dict):
            return {"arguments": arguments}
        if self.text_arguments and not isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False)
        return arguments


def common_chars(a: str, b: str) -> int:
    """Returns the number of leading characters that `a` and `b` share. Compares slices, which is faster than a loop."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
