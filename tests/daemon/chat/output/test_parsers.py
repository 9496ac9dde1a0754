"""Any reply, cut in any way: nothing is lost, and nothing but the text decides what is read.

`replies.jsonl` holds replies of models of many families, and the reading of other servers: facts, from the tests of
llama.cpp, tests/test-chat.cpp (MIT), and vLLM, tests/tool_parsers/test_*_tool_parser.py (Apache-2.0). Only inputs and
results were taken over; long ones were shortened, and their tools have the same few names. Some have no counterpart
there: they were written from the format. White space around content and reasoning is not compared, because the servers
differ in what belongs to a tag. `opened` is how the prompt ends, `tools` are offered and not called. The tools of a
reply are those that it calls, with the types of their arguments. `unlike` says why one is read otherwise than there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from diskprefix.daemon.chat.output.call_patterns import patterns_of
from diskprefix.daemon.chat.output.call_values import OfferedTools, braces, elements, python_calls, value_of
from diskprefix.daemon.chat.output.families import FAMILIES
from diskprefix.daemon.json_values import written
from diskprefix.runtime.files.gguf.known_families import NAMES as ARCHITECTURES
from tests.daemon.chat.output.replies import NAMES, REPLIES, Reply, format_named, joined, read, tool, tool_of

TAGGED = [family.name for family in FAMILIES if not family.channels]
TOOLS = [tool("get_weather", city={"type": "string"}, days={"type": "integer"})]
WORDS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<function=get_weather>",
        "</function>",
        "```json\n",
        "```",
    ),
    *("<parameter=city>", "</parameter>", '{"name": "get_weather"', ', "arguments": {', '"city": "Oslo"', "}", "}}"),
    *("[TOOL_CALLS]", "[", "]", "get_weather", "(city='Oslo')", "\n", " ", "<", '"', "\\", "é", "x", "<|channel|>"),
    *("<|message|>", "<|end|>", "final", "<|tool_call>call:", "<tool_call|>", "<arg_key>", "<｜tool▁calls▁begin｜>"),
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return f"no JSON: {arguments}"


# The formats in which models write calls whose files are read, by the architectures of their files.
OF_FILES = {
    "hermes": "qwen2 qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe granitehybrid exaone4 ernie4_5 ernie4_5-moe "
    "smollm3 falcon-h1 llama mellum",
    "qwen3-coder": "qwen35 qwen35moe qwen3moe qwen3next nemotron_h_moe mimo2",
    "llama-3": "llama llama4",
    "mistral": "llama mistral3 mistral4",
    "deepseek": "deepseek2 llama qwen2",
    "deepseek-v3.1": "deepseek2",
    "kimi": "deepseek2 kimi-linear",
    "glm": "glm4moe laguna",
    "glm-4.7": "glm4moe deepseek2 laguna",
    "hunyuan-3": "hy_v3",
    "gemma-3": "gemma3 gemma3n",
    "gemma-4": "gemma4",
    "harmony": "gpt-oss",
    "granite": "granite granitemoe",
    "nemotron": "nemotron_h",
    "phi-4-mini": "phi3",
    "olmo-3": "olmo2",
    "hunyuan": "hunyuan-dense hunyuan-moe",
    "lfm2": "lfm2 lfm2moe",
    "minimax": "minimax-m2",
    "seed-oss": "seed_oss",
    "command-r": "command-r",
    "command-r7b": "cohere2",
    # Their templates write neither calls nor, for GLM 4, results. Those from Arcee on could not be had.
    "none": "gemma gemma2 glm4 qwen2moe stablelm starcoder2 dots1 mamba2 olmoe bitnet gptneox phi2 "
    "arcee bailingmoe2 afmoe apertus chatglm cohere2moe exaone-moe granite_swa jais2 minicpm3 nemotron "
    "smallthinker",
}


def test_each_format_has_a_recorded_call_and_each_architecture_a_format() -> None:
    recorded = {case["family"] for case in REPLIES if case.get("calls")} | {"none"}
    assert recorded == set(NAMES)
    assert recorded >= set(OF_FILES)
    assert {name for names in OF_FILES.values() for name in names.split()} == set(ARCHITECTURES)


@pytest.mark.cases(16)
@pytest.mark.parametrize("case", REPLIES, ids=lambda case: f"{case['family']}: {case['text'][:60]!r}")
def test_a_reply_is_read_as_the_other_server_reads_it_wherever_it_is_cut(case: dict[str, Any]) -> None:
    tools = [tool_of(name, arguments) for name, arguments in case.get("calls", ())]
    tools += [tool(name) for name in (*case.get("tools", ()), "another_tool")]

    def reply_in(pieces: Iterable[str]) -> Reply:
        return read(format_named(case["family"]), pieces, tools, case.get("opened", ""))

    text = case["text"]
    whole = reply_in([text])
    assert [[name, loaded(arguments)] for name, arguments in whole.calls] == case.get("calls", [])
    assert (whole.content.strip(), whole.reasoning.strip()) == (case.get("content", ""), case.get("reasoning", ""))
    assert reply_in(text) == whole
    for at in range(len(text)):
        assert reply_in([text[:at], text[at:]]) == whole, text[:at]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), TEXTS, st.data())
def test_how_a_text_is_cut_makes_no_difference(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(format_named(name), [text], TOOLS)
    assert read(format_named(name), pieces, TOOLS) == whole
    assert read(format_named(name), text, TOOLS) == whole


def test_a_call_of_an_unknown_tool_in_the_familys_own_tags_is_given() -> None:
    """The agent answers it with an error."""
    text = '<|action_start|><|plugin|>{"name": "delete_everything", "parameters": {}}<|action_end|>'
    assert read(format_named("internlm"), [text], TOOLS).parsed_calls == [("delete_everything", {})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<function=<tool_call>{"name":"n""arguments":'),
        ("mistral", "<function=[TOOL_CALLS]get_weather{}>{"),
    ],
)
def test_a_tag_within_the_name_of_a_call_is_read_alike_in_pieces(name: str, text: str) -> None:
    assert read(format_named(name), text, TOOLS) == read(format_named(name), [text], TOOLS)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([family.name for family in FAMILIES if not (family.dropped or family.channels)]), TEXTS)
def test_without_tools_and_thoughts_the_content_is_the_text(name: str, text: str) -> None:
    reply = read(format_named(name), [text], [])
    if not reply.reasoning and not text.lstrip().startswith("<think>"):
        assert reply.content == text


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_is_passed_on_as_it_comes(name: str) -> None:
    parser = format_named(name).parser(TOOLS, "")
    for word in ("Hello", " there", ", how", " are", " you"):
        assert joined(parser.feed(word)).content == word


def test_half_a_tag_is_never_shown_and_a_whole_one_is_not_waited_for() -> None:
    parser = format_named("hermes").parser(TOOLS, "")
    assert joined(parser.feed("Look: <tool")).content == "Look:"
    assert parser.feed("_call>") == []
    assert joined(parser.feed('{"name": "get_weather", "arguments": {"city": "O')).calls == [
        ["get_weather", '{"city": "O']
    ]


def test_without_tools_a_call_is_content() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    assert read(format_named("hermes"), [text], []).content == text


@pytest.mark.parametrize("name", TAGGED)
def test_an_object_without_tags_is_read_in_every_family(name: str) -> None:
    call = '{\n  "name": "get_weather",\n  "arguments": {"city": "Oslo"}\n}'
    for text in (call, f"```json\n{call}\n```", f"Let me look.\n{call}"):
        calls = read(format_named(name), [text], TOOLS).calls
        assert [(called, json.loads(arguments)) for called, arguments in calls] == [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("before", "after", "is_call"),
    [
        ("[", "]", True),
        ("[", "", True),
        ("```json\n", "\n```\nDone.", True),
        ("```json\n[", "]\n```\nDone.", True),
        ("```json\n[", "\n```", True),
        ("```json\n<tool_call>\n", "\n</tool_call>\n```", True),
        ("[", ' and more"}}]', False),
        ("[", '\nand more"}}]', False),
        ("```json\n", ' and more"}}\n```', False),
        ("```json\n[", '] and more"}}]\n```', False),
    ],
)
def test_a_call_in_a_list_or_fence_needs_its_end(name: str, before: str, after: str, is_call: bool) -> None:
    text = f'{before}{{"name": "get_weather", "arguments": {{"city": "Oslo"}}}}{after}'
    for pieces in ([text], text):
        [(called, arguments)] = read(format_named(name), pieces, TOOLS).calls
        assert called == "get_weather"
        assert is_json(arguments) is is_call, arguments


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_calls_that_stand_in_calls_without_end_are_content() -> None:
    text = '{"function": ' * 5000
    assert read(format_named("json"), [text], TOOLS).content == text


@pytest.mark.parametrize("name", TAGGED)
def test_the_names_of_tools_are_not_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand long ones take a second."""
    compiled: list[str] = []
    compile_one = regex.compile

    def record(pattern: str, flags: int = 0) -> regex.Pattern[str]:
        compiled.append(pattern)
        return compile_one(pattern, flags)

    monkeypatch.setattr(regex, "compile", record)
    format_named(name).parser([tool(f"get_{index}") for index in range(1000)], "").feed("Hello")
    assert compiled
    assert max(map(len, compiled)) < 2000


# Values of arguments without quotes, by their schema, and calls that are not JSON.

OFFERED = OfferedTools([tool("f", a={}, b={}), tool("x.call")])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "integer"}, 7),
        ("5.0", {"type": "integer"}, 5),
        (" -12345678901234567890.00\n", {"type": ["integer", "null"]}, -12345678901234567890),
        ("5.5", {"type": "integer"}, 5.5),
        ("5.0", {"type": "string"}, "5.0"),
        ("02134", {"type": "integer"}, "02134"),
        ("02134", {"type": "string"}, "02134"),
        ("True", {"type": "boolean"}, True),
        ("['a', \"b's\"]", {"type": "array"}, ["a", "b's"]),
        ("true", {"type": "integer"}, "true"),
        ("true", {"type": ["boolean", "string"]}, True),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": "string", "nullable": True}, None),
        ('"a"', {"type": "string"}, '"a"'),
        ('"a"', {"type": ["string", "null"]}, "a"),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"type": "integer", "enum": [7]}, 7),
        ("7", {"type": "integer", "enum": ["7"]}, 7),
        ("7", {"anyOf": [{"type": "string"}]}, "7"),
        ("[1]", {"type": "array"}, [1]),
        ("[1]", {"type": "object"}, "[1]"),
        ("7", True, 7),
        ("Oslo", {}, "Oslo"),
    ],
)
def test_a_text_becomes_a_value_only_of_an_allowed_type(text: str, schema: Any, value: object) -> None:
    read = value_of(text, schema)
    assert read == value
    assert isinstance(read, int) or not isinstance(value, int)


def test_a_number_of_an_integer_or_of_any_number_keeps_its_digits() -> None:
    assert [written(value_of("5.0", {"type": kind})) for kind in ("integer", "number")] == ["5", "5.0"]
    assert written(value_of("-0.0", {"type": "integer"})) == "-0"


def test_a_tool_whose_schema_lists_no_properties_has_none() -> None:
    odd = tool("f")
    odd["function"]["parameters"]["properties"] = ["a"]
    assert OfferedTools([odd]).properties("f") == {}


NS = "]<]minimax[>["


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
        ("glm-4.7", "<tool_call>f<arg_key>b</arg_key><arg_value>", "</arg_value></tool_call>"),
        ("gemma-4", "<|tool_call>call:f{b:", "}<tool_call|>"),
        ("pythonic", "[f(b=", ")]"),
        ("minimax-3", f'{NS}<tool_call>\n{NS}<invoke name="f">', f"{NS}</invoke>\n{NS}</tool_call>"),
    ],
)
def test_arguments_that_are_nested_too_deeply_stay_text(name: str, begin: str, end: str) -> None:
    opened, closed = (f"{NS}<b>", f"{NS}</b>") if name == "minimax-3" else ("[", "]")
    tools = [tool("f", a={"type": "array"}, b={})]
    for depth in (*range(900, 1010), 20_000):
        reply = read(format_named(name), [f"{begin}{opened * depth}{closed * depth}{end}"], tools)
        assert opened in reply.content or [name for name, _ in reply.calls] == ["f"]


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("f(1, b=2)", [("f", {"a": 1, "b": 2})]),
        ("call = f(a=(true, false, null))", [("f", {"a": [True, False, None]})]),
        ("f(a={'k': -1}), f()", [("f", {"a": {"k": -1}}), ("f", {})]),
        (r'f(a="\ud83d\ude00", b="\'")', [("f", {"a": "😀", "b": "'"})]),
        ("y.call(a=1)", [("y", {"a": 1})]),
        ("x.call(a=1)", [("x.call", {"a": 1})]),
        ("f(1, 2, 3)", []),
        ("f(**{'a': 1})", []),
        ("f(a=1e999)", []),
        ("f(a=b'z')", []),
        ("f(a={1: 2})", []),
        ("f(a=g())", []),
        ("f(); import os", []),
        (f"f(a={'-' * 20_000}1)", []),
    ],
)
def test_python_is_read_only_if_it_is_calls_with_values_that_json_knows(source: str, calls: list[Any]) -> None:
    assert python_calls(source, OFFERED) == calls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{a:`x "y" {z:`,"b:c":1}', {"a": 'x "y" {z:', "b:c": 1}),
        ("[1]", None),
        ("{a:" + "[" * 100_000, None),
    ],
)
def test_an_object_with_bare_keys_is_read_as_json_with_other_quotes(text: str, value: Any) -> None:
    assert braces(text, "`", {}) == value


ITEM = {"properties": {"a": {"properties": {"item": {"type": "integer"}}}}}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("", {}, {}),
        ("#<a>#<item>1#</item>#</a>", {}, {"a": [1]}),
        ("#<a>#<item>1#</item>#</a>", ITEM, {"a": {"item": 1}}),
        ("#<a>#<b>1#</b>#</a>", {"properties": {"a": True}}, {"a": {"b": 1}}),
        ("#<a>#<b>1#</b>#</a>", {"properties": {"a": {"properties": 5}}}, {"a": {"b": 1}}),
        ("#<a>1#</b>", {}, None),
        ("#<a>1", {}, None),
        ("1#</a>", {}, None),
        ("#</a>", {}, None),
        ("text #<a>1#</a>", {}, None),
    ],
)
def test_elements_are_a_value_only_if_each_of_them_ends(text: str, schema: Any, value: Any) -> None:
    assert elements(text, "#", schema) == value


@pytest.mark.parametrize("name", TAGGED)
def test_only_a_reply_with_a_call_waits_for_the_patterns_of_calls(name: str) -> None:
    """Making them takes a hundredth of a start, while a first request waits."""
    patterns_of.cache_clear()
    assert read(format_named(name), ["It rains", " in Oslo."], TOOLS).content == "It rains in Oslo."
    assert patterns_of.cache_info().currsize == 0
    read(format_named(name), ['{"name": "get_weather", "arguments": {"city": "Oslo"}}'], TOOLS)
    assert patterns_of.cache_info().currsize > 0
