"""A conversation in one form for all APIs. A `path` is an object's place in the client's body, for later errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from diskprefix.errors import InvalidRequest

if TYPE_CHECKING:
    from diskprefix.runtime.pictures.picture_processor import Detail

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
JsonObject: TypeAlias = dict[str, Any]
Ending: TypeAlias = Literal["reply", "continue", "none"]
"""The end of a prompt: the beginning of a reply, the last message's text, which the reply continues, or its end."""


class CacheMark(Struct, frozen=True):
    """A client's wish to save the prompt up to the end of the marked object. `ttl_s` is None if the daemon decides."""

    ttl_s: float | None = None


class TextPart(Struct, frozen=True):
    """A text of the client; with `offers_tools`, the daemon's own text for tools that came with the message."""

    text: str
    path: str
    mark: CacheMark | None = None
    offers_tools: bool = False


class ImagePart(Struct, frozen=True):
    """An image. `uri` should be a data: URI; `uri_path` is its path. `detail` chooses the resolution. `in_history`: one
    that cannot be read becomes a note, because clients send it again in each request."""

    uri: str
    path: str
    uri_path: str
    detail: Detail = "auto"
    in_history: bool = False


class OtherPart(Struct, frozen=True):
    """A content part of a kind that no model here accepts, or that cannot be read. `kind` is the client's word for it.
    `problem` is what is wrong with the field `at` of one that cannot be read, `text` the text in it, `call_ids` are
    those of calls in it."""

    kind: str
    path: str
    problem: str | None = None
    at: str = ""
    text: str | None = None
    in_history: bool = False
    call_ids: frozenset[str] = frozenset()

    @property
    def refusal(self) -> InvalidRequest | None:
        """The error of a part that cannot be read. A history may have thousands, of which none is raised."""
        if self.problem is None:
            return None
        return InvalidRequest.at(f"{self.path}.{self.at}" if self.at else self.path, self.problem)


ContentPart: TypeAlias = TextPart | ImagePart | OtherPart


class ToolCall(Struct, frozen=True):
    """A tool call of an earlier assistant message. `arguments` are JSON text, or an object."""

    id: str | None
    name: str
    arguments: str | JsonObject


class NewTool(NamedTuple):
    """The name of a tool that came with a message. `is_defined`: the message defines it. Otherwise it is one of the
    tools of the request."""

    name: str
    is_defined: bool = False


class Message(Struct, frozen=True, kw_only=True):
    """One message. `reasoning` has the assistant's thoughts before `content`, `new_tools` the tools that came with the
    message, `withdrawn` the names of those that may no longer be called, `redefined` the tools that it defines anew,
    `number` its place in the client's conversation, if that was counted."""

    role: Role
    content: Sequence[ContentPart] = ()
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    mark: CacheMark | None = None
    new_tools: Sequence[NewTool] = ()
    withdrawn: Sequence[str] = ()
    redefined: Sequence[JsonObject] = ()
    number: int | None = None
    path: str

    @property
    def is_system(self) -> bool:
        return self.role in ("system", "developer")

    @property
    def texts(self) -> list[TextPart]:
        return [part for part in self.content if isinstance(part, TextPart)]

    @property
    def pictures(self) -> list[ImagePart | OtherPart]:
        """The content parts that are not text: images, and parts that will be refused."""
        return [part for part in self.content if not isinstance(part, TextPart)]


def joined(messages: Sequence[Message]) -> Message:
    """Returns messages of one role as one message with the path of the first."""
    if len(messages) == 1:
        return messages[0]
    marks = [message.mark for message in messages if message.mark]
    return replace(
        messages[0],
        content=tuple(part for message in messages for part in message.content),
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
        new_tools=tuple(tool for message in messages for tool in message.new_tools),
        withdrawn=tuple(withdrawn_by(messages)),
        redefined=tuple(tool for message in messages for tool in message.redefined),
        reasoning="\n".join(message.reasoning for message in messages if message.reasoning) or None,
        mark=marks[-1] if marks else None,
    )


def withdrawn_by(messages: Iterable[Message]) -> list[str]:
    """Returns the names of the tools that messages take back, and do not offer again."""
    names: dict[str, None] = {}
    for message in messages:
        for tool in message.new_tools:
            names.pop(tool.name, None)
        names |= dict.fromkeys(message.withdrawn)
    return [*names]


def join_neighbours(messages: Iterable[tuple[Message, bool]]) -> list[Message]:
    """Returns the messages. Neighbours of one role are joined if one of them comes with True."""
    runs: list[list[Message]] = []
    joins_next = False
    for message, joins in messages:
        if runs and runs[-1][0].role == message.role and (joins or joins_next):
            runs[-1].append(message)
        else:
            runs.append([message])
        joins_next = joins
    return [joined(run) for run in runs]


class Conversation(Struct, frozen=True):
    """The source of a prompt.

    `tools` have the form of OpenAI's chat API, which chat templates expect, without marks. `tool_marks` has the marks,
    each with the index of its tool, `tool_paths` the paths of the schemas of the tools' arguments, `late` the names of
    tools that came with a message, which are the last of `tools`, `withdrawn` those that may no longer be called,
    `redefined` the newest definition of each tool that a message defines anew.
    `reasoning_effort` and `thinking` are variables of some templates. The client's `template_variables` override
    others. With `special_tokens_in_text`, the text of a control token becomes that token, whoever wrote it. `left_out`
    has the parts of the client's body that are not part of the prompt. `before` are the tokens of an earlier prompt and
    its reply, which the messages continue.
    """

    messages: Sequence[Message]
    tools: list[JsonObject] | None = None
    tool_marks: Sequence[tuple[int, CacheMark]] = ()
    tool_paths: Sequence[str] = ()
    reasoning_effort: str | None = None
    thinking: bool | None = None
    template_variables: JsonObject = field(default_factory=dict)
    special_tokens_in_text: bool = False
    ending: Ending = "reply"
    path: str = "messages"
    left_out: Sequence[OtherPart] = ()
    late: frozenset[str] = frozenset()
    withdrawn: frozenset[str] = frozenset()
    redefined: Mapping[str, JsonObject] = field(default_factory=dict)
    before: Sequence[int] = ()

    @property
    def first_tools(self) -> list[JsonObject] | None:
        """The tools that the template writes."""
        return [tool for tool in self.tools or () if tool["function"]["name"] not in self.late] or None

    @property
    def newest_tools(self) -> list[JsonObject]:
        """The tools as they are defined last."""
        return [self.redefined.get(tool["function"]["name"], tool) for tool in self.tools or ()]

    @property
    def has_pictures(self) -> bool:
        return any(message.pictures for message in self.messages)

    @property
    def tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools or ()]

    @property
    def tool_results(self) -> list[tuple[str, str]]:
        """The texts that tools returned, each with the tool's name."""
        called = {call.id: call.name for message in self.messages for call in message.tool_calls}
        results = [message for message in self.messages if message.role == "tool"]
        return [
            (result.name or called.get(result.tool_call_id, ""), part.text)
            for result in results
            for part in result.texts
        ]

    @property
    def num_leading(self) -> int:
        """The number of leading system messages, which are the system prompt."""
        return len([*takewhile(lambda message: message.is_system, self.messages)])


def has_late_system(messages: Sequence[Message]) -> bool:
    """Returns whether a system message follows a message of another role."""
    are_system = [message.is_system for message in messages]
    return not all(are_system[: sum(are_system)])


def late_system_as_user(conversation: Conversation) -> Conversation:
    """Returns the conversation with each late system message as the user's, in its place. Adjacent messages of the user
    are joined with it, because many templates want user and assistant to alternate."""
    leading = conversation.num_leading
    messages = (
        (replace(message, role="user"), True) if message.is_system and index >= leading else (message, False)
        for index, message in enumerate(conversation.messages)
    )
    return replace(conversation, messages=join_neighbours(messages))
