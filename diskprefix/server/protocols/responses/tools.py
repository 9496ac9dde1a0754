"""The tools of OpenAI's responses API, and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from diskprefix.chat.messages import CacheMark, JsonObject
from diskprefix.printable import shown
from diskprefix.server.protocols.dialect import ToolChoice, note_left_out
from diskprefix.server.protocols.fields import CacheControl, Markable, ToolName
from diskprefix.server.protocols.strict import AS_SENT, REFUSED, Body, by_json_type, by_type


class FunctionTool(Markable):
    """A function that the model may call."""

    type: Literal["function"] = Field(description="`function`. Tools of other types are skipped.")
    name: ToolName = Field(description="Name of the function.")
    description: str | None = Field(default=None, description="What it does, for the model to read.")
    parameters: JsonObject | None = Field(default=None, description="JSON schema of its arguments.")
    strict: bool | None = Field(default=None, description="Accepted; calls that must be made follow the schema.")


class OtherTool(Body):
    """A tool that OpenAI would run, such as `web_search`. It is skipped."""

    type: str = Field(min_length=1)


ToolAsSent: TypeAlias = Annotated[
    Annotated[
        Annotated[FunctionTool, Tag("~function")] | Annotated[OtherTool, Tag("~other")],
        by_type("function", expected="an object", other="~other"),
    ],
    AS_SENT,
]


class Tools:
    """The functions among the tools of a request, in the form of OpenAI's chat API."""

    def __init__(self, sent: Sequence[JsonObject]) -> None:
        self.functions: list[JsonObject] = []
        self.marks: list[tuple[int, CacheMark]] = []
        self.paths: list[str] = []
        """Where the schema of each one's arguments stood."""
        skipped = set()
        for index, tool in enumerate(sent):
            if tool["type"] != "function":
                skipped.add(shown(tool["type"]))
                continue
            if tool.get("cache_control") is not None:
                mark = CacheControl.model_validate(tool["cache_control"]).mark
                self.marks.append((len(self.functions), mark))
            self.functions.append({"type": "function", "function": _function(tool)})
            self.paths.append(f"tools.{index}.parameters")
        note_left_out(skipped, "OpenAI's servers")


def _function(tool: JsonObject) -> JsonObject:
    """`strict` is left out: it says nothing to a model."""
    kept = ("name", "description", "parameters")
    return {name: value for name, value in tool.items() if name in kept and value is not None}


class ChosenFunction(Body):
    """One of the offered functions."""

    type: Literal["function"] = Field(description="Always `function`.")
    name: str = Field(min_length=1, description="Name of an offered function.")


class ToolChoiceBody(Body):
    """The function that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"] = Field(description="Tools of other types are not served.")
    name: str | None = Field(default=None, min_length=1, description="The function that must be called.")
    mode: Literal["auto", "required"] | None = Field(default=None, description="Whether one of `tools` must be called.")
    tools: list[ChosenFunction] | None = Field(default=None, min_length=1, description="Those that may be called.")

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ToolChoiceBody:
        needed = ("name",) if self.type == "function" else ("mode", "tools")
        for name in needed:
            if getattr(self, name) is None:
                raise PydanticCustomError(REFUSED, f"of type {self.type} needs the field {name}")
        return self

    def neutral(self, *, many: bool) -> ToolChoice:
        if self.name is not None and self.type == "function":
            return ToolChoice("required", frozenset({self.name}), many=False)
        names = frozenset(tool.name for tool in self.tools or ())
        return ToolChoice(self.mode or "auto", names, many=many)


ToolChoiceField: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("~text")] | Annotated[ToolChoiceBody, Tag("~object")],
    by_json_type("auto, none, required or an object"),
]
