"""The tools of Anthropic's API, and the choice of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from diskprefix.daemon.api.fields import Body, NamedTool, OneOf, Typed, optional
from diskprefix.daemon.api.parsed_request import ToolChoice
from diskprefix.daemon.chat.messages import JsonObject, OtherPart
from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown

SEARCHES = "tool_search_tool_"
"""The prefix of the types of tools with which Anthropic's servers search for deferred tools."""
_RUN_BY_ANTHROPIC = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""Prefixes of the types of tools that Anthropic's servers run."""


class CustomTool(NamedTool):
    """A tool that the client runs."""

    type: Literal["custom"] | None = optional("`custom`, or absent.")
    input_schema: JsonObject = Field(description="JSON schema of its arguments.")
    defer_loading: bool | None = optional("`true`: offered where a `tool_reference` names it.")

    @property
    def for_template(self) -> JsonObject:
        """The tool in the form that chat templates expect."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class AnthropicDefinedTool(Body):
    """A tool that Anthropic defines."""

    type: str


AnthropicTool: TypeAlias = Annotated[
    CustomTool | AnthropicDefinedTool, OneOf("a tool", AnthropicDefinedTool, lambda _value: "custom")
]


def served_tools(
    tools: Sequence[CustomTool | AnthropicDefinedTool], *, more_come: bool
) -> tuple[list[tuple[int, CustomTool]], list[OtherPart]]:
    """Returns the tools that the client runs, each with its index, and those that are left out.

    Tools that Anthropic's servers run are left out, because agents send them with every request. Raises
    `InvalidRequest` if no tool remains and no `more_come` later, and for other tools that Anthropic defines, whose
    arguments are not known.
    """
    served = [(index, tool) for index, tool in enumerate(tools) if isinstance(tool, CustomTool)]
    others = [(index, tool.type) for index, tool in enumerate(tools) if isinstance(tool, AnthropicDefinedTool)]
    for index, kind in others:
        problem = "" if served or more_come else "is run by Anthropic's servers, and no other tool is offered"
        if not kind.startswith(_RUN_BY_ANTHROPIC):
            problem = "is not known here; define the tool by name, description and input_schema"
        if problem:
            raise InvalidRequest.at(f"tools.{index}.type", f"{shown(kind)!r} {problem}")
    return served, [OtherPart(shown(kind), f"tools.{index}") for index, kind in others]


class AnthropicToolChoice(Typed):
    """The choice of tools."""

    needs: ClassVar = {"tool": ("name",)}
    type: Literal["auto", "any", "tool", "none"] = Field(description="`any`: some tool; `tool`: the tool `name`.")
    name: str | None = optional("With the type `tool`: its name.", min_length=1)
    disable_parallel_tool_use: bool | None = optional("`true`: at most one call in a reply.")

    @property
    def neutral(self) -> ToolChoice:
        if self.type == "tool" and self.name is not None:
            return ToolChoice("required", frozenset({self.name}), many=False)
        many = not self.disable_parallel_tool_use
        return ToolChoice("required" if self.type == "any" else "none" if self.type == "none" else "auto", many=many)
