"""The requests that constrain their replies, the beginnings of the constraints, and their errors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diskprefix.api.asked import Asked, TextFormat, ToolChoice, constraint_of
from diskprefix.chat.messages import Conversation, JsonObject, Message
from diskprefix.chat.output.format import ContentDelta, OutputDelta, OutputParser, ReasoningDelta, ThoughtTags
from diskprefix.engine.constrained_reply import ConstraintCompiler
from diskprefix.engine.request import Constraint, FreeText, SamplingParams
from diskprefix.errors import InvalidRequest
from tests.server.chat_model import VOCAB_SIZE, write_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = TextFormat("json_schema", json.dumps(SCHEMA), "response_format.json_schema.schema")
REQUIRED = ToolChoice("required")


def tool(name: str, parameters: JsonObject) -> JsonObject:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("read", SCHEMA), tool("write", {"type": "object"})]


class Thinking:
    """A format with thoughts and calls. The template may have opened or closed the thought at the prompt's end."""

    name = "thinking"
    special_tokens: frozenset[str] = frozenset()
    thought = ThoughtTags("<think>", "</think>")

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:  # noqa: ARG002 (the protocol's)
        return Parser(prompt_end.rstrip().endswith("<think>"))

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:
        calls = [f'"{item["function"]["name"]}" %json {json.dumps(item["function"]["parameters"])}' for item in tools]
        return f"start: call{'+' if many else ''}\ncall: {' | '.join(calls)}\n"

    def strict_grammar(self, tools: Sequence[JsonObject], strict: Collection[str]) -> str:
        called = self.call_grammar([item for item in tools if item["function"]["name"] in strict], many=False)
        return called.replace("start: call", "start: /[0-9]*/ call?")


class Parser:
    def __init__(self, thinks: bool) -> None:
        self._thinks = thinks

    def feed(self, text: str) -> list[OutputDelta]:
        return [ReasoningDelta(text) if self._thinks else ContentDelta(text)]

    def finish(self) -> list[OutputDelta]:
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


def found(
    compiler: ConstraintCompiler, prompt_end: str = "", *, tools: list[JsonObject] | None = None, **fields: Any
) -> Constraint | None:
    paths = [f"tools.{index}.function.parameters" for index in range(len(tools or []))]
    conversation = Conversation([Message(role="user", path="messages.0")], tools=tools, tool_paths=paths)
    asked = Asked(prompt=conversation, sampling=SamplingParams(), **fields)
    return constraint_of(asked, Thinking(), prompt_end, compiler.check)


def accepts(compiler: ConstraintCompiler, constraint: Constraint | None, text: str) -> bool:
    """Says whether `text` is all that the constraint allows."""
    assert constraint is not None
    matcher = compiler.matcher(constraint)
    tokens = compiler.tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def test_a_strict_tool_constrains_a_reply_that_may_call_it_and_no_other_does(compiler: ConstraintCompiler) -> None:
    strict = ToolChoice(strict=frozenset({"read"}))
    constraint = found(compiler, tools=TOOLS, tool_choice=strict)
    assert accepts(compiler, constraint, "12")
    assert accepts(compiler, constraint, '12read{"a": 1}')
    assert not accepts(compiler, constraint, '12read{"b": 1}')
    for choice in (ToolChoice(), replace(strict, mode="none"), replace(strict, names=frozenset({"write"}))):
        assert found(compiler, tools=TOOLS, tool_choice=choice) is None


def test_a_reply_is_free_unless_somebody_asks(compiler: ConstraintCompiler) -> None:
    assert found(compiler) is None
    assert found(compiler, tools=TOOLS) is None
    assert found(compiler, tools=TOOLS, tool_choice=ToolChoice("auto", frozenset({"read"}))) is None


def test_a_text_format_is_the_constraint(compiler: ConstraintCompiler) -> None:
    constraint = found(compiler, text_format=JSON)
    assert accepts(compiler, constraint, '{"a": 5}')
    assert not accepts(compiler, constraint, '{"b": 5}')


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
    text = found(compiler, prompt_end, text_format=JSON)
    calls = found(compiler, prompt_end, tools=TOOLS, tool_choice=REQUIRED)
    either = found(compiler, prompt_end, tools=TOOLS, text_format=JSON)
    assert text is not None
    assert calls is not None
    assert either is not None
    assert text.before == calls.before == either.before == thought


@pytest.mark.parametrize(
    ("choice", "allowed", "refused"),
    [
        (REQUIRED, ['read{"a": 1}', "write{}", 'write{}read{"a": 1}'], ["", "hello", '{"a": 1}', "read{}"]),
        (ToolChoice("required", many=False), ["write{}"], ["write{}write{}"]),
        (ToolChoice("required", frozenset({"write"})), ["write{}"], ['read{"a": 1}']),
    ],
)
def test_a_forced_call_is_one_of_the_allowed_tools(
    compiler: ConstraintCompiler, choice: ToolChoice, allowed: list[str], refused: list[str]
) -> None:
    constraint = found(compiler, tools=TOOLS, tool_choice=choice)
    assert [accepts(compiler, constraint, text) for text in allowed] == [True] * len(allowed)
    assert [accepts(compiler, constraint, text) for text in refused] == [False] * len(refused)


@pytest.mark.parametrize("text_format", [JSON, TextFormat("json_object", "", "response_format")])
def test_a_reply_of_json_may_still_be_a_call(compiler: ConstraintCompiler, text_format: TextFormat) -> None:
    constraint = found(compiler, tools=TOOLS, text_format=text_format)
    assert accepts(compiler, constraint, '{"a": 5}')
    assert accepts(compiler, constraint, 'read{"a": 1}')
    assert not accepts(compiler, constraint, "hello")


def test_a_text_that_is_continued_can_be_constrained_and_has_no_thoughts(compiler: ConstraintCompiler) -> None:
    asked = Asked(prompt="a", sampling=SamplingParams(), text_format=TextFormat("choice", '["a"]', "x"))
    constraint = constraint_of(asked, Thinking(), "<think>", compiler.check)
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
        ({"tools": [TOOLS[0], tool("b", BAD)], "tool_choice": REQUIRED}, "tools.1.function.parameters"),
        ({"tools": [TOOLS[0], tool("b", BAD)], "text_format": JSON}, "tools.1.function.parameters"),
    ],
)
def test_what_cannot_be_compiled_is_named_by_its_path(
    compiler: ConstraintCompiler, fields: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        found(compiler, **fields)
    assert str(caught.value.param).startswith(path)
