"""The tools of OpenAI's responses API, and the choice between them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from diskprefix.chat.messages import CacheMark, JsonObject
from diskprefix.printable import shown
from diskprefix.server.protocols.dialect import ToolChoice
from diskprefix.server.protocols.fields import CacheControl, Markable
from diskprefix.server.protocols.strict import REFUSED, Body, by_json_type

log = logging.getLogger("diskprefix")

_noted: set[frozenset[str]] = set()
"""What was said about tools that are skipped: agents send the same ones in every request."""


class FunctionTool(Markable):
    """A function that the model may call."""

    type: Literal["function"] = Field(description="`function`. Tools of other types are skipped.")
    name: str = Field(min_length=1, description="Name of the function.")
    description: str | None = Field(default=None, description="What it does, for the model to read.")
    parameters: JsonObject | None = Field(default=None, description="JSON schema of its arguments.")
    strict: bool | None = Field(default=None, description="Accepted; calls that must be made follow the schema.")


class OtherTool(Body):
    """A tool that OpenAI would run, such as `web_search`. It is skipped."""

    type: str = Field(min_length=1)


def _as_sent(value: JsonObject, check: ValidatorFunctionWrapHandler) -> JsonObject:
    check(value)
    return value


def _kind_of_tool(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    return "~function" if value.get("type") == "function" else "~other"


ToolAsSent: TypeAlias = Annotated[
    Annotated[
        Annotated[FunctionTool, Tag("~function")] | Annotated[OtherTool, Tag("~other")],
        Discriminator(_kind_of_tool, custom_error_type="type", custom_error_message="Input should be an object"),
    ],
    WrapValidator(_as_sent),
]
"""A tool that is checked but kept as the client's dict, because the order of its keys is part of the prompt."""


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
        _note_skipped(frozenset(skipped))


def _function(tool: JsonObject) -> JsonObject:
    """`strict` is left out: it says nothing to a model."""
    kept = ("name", "description", "parameters")
    return {name: value for name, value in tool.items() if name in kept and value is not None}


def _note_skipped(kinds: frozenset[str]) -> None:
    if kinds and kinds not in _noted and len(_noted) < 100:
        _noted.add(kinds)
        log.info("[server] tools of these types are skipped, only functions are served: %s", ", ".join(sorted(kinds)))


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
