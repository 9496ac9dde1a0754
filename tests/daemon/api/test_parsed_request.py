"""Tool choices and formats of the text, as each API says them, and the constraints that follow from them."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from diskprefix.daemon.api.anthropic import Messages, MessagesRequest
from diskprefix.daemon.api.openai_chat import Chat, ChatRequest
from diskprefix.daemon.api.parsed_request import ParsedRequest, TextFormat, ToolChoice, constraint_of
from diskprefix.daemon.api.responses import ResponseRequest, Responses
from diskprefix.daemon.chat.messages import Conversation, JsonObject, Message
from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.format import ContentDelta, OutputDelta, OutputParser, ReasoningDelta, ThoughtTags
from diskprefix.daemon.engine.constraints.constrained_reply import ConstraintCompiler
from diskprefix.daemon.engine.constraints.kept_schema import MAX_CHARS
from diskprefix.daemon.engine.request import Constraint, FreeText, SamplingParams
from diskprefix.daemon.server.body import parse_json
from diskprefix.errors import InvalidRequest
from tests.daemon.server.chat_model import VOCAB_SIZE, write_tokenizer

USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}, "required": ["a"]}
JSON = TextFormat("json_schema", json.dumps(SCHEMA), "response_format.json_schema.schema")
REQUIRED, NO_CALL = ToolChoice("required"), ToolChoice("none", strict=frozenset({"read"}))


def tool(name: str, parameters: JsonObject) -> JsonObject:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("read", SCHEMA), tool("write", {"type": "object"})]


class Thinking(OutputFormat):
    """A format with thoughts and calls. The template may have opened or closed the thought at the prompt's end."""

    def __init__(self) -> None:
        super().__init__(thought=ThoughtTags("<think>", "</think>"))

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:  # noqa: ARG002
        return Parser(prompt_end.rstrip().endswith("<think>"))

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:
        calls = [f'"{item["function"]["name"]}" %json {json.dumps(item["function"]["parameters"])}' for item in tools]
        return f"start: call{'+' if many else ''}\ncall: {' | '.join(calls)}\n"

    def begun_grammar(self, tools: Sequence[JsonObject]) -> str:
        return self.call_grammar(tools, many=False)

    def no_call_grammar(self, tools: Sequence[JsonObject]) -> str:
        return f"start: /[^{''.join(item['function']['name'][0] for item in tools)}]*/"


class Parser:
    has_draft = False

    def __init__(self, thinks: bool) -> None:
        self._thinks = thinks

    def feed(self, text: str) -> list[OutputDelta]:
        return [ReasoningDelta(text) if self._thinks else ContentDelta(text)]

    def finish(self, *, is_whole: bool = True) -> list[OutputDelta]:  # noqa: ARG002
        return []


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConstraintCompiler]:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    compiler = ConstraintCompiler(tokenizer, {tokenizer.eos_token_id}, VOCAB_SIZE)
    yield compiler
    compiler.close()


LAX = {"b": {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "a": {"type": "array", "uniqueItems": True}}
LOOSE = {"type": "object", "properties": LAX, "required": ["a", "b"]}
OVERLAP = {"properties": {"b": LAX["b"]}, "required": ["b"], "type": "object"}


def constraint_for(
    compiler: ConstraintCompiler, prompt_end: str = "", *, tools: list[JsonObject] | None = None, **fields: Any
) -> Constraint | None:
    paths = [f"tools.{index}.function.parameters" for index in range(len(tools or []))]
    conversation = Conversation([Message(role="user", path="messages.0")], tools=tools, tool_paths=paths)
    asked = ParsedRequest(prompt=conversation, sampling=SamplingParams(), **fields)
    return constraint_of(asked, Thinking(), prompt_end, compiler.check_constraint)


READ, WRITE = frozenset({"read"}), frozenset({"write"})
CHOICE = TextFormat("choice", '["a"]', "structured_outputs.choice")


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        ({"text_format": JSON}, ['{"a": 5}'], ['{"b": 5}']),
        ({"tools": TOOLS, "text_format": JSON}, ['{"a": 5}', 'read{"a": 1}'], ["hello"]),
        (
            {"tools": TOOLS, "text_format": TextFormat("json_object", "", "response_format")},
            ['{"a": 5}', 'read{"a": 1}'],
            ["hello"],
        ),
        (
            {"tools": TOOLS, "tool_choice": REQUIRED},
            ['read{"a": 1}', "write{}", 'write{}read{"a": 1}'],
            ["", "hello", '{"a": 1}', "read{}"],
        ),
        ({"tools": TOOLS, "tool_choice": ToolChoice("required", many=False)}, ["write{}"], ["write{}write{}"]),
        ({"tools": TOOLS, "tool_choice": ToolChoice("required", WRITE)}, ["write{}"], ['read{"a": 1}']),
        ({"tools": TOOLS, "tool_choice": ToolChoice(strict=READ)}, ['read{"a": 1}', "write{}"], ['read{"b": 1}', "1"]),
        (
            {"tools": [*TOOLS, tool("odd", LOOSE)], "tool_choice": REQUIRED},
            ["write{}", 'odd{"b":1.5,"a":[1,1]}'],
            ["odd{}", "hello", 'odd{"b":"x","a":[]}'],
        ),
        (
            {"tools": [tool("odd", LOOSE), TOOLS[1]], "tool_choice": ToolChoice("required", WRITE, strict=READ)},
            ["write{}"],
            ["odd{}"],
        ),
        ({"text_format": TextFormat("json_schema", json.dumps(OVERLAP), "text")}, ['{"b": 1}'], ['{"b": "x"}']),
        ({"tools": TOOLS, "tool_choice": NO_CALL}, ["", "hello"], ['read{"a": 1}', "write"]),
        ({"tools": TOOLS, "tool_choice": NO_CALL, "text_format": JSON}, ['{"a": 5}'], ["hello", 'read{"a": 1}']),
    ],
)
def test_a_reply_is_what_the_request_asks_for(
    compiler: ConstraintCompiler, fields: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    constraint = constraint_for(compiler, **fields)
    assert constraint is not None
    for text in (*allowed, *refused):
        tokens, matcher = compiler.tokenizer.tokenize_str(text), compiler.matcher(constraint)
        fits = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
        assert (fits and matcher.is_accepting()) == (text in allowed), text


@pytest.mark.parametrize(
    ("choice", "name"),
    [(ToolChoice(), "read"), (ToolChoice("auto", READ), "read"), (ToolChoice("auto", WRITE, strict=READ), "write")],
)
def test_a_reply_is_free_up_to_a_call(compiler: ConstraintCompiler, choice: ToolChoice, name: str) -> None:
    assert constraint_for(compiler, tool_choice=choice) is None
    constraint = constraint_for(compiler, tools=TOOLS, tool_choice=choice)
    assert constraint is not None
    assert constraint.begins is not None
    assert constraint.make_source is not None
    assert [bool(constraint.begins.search(f'{{"name": "{tool_name}", "arguments": ')) for tool_name in NAMES] == [
        choice.names is None or tool_name in choice.names for tool_name in NAMES
    ]
    assert f'"{name}"' in constraint.make_source()


def test_calls_that_cannot_be_compiled_are_free_and_the_log_says_so(
    compiler: ConstraintCompiler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.daemon.api.parsed_request._logged", defaultdict(set))
    too_much = {"enum": ["x" * MAX_CHARS]}
    constraint = constraint_for(compiler, tools=[tool("read", too_much)])
    assert constraint is not None
    assert constraint.make_source is not None
    with caplog.at_level(logging.INFO, "diskprefix"):
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                constraint.make_source()
    [message] = caplog.messages
    assert message.startswith("[server] calls are not constrained: ")


@pytest.mark.parametrize(
    ("prompt_end", "thought"),
    [
        ("assistant\n", FreeText(begin="<think>", end="</think>")),
        ("assistant\n<think>\n", FreeText(end="</think>")),
        ("assistant\n<think>\n\n</think>\n\n", None),
    ],
    ids=["unsaid", "opened", "closed"],
)
def test_a_constraint_begins_behind_the_thought_that_may_come(
    compiler: ConstraintCompiler, prompt_end: str, thought: FreeText | None
) -> None:
    for fields in (
        {"text_format": JSON},
        {"tool_choice": REQUIRED, "tools": TOOLS},
        {"text_format": JSON, "tools": TOOLS},
    ):
        constraint = constraint_for(compiler, prompt_end, **cast("Any", fields))
        assert constraint is not None
        assert constraint.before == thought


def test_a_text_that_is_continued_can_be_constrained_and_has_no_thoughts(compiler: ConstraintCompiler) -> None:
    asked = ParsedRequest(prompt="a", sampling=SamplingParams(), text_format=CHOICE)
    constraint = constraint_of(asked, Thinking(), "<think>", compiler.check_constraint)
    assert constraint == Constraint(kind="choice", source='["a"]')


BAD: JsonObject = {"type": "object", "properties": {"a": {"type": "weird"}}}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (
            {"text_format": TextFormat("json_schema", json.dumps(BAD), "response_format.json_schema.schema")},
            "response_format.json_schema.schema",
        ),
        ({"text_format": TextFormat("choice", "[]", "structured_outputs.choice")}, "structured_outputs.choice"),
        ({"text_format": TextFormat("json_schema", "5", "structured_outputs.json")}, "structured_outputs.json"),
        (
            {"tools": [TOOLS[0], tool("b", BAD)], "tool_choice": replace(REQUIRED, strict=frozenset("b"))},
            "tools.1.function.parameters.properties.a",
        ),
        (
            {
                "tools": [tool("a", BAD), tool("b", BAD)],
                "text_format": JSON,
                "tool_choice": ToolChoice(strict=frozenset("b")),
            },
            "tools.1.function.parameters.properties.a",
        ),
        ({"text_format": TextFormat("json_schema", json.dumps(OVERLAP), "text", is_strict=True)}, "text.properties.b"),
    ],
)
def test_a_constraint_that_fails_to_compile_is_named_by_its_path(
    compiler: ConstraintCompiler, fields: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint_for(compiler, **fields)
    assert str(caught.value.param).startswith(path)


def test_keywords_that_no_grammar_enforces_are_logged_once(
    compiler: ConstraintCompiler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.daemon.api.parsed_request._logged", defaultdict(set))
    with caplog.at_level(logging.INFO, "diskprefix"):
        for _ in range(2):
            constraint_for(compiler, tools=[TOOLS[0], tool("odd", LOOSE)], tool_choice=REQUIRED)
            constraint_for(compiler, text_format=TextFormat("json_schema", json.dumps(OVERLAP), "text"))
    [loose, one_of] = caplog.messages
    assert "tools.1.function.parameters.properties.a: " in loose
    assert "uniqueItems" in loose
    assert one_of.endswith(": text.properties.b.oneOf")


def test_a_schema_that_is_too_long_is_refused_before_it_is_read(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.daemon.api.parsed_request.with_any_of", None)
    too_long = TextFormat("json_schema", json.dumps({"enum": ["x" * MAX_CHARS]}), "text")
    with pytest.raises(InvalidRequest, match=r"^text: has \d+ characters; at most"):
        constraint_for(compiler, text_format=too_long)


NAMES = ("read", "write")
APIS_READ: dict[str, Any] = {"chat": Chat(), "messages": Messages(), "responses": Responses()}
APIS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "chat": (ChatRequest, {"messages": [USER]}),
    "messages": (MessagesRequest, {"max_tokens": 8, "messages": [USER]}),
    "responses": (ResponseRequest, {"input": "hello"}),
}


def body(api: str, **fields: Any) -> Any:
    model, base = APIS[api]
    return parse_json(json.dumps(base | fields).encode(), model)


def choice_of(api: str, **fields: Any) -> ToolChoice:
    asked = body(api, **fields)
    choice: ToolChoice = asked.choice
    if api == "responses":
        offered = asked.offered()
        choice = asked.choice([tool.tool for tool in offered.tools], offered.strict)
    return choice


def tools(api: str, **fields: Any) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = [{"name": name} for name in NAMES]
    described[0] |= fields
    if api == "chat":
        return [{"type": "function", "function": function} for function in described]
    more: dict[str, Any] = {"input_schema": SCHEMA} if api == "messages" else {"type": "function"}
    return [function | more for function in described]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def some_of_chat(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function(name) for name in names]}}


def some(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


AUTO, NONE = ToolChoice("auto"), ToolChoice("none")
CHOICES: list[tuple[str, dict[str, Any], ToolChoice]] = [
    ("chat", {}, AUTO),
    ("chat", {"tool_choice": "auto", "parallel_tool_calls": True}, AUTO),
    ("chat", {"parallel_tool_calls": False}, replace(AUTO, many=False)),
    ("chat", {"tool_choice": "none"}, NONE),
    ("chat", {"tool_choice": "required"}, REQUIRED),
    ("chat", {"tool_choice": function("write")}, replace(REQUIRED, names=WRITE, many=False)),
    ("chat", {"tool_choice": some_of_chat("auto", "read")}, replace(AUTO, names=READ)),
    ("chat", {"tool_choice": some_of_chat("required", "write", "read")}, replace(REQUIRED, names=READ | WRITE)),
    ("messages", {}, AUTO),
    ("messages", {"tool_choice": {"type": "auto"}}, AUTO),
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, replace(AUTO, many=False)),
    ("messages", {"tool_choice": {"type": "any"}}, REQUIRED),
    ("messages", {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, replace(REQUIRED, many=False)),
    ("messages", {"tool_choice": {"type": "tool", "name": "write"}}, replace(REQUIRED, names=WRITE, many=False)),
    ("messages", {"tool_choice": {"type": "none"}}, NONE),
    ("responses", {}, AUTO),
    ("responses", {"parallel_tool_calls": False}, replace(AUTO, many=False)),
    ("responses", {"tool_choice": "none"}, NONE),
    ("responses", {"tool_choice": "required"}, REQUIRED),
    ("responses", {"tool_choice": {"type": "function", "name": "read"}}, replace(REQUIRED, names=READ, many=False)),
    ("responses", {"tool_choice": some("auto", "read")}, replace(AUTO, names=READ)),
    ("responses", {"tool_choice": some("required", "read")}, replace(REQUIRED, names=READ)),
]


@pytest.mark.parametrize(("api", "fields", "choice"), CHOICES)
def test_a_tool_choice_says_what_may_be_called_and_whether_it_must(
    api: str, fields: dict[str, Any], choice: ToolChoice
) -> None:
    assert choice_of(api, tools=tools(api), **fields) == choice
    assert choice_of(api, tools=tools(api, strict=True), **fields).strict == READ
    allowed = [tool["function"]["name"] for tool in choice.allowed(tools("chat"))]
    assert allowed == [name for name in NAMES if choice.mode != "none" and name in (choice.names or NAMES)]


@pytest.mark.parametrize(
    ("api", "choice"),
    [
        ("chat", some_of_chat("auto", "read")),
        ("chat", "none"),
        ("messages", {"type": "any"}),
        ("messages", {"type": "none"}),
        ("responses", some("auto", "read")),
        ("responses", "none"),
    ],
)
def test_tools_that_may_not_be_called_stay_in_the_prompt(api: str, choice: Any) -> None:
    def conversation(**fields: Any) -> Conversation:
        read: Conversation = APIS_READ[api].read(body(api, **fields), VOCAB_SIZE, cast("Any", lambda: None)).prompt
        return read

    offered = conversation(tools=tools(api))
    assert [tool["function"]["name"] for tool in offered.tools or ()] == [*NAMES]
    assert conversation(tools=tools(api), tool_choice=choice) == offered
    assert conversation(tools=[]).tools is conversation(tools=None).tools is None


def follows(path: str, schema: str = json.dumps(SCHEMA), *, strict: bool = False) -> TextFormat:
    return TextFormat("json_schema", schema, path, strict)


OPEN = {"schema": {name: value for name, value in SCHEMA.items() if name != "type"}}
"""That it is an object need not be said."""
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
OWN_FORMAT = {"type": "json_schema", "schema": SCHEMA}
TEXT_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
FORMATS: list[tuple[str, dict[str, Any], TextFormat | None]] = [
    ("chat", {}, None),
    ("chat", {"response_format": None, "structured_outputs": None}, None),
    ("chat", {"response_format": {"type": "text"}}, None),
    ("chat", {"response_format": {"type": "json_object"}}, TextFormat("json_object", "", "response_format")),
    ("chat", {"response_format": {"type": "json_object"} | OPEN}, follows("response_format.schema")),
    ("chat", {"response_format": CHAT_FORMAT}, follows("response_format.json_schema.schema", strict=True)),
    ("chat", {"structured_outputs": {"json": SCHEMA, "choice": None}}, follows("structured_outputs.json")),
    ("chat", {"structured_outputs": {"json": "{}"}}, follows("structured_outputs.json", "{}")),
    ("chat", {"structured_outputs": {"choice": ["a"]}}, CHOICE),
    (
        "chat",
        {"structured_outputs": {"json_object": True}},
        TextFormat("json_object", "", "structured_outputs.json_object"),
    ),
    ("messages", {}, None),
    ("messages", {"output_config": {"format": OWN_FORMAT}}, follows("output_config.format.schema")),
    ("messages", {"output_format": OWN_FORMAT}, follows("output_format.schema")),
    ("messages", {"structured_outputs": {"choice": ["a"]}}, CHOICE),
    ("responses", {"text": None}, None),
    ("responses", {"text": {"verbosity": "low"}}, None),
    ("responses", {"text": {"format": {"type": "text"}}}, None),
    ("responses", {"text": {"format": {"type": "json_object"}}}, TextFormat("json_object", "", "text.format")),
    ("responses", {"text": {"format": TEXT_FORMAT}}, follows("text.format.schema", strict=True)),
]


@pytest.mark.parametrize(("api", "fields", "text_format"), FORMATS)
def test_each_field_gives_its_text_format(api: str, fields: dict[str, Any], text_format: TextFormat | None) -> None:
    assert body(api, **fields).text_format == text_format
