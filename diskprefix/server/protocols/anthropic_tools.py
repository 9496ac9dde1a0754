"""The tools of Anthropic's messages API, and which of them a reply must call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from diskprefix.chat.messages import CacheMark, JsonObject
from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown
from diskprefix.server.protocols.dialect import ToolChoice, note_left_out
from diskprefix.server.protocols.fields import Markable, ToolName
from diskprefix.server.protocols.strict import REFUSED, Body

_RUN_BY_ANTHROPIC = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""How the types of tools begin that Anthropic's servers run themselves."""


class CustomTool(Markable):
    """A tool that the client runs."""

    type: Literal["custom"] | None = Field(default=None, description="`custom`, or absent.")
    name: ToolName = Field(description="Name of the tool.")
    description: str | None = Field(default=None, description="What it does, for the model to read.")
    input_schema: JsonObject = Field(description="JSON schema of its arguments.")

    @property
    def for_template(self) -> JsonObject:
        """The tool in the form that chat templates expect."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class OtherTool(Body):
    """A tool that Anthropic defines."""

    type: str


def _kind_of_tool(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    return "~custom" if value.get("type") in (None, "custom") else "~other"


AnthropicTool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag("~custom")] | Annotated[OtherTool, Tag("~other")],
    Discriminator(_kind_of_tool, custom_error_type="type", custom_error_message="Input should be a tool"),
]


def served_tools(tools: Sequence[CustomTool | OtherTool]) -> list[tuple[int, CustomTool]]:
    """Returns the tools that the client runs, each with its index.

    Tools that Anthropic's servers run are left out beside others, because agents send them with every request. Raises
    `InvalidRequest` if there are no others, and for other tools that Anthropic defines, whose arguments are not known.
    """
    served = [(index, tool) for index, tool in enumerate(tools) if isinstance(tool, CustomTool)]
    skipped = set()
    for index, tool in enumerate(tools):
        if not isinstance(tool, OtherTool):
            continue
        path, kind = f"tools.{index}.type", shown(tool.type)
        if not tool.type.startswith(_RUN_BY_ANTHROPIC):
            message = f"{path}: {kind!r} is not known here; define the tool by name, description and input_schema"
            raise InvalidRequest(message, param=path)
        if not served:
            message = f"{path}: {kind!r} is run by Anthropic's servers, and no other tool is offered"
            raise InvalidRequest(message, param=path)
        skipped.add(kind)
    note_left_out(skipped, "Anthropic's servers")
    return served


def marks_of(tools: Sequence[tuple[int, CustomTool]]) -> Iterator[tuple[int, CacheMark]]:
    """Returns the marks on tools, each with the index of its tool among those that are served."""
    for position, (_, tool) in enumerate(tools):
        if tool.mark is not None:
            yield position, tool.mark


class AnthropicToolChoice(Body):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"] = Field(description="`any`: some tool; `tool`: the one of `name`.")
    name: str | None = Field(default=None, min_length=1, description="With the type `tool`: its name.")
    disable_parallel_tool_use: bool | None = Field(default=None, description="`true`: at most one call in a reply.")

    @model_validator(mode="after")
    def _has_a_name(self) -> AnthropicToolChoice:
        if self.type == "tool" and self.name is None:
            raise PydanticCustomError(REFUSED, "of type tool needs the field name")
        return self

    @property
    def neutral(self) -> ToolChoice:
        many = not self.disable_parallel_tool_use
        if self.type == "tool" and self.name is not None:
            return ToolChoice("required", frozenset({self.name}), many=False)
        return ToolChoice("required" if self.type == "any" else "none" if self.type == "none" else "auto", many=many)
