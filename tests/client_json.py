"""JSON of clients: values of every shape and size, and the functions of the package that walk them.

A walk takes any JSON value where a client may send any: a tool's schema, the schema of a reply, the arguments of calls.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any

from diskprefix.daemon.api.anthropic import CountTokensRequest, Messages, MessagesRequest
from diskprefix.daemon.api.openai_chat import Chat, ChatRequest
from diskprefix.daemon.api.parsed_request import ParsedRequest, constraint_of
from diskprefix.daemon.api.responses import ResponseRequest, Responses
from diskprefix.daemon.chat.canonicalisers import Canonicalisers
from diskprefix.daemon.chat.messages import Conversation, Message, TextPart, ToolCall
from diskprefix.daemon.chat.output.call_grammar import CallGrammar
from diskprefix.daemon.chat.output.call_values import OfferedTools, braces, elements, python_calls, value_of
from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.families import FAMILIES, Family
from diskprefix.daemon.chat.replay import ConversationHash, Turn
from diskprefix.daemon.chat.template_input import (
    TemplateInput,
    message_for_template,
    require_few_arguments,
    visit_texts,
)
from diskprefix.daemon.compression.compression import shortened
from diskprefix.daemon.engine.constraints.constraint_grammar import excess_of, grammar_of
from diskprefix.daemon.engine.constraints.kept_schema import json_rules, parts, replace_part, weaker, with_any_of
from diskprefix.daemon.engine.request import Constraint
from diskprefix.daemon.ollama.ollama_dialect import Ollama, OllamaChatRequest
from diskprefix.daemon.server.body import parse_json
from diskprefix.errors import InvalidRequest

BIG = {"const": 2**60}
"""A schema with an integer that doubles do not hold: its grammar is written rule by rule."""
WORD = {"type": "string"}

NESTED: dict[str, Callable[[Any], Any]] = {
    "properties": lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
    "two properties": lambda inner: {"properties": {"a": WORD, "b": inner}},
    "items": lambda inner: {"type": "array", "items": inner},
    "prefixItems": lambda inner: {"type": "array", "prefixItems": [WORD, inner]},
    "anyOf": lambda inner: {"anyOf": [inner, {"type": "null"}]},
    "oneOf": lambda inner: {"oneOf": [inner, {"type": "null"}]},
    "oneOf in objects": lambda inner: {"oneOf": [_one("a", inner), _one("b", inner)]},
    "allOf": lambda inner: {"allOf": [inner]},
    "not": lambda inner: {"not": inner},
    "$defs": lambda inner: {"$defs": {"a": inner}, "$ref": "#/$defs/a"},
    "additionalProperties": lambda inner: {"type": "object", "additionalProperties": inner},
    "patternProperties": lambda inner: {"type": "object", "patternProperties": {"^a": inner}},
    "default": lambda inner: {"type": "object", "default": inner},
    "enum": lambda inner: {"enum": [inner, 1]},
    "an object": lambda inner: {"a": inner},
    "an array": lambda inner: [inner],
}
"""A level around a value."""

WIDE: dict[str, Callable[[int], Any]] = {
    "properties": lambda n: {"type": "object", "properties": _many(n, lambda _: WORD), "required": [*_many(n, id)]},
    "big properties": lambda n: {"type": "object", "properties": _many(n, lambda _: BIG), "required": [*_many(n, id)]},
    "items": lambda n: {"type": "array", "prefixItems": [WORD] * n},
    "big items": lambda n: {"type": "array", "prefixItems": [BIG] * n},
    "anyOf": lambda n: {"anyOf": [{"const": f"{k}"} for k in range(n)]},
    "oneOf": lambda n: {"oneOf": [{"const": f"{k}"} for k in range(n)]},
    "enum": lambda n: {"enum": [*range(n)]},
    "big enum": lambda n: {"enum": [2**60 + k for k in range(n)]},
    "required": lambda n: {"type": "object", "required": [f"k{k}" for k in range(n)]},
    "$defs": lambda n: {"$defs": _many(n, lambda _: WORD), "$ref": "#/$defs/k0"},
    "references to one big schema": lambda n: {
        "$defs": {"x": {"type": "object", "properties": _many(n, lambda _: WORD)}, "y": BIG},
        "anyOf": [{"$ref": "#/$defs/y"}, *({"$ref": "#/$defs/x"} for _ in range(n))],
    },
    "a chain of references": lambda n: {
        "$defs": {f"k{k}": {"anyOf": [{"$ref": f"#/$defs/k{k + 1}"}, BIG]} for k in range(n)},
        "anyOf": [{"$ref": f"#/$defs/k{k}"} for k in range(n)],
    },
    "an object": lambda n: _many(n, lambda k: k),
    "an array": lambda n: [*range(n)],
    "texts": lambda n: ["<|im_start|>"] * n,
}
"""A value with so many parts."""


def _many(n: int, make: Callable[[int], Any]) -> dict[str, Any]:
    return {f"k{k}": make(k) for k in range(n)}


def _one(key: str, inner: Any) -> Any:
    # One of the two is deep: both would double the value itself with each level.
    return {"type": "object", "properties": {key: inner if key == "a" else WORD}, "required": [key]}


def nested(name: str, depth: int, leaf: Any = WORD) -> Any:
    """Returns a value of so many levels."""
    value = leaf
    for _ in range(depth):
        value = NESTED[name](value)
    return value


_KEYS = [
    *("type", "properties", "required", "items", "prefixItems", "additionalProperties", "patternProperties", "$defs"),
    *("definitions", "anyOf", "oneOf", "allOf", "not", "$ref", "enum", "const", "pattern", "minItems", "maxItems"),
    *("minimum", "maximum", "minProperties", "minLength", "format", "default", "nullable", "x-guidance", "title"),
    *("a", "b", "", "name", "function", "if", "then", "$schema", "uniqueItems", "contains", "dependentRequired"),
]
_SCALARS: list[Any] = [None, True, False, 0, -1, 3, 2**60, -(2**70), 1.5, 1e300, "", "a", "object", "array", "string"]
_SCALARS += ["integer", "#/$defs/a", "#", "^[a-z]{2,3}$", "[", "(", "\ud83d\ude00", "<|im_start|>", "\x00"]


def random_json(chosen: random.Random, depth: int = 4) -> Any:
    """Returns any JSON, mostly objects with the keywords of schemas, whose values have any type."""
    kind = chosen.random()
    if depth == 0 or kind < 0.3:
        return chosen.choice(_SCALARS)
    if kind < 0.45:
        return [random_json(chosen, depth - 1) for _ in range(chosen.randint(0, 3))]
    return {chosen.choice(_KEYS): random_json(chosen, depth - 1) for _ in range(chosen.randint(0, 4))}


def tool(value: Any) -> dict[str, Any]:
    """Returns a tool with this schema; with a property of this schema if it is no object, which no API takes."""
    schema = value if isinstance(value, dict) else {"properties": {"a": value}}
    return {"type": "function", "function": {"name": "act", "description": "Acts.", "parameters": schema}}


def conversation(schema: Any = None, arguments: Any = None) -> Conversation:
    """Returns a conversation with a tool of this schema and a call with these arguments."""
    call = ToolCall("call00001", "act", {"a": 1} if arguments is None else arguments)
    return Conversation(
        messages=[
            Message(role="system", content=[TextPart("Be brief.", "messages.0.content")], path="messages.0"),
            Message(role="user", content=[TextPart("Do it.", "messages.1.content")], path="messages.1"),
            Message(role="assistant", tool_calls=[call], path="messages.2"),
            Message(role="tool", tool_call_id="call00001", content=[TextPart("1", "x")], path="messages.3"),
            Message(role="user", content=[TextPart("And now?", "messages.4.content")], path="messages.4"),
        ],
        tools=None if schema is None else [tool(schema)],
        tool_paths=["tools.0.function.parameters"],
    )


def _canonicalise(value: Any) -> None:
    Canonicalisers.parse("on", param="--canonicalise").apply(conversation(value))


def _call(value: Any) -> None:
    """Walks the arguments of a call: as an object, and as JSON text."""
    for arguments in ({"a": value}, json.dumps(value), json.dumps({"a": value})):
        asked = conversation(WORD, arguments)
        require_few_arguments(asked)
        messages = [message_for_template(message, True, False) for message in asked.messages]
        visit_texts(TemplateInput(messages, asked.tools, {"v": value}), lambda _, text: text)
        hashed = ConversationHash()
        for message in asked.messages:
            hashed.add_message(message)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        Turn("", calls=(("act", text),)).canonical()
        shortened(asked, 1, lambda texts: [*map(len, texts)])


def _grammars(family: Family, value: Any) -> None:
    made = CallGrammar(family, [tool(value)], {})
    for make in (partial(made.forced, many=True), made.begun, made.forbidden):
        with suppressed():
            grammar_of(Constraint(kind="lark", source=make()), "tools")
    # As a reply's parser asks for it.
    offered = OfferedTools([tool(value)])
    offered.is_text("act", "a")


def _reply(family: Family, value: Any) -> None:
    """Reads a reply whose call has the value as arguments, and as a schema."""
    text = json.dumps({"name": "act", "arguments": value})
    parser = OutputFormat(family).parser([tool(value)], "")
    [*parser.feed(text), *parser.finish()]
    value_of(json.dumps(value), value)
    python_calls(f"[act(a={value!r})]", OfferedTools([tool(value)]))
    braces(json.dumps(value), "", {"a": value})
    elements("".join(_as_elements(value)), "", {"properties": {"a": value}})


def _as_elements(value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key.isalnum():
            yield f"<{key}>"
            yield from _as_elements(inner) if isinstance(inner, dict) else ["1"]
            yield f"</{key}>"


def _kept(value: Any) -> None:
    # Their callers take the latter for a schema that is nested too deeply.
    with suppressed(), suppress(RecursionError):
        json_rules("start", value | {"x-guidance": {}} if isinstance(value, dict) else value)
    with suppressed(), suppress(RecursionError):
        with_any_of(value, only_proven=False)
    if isinstance(value, dict):
        weaker(value, lambda one: "a" in one)
        for path, part in list(parts(value))[:2]:
            replace_part(value, path, part)


def _text_format(value: Any) -> None:
    source = json.dumps(value)
    excess_of(source)
    with suppressed():
        grammar_of(Constraint(kind="json_schema", source=source), "response_format")


_MESSAGES: list[Any] = [{"role": "user", "content": "Do it."}]
_FUNCTION = {"name": "act", "description": "Acts."}


def _bodies(value: Any) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Returns the APIs, each with the model of its body and a body that holds the value wherever it may."""
    called: dict[str, Any] = {"type": "function", "id": "c", "function": {"name": "act", "arguments": {"a": value}}}
    chat = [*_MESSAGES, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "1"}, *_MESSAGES]
    blocks = [{"type": "tool_use", "id": "c", "name": "act", "input": {"a": value}}]
    items = [{"type": "local_shell_call", "call_id": "c", "action": {"a": value}}, *_MESSAGES]
    said = [*_MESSAGES, {"role": "assistant", "content": blocks}, *_MESSAGES]
    tools = [{"type": "function", "function": _FUNCTION | {"parameters": value}}]
    own = {"type": "json_schema", "name": "x", "schema": value}
    of_responses = {"input": items, "tools": [{"type": "function", **_FUNCTION, "parameters": value, "strict": False}]}
    of_anthropic = {"max_tokens": 1, "messages": said, "tools": [_FUNCTION | {"input_schema": value}]}
    of_chat = {"messages": chat, "tools": tools, "chat_template_kwargs": {"v": value}}
    asked: list[tuple[Any, Any, dict[str, Any]]] = [
        (Chat(), ChatRequest, of_chat),
        (Chat(), ChatRequest, {"messages": chat, "response_format": {"type": "json_schema", "json_schema": own}}),
        (Chat(), ChatRequest, {"messages": chat, "structured_outputs": {"json": value}}),
        (Chat(), ChatRequest, {"messages": chat, "structured_outputs": {"json": json.dumps(value)}}),
        (Responses(), ResponseRequest, of_responses),
        (Responses(), ResponseRequest, {"input": "x", "text": {"format": own}}),
        (Messages(), MessagesRequest, of_anthropic),
        (Ollama(OllamaChatRequest), OllamaChatRequest, {"messages": chat, "tools": tools, "format": value}),
    ]
    choices = ("none", "required")
    asked += [(Chat(), ChatRequest, of_chat | {"tool_choice": choice}) for choice in choices]
    return asked


def _requests(format_: OutputFormat, value: Any) -> None:
    """Takes bodies of each API from their bytes to the constraint of the reply."""
    for dialect, model, fields in _bodies(value):
        with suppressed():
            body = parse_json(json.dumps(fields).encode(), model)
            parsed: ParsedRequest = dialect.read(body, 512, lambda: None)
            made = constraint_of(parsed, format_, "", lambda *_, **__: {})
            if made is not None and made.make_source is not None:
                made.make_source()
    with suppressed():
        body = {"messages": _MESSAGES, "tools": [_FUNCTION | {"input_schema": value}]}
        _ = parse_json(json.dumps(body).encode(), CountTokensRequest).conversation
    with suppressed():
        # No API takes such a number.
        parse_json(json.dumps({"messages": _MESSAGES, "x": [value, float("inf")]}).encode(), ChatRequest)


@contextmanager
def suppressed() -> Iterator[None]:
    """Lets pass what is an error of the client's, with a message. `ValueError` is that of `kept_schema`."""
    said = "no error"
    try:
        yield
    except InvalidRequest as error:
        said = error.message
    except UnicodeError:
        raise
    except ValueError as error:
        said = str(error)
    assert said


_BY_BODY = {(family.body, family.channels is not None): family for family in FAMILIES}
"""A family of each kind: its grammars and its readers are those of the others, with other tags."""
WALKS: Mapping[str, Callable[[Any], None]] = {
    "canonicalisers": _canonicalise,
    "calls": _call,
    "kept schemas": _kept,
    "formats of texts": _text_format,
    "requests": partial(_requests, OutputFormat(_BY_BODY["objects", False])),
    **{f"grammars of {family.name}": partial(_grammars, family) for family in _BY_BODY.values()},
    **{f"replies of {family.name}": partial(_reply, family) for family in _BY_BODY.values()},
}


class TooMuch(BaseException):
    """More work than the limit. No handler of the package's own takes it for an error."""


class Work:
    """Counts the work of a function: the instructions of Python, and the characters of JSON text."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.count = 0
        self.ran: set[CodeType] = set()
        self._limit = limit

    def of(self, walk: Callable[[Any], None], value: Any) -> int:
        """Runs a walk and returns its work. Raises `TooMuch` at the limit."""
        old, dumps, loads = sys.gettrace(), json.dumps, json.loads
        json.dumps, json.loads = self._counted(dumps), self._counted(loads)
        sys.settrace(self._trace)
        try:
            walk(value)
        finally:
            sys.settrace(old)
            json.dumps, json.loads = dumps, loads
        return self.count

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(value: Any, *args: Any, **options: Any) -> Any:
            result = function(value, *args, **options)
            text = result if isinstance(result, str) else value
            self._add(len(text) // 8)
            return result

        return run

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "call":
            self.ran.add(frame.f_code)
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        elif event == "opcode":
            self._add(1)
        return self._trace

    def _add(self, number: int) -> None:
        self.count += number
        if self.count > self._limit:
            raise TooMuch
