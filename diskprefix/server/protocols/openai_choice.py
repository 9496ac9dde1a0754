"""The fields with which OpenAI's chat API says what the reply must be: `tool_choice` and `response_format`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from diskprefix.chat.messages import JsonObject
from diskprefix.server.protocols.dialect import ToolChoice
from diskprefix.server.protocols.strict import REFUSED, Body, by_json_type
from diskprefix.server.protocols.structured_outputs import TextFormat


class NamedFunction(Body):
    name: str = Field(min_length=1, description="Name of an offered function.")


class FunctionReference(Body):
    """One of the offered functions."""

    type: Literal["function"] = Field(description="Always `function`.")
    function: NamedFunction


class AllowedTools(Body):
    """Some of the offered functions. The prompt shows all of them, so it stays the same."""

    mode: Literal["auto", "required"] = Field(description="Whether one of them must be called.")
    tools: list[FunctionReference] = Field(min_length=1, description="Those that may be called.")


class ToolChoiceBody(Body):
    """The function that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"] = Field(description="Which of the other fields is given.")
    function: NamedFunction | None = Field(default=None, description="The one that must be called.")
    allowed_tools: AllowedTools | None = Field(default=None, description="Those that may be called.")

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ToolChoiceBody:
        if getattr(self, self.type) is None:
            raise PydanticCustomError(REFUSED, f"of type {self.type} needs the field {self.type}")
        return self

    def neutral(self, *, many: bool) -> ToolChoice:
        if self.function is not None:
            return ToolChoice("required", frozenset({self.function.name}), many=False)
        assert self.allowed_tools is not None, "one of both is given"
        names = frozenset(tool.function.name for tool in self.allowed_tools.tools)
        return ToolChoice(self.allowed_tools.mode, names, many=many)


ToolChoiceField: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("~text")] | Annotated[ToolChoiceBody, Tag("~object")],
    by_json_type("auto, none, required or an object"),
]


class JsonSchemaFormat(Body):
    """A reply that follows a JSON schema."""

    name: str | None = Field(default=None, description="Accepted and ignored.")
    description: str | None = Field(default=None, description="Accepted and ignored.")
    schema_: JsonObject = Field(alias="schema", description="The JSON schema.")
    strict: bool | None = Field(default=None, description="Accepted and ignored: every reply follows the schema.")


class ResponseFormat(Body):
    """The format of the reply's text."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="`text` is any text.")
    json_schema: JsonSchemaFormat | None = Field(default=None, description="With the type `json_schema`.")

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError(REFUSED, "of type json_schema needs the field json_schema")
        return self

    @property
    def text_format(self) -> TextFormat | None:
        schema = None if self.json_schema is None else self.json_schema.schema_
        return TextFormat.of_json(self.type, schema, "response_format", ".json_schema.schema")
