"""The tools of OpenAI's responses API: of a request, and those that come later as items of its input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from diskprefix.daemon.api.fields import (
    AS_SENT,
    MAX_NAME_CHARS,
    MAX_TOOLS,
    Body,
    CacheControl,
    NamedTool,
    OneOf,
    optional,
)
from diskprefix.daemon.api.offered_tools import OfferedTool
from diskprefix.daemon.api.openai_messages import TEXT_ARGUMENT
from diskprefix.daemon.chat.messages import JsonObject, NewTool, OtherPart
from diskprefix.printable import shown

SEARCH = "tool_search"
"""The type of the tool with which a client searches for deferred tools, and the name of its function for the model."""

_DEFAULT_NAMESPACE = "functions"
"""The namespace of functions without one. Codex names it for its own tools."""


def full_name(name: str, namespace: str | None) -> str:
    """Returns the name that the model gets for a function."""
    return name if namespace in (None, _DEFAULT_NAMESPACE) else f"{namespace}__{name}"


class FunctionTool(NamedTool):
    """A function that the model may call."""

    type: Literal["function"] = Field(description="`function`. Tools of other types are skipped.")
    parameters: JsonObject | None = optional("JSON schema of its arguments.")
    defer_loading: bool | None = optional("`true`: offered from the `tool_search_output` on that has it.")


class TextFormatBody(Body):
    """The format of a custom tool's text."""

    type: Literal["text", "grammar"]
    syntax: str = Field(default="", description="Of a grammar: `lark` or `regex`.")
    definition: str = Field(default="", description="The grammar. The model reads it, and is not constrained by it.")


class TextTool(NamedTool):
    """A tool that takes a text. The model knows it as a function with one argument."""

    type: Literal["custom"]
    format: TextFormatBody | None = optional("The format of its text.")


class HostedTool(Body):
    """A tool that OpenAI's servers run, such as `web_search`. It is skipped."""

    type: str = Field(min_length=1)


class Namespace(Body):
    """A group of functions, such as the functions of an MCP server in Codex. The model gets `namespace__name`."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    tools: Annotated[
        list[Annotated[FunctionTool | TextTool | HostedTool, OneOf("an object", HostedTool)]],
        Field(max_length=MAX_TOOLS),
    ]


ToolAsSent: TypeAlias = Annotated[
    Annotated[FunctionTool | TextTool | Namespace | HostedTool, OneOf("an object", HostedTool)], AS_SENT
]


def defined_by(tools: Iterable[JsonObject]) -> list[NewTool]:
    """Returns the tools of a search or a server, by the names that the model gets for them."""
    return [NewTool(tool["name"], is_defined=True) for _, tool, _ in _named(tools, "") if _is_served(tool)]


class OfferedFunctions:
    """The functions and custom tools of a request, in the form of OpenAI's chat API. `later` has tools that come as
    items, each list with its path."""

    def __init__(self, sent: Sequence[JsonObject], later: Iterable[tuple[str, Sequence[JsonObject]]] = ()) -> None:
        self.tools: list[OfferedTool] = []
        self.namespaces: dict[str, str] = {}
        """The names that the model gets → their namespaces."""
        self.left_out: list[OtherPart] = []
        """The tools that only OpenAI's servers can run."""
        self.strict: frozenset[str] = frozenset()
        self.custom: frozenset[str] = frozenset()
        """The names of the custom tools."""
        later = [*later]
        self.searches = any(map(_is_search, (*sent, *(tool for _, tools in later for tool in tools))))
        """True if the client runs a search for the deferred tools. Otherwise they are offered at once."""
        self._add(sent, "tools", are_later=False)
        for path, tools in later:
            self._add(tools, path, are_later=True)

    def _add(self, sent: Sequence[JsonObject], path: str, *, are_later: bool) -> None:
        named = [*_named(sent, path)]
        for place, tool, namespace in named:
            if not _is_served(tool):
                self.left_out.append(OtherPart(shown(tool["type"]), place))
                continue
            if namespace is not None:
                self.namespaces[tool["name"]] = namespace
            given = tool.get("cache_control")
            self.tools.append(
                OfferedTool(
                    {"type": "function", "function": _function(tool)},
                    f"{place}.{'format' if tool['type'] == 'custom' else 'parameters'}",
                    None if given is None else CacheControl.model_validate(given).mark,
                    deferred=self.searches and bool(tool.get("defer_loading")),
                    comes_with_message=are_later,
                )
            )
        self.strict |= {tool["name"] for _, tool, _ in named if tool["type"] == "function" and tool.get("strict")}
        self.custom |= {tool["name"] for _, tool, _ in named if tool["type"] == "custom"}


def _named(sent: Iterable[JsonObject], path: str) -> Iterator[tuple[str, JsonObject, str | None]]:
    """Returns the tools with their paths, under the names that the model gets, and their namespaces."""
    for index, tool in enumerate(sent):
        if tool["type"] != "namespace":
            yield f"{path}.{index}", tool | {"name": SEARCH} if _is_search(tool) else tool, None
            continue
        for place, member in enumerate(tool["tools"]):
            if _is_served(member):
                member = member | {"name": full_name(member["name"], tool["name"])}
            yield f"{path}.{index}.tools.{place}", member, tool["name"]


def _is_search(tool: JsonObject) -> bool:
    return bool(tool["type"] == SEARCH and tool.get("execution") == "client")


def _is_served(tool: JsonObject) -> bool:
    return tool["type"] in ("function", "custom") or _is_search(tool)


def _function(tool: JsonObject) -> JsonObject:
    """Returns a tool for the template, without `strict`, which is not for the model."""
    if tool["type"] == "custom":
        form = tool.get("format") or {}
        described = {"description": f"Text of this {form.get('syntax')} grammar: {form.get('definition')}"}
        text = {"type": "string"} | (described if form.get("type") == "grammar" else {})
        tool = tool | {
            "parameters": {"type": "object", "properties": {TEXT_ARGUMENT: text}, "required": [TEXT_ARGUMENT]}
        }
    fields = ("name", "description", "parameters")
    return {name: value for name, value in tool.items() if name in fields and value is not None}
