"""Grammars of forced calls: llguidance compiles them, and what they generate is parsed back."""

from __future__ import annotations

import random
import re
from itertools import islice
from typing import Any

import llguidance
import llguidance.numpy
import pytest

from diskprefix.daemon.chat.output.call_values import value_of
from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.families import FAMILIES, NONE
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.engine.constraints.constrained_reply import ConstrainedCalls, ConstraintCompiler
from diskprefix.daemon.engine.request import Constraint
from diskprefix.errors import InvalidRequest
from tests.daemon.chat.families.families import named, tokenizer_of
from tests.daemon.chat.output.replies import NAMES, format_named, read, tool

BYTES = llguidance.LLTokenizer("byte")
WEATHER = tool("get_weather", city={"type": "string"}, days={"type": "integer"}, day={"type": "string"})
WEATHER["function"]["parameters"]["required"] = ["city"]
TOOLS = [WEATHER, tool("no_arguments"), tool("rank", kind={"enum": ["a", "b"]}, items={"type": "array"})]
REQUIRED = {"get_weather": {"city"}, "no_arguments": set(), "rank": {"kind", "items"}}


def generated(grammar: str, seed: int) -> str | None:
    """A random text of the grammar, of printable characters; None if it does not end soon."""
    chance, matcher, text = random.Random(seed), llguidance.LLMatcher(BYTES, grammar), b""
    mask = llguidance.numpy.allocate_token_bitmask(1, BYTES.vocab_size)
    for _ in range(600):
        if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.3):
            return text.decode()
        llguidance.numpy.fill_next_token_bitmask(matcher, mask)
        allowed = [byte for byte in range(256) if mask[0][byte // 32] >> (byte % 32) & 1]
        printable = [byte for byte in allowed if 32 <= byte < 127] or allowed
        ending = [byte for byte in printable if chr(byte) in '"<}]`[)'] if chance.random() < 0.5 else []
        byte = chance.choice(ending or printable)
        text += bytes([byte])
        assert matcher.consume_token(byte)
    return None


@pytest.mark.cases(8)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_generated_calls_are_parsed_back(name: str, many: bool) -> None:
    format = format_named(name)
    grammar = format.call_grammar(TOOLS, many=many)
    assert llguidance.LLMatcher.validate_grammar(grammar, BYTES) == ""
    texts = (generated(grammar, seed) for seed in range(50))
    ended = list(islice((text for text in texts if text is not None), 2))
    assert len(ended) == 2
    for text in ended:
        reply = read(format, [text], TOOLS, "<|start|>assistant")
        assert reply.content.strip() == "", text
        assert many or len(reply.calls) == 1
        for called, arguments in reply.parsed_calls:
            assert REQUIRED[called] <= set(arguments), text


HARD = "NAME_ARGUMENTS_KEY_VALUE_IS_TEXT_MIME_TYPE_INDEX"
PLACED = tool(HARD, **{HARD: {"type": "boolean"}, "TYPE": {"enum": [HARD, "a  INDEX"]}, "KEY": {"type": "boolean"}})


@pytest.mark.cases(16)
@pytest.mark.parametrize("name", NAMES)
def test_names_and_values_may_hold_the_words_of_a_template(name: str) -> None:
    format = format_named(name)
    grammar = format.call_grammar([PLACED], many=False)
    assert llguidance.LLMatcher.validate_grammar(grammar, BYTES) == ""
    text = next(text for seed in range(50) if (text := generated(grammar, seed)) is not None)
    ((called, arguments),) = read(format, [text], [PLACED], "<|start|>assistant").parsed_calls
    assert called == HARD
    assert {HARD, "TYPE", "KEY"} <= set(arguments)
    assert arguments["TYPE"] in (HARD, "a  INDEX")


@pytest.mark.parametrize("required", [5, [{}]])
@pytest.mark.parametrize("malformed", [{"anyOf": 5}, {"type": [{}]}, {"type": "string", "enum": 5}, {"const": {}}])
@pytest.mark.parametrize("name", NAMES)
def test_a_malformed_schema_says_nothing_of_an_argument(name: str, malformed: Any, required: Any) -> None:
    """Whether it is refused is decided where it is compiled."""
    asked, format = tool("find", a=malformed), format_named(name)
    asked["function"]["parameters"]["required"] = required
    assert "find" in format.call_grammar([asked], many=True)
    assert format.begun_grammar([asked])
    assert value_of("1", malformed) is not None


def test_a_grammar_does_not_grow_beyond_its_limit() -> None:
    """The definitions are repeated for each argument."""
    asked = tool("find", **{f"a{i}": {"$ref": "#/$defs/d"} for i in range(1000)})
    asked["function"]["parameters"]["$defs"] = {"d": {"description": "x" * 10_000}}
    with pytest.raises(InvalidRequest, match="tools: make a grammar of more than"):
        format_named("pythonic").call_grammar([asked], many=False)


def test_a_tag_that_is_a_special_token_is_written_as_that_token() -> None:
    mistral = next(family for family in FAMILIES if family.name == "mistral")
    format = OutputFormat(mistral, token_ids={"[TOOL_CALLS]": 9, "[ARGS]": 32})
    grammar = format.call_grammar(TOOLS[1:2], many=False)
    assert '<[9]> "no_arguments" <[32]>' in " ".join(grammar.split()).replace('"" ', "")


def test_calls_of_one_reply_may_have_numbers_of_their_own() -> None:
    matcher = llguidance.LLMatcher(BYTES, format_named("kimi").call_grammar(TOOLS[1:2], many=True))
    call = "<|tool_call_begin|>functions.no_arguments:%d<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call % 0}{call % 11}<|tool_calls_section_end|>"
    assert matcher.consume_tokens(list(text.encode()))


@pytest.mark.cases(47)
@pytest.mark.parametrize("blanks", ["\n", "\n\n", " \n"])
@pytest.mark.parametrize("name", NAMES)
def test_a_reply_may_end_behind_white_space_after_a_call(name: str, blanks: str) -> None:
    """A model that is done writes a line end, and would have to call again for ever."""
    format = format_named(name)
    grammar = format.call_grammar(TOOLS[1:2], many=True)
    single = format.call_grammar(TOOLS[1:2], many=False)
    call = next(text for seed in range(50) if (text := generated(single, seed)) is not None)
    matcher = llguidance.LLMatcher(BYTES, grammar)
    assert matcher.consume_tokens(list(call.encode()))
    # Behind the tag that closes all calls, nothing but the end may come anyway.
    if not matcher.is_stopped():
        assert matcher.consume_tokens(list(blanks.encode()))
        assert matcher.is_accepting()


ONE, OTHER = tool("a", n={"type": "boolean"}), tool("b", m={"type": "boolean"})
WRONG, UNKNOWN = tool("a", m={"type": "boolean"}), tool("c", n={"type": "boolean"})
"""A tool with another schema, and one that is not offered."""


def takes(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, grammar)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


def one_call(name: str, called: dict[str, Any], format: OutputFormat | None = None) -> str:
    grammar = (format or format_named(name)).call_grammar([called], many=False)
    return next(text for seed in range(50) if (text := generated(grammar, seed)) is not None)


FOUND: dict[str, list[bool | None]] = {
    **{name: [None, None, None] for name in ("functionary-3.2", "pythonic")},
    **{name: [True, False, None] for name in ("llama-3", "json", "none", "hyperclova")},
}
"""What is found in formats in which nothing but the name tells a call from text: objects. In that of HyperCLOVA X, the
header of a message does too, which is no text of a grammar."""


def follows(format: OutputFormat, text: str) -> bool | None:
    """Whether the first call in a text is one of the tools, and ends; None if no call begins in it."""
    asked = [ONE, OTHER]
    begins, grammar = format.beginning_of_calls(asked), format.begun_grammar(asked)
    assert begins is not None
    assert llguidance.LLMatcher.validate_grammar(grammar, BYTES) == ""
    if (match := begins.search(text)) is None:
        return None
    matcher, begun = (
        llguidance.LLMatcher(BYTES, grammar, log_level=0),
        f"{match.lastindex or match[0]}{text[match.end() :]}",
    )
    return any(matcher.consume_token(byte) and matcher.is_accepting() for byte in begun.encode())


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_begins_in_a_text_follows_the_schema_of_its_tool(name: str) -> None:
    format = format_named(name)
    right, wrong, unknown = (one_call(name, called) for called in (ONE, WRONG, UNKNOWN))
    verdicts = [follows(format, f"First <b> this: {{.\n{text}\nThen that.") for text in (right, wrong, unknown)]
    assert verdicts == FOUND.get(name, [True, False, False])
    assert follows(format, "First <b> this: {.") is None


@pytest.mark.cases(31)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_without_tags_follows_its_schema_in_any_layout(name: str) -> None:
    for called, key, taken in [("a", "n", True), ("a", "m", False), ("c", "x", None)]:
        text = f'```json\n{{\n "name": "{called}",\n "arguments": {{\n  "{key}":true\n }}\n}}\n```\nDone.'
        assert follows(format_named(name), text) is taken


@pytest.mark.slow
def test_a_call_as_a_template_writes_it_is_allowed_token_by_token() -> None:
    """A special token that begins a call was none for the grammar, which then took what followed."""
    text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    text += '{"city": "Oslo", "day": "today"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    tokenizer = tokenizer_of(named("deepseek-v3.1"))
    renderer = PromptRenderer(tokenizer, vocab_size=len(tokenizer), max_positions=1 << 15)
    renderer.warm_up()
    format, asked = renderer.output_format, [WEATHER, tool("get_time")]
    compiler = ConstraintCompiler(tokenizer, {tokenizer.eos_token_id}, len(tokenizer))
    begins, source = format.beginning_of_calls(asked), format.begun_grammar(asked)
    reply = compiler.begin_reply(Constraint(kind="lark", begins=begins, source=source))
    assert isinstance(reply, ConstrainedCalls)
    num_constrained = 0
    for token in tokenizer.encode(text, add_special_tokens=False):
        if (forbidden := reply.forbidden()) is not None:
            num_constrained += 1
            assert not forbidden[token]
        assert reply.accept_token(token)
        reply.record_text(tokenizer.decode([token]))
    assert num_constrained >= 12
    assert reply.is_free
    compiler.close()


@pytest.mark.cases(21)
@pytest.mark.parametrize("name", NAMES)
def test_no_call_begins_in_a_text_where_none_may(name: str) -> None:
    format = format_named(name)
    grammar = format.no_call_grammar([ONE, OTHER])
    assert llguidance.LLMatcher.validate_grammar(grammar, BYTES) == ""
    assert takes(grammar, "")
    assert takes(grammar, 'First <b> this: {"a": 1}, [b] and {.\n```json\n[{"name": "c"}]\n```\nThen\nthat.')
    call = one_call(name, ONE)
    assert not takes(grammar, f"First.\n{call}") or name == "functionary-3.2"
    assert not takes(grammar, 'Now {"name": "a", "arguments": {}}')


def test_a_tag_that_is_a_token_begins_no_call_with_its_letters_either() -> None:
    """Whoever reads the text does not see the tokens."""
    hermes = next(family for family in FAMILIES if family.name == "hermes")
    format = OutputFormat(hermes, token_ids={"<tool_call>": 300, "</tool_call>": 301})
    assert "<[300]>" not in format.no_call_grammar([ONE])
    assert not takes(format.no_call_grammar([ONE]).replace("<[301]>", '"!"'), "<tool_call>")


@pytest.mark.cases(9)
@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_holds_a_tag_is_read_back_whole_and_cut_anywhere(name: str) -> None:
    """Tags of the family in a string ended the call."""
    format, family = format_named(name), next(family for family in [*FAMILIES, NONE] if family.name == name)
    tags = set(re.findall(r"<[^<>\s]+>|\[/?[A-Z_]+\]", "\n".join(family.tags)))
    refused = 0
    for tag in sorted(tag for tag in tags if not re.search("NAME|KEY|TYPE", tag)):
        asked = tool("put", text={"type": "string", "const": f"a{tag}b"})
        asked["function"]["parameters"] |= {"required": ["text"], "additionalProperties": False}
        try:
            text = one_call("", asked, format)
        except InvalidRequest:
            refused += 1
            continue
        for pieces in ([text], list(text)):
            assert read(format, pieces, [asked], "<|start|>assistant").parsed_calls == [("put", {"text": f"a{tag}b"})]
    assert refused <= 2


def test_definitions_of_a_schema_hold_where_each_argument_has_its_own() -> None:
    asked = tool("find", where={"$ref": "#/$defs/place"})
    asked["function"]["parameters"]["$defs"] = {"place": {"enum": ["Oslo", "Rome"]}}
    grammar = format_named("pythonic").call_grammar([asked], many=False)
    assert llguidance.LLMatcher.validate_grammar(grammar, BYTES) == ""
    assert generated(grammar, 0) in ('[find(where="Oslo")]', '[find(where="Rome")]')
