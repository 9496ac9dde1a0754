"""`POST /v1/responses`: a conversation as items, with stored responses that can be continued."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, ClassVar, Literal, TypeAlias, cast

import msgspec
from msgspec.structs import replace
from pydantic import Field, StringConstraints

from diskprefix.daemon.api.dialect import Head, Json, json_text
from diskprefix.daemon.api.fields import (
    MAX_TOOLS,
    NO_LIMIT,
    Body,
    Count,
    Limit,
    OneOf,
    ReasoningLimits,
    RequestBody,
    Typed,
    Unmarkable,
    optional,
    sampling_params,
)
from diskprefix.daemon.api.offered_tools import tool_fields
from diskprefix.daemon.api.parsed_request import OF_ONE_OF, ParsedRequest, TextFormat, ToolChoice, openai_choice
from diskprefix.daemon.api.response_store import MAX_STORED_BYTES, ItemAt, ResponseStore
from diskprefix.daemon.api.responses_items import (
    FoundToolsItem,
    Input,
    Item,
    MessageItem,
    ReferenceItem,
    ToolsItem,
    TriggerItem,
    messages_of,
    stored_form,
)
from diskprefix.daemon.api.responses_tools import OfferedFunctions, ToolAsSent
from diskprefix.daemon.api.responses_writer import OutputItems, ResponseWriter
from diskprefix.daemon.api.unread import Unread
from diskprefix.daemon.chat.messages import Conversation, JsonObject, Message, TextPart
from diskprefix.errors import InvalidRequest
from diskprefix.prefixstore.store.notes import TenantNotes
from diskprefix.units import format_size

_REQUIRED_OF_FUNCTIONS: JsonObject = {"description": None, "parameters": None, "strict": None}
"""The fields that a function must have in a response, and their values if a request leaves them out."""


class ChosenFunction(Body):
    """One of the offered functions and custom tools."""

    type: Literal["function", "custom"] = Field(description="`function` or `custom`.")
    name: str = Field(min_length=1, description="Name of an offered function.")


class ResponseToolChoice(Typed):
    """The function that must be called, or the functions that may be called."""

    needs: ClassVar = {"function": ("name",), "custom": ("name",), "allowed_tools": ("mode", "tools")}
    type: Literal["function", "custom", "allowed_tools"] = Field(description="Tools of other types are not served.")
    name: str | None = optional("The function that must be called.", min_length=1)
    mode: Literal["auto", "required"] | None = optional("Whether one of `tools` must be called.")
    tools: list[ChosenFunction] | None = optional("The functions that may be called.", min_length=1)

    def neutral(self, *, many: bool) -> ToolChoice:
        if self.name is not None and self.type != "allowed_tools":
            return ToolChoice("required", frozenset({self.name}), many=False)
        names = frozenset(tool.name for tool in self.tools or ())
        return ToolChoice(self.mode or "auto", names, many=many)


ToolChoiceField: TypeAlias = Annotated[
    Literal["auto", "none", "required"] | ResponseToolChoice,
    OneOf("auto, none, required or an object", ResponseToolChoice),
]


_LOGPROBS = "message.output_text.logprobs"

MetadataKey: TypeAlias = Annotated[str, StringConstraints(max_length=64)]
MetadataValue: TypeAlias = Annotated[str, StringConstraints(max_length=512)]


class FormatBody(Typed):
    """The format of the reply's text."""

    needs: ClassVar = {"json_schema": ("schema_",)}
    type: Literal["text", "json_object", "json_schema"] = Field(description="`text` is any text.")
    name: str | None = optional("Accepted and ignored.")
    description: str | None = optional("Accepted and ignored.")
    schema_: JsonObject | None = optional("With `json_schema`, or with `json_object`: the schema.", alias="schema")
    strict: bool | None = optional(OF_ONE_OF)

    @property
    def text_format(self) -> TextFormat | None:
        return TextFormat.of_json(self.type, self.schema_, "text.format", ".schema", strict=self.strict)

    @property
    def echo(self) -> Json:
        """The format as a response repeats it. A schema's format has all fields."""
        given: Json = self.model_dump(by_alias=True, exclude_none=True)
        required = {"name": "", "description": None, "strict": False} if self.type == "json_schema" else {}
        return required | given


class TextBody(Body):
    """The format of the text."""

    format: FormatBody | None = optional("JSON, or JSON of a schema.")
    verbosity: Literal["low", "medium", "high"] | None = optional("Accepted and ignored.")


class ReasoningBody(ReasoningLimits):
    """The effort of thinking, and its form in the response."""

    summary: Literal["auto", "concise", "detailed"] | None = optional(
        "With any value, the whole reasoning is the `summary` of its item, not the `content`."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = optional("As `summary`.")


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool | None = optional("Accepted and ignored.")


class ResponseRequest(RequestBody, Unmarkable, json_schema_extra={"example": {"input": "Name three rivers."}}):
    """`POST /v1/responses`."""

    input: Input | None = optional("A user's text, or the items of a conversation.")
    instructions: str | None = optional("A system message before everything else.")
    previous_response_id: str | None = optional("A stored response, which `input` continues.", min_length=1)
    store: bool | None = optional("`false`: the response is not stored. Default: true.")
    max_output_tokens: Limit | None = optional("Most tokens of the reply. Absent, -1, or too many: as many as fit.")
    tools: list[ToolAsSent] | None = optional("Functions, custom tools, and namespaces of them.", max_length=MAX_TOOLS)
    tool_choice: ToolChoiceField | None = optional("`auto`, `none`, `required`, a function, or `allowed_tools`.")
    parallel_tool_calls: bool | None = optional("`false`: at most one call in a reply.")
    text: TextBody | None = optional("The format of the text.")
    reasoning: ReasoningBody | None = optional("Reasoning.")
    include: list[str] | None = optional(f"`{_LOGPROBS}`; others are accepted and ignored.")
    top_logprobs: int | None = optional(f"With `include: [{_LOGPROBS}]`.", ge=0, le=20)
    max_tool_calls: Count | None = optional("Accepted and ignored: limits OpenAI's own tools.")
    safety_identifier: str | None = optional("Comes back with the response.")
    metadata: dict[MetadataKey, MetadataValue] | None = optional("Comes back with the response.", max_length=16)
    stream_options: ResponseStreamOptions | None = optional("Only with `stream: true`.")
    truncation: Literal["disabled"] | None = optional("`disabled`: a conversation that does not fit is an error.")
    background: Literal[False] | None = optional("Not supported.")
    conversation: None = optional("Not supported: use `previous_response_id`.")
    prompt: None = optional("Not supported.")
    modalities: list[Literal["text"]] | None = optional("Only `text`.")

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def offered(self, items: Iterable[ItemAt] = ()) -> OfferedFunctions:
        """Returns the tools of the request, and those that come with `items`."""
        later = (
            (f"{path}.tools", cast("list[JsonObject]", item.tools))
            for item, path in items
            if isinstance(item, ToolsItem | FoundToolsItem)
        )
        return OfferedFunctions(cast("list[JsonObject]", self.tools or []), later)

    def choice(self, tools: Sequence[JsonObject], strict: frozenset[str]) -> ToolChoice:
        """Raises `InvalidRequest` for a function that is not among `tools`."""
        return openai_choice(self.tool_choice, parallel=self.parallel_tool_calls, tools=tools, strict=strict)

    @property
    def text_format(self) -> TextFormat | None:
        own = self.text.format.text_format if self.text is not None and self.text.format is not None else None
        return self.text_format_beside(own)

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def summary(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary

    @property
    def logprobs(self) -> int | None:
        """The number of alternatives with log probabilities; None for no log probabilities."""
        return self.top_logprobs or 0 if _LOGPROBS in (self.include or ()) else None

    @property
    def needs_stored_items(self) -> bool:
        """See `RequestBody`."""
        return self.previous_response_id is not None or any(isinstance(item, ReferenceItem) for item in self.items)

    @property
    def items(self) -> list[Item]:
        """The items of the input; none if the input is a text."""
        return [] if self.input is None or isinstance(self.input, str) else self.input

    @property
    def echo(self) -> dict[str, msgspec.Raw]:
        """The fields that the response repeats, as JSON text: as objects they may take a hundred times the memory. The
        sampling is the one that is used: `with_sampling` has filled it in."""
        text: Json = {} if self.text is None else self.text.model_dump(by_alias=True, exclude_none=True)
        if self.text is not None and self.text.format is not None:
            text["format"] = self.text.format.echo
        choice = self.tool_choice
        echo: Json = {
            "instructions": self.instructions,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "max_output_tokens": None if self.max_output_tokens == NO_LIMIT else self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": self.presence_penalty or 0.0,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "reasoning": {"effort": self.effort, "summary": self.summary},
            "safety_identifier": self.safety_identifier,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium"} | text,
            "tool_choice": choice.model_dump(exclude_none=True)
            if isinstance(choice, ResponseToolChoice)
            else choice or "auto",
            "tools": [
                _REQUIRED_OF_FUNCTIONS | tool if tool["type"] == "function" else tool
                for tool in cast("list[JsonObject]", self.tools or [])
            ],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
        }
        return {name: msgspec.Raw(json_text(value)) for name, value in echo.items()}


log = logging.getLogger("diskprefix")

MAX_SUMMARY_TOKENS = 4096
"""The most tokens of a summary: clients set no limit, and a weak model does not stop."""
_REQUEST = (
    "Stop here, and sum up this conversation for whoever goes on with it and will not see it. Write down what the user "
    "wants, and all rules and preferences that the user stated; what was done and found out, with the names of files, "
    "commands and values that matter; what was decided, and why; and what remains to be done, beginning with the next "
    "step. Write the summary alone, without any call of a tool."
)
_ASK_FOR_SUMMARY = Message(role="user", content=(TextPart(_REQUEST, "input"),), path="input")


class Responses:
    """The API for one request."""

    body: type[ResponseRequest] = ResponseRequest
    id_prefix = "resp_"
    call_id_prefix = "call_"

    def __init__(self) -> None:
        self._store: ResponseStore | None = None
        self._offered = OfferedFunctions(())
        self._echo: Mapping[str, msgspec.Raw] = {}
        self._input: bytes | None = None
        """JSON text of the request's own items, if the response will be stored."""
        self._early: ResponseWriter | None = None
        """The writer of the events that were sent while the model was loading."""
        self.compacts = False
        """True if the reply is a summary of the conversation."""

    def read(self, body: ResponseRequest, vocab_size: int, notes: Callable[[], TenantNotes]) -> ParsedRequest:
        body.require_stream(body.stream_options)
        self._echo = _echo_of(body)
        prompt = self.conversation(body, ResponseStore(notes()))
        sampling = sampling_params(body, vocab_size, max_tokens=body.max_output_tokens, logprobs=body.logprobs)
        parsed = ParsedRequest(prompt=prompt, sampling=sampling, limit_path="max_output_tokens")
        if self.compacts:
            # The tools stay in the prompt, so that it begins like the conversation so far.
            limit = min(sampling.max_tokens or MAX_SUMMARY_TOKENS, MAX_SUMMARY_TOKENS)
            return replace(parsed, sampling=replace(sampling, max_tokens=limit), tool_choice=ToolChoice("none"))
        budget = None if body.reasoning is None else body.reasoning.max_tokens
        choice = body.choice(prompt.tools or (), self._offered.strict)
        return replace(parsed, tool_choice=choice, text_format=body.text_format, thinking_budget=budget)

    def conversation(self, body: ResponseRequest, store: ResponseStore) -> Conversation:
        """Returns the conversation for the chat template. Waits for the disk.

        Raises `InvalidRequest` for responses and items that are not stored.
        """
        self._store = store
        items = self._items(body, store)
        self._offered = body.offered(items)
        messages, left_out = messages_of(items)
        if body.instructions is not None:
            text = TextPart(body.instructions, "instructions")
            messages.insert(0, Message(role="system", content=(text,), path="instructions"))
        return Conversation(
            **tool_fields(self._offered.tools, [*messages, _ASK_FOR_SUMMARY] if self.compacts else messages),
            reasoning_effort=body.effort,
            special_tokens_in_text=body.special_tokens_in_text or False,
            path="input",
            left_out=[*self._offered.left_out, *left_out],
        )

    def early(self, body: ResponseRequest, reply_id: str, model: str) -> ResponseWriter | None:
        """Returns the writer of `response.created` and `response.in_progress` before the model is loaded."""
        with suppress(InvalidRequest):
            head = Head(id=reply_id, created=int(time.time()), model=model)
            # This writer reports whether the response will be stored, and never writes a whole response.
            keep = (lambda _: None) if body.is_stored else None
            self._early = ResponseWriter(head, _echo_of(body), OutputItems(reply_id), keep=keep)
        return self._early

    def writer(self, body: ResponseRequest, head: Head) -> ResponseWriter:
        num_events = 0
        if self._early is not None:
            head, num_events = replace(head, created=self._early.head.created), self._early.num_events
        keep = None
        if self._store is not None and self._input is not None:
            keep = partial(self._store.put, input_json=self._input, prompt=head.prompt)
        items = OutputItems(
            head.id,
            reasoning_is_summary=body.summary is not None,
            compacts=self.compacts,
            namespaces=self._offered.namespaces,
            custom=self._offered.custom,
            searches=self._offered.searches,
        )
        return ResponseWriter(head, self._echo, items, keep=keep, num_events=num_events)

    def _items(self, body: ResponseRequest, store: ResponseStore) -> list[ItemAt]:
        """Returns the items of the conversation. Raises `InvalidRequest` for items that are not stored."""
        earlier = [] if body.previous_response_id is None else store.history(body.previous_response_id)
        own: list[ItemAt] = []
        if isinstance(body.input, str):
            own.append((MessageItem(role="user", content=body.input), "input"))
        for index, item in enumerate(items := body.items):
            path = f"input.{index}"
            if isinstance(item, TriggerItem) and index + 1 == len(items):
                self.compacts = True
            elif isinstance(item, TriggerItem):
                own.append((Unread(item.model_dump(), "type", "must be the last item"), path))
            elif isinstance(item, ReferenceItem):
                own.append(store.referred(item, path))
            else:
                own.append((item, path))
        if not earlier and not own:
            raise InvalidRequest.at("input", "must not be empty")
        if body.is_stored and not self.compacts:
            text = json_text([stored_form(item) for item, _ in own])
            if len(text) <= MAX_STORED_BYTES:
                self._input = text
            else:
                log.info("[server] a response is not stored: its input has %s", format_size(len(text)))
        return [*earlier, *own]


def _echo_of(body: ResponseRequest) -> Mapping[str, msgspec.Raw]:
    """Returns `body.echo`. Raises `InvalidRequest` if it is too large."""
    echo = body.echo
    if (num_bytes := sum(len(bytes(value)) for value in echo.values())) > MAX_STORED_BYTES:
        limit = format_size(MAX_STORED_BYTES)
        said = f"the response repeats them, and would have {format_size(num_bytes)}; send {limit} at most"
        raise InvalidRequest.at(max(echo, key=lambda name: len(bytes(echo[name]))), said)
    return echo
