# ruff: noqa: E501, UP031
"""Replies of models of many families, and the reading of other servers: facts, from the tests of two projects.

* llama.cpp, tests/test-chat.cpp (MIT)
* vLLM, tests/tool_parsers/test_*_tool_parser.py (Apache-2.0)

Only inputs and expected results were taken over; long ones were shortened, and their tools have the same few names.
Some cases have no counterpart there: they were written from the format. White space around content and reasoning is not
compared: the servers differ in what belongs to a tag. The tools of a case are those that it calls, with the types of
their arguments. Plain text is in `test_parsers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Calls: TypeAlias = list[tuple[str, Any]]

HELLO = "Hello, world!\nWhat's up?"
THOUGHT = "I'm\nthinking"
ONE: Calls = [("special_function", {"arg1": 1})]
TWO: Calls = [*ONE, ("python", {"code": "print('hello')"})]
OBJECT = '{"name": "special_function", "arguments": {"arg1": 1}}'
CITY, ZONE = '{"city": "Tokyo"}', '{"timezone": "Asia/Tokyo"}'
WEATHER = f'{{"name": "get_weather", "arguments": {CITY}}}'
TIME = f'{{"name": "get_time", "arguments": {ZONE}}}'
TOKYO: Calls = [("get_weather", {"city": "Tokyo"})]
BOTH: Calls = [*TOKYO, ("get_time", {"timezone": "Asia/Tokyo"})]
TYPES: Calls = [
    (
        "test_function",
        {
            "string_field": "hello",
            "int_field": 42,
            "float_field": 3.14,
            "bool_field": True,
            "null_field": None,
            "array_field": ["a", "b", "c"],
            "object_field": {"nested": "value"},
        },
    )
]
TYPES_JSON = (
    '{"string_field": "hello", "int_field": 42, "float_field": 3.14, "bool_field": true, "null_field": null, '
    '"array_field": ["a", "b", "c"], "object_field": {"nested": "value"}}'
)
QUOTES: Calls = [
    ("test_function", {"quoted": 'He said "hello"', "path": "C:\\Users\\file.txt", "newline": "line1\nline2"})
]
QUOTES_JSON = '{"quoted": "He said \\"hello\\"", "path": "C:\\\\Users\\\\file.txt", "newline": "line1\\nline2"}'
DS_BEGIN, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_CALL, DS_SEP, DS_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
SAN_FRANCISCO: Calls = [("get_weather", {"city": "San Francisco", "metric": "celsius"})]
JOHN_DOE = {
    "name": "John Doe",
    "age": 37,
    "address": {"city": "San Francisco", "state": "CA"},
    "role": None,
    "passed_test": True,
    "aliases": ["John", "Johnny"],
}


@dataclass(frozen=True)
class Case:
    """A reply. `opened`: the prompt ends with the tag that begins reasoning. `arguments`: of a reply that was cut off."""

    family: str
    text: str
    calls: Calls
    content: str = ""
    reasoning: str = ""
    opened: str = ""
    arguments: str | None = None
    tools: tuple[str, ...] = ()
    """Tools of the request that are not called."""
    miss: str = ""
    """The reason why it is not read as that server reads it."""


def _text(family: str, text: str, *tools: str) -> Case:
    """A reply that is read as text, though parts of it look like a call."""
    return Case(family, text, [], content=text, tools=tools)


def _kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{name} <|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _deepseek(name: str, arguments: str) -> str:
    return f"{DS_CALL}function{DS_SEP}{name}\n```json\n{arguments}\n```{DS_CALL_END}"


def _glm(name: str, *pairs: tuple[str, str], indent: str = "") -> str:
    lines = [f"{indent}<arg_key>{key}</arg_key>\n{indent}<arg_value>{value}</arg_value>\n" for key, value in pairs]
    return f"<tool_call>{name}\n{''.join(lines)}{indent}</tool_call>"


_TAG = "<tool_call>\n%s\n</tool_call>" % OBJECT
HERMES = [
    _text("hermes", 'Let\'s call something\n<tool_call>{"name"'),
    Case("hermes", f"{THOUGHT}</think>\n<tool_call>{OBJECT}</tool_call>", ONE, reasoning=THOUGHT, opened="<think>\n"),
    Case("hermes", _TAG, ONE),
    Case("hermes", HELLO + _TAG, ONE, content=HELLO),
    Case("hermes", '<function=special_function>{"arg1": 1}</function>', ONE),
    Case("hermes", '<function name="special_function">\n{"arg1": 1}\n</function>', ONE),
    Case("hermes", f"<tool>\n  {OBJECT}\n</tool>", ONE),
    Case("hermes", f"<tools>\n  {OBJECT}\n</tools>", ONE),
    Case("hermes", f"<response>\n  {OBJECT}\n</response>", ONE),
    Case("hermes", f"```xml\n<response>\n    {OBJECT}\n</response>\n```", ONE),
    Case("hermes", f"```xml\n  {OBJECT}\n```", ONE),
    Case("hermes", f"```\n  {OBJECT}\n```", ONE),
    Case("hermes", f"```json\n  {OBJECT}\n```", ONE),
    Case("hermes", f"```json\n\n      <function_call> {OBJECT} \n      </function_call> \n``` ", ONE),
    Case("hermes", f"<json>\n  {OBJECT}\n</json>", ONE),
    Case("hermes", f"<JSON>\n  {OBJECT}\n</JSON>", ONE),
    Case("hermes", '<xml>\n  {\n    "name": "special_function", "arguments": {"arg1": 1}\n  }\n</xml>', ONE),
    Case("hermes", OBJECT, ONE),
    Case("hermes", '{\n  "name": "special_function", "arguments": {"arg1": 1}}', ONE),
    Case(
        "hermes",
        f'{_TAG}\n<tool_call>\n{{"name": "python", "arguments": {{"code":"print(\'hello\')"}}}}\n</tool_call>',
        TWO,
    ),
    Case(
        "hermes",
        '<function=special_function>{"arg1": 1}</function>\n<function=python>{"code":"print(\'hello\')"}</function>',
        TWO,
    ),
    Case("hermes", f"This is not a tool call:\n{OBJECT}", ONE, content="This is not a tool call:"),
    Case("hermes", f"<think>{THOUGHT}</think>{HELLO}", [], content=HELLO, reasoning=THOUGHT),
    _text("hermes", f"{THOUGHT}</think>{HELLO}"),
    Case("hermes", f"{THOUGHT}</think>{HELLO}", [], content=HELLO, reasoning=THOUGHT, opened="<think>"),
    Case("hermes", "<think><tool_call>nah uhg</tool_call>", [], reasoning="<tool_call>nah uhg</tool_call>"),
    Case(
        "hermes",
        '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}}',
        [("final_answer", {"trigger": True})],
    ),
    Case(
        "hermes",
        '<tool_call>\n{"name": "get_db_config", "arguments": "{\\"param\\": \\"max_connections\\"}"}\n</tool_call>',
        [("get_db_config", {"param": "max_connections"})],
    ),
    Case("hermes", '<tool_call>\n{"name": "do_thing", "arguments": "hello"}\n</tool_call>', [("do_thing", "hello")]),
    Case(
        "hermes",
        '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}',
        [],
        content='<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}',
        tools=("final_answer",),
        miss="the arguments are complete, so the call is given though its last brace is missing",
    ),
]
HERMES += [
    Case("hermes", '<tool_call>{"name": "refresh"}</tool_call>', [("refresh", {})]),
    Case("hermes", '<tool_call>{"name": "refresh", "arguments": null}</tool_call>', [("refresh", {})]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\":\n1}"}</tool_call>', [("f", {"a": 1})]),
    Case("hermes", '<tool_call>{"name": "f", "tool": "g", "arguments": {}}</tool_call>', [("f", {})]),
    Case("phi-4-mini", f"<|tool_call|>[{OBJECT}]<|/tool_call|>", ONE),
    Case("json", OBJECT, ONE),
    Case("pythonic", "[print(text='a')]", [("print", {"text": "a"})]),
    Case("apertus", '<|tools_prefix|>[{"refresh": {}}]<|tools_suffix|>', [("refresh", {})]),
    _text("apertus", r'<|tools_prefix|>[{"\q": {}}]'),
]

LLAMA = [
    Case("llama-3", '{"name": "special_function", "parameters": {"arg1": 1}}', ONE),
    Case(
        "llama-3",
        "<|python_tag|>code_interpreter.call(code=\"print('hey')\")",
        [("code_interpreter", {"code": "print('hey')"})],
    ),
    Case("llama-3", "<|python_tag|>python.call(code=\"print('hey')\")", [("python", {"code": "print('hey')"})]),
    Case(
        "llama-3",
        'Here is the result: {"name": "getOpenIncidentsTool", "parameters": {}} More?',
        [("getOpenIncidentsTool", {})],
        content="Here is the result:More?",
    ),
    Case(
        "llama-3",
        '{"name": "searchTool", "arguments": {"query": "test", "limit": 10}}',
        [("searchTool", {"query": "test", "limit": 10})],
    ),
    *(
        Case(
            "llama-3",
            '{"name": "searchTool", "parameters": {"query": "test1"}}%s{"name": "getOpenIncidentsTool", "parameters": {}}'
            % between,
            [("searchTool", {"query": "test1"}), ("getOpenIncidentsTool", {})],
        )
        for between in ("; ", ";", ";\n", "\n", " ; ")
    ),
    Case(
        "llama-3",
        '{"name": "complexTool", "parameters": {"a": {"b": {"c": {"d": "deep"}}}}}',
        [("complexTool", {"a": {"b": {"c": {"d": "deep"}}}})],
    ),
    Case(
        "llama-3",
        '{"name": "searchTool", "parameters": {"query": "test {value} [complex]","nested": {"inner": "more {brackets}"}}}',
        [("searchTool", {"query": "test {value} [complex]", "nested": {"inner": "more {brackets}"}})],
    ),
    _text("llama-3", '{"parameters": {}}'),
    _text("llama-3", '{"name": "toolWithoutParams"}', "toolWithoutParams"),
    Case(
        "llama-3",
        '{"name": "searchTool", "parameters": {"query": "test"}} The arguments were {"query": "test"}',
        [("searchTool", {"query": "test"})],
        content='The arguments were {"query": "test"}',
    ),
]

_R7B = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "special_function", "parameters": {"arg1": 1}}\n]<|END_ACTION|>'
_R7B_THOUGHT = f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>"
COHERE = [
    Case("command-r7b", f"<|START_RESPONSE|>{HELLO}<|END_RESPONSE|>", [], content=HELLO),
    Case(
        "command-r7b", f"{_R7B_THOUGHT}<|START_RESPONSE|>{HELLO}<|END_RESPONSE|>", [], content=HELLO, reasoning=THOUGHT
    ),
    Case("command-r7b", _R7B_THOUGHT + _R7B, ONE, reasoning=THOUGHT),
    Case("command-r7b", f"<|START_THINKING|><|END_THINKING|>{_R7B}", ONE),
    Case("command-r", 'Action:\n```json\n[{"tool_name": "special_function", "parameters": {"arg1": 1}}]\n```', ONE),
]

_MISTRAL = '[TOOL_CALLS] [{"name": "add", "arguments":{"a": 3.5, "b": 4}}, {"name": "sub", "arguments":{"c": "CA"}}]'
_ADD: Calls = [("add", {"a": 3.5, "b": 4})]
MISTRAL = [
    Case(
        "mistral-array", '[TOOL_CALLS][{"name": "special_function", "arguments": {"arg1": 1}, "id": "123456789"}]', ONE
    ),
    Case(
        "mistral-array",
        '[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "get_age"}]',
        [("get_age", {"name": "John Doe"})],
    ),
    Case("mistral-array", _MISTRAL, [*_ADD, ("sub", {"c": "CA"})]),
    Case("mistral-array", 'Hello[TOOL_CALLS] [{"name": "add", "arguments":{"a": 3.5, "b": 4}}]', _ADD, content="Hello"),
    Case(
        "mistral-array", '[TOOL_CALLS] [{"name": "add", "arguments":{"a": 3.5, "b": 4}}]\nextra', _ADD, content="extra"
    ),
    _text("mistral-array", "[TOOL_CALLS] not json at all"),
    Case("mistral", '[TOOL_CALLS]add{"a": 3.5, "b": 4}', _ADD),
    Case(
        "mistral",
        '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]multiply{"a": 3, "b": 6}',
        [*_ADD, ("multiply", {"a": 3, "b": 6})],
    ),
    Case("mistral", '[TOOL_CALLS]special_function[ARGS]{"arg1": 1}', ONE),
    Case("mistral", '[TOOL_CALLS]special_function[CALL_ID]123456789[ARGS]{"arg1": 1}', ONE),
    Case("mistral", f"[THINK]{THOUGHT}[/THINK]{HELLO}", [], content=HELLO, reasoning=THOUGHT),
]

_ONE_CALL = _deepseek("special_function", '{"arg1": 1}')
DEEPSEEK = [
    Case("deepseek", f"{THOUGHT}</think>{HELLO}", [], content=HELLO, reasoning=THOUGHT, opened="<think>\n"),
    Case("deepseek", f"<think>{THOUGHT}</think>{HELLO}", [], content=HELLO, reasoning=THOUGHT),
    Case("deepseek", f"<think>{THOUGHT}</think>\n\n{DS_BEGIN}{_ONE_CALL}{DS_END}", ONE, reasoning=THOUGHT),
    Case(
        "deepseek",
        f'<｜tool▁calls｜>function{DS_SEP}special_function\n```json\n{{"arg1": 1}}\n```{DS_CALL_END}{DS_END}',
        ONE,
    ),
    Case(
        "deepseek",
        f"It starts with {DS_BEGIN} and ends with",
        [],
        reasoning=f"It starts with {DS_BEGIN} and ends with",
        opened="<think>\n",
    ),
    Case("deepseek", DS_BEGIN + _deepseek("get_weather", CITY) + _deepseek("get_time", ZONE) + DS_END, BOTH),
    Case("deepseek", DS_BEGIN + _deepseek("test_function", TYPES_JSON) + DS_END, TYPES),
    Case("deepseek", DS_BEGIN + _deepseek("test_function", QUOTES_JSON) + DS_END, QUOTES),
    Case("deepseek", DS_BEGIN + _deepseek("get_current_time", "{}") + DS_END, [("get_current_time", {})]),
    Case(
        "deepseek", "Let me check." + DS_BEGIN + _deepseek("get_weather", CITY) + DS_END, TOKYO, content="Let me check."
    ),
    Case("deepseek-v3.1", f'{DS_BEGIN}{DS_CALL}get_weather{DS_SEP}{{"city": "Tokyo"}}{DS_CALL_END}{DS_END}', TOKYO),
]

GRANITE = [
    Case("granite", f"<think>{THOUGHT}</think>{HELLO}", [], content=HELLO, reasoning=THOUGHT),
    Case("granite", f"<|tool_call|>[{OBJECT}]", ONE),
    Case("granite", f"<|tool_call|> [{WEATHER},\n  {TIME}\n]", BOTH),
    Case("granite", f'<tool_call> [{{"name": "test_function", "arguments": {TYPES_JSON}}}]', TYPES),
    Case("granite", '<|tool_call|> [{"name": "refresh", "arguments": {}}]', [("refresh", {})]),
    Case("granite", f"Let me check.\n<|tool_call|> [{WEATHER}]\nDone.", TOKYO, content="Let me check.Done."),
    Case(
        "granite",
        '<|tool_call|> [{"arguments": {"city": "Tokyo"}, "name": "get_weather"}, {"arguments": {"timezone": "Asia/Tokyo"}, "name": "get_time"}]',
        BOTH,
    ),
    _text("granite", 'Some text [{"name": "func"}]', "func"),
]

FUNCTOOLS = [
    Case("functools", f" functools[{OBJECT}]", ONE),
    Case("functools", f"functools[{WEATHER}, {TIME}]", BOTH),
    Case("functools", f"Let me check.\nfunctools[{WEATHER}]\nMore?", TOKYO, content="Let me check.More?"),
    _text("functools", "functools[] This is just text"),
]

INTERNLM = [
    Case(
        "internlm",
        '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Tokyo"}}<|action_end|>',
        TOKYO,
    ),
    _text("internlm", "<|action_start|><|plugin|>not json<|action_end|>"),
    Case(
        "internlm",
        '<|action_start|><|plugin|>{"name": "delete_everything", "parameters": {"city": "Tokyo"}}<|action_end|>',
        [],
        tools=("get_weather",),
        content="",
        miss="a call of an unknown tool with the family's own tags is given: the agent answers it with an error",
    ),
]

_REGISTER = (
    "register_user(name='John Doe', age=37, address={'city': 'San Francisco', 'state': 'CA'}, role=None, "
    "passed_test=True, aliases=['John', 'Johnny'])"
)
_SF = "get_weather(city='San Francisco', metric='celsius')"
PYTHONIC = [
    Case("pythonic", f"[{_SF}]", SAN_FRANCISCO),
    Case("pythonic", f"[{_REGISTER}]", [("register_user", JOHN_DOE)]),
    Case("pythonic", f"[{_SF}, {_REGISTER}]", [*SAN_FRANCISCO, ("register_user", JOHN_DOE)]),
    Case("pythonic", "[get_weather()]", [("get_weather", {})]),
    Case("pythonic", "[do_something_cool(additional_data={})]", [("do_something_cool", {"additional_data": {}})]),
    Case("pythonic", "[do_something_cool(steps=[])]", [("do_something_cool", {"steps": []})]),
    Case(
        "pythonic",
        r"[get_weather(city='Martha\'s Vineyard', metric='\"cool units\"')]",
        [("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'})],
    ),
    Case(
        "pythonic",
        f"[bad(x=b'z'), {_SF}]",
        SAN_FRANCISCO,
        tools=("bad",),
        miss="a list with a call that cannot be read is text as a whole: no token is lost",
    ),
    Case("lfm2", "<|tool_call_start|>[special_function(arg1=1)]<|tool_call_end|>", ONE),
    Case("gemma-3", f"```tool_code\nprint({_SF})\n```", SAN_FRANCISCO),
]

KIMI_K2 = [
    Case(
        "kimi", "I'll check. " + KIMI + _kimi("functions.get_weather:0", CITY) + KIMI_END, TOKYO, content="I'll check."
    ),
    Case("kimi", KIMI + _kimi("functions.get_weather:0", CITY) + _kimi("functions.get_time:1", ZONE) + KIMI_END, BOTH),
    Case(
        "kimi",
        KIMI + _kimi("functions.data:0", '{\n  "name": "test",\n  "value": 123\n}') + KIMI_END,
        [("data", {"name": "test", "value": 123})],
    ),
    Case("kimi", KIMI + _kimi("get_weather:0", CITY) + KIMI_END, TOKYO),
    Case(
        "kimi",
        KIMI
        + _kimi("functions.bad:0", '{"city": "Beijing"')
        + _kimi("functions.good:1", '{"city": "Shanghai"}')
        + KIMI_END,
        [("bad", 'no JSON: {"city": "Beijing"'), ("good", {"city": "Shanghai"})],
    ),
    Case(
        "kimi",
        KIMI + _kimi("functions.get_weather:0", CITY) + _kimi("functions.bad:1", "oops") + KIMI_END,
        TOKYO,
        content=_kimi("functions.bad:1", "oops") + KIMI_END,
    ),
    Case(
        "kimi",
        KIMI + _kimi("0", CITY) + KIMI_END,
        TOKYO,
        miss="a call without a name is given under its number: a name that is guessed from arguments may be the wrong one",
    ),
]

_XML = "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>"
_P = "<parameter=%s>%s</parameter>\n"
_XML_TYPES = [
    ("string_field", "hello"),
    ("int_field", "42"),
    ("float_field", "3.14"),
    ("bool_field", "true"),
    ("null_field", "null"),
    ("array_field", '["a", "b", "c"]'),
    ("object_field", '{"nested": "value"}'),
]
QWEN_CODER = [
    Case("qwen3-coder", _XML % ("get_weather", _P % ("city", "Tokyo")), TOKYO),
    Case("qwen3-coder", _XML % ("get_weather", _P % ("city", "\nTokyo\n")), TOKYO),
    Case(
        "qwen3-coder",
        _XML % ("get_weather", _P % ("city", "Tokyo")) + _XML % ("get_time", _P % ("timezone", "Asia/Tokyo")),
        BOTH,
    ),
    Case("qwen3-coder", _XML % ("test_function", "".join(_P % pair for pair in _XML_TYPES)), TYPES),
    Case("qwen3-coder", _XML % ("refresh", ""), [("refresh", {})]),
    Case(
        "qwen3-coder",
        "Let me check.\n\n" + _XML % ("get_weather", _P % ("city", "Tokyo")) + "\n\nDone.",
        TOKYO,
        content="Let me check.Done.",
    ),
    Case(
        "qwen3-coder",
        _XML
        % (
            "test_function",
            _P % ("quoted", 'He said "hello"')
            + _P % ("path", "C:\\Users\\file.txt")
            + _P % ("newline", "line1\nline2"),
        ),
        QUOTES,
    ),
    _text("qwen3-coder", "<tool_call><function=></function></tool_call>"),
    Case("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=days>\n1", [("f", None)], arguments='{"days": 1'),
    Case("qwen3-coder", "<function=get_weather>\n<parameter=city>\nTokyo\n</parameter>\n</function>", TOKYO),
    Case(
        "qwen3-coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nTokyo\n</function>\n</tool_call>", TOKYO
    ),
    Case("seed-oss", (_XML % ("get_weather", _P % ("city", "Tokyo"))).replace("tool_call>", "seed:tool_call>"), TOKYO),
    Case("seed-oss", f"<seed:think>{THOUGHT}</seed:think>{HELLO}", [], content=HELLO, reasoning=THOUGHT),
]

_DALLAS = (("city", "Dallas"), ("state", "TX"), ("unit", "fahrenheit"))
GLM = [
    Case("glm", _glm("get_current_weather", *_DALLAS, indent="    "), [("get_current_weather", dict(_DALLAS))]),
    Case("glm", "I'll help. " + _glm("get_weather", ("city", "Tokyo")), TOKYO, content="I'll help."),
    Case(
        "glm",
        _glm("get_weather", ("city", "Tokyo")) + "\n\nmeanwhile\n\n" + _glm("get_time", ("timezone", "Asia/Tokyo")),
        BOTH,
        content="meanwhile",
    ),
    Case(
        "glm",
        "<think>I want to.</think>\n\nI will.\n" + _glm("get_weather", ("city", "Tokyo")),
        TOKYO,
        content="I will.",
        reasoning="I want to.",
    ),
    Case("glm", "<tool_call>get_current_time\n</tool_call>", [("get_current_time", {})]),
    Case("glm-4.7", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Tokyo</arg_value></tool_call>", TOKYO),
    Case(
        "glm",
        _glm("get_weather", ("city", "Tokyo")).removesuffix("\n</tool_call>"),
        [],
        content=_glm("get_weather", ("city", "Tokyo")).removesuffix("\n</tool_call>"),
        tools=("get_weather",),
        miss="arguments are passed on as they come, so a call that is cut off has begun",
    ),
]

_GEMMA = "<start_function_call>call:%s{%s}<end_function_call>"
GEMMA = [
    Case(
        "functiongemma",
        "Let me see. " + _GEMMA % ("get_weather", "city:<escape>Tokyo<escape>"),
        TOKYO,
        content="Let me see.",
    ),
    Case(
        "functiongemma",
        _GEMMA % ("get_weather", "city:<escape>San Francisco<escape>,metric:<escape>celsius<escape>"),
        SAN_FRANCISCO,
    ),
    Case(
        "functiongemma",
        _GEMMA % ("get_weather", "city:<escape>Tokyo<escape>")
        + _GEMMA % ("get_time", "timezone:<escape>Asia/Tokyo<escape>"),
        BOTH,
    ),
    _text("functiongemma", _GEMMA % ("f", "a:"), "f"),
    Case("gemma-4", "<|tool_call>call:special_function{arg1:1}<tool_call|>", ONE),
    Case(
        "gemma-4",
        '<|tool_call>call:f{a:<|"|>x "y": {z}<|"|>,b:[1,{c:true}]}<tool_call|>',
        [("f", {"a": 'x "y": {z}', "b": [1, {"c": True}]})],
    ),
    Case("gemma-4", f"<|channel>thought\n{THOUGHT}<channel|>{HELLO}", [], content=HELLO, reasoning=THOUGHT),
]

_INVOKE = '<invoke name="%s">%s</invoke>'
_IP = '<parameter name="%s">%s</parameter>'
MINIMAX = [
    Case(
        "minimax",
        "Let me check. <minimax:tool_call>"
        + _INVOKE % ("get_weather", _IP % ("city", "Tokyo"))
        + "</minimax:tool_call>",
        TOKYO,
        content="Let me check.",
    ),
    Case(
        "minimax",
        "<minimax:tool_call>"
        + _INVOKE % ("get_weather", _IP % ("city", "Tokyo"))
        + _INVOKE % ("get_time", _IP % ("timezone", "Asia/Tokyo"))
        + "</minimax:tool_call>",
        BOTH,
    ),
    Case(
        "minimax",
        "<minimax:tool_call>"
        + _INVOKE % ("get_weather", _IP % ("city", "Seattle") + _IP % ("days", "5"))
        + "</minimax:tool_call>",
        [("get_weather", {"city": "Seattle", "days": "5"})],
    ),
]

_HY = '<tool_calls>[{"name": "get_weather", "arguments": {"city": "%s"}}]</tool_calls>'
HUNYUAN = [
    Case("tool-calls", _HY % "Tokyo", TOKYO),
    Case("tool-calls", "I will call. " + _HY % "Tokyo", TOKYO, content="I will call."),
    Case("tool-calls", _HY % "Tokyo" + "\n</answer>", TOKYO),
    Case(
        "tool-calls",
        '<tool_calls>[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 42}}]</tool_calls>',
        [("a", {}), ("b", {"x": 42})],
    ),
    Case("tool-calls", _HY % "Tokyo" + "\nThank you!", TOKYO, content="Thank you!"),
]

_ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
_TO = "<|start|>assistant<|channel|>commentary to=functions.special_function"
HARMONY = [
    Case("harmony", f"<|channel|>analysis<|message|>{THOUGHT}", [], reasoning=THOUGHT),
    Case("harmony", _ANALYSIS, [], reasoning=THOUGHT),
    Case(
        "harmony",
        f"{_ANALYSIS}<|start|>assistant<|channel|>final<|message|>{HELLO}",
        [],
        content=HELLO,
        reasoning=THOUGHT,
    ),
    Case(
        "harmony",
        f'{_ANALYSIS}{_TO} <|constrain|>json<|message|>{{"arg1',
        [("special_function", None)],
        reasoning=THOUGHT,
        arguments='{"arg1',
    ),
    Case(
        "harmony",
        f'{_ANALYSIS}{_TO}<|message|>{{"arg1',
        [("special_function", None)],
        reasoning=THOUGHT,
        arguments='{"arg1',
    ),
    Case("harmony", f'{_ANALYSIS}{_TO} <|constrain|>json<|message|>{{"arg1": 1}}', ONE, reasoning=THOUGHT),
    Case(
        "harmony",
        f'{_ANALYSIS}{_TO.replace("commentary", "analysis")} <|constrain|>json<|message|>{{"arg1": 1}}',
        ONE,
        reasoning=THOUGHT,
    ),
    Case(
        "harmony",
        f"{_ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>{HELLO}",
        [],
        content=HELLO,
        reasoning=THOUGHT,
    ),
    Case(
        "harmony",
        f'{_ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>{HELLO}<|end|>{_TO} <|constrain|>json<|message|>{{"arg1": 1}}',
        ONE,
        content=HELLO,
        reasoning=THOUGHT,
    ),
    Case("harmony", ' to=functions.special_function<|channel|>commentary <|constrain|>json<|message|>{"arg1": 1}', ONE),
    Case("harmony", ' to=functions.special_function<|channel|>analysis <|constrain|>json<|message|>{"arg1": 1}', ONE),
    Case(
        "harmony",
        f'{_ANALYSIS}<|start|>assistant to=functions.special_function<|channel|>analysis <|constrain|>json<|message|>{{"arg1": 1}}',
        ONE,
        reasoning=THOUGHT,
    ),
]

_GIGACHAT = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
_MEMORY_CALL = '{"name": "manage_user_memory", "arguments": %s}'
_MEMORY = {"action": "create", "id": "preferences"}
GIGACHAT = [
    Case("gigachat-3", _GIGACHAT + OBJECT, ONE),
    Case("gigachat-3", HELLO + _GIGACHAT + OBJECT, ONE, content=HELLO),
    Case("gigachat-3", _GIGACHAT + _MEMORY_CALL % "{}", [("manage_user_memory", {})]),
    Case("gigachat", f"<|function_call|>{OBJECT}", ONE),
    Case("gigachat", f"{HELLO}<|function_call|>{OBJECT}", ONE, content=HELLO),
    Case(
        "gigachat",
        "<|function_call|>" + _MEMORY_CALL % '{"action": "create", "id": "preferences"}',
        [("manage_user_memory", _MEMORY)],
    ),
]

_K3_SAID = "<|open|>response<|sep|>%s<|close|>response<|sep|>"
_K3_CALL = '<|open|>call tool="%s" index="%d"<|sep|>%s<|close|>call<|sep|>'
_K3_ARGUMENT = '<|open|>argument key="%s" type="%s"<|sep|>%s<|close|>argument<|sep|>'
_K3_END = "<|close|>message<|sep|>"
_K3_ARG1, _K3_ARG2 = _K3_ARGUMENT % ("arg1", "number", "1"), _K3_ARGUMENT % ("arg2", "number", "2")


def _k3_tools(*calls: str) -> str:
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


KIMI_K3 = [
    Case("kimi-3", _K3_SAID % HELLO + _K3_END, [], content=HELLO),
    Case(
        "kimi-3",
        f"{THOUGHT}<|close|>think<|sep|>{_K3_SAID % HELLO}{_K3_END}",
        [],
        content=HELLO,
        reasoning=THOUGHT,
        opened="<|open|>think<|sep|>",
    ),
    Case(
        "kimi-3",
        _K3_SAID % "Use the response tag, then message the handler." + _K3_END,
        [],
        content="Use the response tag, then message the handler.",
    ),
    Case("kimi-3", THOUGHT, [], reasoning=THOUGHT, opened="<|open|>think<|sep|>"),
    Case("kimi-3", _K3_SAID % "" + _k3_tools(_K3_CALL % ("special_function", 1, _K3_ARG1)) + _K3_END, ONE),
    Case(
        "kimi-3",
        f"{THOUGHT}<|close|>think<|sep|>{_K3_SAID % 'On it.'}"
        + _k3_tools(_K3_CALL % ("special_function", 1, _K3_ARG1))
        + _K3_END,
        ONE,
        content="On it.",
        reasoning=THOUGHT,
        opened="<|open|>think<|sep|>",
    ),
    Case(
        "kimi-3",
        _K3_SAID % ""
        + _k3_tools(
            _K3_CALL % ("special_function", 1, _K3_ARG1),
            _K3_CALL % ("special_function_with_opt", 2, _K3_ARG1 + _K3_ARG2),
        )
        + _K3_END,
        [*ONE, ("special_function_with_opt", {"arg1": 1, "arg2": 2})],
    ),
    Case("kimi-3", _k3_tools(_K3_CALL % ("python", 1, _K3_ARGUMENT % ("code", "string", "print('hello')"))), TWO[1:]),
    Case(
        "kimi-3",
        _K3_SAID % "answer"
        + _k3_tools(
            _K3_CALL
            % (
                "calc",
                1,
                _K3_ARGUMENT % ("x", "number", "1")
                + _K3_ARGUMENT % ("flag", "boolean", "true")
                + _K3_ARGUMENT % ("text", "string", "raw"),
            )
        ),
        [("calc", {"x": 1, "flag": True, "text": "raw"})],
        content="answer",
    ),
]

_NS = "]<]minimax[>["
_M3 = f"{_NS}<tool_call>\n%s\n{_NS}</tool_call>"


def _m3(name: str, *children: str) -> str:
    return f"{_NS}<{name}>{''.join(children)}{_NS}</{name}>"


def _m3_call(name: str, *children: str) -> str:
    return f'{_NS}<invoke name="{name}">{"".join(children)}{_NS}</invoke>'


_ORDER = _m3_call(
    "create_order",
    _m3("user_id", "42"),
    _m3("urgent", "true"),
    _m3("note", "Please leave at front desk."),
    _m3("shipping", _m3("city", "Singapore"), _m3("zip", "18956")),
    _m3(
        "items", *(_m3("item", _m3("sku", sku), _m3("qty", qty)) for sku, qty in (("book-001", "2"), ("pen-007", "5")))
    ),
    _m3("metadata", _m3("source", "mobile"), _m3("campaign", "may-launch")),
    _m3("duplicate_demo", _m3("tag", "a"), _m3("tag", "b")),
)
_ORDERED = {
    "user_id": 42,
    "urgent": True,
    "note": "Please leave at front desk.",
    "shipping": {"city": "Singapore", "zip": 18956},
    "items": [{"sku": "book-001", "qty": 2}, {"sku": "pen-007", "qty": 5}],
    "metadata": {"source": "mobile", "campaign": "may-launch"},
    "duplicate_demo": {"tag": ["a", "b"]},
}
MINIMAX_3 = [
    Case("minimax-3", f"<mm:think>{THOUGHT}</mm:think>{HELLO}", [], content=HELLO, reasoning=THOUGHT),
    Case("minimax-3", f"</mm:think>{HELLO}", [], content=HELLO),
    Case(
        "minimax-3",
        f"<mm:think>{THOUGHT}</mm:think>{_M3 % _m3_call('get_weather', _m3('city', 'Tokyo'))}",
        TOKYO,
        reasoning=THOUGHT,
    ),
    Case("minimax-3", "</mm:think>" + _M3 % _m3_call("special_function", _m3("arg1", "1")), ONE),
    *(
        _text("minimax-3", _M3 % broken, "f")
        for broken in (_m3_call("f", f"{_NS}<a>1{_NS}</b>"), _m3_call("f", "text"), _m3_call("f", f"{_NS}<a>1"))
    ),
    Case("minimax-3", _M3 % _m3_call("empty_args"), [("empty_args", {})]),
    Case(
        "minimax-3",
        _M3
        % "\n".join(
            [_m3_call("get_weather", _m3("city", "Tokyo")), _m3_call("get_time", _m3("timezone", "Asia/Tokyo"))]
        ),
        BOTH,
    ),
    Case(
        "minimax-3",
        "Let me call." + _M3 % _m3_call("f", _m3("ref", "-14")),
        [("f", {"ref": -14})],
        content="Let me call.",
    ),
    Case("minimax-3", "I will create it.\n" + _M3 % _ORDER, [("create_order", _ORDERED)], content="I will create it."),
]

_ATEM = (
    '<atem:function_calls>\n<atem:invoke name="special_function">\n<atem:parameter name="arg1">1</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
MUSE = [
    Case("muse", f" to=user<|message|>{HELLO}<|eot|>", [], content=HELLO),
    Case("muse", f" to=special_function<|message|>{_ATEM}", ONE),
    Case(
        "muse",
        f" to=user<|message|>{HELLO}<|eom|><|start|>assistant to=special_function<|message|>{_ATEM}",
        ONE,
        content=HELLO,
    ),
    Case(
        "muse",
        f" to=user<|message|>You invoke it like this:\n{_ATEM}<|eot|>",
        [],
        content=f"You invoke it like this:\n{_ATEM}",
        tools=("special_function",),
    ),
    Case(
        "muse",
        f" to=self<|message|>I could use {_ATEM} here<|eom|><|start|>assistant to=user<|message|>Hello!<|eot|>",
        [],
        content="Hello!",
        reasoning=f"I could use {_ATEM} here",
        tools=("special_function",),
    ),
]

_HY3_WEATHER = (
    "<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n"
    "<arg_key>date</arg_key>\n<arg_value>2026-03-30</arg_value>\n</tool_call>\n"
)
HUNYUAN_3 = [
    Case(
        "hunyuan-3-preview",
        "<tool_calls><tool_call>get_current_date<tool_sep></tool_call></tool_calls>",
        [("get_current_date", {})],
    ),
    Case(
        "hunyuan-3-preview",
        "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Beijing"
        "</arg_value><arg_key>date</arg_key><arg_value>2026-03-30</arg_value></tool_call></tool_calls>",
        [("get_weather", {"city": "Beijing", "date": "2026-03-30"})],
    ),
    Case(
        "hunyuan-3-preview",
        f"<tool_calls>\n{_HY3_WEATHER % 'Beijing'}{_HY3_WEATHER % 'Hangzhou'}</tool_calls>",
        [("get_weather", {"city": city, "date": "2026-03-30"}) for city in ("Beijing", "Hangzhou")],
    ),
]

_DSML = "<｜DSML｜function_calls>\n%s</｜DSML｜function_calls>"
_DSML_CALL = (
    '<｜DSML｜invoke name="%s">\n<｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
DEEPSEEK_32 = [
    Case(
        "deepseek-v3.2",
        f"{THOUGHT}</think>\n\n{_DSML % (_DSML_CALL % ('get_weather', 'city', 'true', 'Tokyo'))}",
        TOKYO,
        reasoning=THOUGHT,
        opened="<think>",
    ),
    Case(
        "deepseek-v3.2",
        (_DSML % (_DSML_CALL % ("f", "city", "true", "Oslo"))).partition("lo</")[0],
        [("f", None)],
        arguments='{"city": "Os',
    ),
    Case("deepseek-v3.2", _DSML % (_DSML_CALL % ("special_function", "arg1", "false", "1")), ONE),
]

HARMONY += [
    Case("harmony", f"{_TO}<|message|><|call|>", [("special_function", {})]),
    Case("harmony", f'{_TO}<|message|>{{"arg1": 1}}\nDone.<|call|>', ONE, content="Done."),
    Case("functionary-3.2", "special_function\n", [("special_function", {})]),
    Case(
        "functionary-3.2",
        'all\n>>> 1 + 1\n2\n>>>special_function\n{"arg1": 1}>>>python\n{"code": "print(\'hello\')"}',
        TWO,
        content=">>> 1 + 1\n2",
    ),
]

FUNCTIONARY = [
    Case("functionary", '<function=special_function>{"arg1": 1}</function>', ONE),
    Case("functionary", '<function=special_function>{"arg1": 1}<', ONE, content="<"),
    Case("functionary-3.2", f"all\n{HELLO}", [], content=HELLO),
    Case("functionary-3.2", 'special_function\n{"arg1": 1}', ONE),
]

CASES = [
    *HERMES,
    *LLAMA,
    *COHERE,
    *MISTRAL,
    *DEEPSEEK,
    *GRANITE,
    *FUNCTOOLS,
    *INTERNLM,
    *PYTHONIC,
    *KIMI_K2,
    *QWEN_CODER,
    *GLM,
    *GEMMA,
    *MINIMAX,
    *HUNYUAN,
    *HARMONY,
    *FUNCTIONARY,
    *GIGACHAT,
    *KIMI_K3,
    *MINIMAX_3,
    *MUSE,
    *HUNYUAN_3,
    *DEEPSEEK_32,
]
