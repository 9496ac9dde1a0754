"""`POST /v1/chat/completions`: a conversation, with tools, reasoning and constrained replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

from pydantic import Field

from diskprefix.daemon.api.dialect import Head, Json
from diskprefix.daemon.api.fields import MAX_MESSAGES, MAX_TOOLS, Effort, Limit, NotServed, ReasoningLimits, optional
from diskprefix.daemon.api.openai import OpenAIBody, OpenAIWriter, early_head
from diskprefix.daemon.api.openai_messages import (
    MessageBody,
    MessageOrUnread,
    ResponseFormat,
    ToolAsSent,
    ToolChoiceField,
    conversation_of,
    neutral_messages,
)
from diskprefix.daemon.api.parsed_request import ParsedRequest, TextFormat, ToolChoice, openai_choice
from diskprefix.daemon.api.reply import CallBegin, DeltaEvent, ReplyDelta, WholeChoice, logprob_reply
from diskprefix.daemon.chat.messages import Conversation, Ending, JsonObject
from diskprefix.daemon.chat.output.format import ContentDelta, ReasoningDelta
from diskprefix.daemon.engine.request import TokenLogprob
from diskprefix.errors import InvalidRequest
from diskprefix.prefixstore.store.notes import TenantNotes


class ChatRequest(OpenAIBody, json_schema_extra={"example": {"messages": [{"role": "user", "content": "Hello!"}]}}):
    """`POST /v1/chat/completions`."""

    messages: list[MessageOrUnread] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="The conversation, oldest message first."
    )
    max_completion_tokens: Limit | None = optional("Takes precedence over `max_tokens`.")
    logprobs: bool | None = optional("Return the log probability of every token of the reply.")
    top_logprobs: int | None = optional("Number of alternatives for every token, with `logprobs`.", ge=0, le=20)
    tools: list[ToolAsSent] | None = optional("Functions offered to the model by its template.", max_length=MAX_TOOLS)
    tool_choice: ToolChoiceField | None = optional("`auto`, `none`, `required`, a function, or `allowed_tools`.")
    parallel_tool_calls: bool | None = optional("`false`: at most one call in a reply.")
    response_format: ResponseFormat | None = optional("JSON, or JSON of a schema.")
    reasoning_effort: Effort = None
    reasoning: ReasoningLimits | None = optional("Effort and length of thinking, as in OpenRouter.")
    chat_template_kwargs: JsonObject | None = optional("Variables for the chat template.")
    add_generation_prompt: bool | None = optional("`false`: the prompt does not end with the start of a reply.")
    continue_final_message: bool | None = optional(
        "The reply continues the last message. Absent: it does so if the last message is an assistant's text."
    )
    return_progress: bool | None = optional("Send events with `prompt_progress` while the prompt is computed.")
    modalities: list[Literal["text"]] | None = optional("Only `text`.")
    audio: None = optional("Not supported.")
    web_search_options: None = optional("Not supported.")
    functions: NotServed = optional("Not supported (deprecated by OpenAI): use `tools`.")
    function_call: NotServed = optional("Not supported (deprecated by OpenAI): use `tool_choice`.")

    @property
    def conversation(self) -> Conversation:
        """Returns the conversation for the chat template."""
        messages, left_out = neutral_messages(self.messages)
        return conversation_of(
            messages,
            self.tools,
            left_out,
            reasoning_effort=self.reasoning_effort or (None if self.reasoning is None else self.reasoning.effort),
            template_variables=self.chat_template_kwargs or {},
            special_tokens_in_text=self.special_tokens_in_text or False,
            ending=self._ending,
        )

    @property
    def choice(self) -> ToolChoice:
        """Raises `InvalidRequest` for a tool that is not offered."""
        tools = cast("list[JsonObject]", self.tools or [])
        strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))
        return openai_choice(self.tool_choice, parallel=self.parallel_tool_calls, tools=tools, strict=strict)

    @property
    def text_format(self) -> TextFormat | None:
        return self.text_format_beside(None if self.response_format is None else self.response_format.text_format)

    @property
    def _ending(self) -> Ending:
        last = self.messages[-1]
        is_begun = isinstance(last, MessageBody) and last.is_begun
        if self.continue_final_message:
            param = "continue_final_message"
            if self.add_generation_prompt:
                raise InvalidRequest.at(param, "is not allowed beside add_generation_prompt")
            if not is_begun:
                raise InvalidRequest.at(param, "needs a last message of role assistant with text alone")
            return "continue"
        if self.add_generation_prompt is False:
            return "none"
        if is_begun and self.add_generation_prompt is None and self.continue_final_message is None:
            return "continue"
        return "reply"


class Chat:
    body = ChatRequest
    id_prefix = "chatcmpl-"
    call_id_prefix = "call_"

    def read(self, body: ChatRequest, vocab_size: int, _notes: Callable[[], TenantNotes]) -> ParsedRequest:
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest.at("top_logprobs", "needs logprobs: true")
        max_tokens = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = body.sampling(vocab_size, max_tokens, logprobs)
        return ParsedRequest(
            prompt=body.conversation,
            sampling=sampling,
            tool_choice=body.choice,
            text_format=body.text_format,
            thinking_budget=None if body.reasoning is None else body.reasoning.max_tokens,
            return_progress=bool(body.return_progress and body.stream),
            limit_path="max_completion_tokens" if body.max_completion_tokens else "max_tokens",
        )

    def early(self, body: ChatRequest, reply_id: str, model: str) -> OpenAIWriter:
        return self.writer(body, early_head(reply_id, model))

    def writer(self, body: ChatRequest, head: Head) -> OpenAIWriter:
        return ChatWriter(head, include_usage=body.include_usage, with_logprobs=bool(body.logprobs))


class ChatWriter(OpenAIWriter):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: Head, *, include_usage: bool, with_logprobs: bool) -> None:
        super().__init__(head, include_usage=include_usage, with_logprobs=with_logprobs)
        self._started: set[int] = set()
        """The choices that have begun."""

    def whole_choice(self, choice: WholeChoice) -> Json:
        message: Json = {
            "role": "assistant",
            "content": choice.content or (None if choice.calls else ""),
            "refusal": None,
        }
        if choice.reasoning:
            message |= _reasoning(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.calls
            ]
        return {"message": message, "logprobs": _logprobs(choice.tokens) if self.with_logprobs else None}

    def chunk_choices(self, event: DeltaEvent) -> list[Json]:
        deltas: list[Json] = [_delta(delta) for delta in event.deltas] or ([{}] if event.tokens else [])
        choices: list[Json] = [{"delta": delta, "logprobs": None} for delta in deltas]
        if event.tokens:
            choices[0]["logprobs"] = _logprobs(event.tokens)
        if event.choice in self._started:
            return choices
        self._started.add(event.choice)
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}, *choices]

    @property
    def empty_choice(self) -> Json:
        return {"delta": {}, "logprobs": None}


def _delta(delta: ReplyDelta) -> Json:
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return _reasoning(delta.text)
    if isinstance(delta, CallBegin):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}


def _reasoning(text: str) -> Json:
    """Returns the text under two names: the first is DeepSeek's, llama.cpp's and SGLang's, the second OpenRouter's and
    vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {"content": [logprob_reply(token) for token in tokens], "refusal": None}
