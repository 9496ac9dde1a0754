"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: a conversation, as Anthropic's clients send it."""

from __future__ import annotations

import json
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, Tag, field_validator

from diskprefix.chat.messages import Conversation, JsonObject
from diskprefix.errors import InvalidRequest
from diskprefix.server.protocols.anthropic_blocks import TextBlock
from diskprefix.server.protocols.anthropic_conversation import AnthropicMessageBody, neutral_messages
from diskprefix.server.protocols.anthropic_stream import MessageWriter
from diskprefix.server.protocols.anthropic_tools import AnthropicTool, AnthropicToolChoice, marks_of, served_tools
from diskprefix.server.protocols.dialect import Arrival, Asked, Head, ToolChoice
from diskprefix.server.protocols.fields import (
    MAX_COUNT,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    MAX_TOOLS,
    Count,
    Markable,
    RequestBody,
    StopString,
)
from diskprefix.server.protocols.params import sampling_params
from diskprefix.server.protocols.strict import Body, by_json_type
from diskprefix.server.protocols.structured_outputs import TextFormat

System: TypeAlias = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextBlock], Field(max_length=MAX_PARTS), Tag("~list")],
    by_json_type("a string or a list of text blocks"),
]


class ThinkingBody(Body):
    """Whether the model thinks before it answers, told to chat templates that can switch it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="`adaptive` and `between_tools`: as the chat template has it."
    )
    budget_tokens: Count | None = Field(default=None, description="Accepted; thinking is bounded by `max_tokens` only.")
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="`omitted`: the thought is left out of the reply. Otherwise all of it is shown."
    )

    @property
    def switch(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class JsonFormat(Body):
    """A reply that follows a JSON schema."""

    type: Literal["json_schema"] = Field(description="`json_schema`.")
    schema_: JsonObject = Field(alias="schema", description="The JSON schema.")


class OutputConfig(Body):
    """How the reply should be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Told to chat templates that know it, as `reasoning_effort`."
    )
    format: JsonFormat | None = Field(default=None, description="What the text of the reply must be.")


class CountTokensRequest(RequestBody, Markable):
    """`POST /v1/messages/count_tokens`: what makes the prompt."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"messages": [{"role": "user", "content": "Name three rivers."}]}}
    )

    messages: list[AnthropicMessageBody] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="The conversation, oldest message first."
    )
    system: System | None = Field(default=None, description="The system prompt, as text or text blocks.")
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Tools offered to the model by its template."
    )
    tool_choice: AnthropicToolChoice | None = Field(default=None, description="Whether a tool must be called.")
    thinking: ThinkingBody | None = Field(default=None, description="Absent: as the chat template has it.")
    output_config: OutputConfig | None = Field(default=None, description="Effort, and JSON of a schema.")
    output_format: JsonFormat | None = Field(default=None, description="The older name of `output_config.format`.")
    mcp_servers: None = Field(default=None, description="Not supported.")
    container: None = Field(default=None, description="Not supported.")
    compaction: None = Field(default=None, description="Not supported.")
    thread: JsonObject | None = Field(default=None, description="Not supported; the client then sends all messages.")

    @field_validator("thread", mode="after")
    @classmethod
    def _no_thread(cls, thread: JsonObject | None) -> None:
        """Raises `InvalidRequest` with the code that makes Anthropic's clients go on without a thread."""
        if thread is not None:
            message = "thread: conversations are not held here; send all messages"
            raise InvalidRequest(message, param="thread", code="thread_unsupported_request")

    @property
    def conversation(self) -> Conversation:
        """What the prompt is rendered from. A `tool_choice` of type `none` leaves the tools out."""
        offered = [] if self.choice.mode == "none" else served_tools(self.tools or ())
        return Conversation(
            messages=neutral_messages(self.system, self.messages, self.mark),
            tools=[tool.for_template for _, tool in offered] or None,
            tool_marks=tuple(marks_of(offered)),
            tool_paths=[f"tools.{index}.input_schema" for index, _ in offered],
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            thinking=None if self.thinking is None else self.thinking.switch,
            ending="continue" if self.messages[-1].is_begun_reply else "reply",
        )

    @property
    def choice(self) -> ToolChoice:
        return ToolChoice() if self.tool_choice is None else self.tool_choice.neutral


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"max_tokens": 64, "messages": [{"role": "user", "content": "Name three rivers."}]}
        }
    )

    max_tokens: int = Field(
        ge=0,
        le=MAX_COUNT,
        description="Most tokens of the reply. More than fit: as many as fit. 0: the prompt is computed and kept, and "
        "there is no reply.",
    )
    temperature: float | None = Field(default=None, ge=0, le=1, description="Below 0.00001 it is greedy; default 1.")
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, description="Texts that end the reply; they are not part of it."
    )
    metadata: JsonObject | None = Field(default=None, description="Accepted and ignored.")
    service_tier: Literal["auto", "standard_only"] | None = Field(default=None, description="Accepted and ignored.")
    context_management: JsonObject | None = Field(default=None, description="Accepted; nothing is edited.")

    @property
    def text_format(self) -> TextFormat | None:
        """Raises `InvalidRequest` if two fields say what the text must be."""
        own, path = self.output_format, "output_format.schema"
        if self.output_config is not None and self.output_config.format is not None:
            own, path = self.output_config.format, "output_config.format.schema"
        return self.text_format_beside(
            None if own is None else TextFormat("json_schema", json.dumps(own.schema_), path)
        )

    def require_reply_or_nothing_of_it(self) -> None:
        """Raises `InvalidRequest` for what asks for a reply beside a `max_tokens` of 0, as Anthropic's API does."""
        if self.max_tokens:
            return
        text_format = self.text_format
        asked = {
            "stream": bool(self.stream),
            "thinking": self.thinking is not None and self.thinking.type == "enabled",
            "tool_choice": self.choice.mode == "required",
            "" if text_format is None else text_format.path: text_format is not None,
        }
        for path in (path for path, is_asked in asked.items() if is_asked):
            raise InvalidRequest(f"{path}: asks for a reply, and max_tokens of 0 for none", param=path)


class Messages:
    body = MessagesRequest
    id_prefix = "msg_"
    call_id_prefix = "toolu_"

    def read(self, body: MessagesRequest, arrival: Arrival) -> Asked:
        conversation, choice = body.conversation, body.choice
        choice.check(conversation.tools or ())
        body.require_reply_or_nothing_of_it()
        sampling = sampling_params(
            body, arrival.serving.renderer.vocab_size, max_tokens=body.max_tokens, stop=body.stop_sequences or ()
        )
        return Asked(
            prompt=conversation,
            sampling=sampling,
            tool_choice=choice,
            text_format=body.text_format,
            # The first event of a stream has the usage, so it waits until it is known what was restored.
            return_progress=bool(body.stream),
        )

    def writer(self, body: MessagesRequest, head: Head) -> MessageWriter:
        return MessageWriter(head, shows_thoughts=body.thinking is None or body.thinking.display != "omitted")
