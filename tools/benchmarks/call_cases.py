"""Calls with awkward values, written as a template writes them and as models are known to write them instead.

The deviations are from issues and pull requests on the parsers of vLLM (22885, 24478, 32146, 41739, 48171, 55495),
SGLang (9606, 21377, 30481), llama.cpp (17376, 24202, 26763), mlx-lm (1785), TRL (6535) and dynamo (9355).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from diskprefix.daemon.chat.output.families import Family
from tools.benchmarks.call_texts import as_json, call_text, json_type

FILE = """<module>
  <function name="main">
    print('it''s done', end='')
  </function>
</module>
"""
SCRIPT = """cat > f.py << 'EOF'
x = {"a": [1, 2], 'b': "it's"}
print(f"{x['b']}\\n")
EOF"""
VALUES: dict[str, Any] = {
    "empty": "",
    "blank": " ",
    "lines": "one\ntwo",
    "line ends around": "\n one \n",
    "apostrophe": "it's",
    "quotes": 'say "hi"',
    "in apostrophes": "'x'",
    "in quotes": '"x"',
    "backslashes": r"C:\new\table",
    "backslash at the end": "pattern \\",
    "pattern": r"^\d+\.\w*$",
    "tab": "a\tb",
    "emoji": "😀 é ｜",
    "looks like arguments": "a, b=1",
    "looks like a call": "print('a', end='')",
    "looks like a list": "[1, 'x']",
    "looks like an object": '{"a": "b"}',
    "looks like null": "null",
    "looks like None": "None",
    "looks like a number": "007",
    "braces": "}} {",
    "brackets": ")] [(",
    "colon": "a: b, c: d",
    "ends of functions": "x</function>y",
    "ends of arguments": "x</parameter>y",
    "an argument": "x = '<parameter=y>'",
    "a line with an argument": "x\n<parameter=y>\nz",
    "a tag of calls": "<tool_call> and </tool_call>",
    "an end of keys": "</arg_value> and <arg_key>k</arg_key>",
    "thought": "<think>x</think>",
    "fence": "```json\n{}\n```",
    "file": FILE,
    "script": SCRIPT,
    "markup": '<a href="/x">&lt;</a>',
    "long": 'word\'s "way" ' * 40,
    "zero": 0,
    "negative": -74.0046539,
    "large": 12345678901234567890,
    "yes": True,
    "nothing": None,
    "list": [1, "it's", None, True],
    "object": {"a": "it's", "b": [False, {"c": 'x "y"'}]},
    "deep": [[[["x"]]], {"a": {"b": {"c": []}}}],
}
NO_ELEMENTS = ("deep",)
"""In elements, no list in a list can be written, and no empty one."""
NAME, OTHER = "write_file", "look"
FIRST, LAST = "alpha7", "omega7"


class Case(NamedTuple):
    """A reply with calls, and the calls."""

    family: Family
    value: str
    deviation: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]

    @property
    def name(self) -> str:
        return f"{self.family.name}: {self.deviation}: {self.value}"


def arguments_with(value: Any) -> dict[str, Any]:
    """Returns the arguments of a call with `value` in the middle."""
    return {"first": FIRST, "middle": value, "zlast": LAST}


def tools_for(value: Any) -> list[dict[str, Any]]:
    """Returns the tools with the types of the arguments; null may be a text too."""
    kind = ["string", "null"] if value is None else json_type(value)
    known = {"first": {"type": "string"}, "middle": {"type": kind}, "zlast": {"type": "string"}}
    named = {NAME: known, OTHER: {"from": {"type": "string"}}}
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in named.items()
    ]


Rewrite = Callable[[Family], Family]
Edit = Callable[[Family, str, Any], str | None]
"""Makes of a text, and of the value in it, what a model wrote instead; None if this does not apply."""


def _each_part(change: Callable[[str], str]) -> Rewrite:
    return lambda family: replace(family, call=change(family.call), argument=change(family.argument))


def _omits_closing_key(family: Family) -> Family:
    before, value, after = family.argument.partition("VALUE")
    return replace(family, argument=re.sub("</[^<>]+>", "", before) + value + after)


def _without_line_ends(text: str) -> str:
    return re.sub(r"\n(?!VALUE|</parameter>)", "", text)


TAGGED = ("parameters",)
JSON = ("objects", "json")
REWRITES: dict[str, tuple[tuple[str, ...], Rewrite]] = {
    "blanks between tags": (TAGGED, _each_part(lambda text: text.replace("><", "> \n<"))),
    "no line ends": (TAGGED, _each_part(_without_line_ends)),
    "more line ends": (TAGGED, _each_part(lambda text: re.sub(r"\n(?!VALUE|</parameter>)", "\n\n", text))),
    "no end of the key": (TAGGED, _omits_closing_key),
    "one brace too many": ((*JSON, "braces"), _each_part(lambda text: text.replace("ARGUMENTS", "ARGUMENTS}"))),
    "two braces too many": (("objects",), _each_part(lambda text: text.replace("ARGUMENTS}", "ARGUMENTS}}}"))),
    "blanks around": (("python",), _each_part(lambda text: text.replace("KEY=VALUE", "KEY = VALUE"))),
}
"""By the bodies of families that they concern."""


def _json_edit(change: Callable[[dict[str, Any]], str]) -> Edit:
    def edit(family: Family, text: str, value: Any) -> str | None:
        if family.body not in JSON:
            return None
        return text.replace(as_json(arguments_with(value)), change(arguments_with(value)))

    return edit


def _whole_object(change: Callable[[str, dict[str, Any]], str]) -> Edit:
    def edit(family: Family, text: str, value: Any) -> str | None:
        arguments = arguments_with(value)
        written = family.call.strip().replace("NAME", as_json(NAME)).replace("ARGUMENTS", as_json(arguments))
        if family.body != "objects" or not family.begins or not family.call.strip().startswith('{"name"'):
            return None
        return text.replace(written, change(NAME, arguments))

    return edit


def _in_apostrophes(value: Any) -> str:
    """Returns a value as LFM2's template writes it: it escapes nothing."""
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_apostrophes, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_in_apostrophes(key)}: {_in_apostrophes(each)}' for key, each in value.items())}}}"
    return repr(value)


def _unescaped(family: Family, text: str, value: Any) -> str | None:
    # In these quotes, \n is a line break.
    if family.body != "python" or re.search(r"\\[nt]", str(value)):
        return None
    arguments = ", ".join(f"{key}={_in_apostrophes(each)}" for key, each in arguments_with(value).items())
    return f"{text[: text.index('(')]}({arguments}){text[text.rindex(')') + 1 :]}"


def _python_value(family: Family, text: str, value: Any) -> str | None:
    if family.body != "parameters" or not isinstance(value, list | dict):
        return None
    return text.replace(as_json(value), repr(value))


def _braces_edit(written: str) -> Edit:
    def edit(family: Family, text: str, _: Any) -> str | None:
        quoted = f"{family.quotes}{FIRST}{family.quotes}"
        return text.replace(quoted, written) if family.body == "braces" else None

    return edit


def _null_as_none(family: Family, text: str, value: Any) -> str | None:
    return text.replace("null", "None") if family.body in ("braces", *JSON) and value is None else None


def _no_end(family: Family, text: str, _: Any) -> str | None:
    end = family.end if family.each else family.after
    stripped = text.removesuffix(end) if end else ""
    # Two families need their end: their calls are read as a whole.
    return stripped if stripped and family.body not in ("python", "elements", "braces") else None


def _stray_end_of_value(family: Family, text: str, _: Any) -> str | None:
    end = family.argument.partition("VALUE")[2].strip()
    first = family.argument.partition("KEY")[0]
    return text.replace(first, end + first, 1) if family.body == "parameters" and end else None


def _no_list(family: Family, text: str, _: Any) -> str | None:
    before, after = family.before, family.after
    if not family.begins or not before.endswith("[") or not after.startswith("]"):
        return None
    return before[:-1] + text.removeprefix(before).removesuffix(after) + after[1:]


def _end_of_message(family: Family, text: str, _: Any) -> str | None:
    if family.channels is None:
        return None
    ends = (*family.channels.tags, ">>>all\n")
    return text + next(tag for tag in ends if re.match(family.channels.end, tag))


EDITS: dict[str, Edit] = {
    "as written": lambda _family, text, _value: text,
    "with text around": lambda family, text, _value: None if family.channels else f"I write.\n{text}",
    "no closing tag": _no_end,
    "no list": _no_list,
    "the end of its message": _end_of_message,
    "a stray end of a value": _stray_end_of_value,
    "indented JSON": _json_edit(lambda arguments: json.dumps(arguments, indent=2)),
    "a last comma": _json_edit(lambda arguments: as_json(arguments)[:-1] + ",}"),
    "arguments in Python": _json_edit(repr),
    "object in Python": _whole_object(lambda name, arguments: repr({"name": name, "arguments": arguments})),
    "arguments as a string": _whole_object(
        lambda name, arguments: as_json({"name": name, "arguments": as_json(arguments)})
    ),
    "no key of arguments": _whole_object(lambda name, arguments: as_json({"name": name, **arguments})),
    "members behind the arguments": _whole_object(
        lambda name, arguments: as_json({"name": name, "arguments": {"first": FIRST}, **dict([*arguments.items()][1:])})
    ),
    "arguments first": _whole_object(lambda name, arguments: as_json({"arguments": arguments, "name": name})),
    "strings in apostrophes, not escaped": _unescaped,
    "values in Python": _python_value,
    "text without quotes": _braces_edit(FIRST),
    "text in apostrophes": _braces_edit(f"'{FIRST}'"),
    "text in JSON": _braces_edit(f'"{FIRST}"'),
    "None for null": _null_as_none,
}

WORD_OF_PYTHON, TWO_CALLS = "a key that is a word of Python", "two calls"
DEVIATIONS = (*[name for name in EDITS if name != "as written"], *REWRITES, WORD_OF_PYTHON, TWO_CALLS)


def cases_of(family: Family, value_name: str) -> Iterator[Case]:
    """Yields the calls of a family with a value: in each way that concerns it."""
    value = VALUES[value_name]
    if family.body == "elements" and value_name in NO_ELEMENTS:
        return
    call = (NAME, arguments_with(value))
    text = call_text(family, [call])
    for name, edit in EDITS.items():
        edited = edit(family, text, value)
        if edited is not None and (edited != text or name == "as written"):
            yield Case(family, value_name, name, edited, [call])
    for name, (bodies, rewrite) in REWRITES.items():
        written = rewrite(family)
        if family.body in bodies and written != family:
            yield Case(family, value_name, name, call_text(written, [call]), [call])
    if family.body == "python":
        named = (OTHER, {"from": FIRST})
        yield Case(family, value_name, WORD_OF_PYTHON, call_text(family, [named]), [named])
    if not family.only_one:
        other = (OTHER, {"from": LAST})
        yield Case(family, value_name, TWO_CALLS, call_text(family, [call, other]), [call, other])
