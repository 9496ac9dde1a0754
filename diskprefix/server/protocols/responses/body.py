"""The body of `POST /v1/responses`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, TypeAlias, cast

import msgspec
from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from diskprefix.chat.messages import JsonObject
from diskprefix.server.protocols.dialect import Json, ToolChoice, json_text, openai_choice
from diskprefix.server.protocols.fields import MAX_TOOLS, Count, Effort, RequestBody, Unmarkable
from diskprefix.server.protocols.responses.items import Input, ReferenceItem
from diskprefix.server.protocols.responses.tools import ToolAsSent, ToolChoiceBody, ToolChoiceField, Tools
from diskprefix.server.protocols.strict import REFUSED, Body
from diskprefix.server.protocols.structured_outputs import TextFormat

_LOGPROBS = "message.output_text.logprobs"

MetadataKey: TypeAlias = Annotated[str, StringConstraints(max_length=64)]
MetadataValue: TypeAlias = Annotated[str, StringConstraints(max_length=512)]


class FormatBody(Body):
    """The format of the reply's text."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="`text` is any text.")
    name: str | None = Field(default=None, description="Accepted and ignored.")
    description: str | None = Field(default=None, description="Accepted and ignored.")
    schema_: JsonObject | None = Field(default=None, alias="schema", description="With `json_schema`: the schema.")
    strict: bool | None = Field(default=None, description="Accepted and ignored: every reply follows the schema.")

    @model_validator(mode="after")
    def _has_a_schema(self) -> FormatBody:
        if self.type == "json_schema" and self.schema_ is None:
            raise PydanticCustomError(REFUSED, "of type json_schema needs the field schema")
        return self

    @property
    def text_format(self) -> TextFormat | None:
        return TextFormat.of_json(self.type, self.schema_, "text.format", ".schema")


class TextBody(Body):
    """What the text of the reply must be."""

    format: FormatBody | None = Field(default=None, description="JSON, or JSON of a schema.")
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="Accepted and ignored.")


class ReasoningBody(Body):
    """How much the model thinks, and how this is shown."""

    effort: Effort = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="With any value, the whole reasoning is the `summary` of its item, not the `content`."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(default=None, description="As `summary`.")


class StreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(default=None, description="Accepted and ignored.")


class ResponseRequest(RequestBody, Unmarkable):
    """`POST /v1/responses`."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": "Name three rivers."}})

    input: Input | None = Field(default=None, description="A user's text, or the items of a conversation.")
    instructions: str | None = Field(default=None, description="A system message before everything else.")
    previous_response_id: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A stored response, whose input and output come before `input`."
    )
    store: bool | None = Field(default=None, description="`false`: the response is not stored. Default: true.")
    max_output_tokens: Count | None = Field(
        default=None, description="Most tokens of the reply. Absent, or more than fit: as many as fit."
    )
    tools: Annotated[list[ToolAsSent], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions. Tools of other types are skipped."
    )
    tool_choice: ToolChoiceField | None = Field(
        default=None, description="`auto`, `none`, `required`, a function, or `allowed_tools`."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="`false`: at most one call in a reply.")
    text: TextBody | None = Field(default=None, description="The format of the text.")
    reasoning: ReasoningBody | None = Field(default=None, description="Reasoning.")
    include: list[str] | None = Field(default=None, description=f"`{_LOGPROBS}`; others are accepted and ignored.")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description=f"With `include: [{_LOGPROBS}]`.")
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = Field(
        default=None, description="Comes back with the response."
    )
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream: true`.")
    truncation: Literal["disabled"] | None = Field(
        default=None, description="`disabled`: a conversation that does not fit is an error."
    )
    background: Literal[False] | None = Field(default=None, description="Not supported.")
    conversation: None = Field(default=None, description="Not supported: use `previous_response_id`.")
    prompt: None = Field(default=None, description="Not supported.")
    modalities: list[Literal["text"]] | None = Field(default=None, description="Only `text`.")

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @cached_property
    def offered(self) -> Tools:
        """The functions. `tool_choice: none` leaves them out."""
        return Tools(cast("list[JsonObject]", self.tools or []) if self.tool_choice != "none" else [])

    @property
    def choice(self) -> ToolChoice:
        """Raises `InvalidRequest` for a function that is not offered."""
        tools = self.offered.functions
        return openai_choice(self.tool_choice, parallel=self.parallel_tool_calls, tools=tools)

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
        """The number of alternatives whose log probabilities are asked for; None for no log probabilities."""
        return self.top_logprobs or 0 if _LOGPROBS in (self.include or ()) else None

    @property
    def reads_more(self) -> bool:
        """See `RequestBody`."""
        items = () if self.input is None or isinstance(self.input, str) else self.input
        return self.previous_response_id is not None or any(isinstance(item, ReferenceItem) for item in items)

    @property
    def echo(self) -> dict[str, msgspec.Raw]:
        """What the response repeats of the request, as JSON text: as objects, it may be a hundred times as large."""
        text: Json = {} if self.text is None else self.text.model_dump(by_alias=True, exclude_none=True)
        choice = self.tool_choice
        echo: Json = {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "reasoning": {"effort": self.effort, "summary": self.summary},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium"} | text,
            "tool_choice": choice.model_dump(exclude_none=True)
            if isinstance(choice, ToolChoiceBody)
            else choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }
        return {name: msgspec.Raw(json_text(value)) for name, value in echo.items()}
