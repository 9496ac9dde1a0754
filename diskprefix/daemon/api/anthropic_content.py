"""The messages of Anthropic's API, and their conversion to neutral messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec.structs import replace
from pydantic import AfterValidator, Field, ValidationInfo

from diskprefix.daemon.api.anthropic_tools import CustomTool
from diskprefix.daemon.api.fields import (
    MAX_PARTS,
    Body,
    Markable,
    OneOf,
    empty_as,
    mark_beside_text,
    optional,
    require_content,
)
from diskprefix.daemon.api.unread import Unread, read_messages, refuse_unread
from diskprefix.daemon.chat.data_uri import data_uri
from diskprefix.daemon.chat.messages import (
    CacheMark,
    ContentPart,
    ImagePart,
    JsonObject,
    Message,
    NewTool,
    OtherPart,
    TextPart,
    ToolCall,
    join_neighbours,
)
from diskprefix.printable import shown


class TextBlock(Markable):
    """Text."""

    type: Literal["text"] = Field(description="`text`.")
    text: str = Field(description="The text itself.")

    def parts(self, path: str) -> Iterator[ContentPart]:
        yield TextPart(self.text, f"{path}.text", self.mark)


class Base64Source(Body):
    """A file that is sent inside the request."""

    type: Literal["base64"] = Field(description="`base64`.")
    media_type: str = Field(min_length=1, description="For example `image/png`.")
    data: str = Field(description="The file in base64.")


class UrlSource(Body):
    """A file that is named by a URL. It is read so that the error can say that nothing is fetched."""

    type: Literal["url"] = Field(description="`url`.")
    url: str


class TextSource(Body):
    """A document of plain text."""

    type: Literal["text"] = Field(description="`text`.")
    data: str = Field(description="The text.")


class ImageBlock(Markable):
    """An image, for models that take images."""

    type: Literal["image"] = Field(description="`image`.")
    source: Annotated[Base64Source | UrlSource, OneOf("an object of type base64")] = Field(
        description="PNG, JPEG, WebP, GIF or BMP in base64. No URL is fetched."
    )

    def parts(self, path: str) -> Iterator[ContentPart]:
        source = self.source
        if isinstance(source, UrlSource):
            yield ImagePart(source.url, path, f"{path}.source.url")
        else:
            yield ImagePart(data_uri(source.media_type, source.data), path, f"{path}.source.data")


class ContentSource(Body):
    """A document of content blocks."""

    type: Literal["content"] = Field(description="`content`.")
    content: TextOrBlocks = Field(description="Text, or text and image blocks.")


class DocumentBlock(Markable):
    """A document. Plain text is used unchanged; models here accept no PDF. `citations` are ignored: replies cite
    nothing."""

    type: Literal["document"] = Field(description="`document`.")
    source: Annotated[TextSource | ContentSource | Base64Source | UrlSource, OneOf("an object of type text or content")]
    title: str | None = optional("Stands before the text.")
    context: str | None = optional("Stands before the text.")

    def parts(self, path: str) -> Iterator[ContentPart]:
        for name, text in (("title", self.title), ("context", self.context)):
            if text:
                yield TextPart(text, f"{path}.{name}")
        source = self.source
        if isinstance(source, TextSource):
            yield TextPart(source.data, f"{path}.source.data")
        elif isinstance(source, ContentSource):
            yield from content_parts(source.content, f"{path}.source.content")
        else:
            yield OtherPart("document", path)


class SearchResultBlock(Markable):
    """A result of a search that the client made."""

    type: Literal["search_result"] = Field(description="`search_result`.")
    source: str = Field(description="The address or name of the source.")
    title: str
    content: Annotated[list[TextBlock], Field(max_length=MAX_PARTS)]

    def parts(self, path: str) -> Iterator[ContentPart]:
        yield TextPart(self.title, f"{path}.title")
        yield TextPart(self.source, f"{path}.source")
        for index, block in enumerate(self.content):
            yield from block.parts(f"{path}.content.{index}")


class ToolReferenceBlock(Markable):
    """The name of a tool that a search has found. If it was deferred, it is offered from here on."""

    type: Literal["tool_reference"] = Field(description="`tool_reference`.")
    tool_name: str

    def parts(self, path: str) -> Iterator[ContentPart]:
        yield TextPart(self.tool_name, f"{path}.tool_name")


class FoundTools(Body):
    """The tools that a search of Anthropic's servers has found."""

    tool_references: Annotated[list[ToolReferenceBlock], Field(max_length=MAX_PARTS)] = Field(
        default=[], description="Names of tools."
    )


class FoundToolsBlock(Body):
    """The result of a search for tools that Anthropic's servers ran."""

    type: Literal["tool_search_tool_result"] = Field(description="`tool_search_tool_result`.")
    content: FoundTools


class ToolUseBlock(Markable):
    """A tool call of an earlier reply."""

    type: Literal["tool_use"] = Field(description="`tool_use`.")
    id: str = Field(min_length=1, description="The `tool_use_id` of its result refers to it.")
    name: str = Field(min_length=1, description="Name of the tool.")
    input: Annotated[JsonObject, empty_as({})] = Field(description="Its arguments.")


class ToolResultBlock(Markable):
    """The result of a tool call."""

    type: Literal["tool_result"] = Field(description="`tool_result`.")
    tool_use_id: str = Field(min_length=1, description="The call that it answers.")
    content: TextOrBlocks | None = optional("Text, or blocks.")
    is_error: bool | None = optional("`true`: the model reads `Error:` before the content.")

    def parts(self, path: str) -> Iterator[ContentPart]:
        if self.is_error:
            yield TextPart("Error:", path)
        if self.content is not None:
            yield from content_parts(self.content, f"{path}.content")


class ThinkingBlock(Body):
    """A thought of the assistant. The signature is not checked."""

    type: Literal["thinking"] = Field(description="`thinking`.")
    thinking: str = Field(description="The thought.")


class RedactedThinkingBlock(Body):
    """A thought that only Anthropic's servers can read. It is left out."""

    type: Literal["redacted_thinking"] = Field(description="`redacted_thinking`.")


class NamedChange(Body):
    """The name of a tool in `tools`, or of one that was defined earlier."""

    type: Literal["tool_reference"] = Field(description="`tool_reference`.")
    name: str


class DefinedChange(Body):
    """A tool that is defined where it comes."""

    type: Literal["tool_definition"] = Field(description="`tool_definition`.")
    definition: CustomTool

    @property
    def name(self) -> str:
        return self.definition.name


class AdditionBlock(Markable):
    """A tool that may be called from here on."""

    type: Literal["tool_addition"] = Field(description="`tool_addition`.")
    tool: Annotated[NamedChange | DefinedChange, OneOf("an object of type tool_reference or tool_definition")]


class RemovalBlock(Markable):
    """A tool that may no longer be called from here on."""

    type: Literal["tool_removal"] = Field(description="`tool_removal`.")
    tool: NamedChange


ChangeBlock: TypeAlias = AdditionBlock | RemovalBlock


class CompactionBlock(Markable):
    """A summary of the conversation before it."""

    type: Literal["compaction"] = Field(description="`compaction`.")
    content: Annotated[str, empty_as("")] = Field(default="", description="The summary.")
    tool_changes: Annotated[
        list[Annotated[ChangeBlock | Unread, OneOf("a change of the tools", or_unread=True)]],
        Field(max_length=MAX_PARTS),
        empty_as([]),
    ] = Field(default=[], description="The tools that came before it, or may no longer be called.")

    def parts(self, path: str) -> Iterator[ContentPart]:
        yield TextPart(self.content, f"{path}.content")


_OF_RESULTS = frozenset({"text", "image", "document", "search_result", "tool_reference"})
_ALLOWED = {
    "user": frozenset({"text", "image", "document", "search_result", "tool_result"}),
    "assistant": frozenset(
        {"text", "tool_use", "thinking", "redacted_thinking", "compaction", "tool_search_tool_result"}
    ),
    "system": frozenset({"text", "tool_addition", "tool_removal"}),
}


PartBlock: TypeAlias = (
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ToolResultBlock | CompactionBlock
)
"""A block that has content."""
Block: TypeAlias = Annotated[
    PartBlock | ToolUseBlock | FoundToolsBlock | ChangeBlock | ThinkingBlock | RedactedThinkingBlock | Unread,
    OneOf("a content block with a type", or_unread=True),
]
_TEXT_OR_BLOCKS = OneOf("a string or a list of content blocks")
TextOrBlocks: TypeAlias = Annotated[str | Annotated[list[Block], Field(max_length=MAX_PARTS)], _TEXT_OR_BLOCKS]


def placed(block: Block, allowed: frozenset[str], place: str) -> Block:
    """Returns a block, as one that cannot be read if its type is not served in this place."""
    if isinstance(block, Unread):
        if block.at != "type" or not isinstance(block.sent, dict) or not isinstance(block.sent.get("type"), str):
            return block
    elif block.type in allowed:
        return block
    sent = block.sent if isinstance(block, Unread) else {"type": block.type}
    known = ", ".join(sorted(allowed))
    return Unread(sent, "type", f"{shown(sent['type'])!r} is not supported in {place}; {known} may stand there")


def content_parts(content: str | Sequence[Block], path: str) -> Iterator[ContentPart]:
    """Returns content of a document or a result."""
    if isinstance(content, str):
        yield TextPart(content, path)
        return
    for index, block in enumerate(content):
        yield from parts_of(placed(block, _OF_RESULTS, "this content"), f"{path}.{index}")


def parts_of(block: Block, path: str) -> Iterator[ContentPart]:
    """Returns the parts of a block with content; none for other blocks."""
    if isinstance(block, PartBlock):
        yield from block.parts(path)
    elif isinstance(block, Unread):
        yield block.neutral(path)


def _require_content(content: TextOrBlocks | None, info: ValidationInfo) -> TextOrBlocks | None:
    # A system message may set the effort of a turn, and say nothing.
    return content if info.data.get("role") == "system" else require_content(content, info)


class AnthropicMessageBody(Body):
    """One message of the conversation. A `system` message may stand anywhere, and stays there."""

    role: Literal["user", "assistant", "system"] = Field(description="Who speaks.")
    content: Annotated[TextOrBlocks | None, AfterValidator(_require_content)] = optional(
        "Text, or a list of content blocks. An assistant may have none.", validate_default=True
    )

    def neutral(self, path: str) -> Iterator[Message]:
        """Returns the message as neutral messages: one for each tool result, and one for the blocks between them."""
        if isinstance(self.content, str):
            yield Message(role=self.role, content=(TextPart(self.content, f"{path}.content"),), path=path)
            return
        said: list[tuple[Block, str]] = []
        for index, block in enumerate(self.content or ()):
            block_path = f"{path}.content.{index}"
            block = placed(block, _ALLOWED[self.role], f"a message of role {self.role}")
            if not isinstance(block, ToolResultBlock):
                said.append((block, block_path))
                continue
            if said:
                yield self._message(said, path)
                said = []
            yield _result(block, block_path)
        if said or not (self.content or self.role == "system"):
            yield self._message(said, path)

    def _message(self, said: Sequence[tuple[Block, str]], path: str) -> Message:
        blocks = [block for block, _ in said]
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
        calls = (block for block in blocks if isinstance(block, ToolUseBlock))
        changes = [change for block in blocks for change in _changes(block)]
        return Message(
            role=self.role,
            content=tuple(part for block, block_path in said for part in parts_of(block, block_path)),
            tool_calls=tuple(ToolCall(call.id, call.name, call.input) for call in calls),
            reasoning="\n".join(thoughts) or None,
            new_tools=[new for _, new in changes if new is not None],
            withdrawn=[name for name, new in dict(changes).items() if new is None],
            mark=mark_beside_text(blocks),
            path=path,
        )

    @property
    def has_results(self) -> bool:
        return any(isinstance(block, ToolResultBlock) for block in self.content or ())

    @property
    def is_prefill(self) -> bool:
        """Returns whether the message is an assistant's text alone, which the reply continues."""
        if self.role != "assistant" or isinstance(self.content, str):
            return self.role == "assistant" and bool(self.content)
        blocks = [block for block in self.content or () if not isinstance(block, ThinkingBlock | RedactedThinkingBlock)]
        return bool(blocks) and all(isinstance(block, TextBlock) and block.text for block in blocks)


def _result(block: ToolResultBlock, path: str) -> Message:
    content = () if isinstance(block.content, str | None) else block.content
    return Message(
        role="tool",
        content=tuple(block.parts(path)),
        tool_call_id=block.tool_use_id,
        mark=block.mark,
        new_tools=[NewTool(part.tool_name) for part in content if isinstance(part, ToolReferenceBlock)],
        path=path,
    )


def _changes(block: Block) -> Iterator[tuple[str, NewTool | None]]:
    """Returns the names of the tools that a block adds, or takes back (with None)."""
    if isinstance(block, FoundToolsBlock):
        yield from ((tool.tool_name, NewTool(tool.tool_name)) for tool in block.content.tool_references)
    elif isinstance(block, AdditionBlock):
        yield block.tool.name, NewTool(block.tool.name, isinstance(block.tool, DefinedChange))
    elif isinstance(block, RemovalBlock):
        yield block.tool.name, None
    elif isinstance(block, CompactionBlock):
        for change in block.tool_changes:
            yield from () if isinstance(change, Unread) else _changes(change)


def defined_tools(messages: Sequence[AnthropicMessageBody | Unread]) -> Iterator[tuple[CustomTool, str]]:
    """Returns the tools that messages define where they may, each with the path of the schema of its arguments."""
    for index, message in enumerate(messages):
        if isinstance(message, Unread) or isinstance(message.content, str | None):
            continue
        for place, block in enumerate(message.content):
            if isinstance(block, Unread) or block.type not in _ALLOWED[message.role]:
                continue
            path = f"messages.{index}.content.{place}"
            changes: list[tuple[Block, str]] = [(block, path)]
            if isinstance(block, CompactionBlock):
                changes = [(change, f"{path}.tool_changes.{at}") for at, change in enumerate(block.tool_changes)]
            for change, at in changes:
                if isinstance(change, AdditionBlock) and isinstance(change.tool, DefinedChange):
                    yield change.tool.definition, f"{at}.tool.definition.input_schema"


def neutral_messages(
    system: str | Sequence[TextBlock] | None,
    messages: Sequence[AnthropicMessageBody | Unread],
    end_mark: CacheMark | None,
) -> tuple[list[Message], list[OtherPart]]:
    """Returns the conversation, and what is left out of it. `end_mark` is a mark on its last message. Raises the errors
    of `read_messages`."""
    refuse_unread(system, "system")
    sent = ((message, f"messages.{index}") for index, message in enumerate(messages))
    read, left_out = read_messages(sent, AnthropicMessageBody.neutral)
    # Joins neighbours as Anthropic's API does. Tool results stay apart.
    conversation = join_neighbours((message, message.role != "tool") for message in (*_system(system), *read))
    if end_mark is not None:
        conversation[-1] = replace(conversation[-1], mark=end_mark)
    return conversation, left_out


def _system(system: str | Sequence[TextBlock] | None) -> Iterator[Message]:
    if isinstance(system, str):
        if system:
            yield Message(role="system", content=(TextPart(system, "system"),), path="system")
    elif system:
        parts = tuple(part for index, block in enumerate(system) for part in block.parts(f"system.{index}"))
        yield Message(role="system", content=parts, path="system")
