"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: a conversation, as Anthropic's clients send it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

from msgspec.structs import replace
from pydantic import ConfigDict, Field, field_validator

from diskprefix.daemon.api.anthropic_content import AnthropicMessageBody, TextBlock, defined_tools, neutral_messages
from diskprefix.daemon.api.anthropic_tools import SEARCHES, AnthropicTool, AnthropicToolChoice, CustomTool, served_tools
from diskprefix.daemon.api.anthropic_writer import MessageWriter
from diskprefix.daemon.api.dialect import Head, Json
from diskprefix.daemon.api.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    Count,
    Effort,
    LimitOrNothing,
    MarkableStrictly,
    NotServed,
    OneOf,
    RequestBody,
    StopString,
    optional,
    sampling_params,
    without_sampling,
)
from diskprefix.daemon.api.offered_tools import OfferedTool, tool_fields
from diskprefix.daemon.api.parsed_request import ParsedRequest, TextFormat, ToolChoice
from diskprefix.daemon.api.unread import OrUnread, Unread
from diskprefix.daemon.chat.messages import Conversation, JsonObject
from diskprefix.errors import InvalidRequest
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.values import MAX_STOPS

System: TypeAlias = Annotated[
    str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)], OneOf("a string or a list of text blocks")
]


class ThinkingBody(Body):
    """The switch for thinking, for chat templates that have one."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="`adaptive` and `between_tools`: the chat template's default."
    )
    budget_tokens: Count | None = optional("The most tokens of the thoughts, which end there.")
    display: Literal["summarized", "omitted"] | None = optional("`omitted`: no thought is shown. Otherwise all are.")


class JsonFormat(Body):
    """A reply that follows a JSON schema."""

    type: Literal["json_schema"] = Field(description="`json_schema`.")
    schema_: JsonObject = Field(alias="schema", description="The JSON schema.")


class OutputConfig(Body):
    """Options of the reply."""

    effort: Effort = None
    format: JsonFormat | None = optional("The format of the reply's text.")


def _of_counting(schema: Json) -> None:
    schema["properties"] = without_sampling(schema["properties"])
    schema["example"] = {"messages": [{"role": "user", "content": "Hello!"}]}


class CountTokensRequest(RequestBody, MarkableStrictly):
    """`POST /v1/messages/count_tokens`: the fields that make the prompt. Those of `SamplingFields` change nothing."""

    model_config = ConfigDict(json_schema_extra=_of_counting)

    messages: list[Annotated[AnthropicMessageBody | Unread, OrUnread(AnthropicMessageBody)]] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="The conversation, oldest message first."
    )
    system: System | None = optional("The system prompt, as text or text blocks.")
    tools: list[AnthropicTool] | None = optional("Tools offered to the model by its template.", max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = optional("Whether a tool must be called.")
    thinking: ThinkingBody | None = optional("Absent: the chat template's default.")
    output_config: OutputConfig | None = optional("Effort, and JSON of a schema.")
    output_format: JsonFormat | None = optional("The older name of `output_config.format`.")
    mcp_servers: NotServed = optional("Not supported.")
    container: None = optional("Not supported.")
    compaction: None = optional("Not supported.")
    thread: JsonObject | None = optional("Not supported; the client then sends all messages.")

    @field_validator("thread", mode="after")
    @classmethod
    def _no_thread(cls, thread: JsonObject | None) -> None:
        """Raises `InvalidRequest` with the code after which Anthropic's clients go on without a thread."""
        if thread is not None:
            problem = "conversations are not held here; send all messages"
            raise InvalidRequest.at("thread", problem, code="thread_unsupported_request")

    @property
    def conversation(self) -> Conversation:
        """Returns the conversation for the chat template. If no tool of the client could find the deferred tools, they
        are offered at once."""
        defined = [*defined_tools(self.messages)]
        offered, tools_left_out = served_tools(self.tools or (), more_come=bool(defined))
        searches_there = any(tool.type and tool.type.startswith(SEARCHES) for tool in self.tools or ())
        searches_here = not searches_there and not all(tool.defer_loading for _, tool in offered)
        messages, left_out = neutral_messages(self.system, self.messages, self.mark)
        return Conversation(
            left_out=[*tools_left_out, *left_out],
            **tool_fields(
                [
                    OfferedTool(
                        tool.for_template,
                        f"tools.{index}.input_schema",
                        tool.mark,
                        deferred=bool(tool.defer_loading) and searches_here,
                    )
                    for index, tool in offered
                ]
                + [OfferedTool(tool.for_template, path, comes_with_message=True) for tool, path in defined],
                messages,
            ),
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            thinking=None if self.thinking is None else {"enabled": True, "disabled": False}.get(self.thinking.type),
            special_tokens_in_text=self.special_tokens_in_text or False,
            ending="continue" if self._is_prefilled else "reply",
        )

    @property
    def _is_prefilled(self) -> bool:
        last = self.messages[-1]
        return isinstance(last, AnthropicMessageBody) and last.is_prefill

    @property
    def choice(self) -> ToolChoice:
        choice = ToolChoice() if self.tool_choice is None else self.tool_choice.neutral
        tools = [tool for tool in self.tools or () if isinstance(tool, CustomTool)]
        tools += [tool for tool, _ in defined_tools(self.messages)]
        return replace(choice, strict=frozenset(tool.name for tool in tools if tool.strict))


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"max_tokens": 64, "messages": [{"role": "user", "content": "Hello!"}]}}
    )

    max_tokens: LimitOrNothing = Field(
        description="Most tokens of the reply. -1, or more than fit: as many as fit. 0: the prompt is computed and "
        "saved, and there is no reply."
    )
    temperature: float | None = optional("Below 0.00001 it is greedy.", ge=0, le=1)
    stop_sequences: list[StopString] | None = optional("Texts that end the reply, without them.", max_length=MAX_STOPS)

    @property
    def text_format(self) -> TextFormat | None:
        """Raises `InvalidRequest` if two fields give the format of the text."""
        own, path = self.output_format, "output_format.schema"
        if self.output_config is not None and self.output_config.format is not None:
            own, path = self.output_config.format, "output_config.format.schema"
        return self.text_format_beside(
            None if own is None else TextFormat("json_schema", json.dumps(own.schema_), path)
        )

    def check_max_tokens_zero(self) -> None:
        """Raises `InvalidRequest`, as Anthropic's API does, if `max_tokens` is 0 and another field asks for a reply."""
        if self.max_tokens:
            return
        text_format = self.text_format
        asks_for_reply = {
            "stream": bool(self.stream),
            "thinking": self.thinking is not None and self.thinking.type == "enabled",
            "tool_choice": self.choice.mode == "required",
            "" if text_format is None else text_format.path: text_format is not None,
        }
        for path in (path for path, asks in asks_for_reply.items() if asks):
            raise InvalidRequest.at(path, "cannot be combined with max_tokens: 0, which produces no reply")


class Messages:
    body = MessagesRequest
    id_prefix = "msg_"
    call_id_prefix = "toolu_"

    def read(self, body: MessagesRequest, vocab_size: int, _notes: Callable[[], TenantNotes]) -> ParsedRequest:
        conversation = body.conversation
        choice = body.choice.without(conversation.withdrawn, conversation.tool_names)
        choice.check(conversation.tools or ())
        body.check_max_tokens_zero()
        sampling = sampling_params(body, vocab_size, max_tokens=body.max_tokens, stop=body.stop_sequences)
        return ParsedRequest(
            prompt=conversation,
            sampling=sampling,
            tool_choice=choice,
            text_format=body.text_format,
            thinking_budget=None if body.thinking is None else body.thinking.budget_tokens,
            # The first event of a stream has the usage, so it waits until the restored tokens are known.
            return_progress=bool(body.stream),
        )

    def writer(self, body: MessagesRequest, head: Head) -> MessageWriter:
        return MessageWriter(head, shows_thoughts=body.thinking is None or body.thinking.display != "omitted")
