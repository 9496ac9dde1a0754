"""Every regular expression of the package is linear: what a client or a model writes cannot make one run for minutes.

A regular expression holds the interpreter's lock while it runs, so a slow one stops every thread of the daemon.
"""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Protocol

import pytest
import regex

import diskprefix
from diskprefix.daemon.api.anthropic_writer import MessageWriter
from diskprefix.daemon.api.dialect import Head
from diskprefix.daemon.api.reply import DeltaEvent
from diskprefix.daemon.api.responses_writer import OutputItems
from diskprefix.daemon.chat.canonicalisers import CANONICALISERS
from diskprefix.daemon.chat.output.call_patterns import strings_of
from diskprefix.daemon.chat.output.call_values import OfferedTools, python_calls
from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.families import FAMILIES, Family
from diskprefix.daemon.chat.output.format import ContentDelta

PACKAGE = Path(diskprefix.__file__).parent
USES = ("match", "fullmatch", "search", "sub", "split", "finditer", "findall")
MADE: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "daemon/chat/client_text.py": [
        (r"(?i)(<\|im_(?:end\|>|start\|>))", ("split", "match")),
        ("(?i)[<|]", ("search",)),
        ("[\U000f0000-\U000f0010][\U000f0000-\U000f0010]*", ("search", "sub")),
        (r"\\u(db[89a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})", ("sub",)),
    ],
    "daemon/chat/content.py": [(r"(<\|image_pad\|>)", ("split",))],
    "runtime/files/gguf/encoders.py": [(r"model\.visual\.blocks\.(\d+)\.(.+)", ("fullmatch",))],
    "runtime/plan/families/optional_weights.py": [(r"(?!)|self_attn\.(qkv|q|k|v)_proj|mamba\.conv1d", ("fullmatch",))],
    "runtime/files/folder_weights.py": [(r"self_attn\.(f_a_proj\.|f_b_proj\.|dt_bias|A_log)", ("sub",))],
    "daemon/chat/canonicaliser_rules.py": [
        (f"(?m){pattern.pattern}", uses)
        for one in CANONICALISERS
        for pattern, uses in ((one.pattern, ("search", "sub")), (one.lines, ("search",)), (one.seen, ("search",)))
    ],
    "daemon/chat/output/call_grammar.py": [("ARGUMENTS|VALUE", ("sub",))],
    "daemon/chat/output/call_values.py": [(r"<(/?)([\w.\-]+)>", ("split",))],
    "daemon/chat/output/loose_values.py": [
        (r"(?<=\S)\s*(?:,\s*(?:['\"\[({]|-?\d|(?:true|None)\b)|(?:,\s*)?[\])])", ("match", "search")),
        (r"(?<=\S)\s*(?:,\s*(?:key|other)\s*=|(?:,\s*)?\)\s*(?:(?:\]\s*)?\Z|(?:[,;]\s*)?\w+\s*\())", ("match",)),
    ],
    "daemon/chat/output/parsers.py": [],
    "daemon/chat/output/call_patterns.py": [
        (r'<invoke name="(?P<name>[^"\n]+)">', ("match",)),
        (strings_of("").pattern, ("finditer",)),
        (r"\n?</p>(?=\s*(?:</f>|<p=(?P<next>[^>\n]+)>))|\n(?=<p=[^>\n]+>)|\n?(?=(?:</f>)\s*</c>\s*<c>)", ("search",)),
    ],
    "daemon/cli/policy_file.py": [(r"""\s*(\[+\s*)?["']?key["']?\s*[=.\]]""", ("match",))],
}
"""Samples of the patterns that are made while the program runs, and how they are used, by module. Alternatives of
escaped texts need none. Those of formats of replies are run by their parsers, below."""
PASSED_ON = {
    "daemon/chat/output/reader.py:_STRING": ("match",),
    "daemon/chat/output/parsers.py:_WRAPPER_END": ("search",),
}
"""How patterns are used that a module hands to another one."""
LARGEST_COUNT = 64
"""Of a repetition: what may repeat 300 times makes 300 attempts at every character."""
SHORT, FACTOR = 250, 8
MOST_GROWTH = 3 * FACTOR
"""Of the work, when the text is `FACTOR` times as long: 8 if it is linear, 64 if it is quadratic."""
LEAST_S = 2e-6
"""Below, the steps of the clock are seen."""


class Work(Protocol):
    """What reads a text."""

    def run(self, text: str) -> None: ...


@dataclass(frozen=True)
class Used:
    where: str
    pattern: Any
    methods: tuple[str, ...]

    def run(self, text: str) -> None:
        for method in self.methods:
            if method == "sub":
                self.pattern.sub("", text)
            elif method == "finditer":
                list(self.pattern.finditer(text))
            else:
                getattr(self.pattern, method)(text)


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module = node.func.value
            if isinstance(module, ast.Name) and module.id in ("re", "regex") and node.func.attr in (*USES, "compile"):
                yield node


def used_patterns() -> Iterator[Used]:
    for path in sorted(PACKAGE.rglob("*.py")):
        source, name = path.read_text(), str(path.relative_to(PACKAGE))
        found = list(calls(ast.parse(source))) if re.search(r"\b(re|regex)\.", source) else []
        if not found:
            continue
        module = importlib.import_module("diskprefix." + name.removesuffix(".py").replace("/", "."))
        for variable, value in vars(module).items():
            if isinstance(value, re.Pattern | regex.Pattern) and f"\n{variable} = " in source:
                where = f"{name}:{variable}"
                methods = tuple(use for use in USES if f"{variable}.{use}(" in source)
                yield Used(where, value, PASSED_ON.get(where) or methods or USES)
        for call in found:
            assert isinstance(call.func, ast.Attribute)
            if call.func.attr != "compile" and isinstance(call.args[0], ast.Constant):
                pattern = re.compile(str(call.args[0].value))
                yield Used(f"{name}:{call.lineno}", pattern, (call.func.attr,))
        for sample, uses in MADE.get(name, ()):
            yield Used(f"{name}:{sample}", re.compile(sample), uses)


PATTERNS = list(used_patterns())


def hostile_units(pattern: str) -> list[str]:
    """What to repeat: characters that the pattern names and one of each class, alone and in pairs."""
    named = re.sub(r"\\[a-zA-Z]|\(\?P<\w+>|[a-zA-Z0-9]", "", pattern)
    characters = sorted({"a", "0", " ", "\n", *named} - set("()[]^$?*+|\\") | set(re.findall(r"\\([^\w])", pattern)))
    return [*characters, *(f"{first}{second}" for first, second in permutations(characters, 2))]


def work(used: Work, text: str, runs: int = 3) -> float:
    """CPU time of this thread in seconds: the least of several runs, as what disturbs only adds to it."""
    times = []
    for _ in range(runs):
        began = time.thread_time()
        used.run(text)
        times.append(time.thread_time() - began)
    return min(times)


def growth(used: Used) -> tuple[float, str]:
    """How much more work a longer text is, at most, and what it repeats. Ends with the first that is too much."""
    worst = (0.0, "")
    for unit in hostile_units(used.pattern.pattern):
        # The end keeps the text from matching as a whole.
        short, long = (unit * (count // len(unit)) + "\0" for count in (SHORT, SHORT * FACTOR))
        # What is too much once is measured again: something may have disturbed all three runs.
        found = next((one for one in measured(used, short, long) if one <= MOST_GROWTH), None)
        worst = max(worst, (found or min(measured(used, short, long)), unit))
        if worst[0] > MOST_GROWTH:
            break
    return worst


def measured(used: Work, short: str, long: str, first: int = 3) -> Iterator[float]:
    for runs in (first, 3, 3):
        yield work(used, long, runs) / max(work(used, short, runs), LEAST_S)


def largest_count(pattern: str) -> int:
    counts = re.findall(r"\{(\d*),?(\d*)\}", pattern)
    return max((int(count) for pair in counts for count in pair if count), default=0)


@pytest.mark.cases(26)
@pytest.mark.parametrize("used", PATTERNS, ids=lambda used: used.where)
def test_the_work_of_every_regular_expression_grows_as_its_text(used: Used) -> None:
    assert largest_count(used.pattern.pattern) <= LARGEST_COUNT
    found, unit = growth(used)
    assert found < MOST_GROWTH, f"the work grows by {found:.0f} for a text of {unit!r} that is {FACTOR} times as long"


@pytest.mark.cases(2)
@pytest.mark.parametrize("pattern", [r"\s+x", "a[^b]*b", "-(?:[^a]|aa)*b"])
def test_a_regular_expression_that_is_not_linear_is_found(pattern: str) -> None:
    assert growth(Used("", re.compile(pattern), ("search",)))[0] > MOST_GROWTH


def test_every_pattern_that_is_made_while_the_program_runs_has_a_sample() -> None:
    made = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for call in calls(ast.parse(path.read_text()))
        if not isinstance(call.args[0], ast.Constant) and not is_constant(call.args[0])
    }
    assert made == MADE.keys()


def is_constant(pattern: ast.expr) -> bool:
    """Whether a pattern is made of constants, or of alternatives of escaped texts."""
    text = ast.unparse(pattern)
    if "'|'.join(map(re.escape, " in text or text.startswith("'|'.join((regex.escape("):
        return True
    names = {node.id for node in ast.walk(pattern) if isinstance(node, ast.Name)}
    return isinstance(pattern, ast.JoinedStr) and all(name.isupper() for name in names)


@dataclass(frozen=True)
class Parsed:
    """A format of replies, whose parser reads a text in pieces of `size`, whole if that is None. Its patterns are
    made of what the family writes."""

    format: OutputFormat
    size: int | None = None

    def run(self, text: str) -> None:
        parser = self.format.parser(TOOLS, "<|im_start|>assistant\n")
        for at in range(0, len(text), self.size or len(text)):
            parser.feed(text[at : at + (self.size or len(text))])
        parser.finish()


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"text": {"type": "string"}}}}}]
FORMATS: dict[str, tuple[OutputFormat, Family]] = {family.name: (OutputFormat(family), family) for family in FAMILIES}


def written_call(family: Family) -> str:
    argument = re.sub("KEY", "text", re.sub("VALUE", "x", re.sub("IS_TEXT", "true", family.argument)))
    arguments = re.sub("TYPE", "string", argument) or '{"text": "x"}'
    name = '"f"' if re.search(r'name": NAME|\{NAME', family.call) else "f"
    call = family.whole_call.replace("NAME", name).replace("INDEX", "1").replace("ARGUMENTS", arguments)
    return f"{family.before}{call}{family.after}"


def beginnings(call: str) -> list[str]:
    """A call that is cut where words, blanks and marks meet."""
    return [call[: found.start()] for found in re.finditer(r"(?<=\w)\b|(?<=\W)\b|\B(?=\s)|\Z", call)]


def require_linear(parsed: Parsed, begin: str, unit: str, end: str) -> None:
    short, long = (begin + unit * (count // len(unit)) + end for count in (SHORT, SHORT * FACTOR))
    grown = measured(parsed, short, long, first=1)
    assert any(one <= MOST_GROWTH for one in grown), f"behind {begin!r}, many {unit!r} are not read in one pass"


@pytest.mark.cases(4)
@pytest.mark.parametrize("size", [None, 8], ids=["whole", "in pieces"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_work_of_every_parser_of_replies_grows_as_the_reply(name: str, size: int | None) -> None:
    """What a model writes can be chosen: a request may demand it."""
    parsed, call = Parsed(FORMATS[name][0], size), written_call(FORMATS[name][1])
    for begin in [*beginnings(call), "```", '{"arguments": "']:
        require_linear(parsed, begin, " ", "<z")
        require_linear(parsed, begin, "a", "!")


@pytest.mark.cases(13)
@pytest.mark.parametrize("size", [None, 8], ids=["whole", "in pieces"])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_calls_that_are_none_are_not_read_again_and_again(name: str, size: int | None) -> None:
    parsed, call = Parsed(FORMATS[name][0], size), written_call(FORMATS[name][1])
    for begin, end in (("", ""), ("", "`"), ("", "}" * 2000), (call[: len(call) // 2], "")):
        require_linear(parsed, begin, '{"id":\n', end)
    for begin in dict.fromkeys(beginnings(call)[-6:]):
        require_linear(parsed, "", f"\n{begin}", "!")


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.channels])
def test_many_tags_in_a_long_text_are_read_in_one_pass(name: str) -> None:
    format, family = FORMATS[name]
    assert family.channels is not None
    for tag in (*family.channels.tags, ">>>all\n"):
        short, long = (tag * (count // len(tag)) for count in (8000, 8000 * FACTOR))
        grown = measured(Parsed(format), short, long, first=1)
        assert any(one <= 2 * FACTOR for one in grown), f"many {tag!r} are not read in one pass"


class PythonCall:
    def run(self, text: str) -> None:
        assert python_calls(f"f(text=[{text}])", OfferedTools(TOOLS))


def test_the_work_of_a_call_in_python_grows_as_its_texts() -> None:
    assert any(one <= MOST_GROWTH for one in measured(PythonCall(), "'',\n" * SHORT, "'',\n" * SHORT * FACTOR, first=1))


HEAD = Head(id="r", created=0, model="m", fingerprint="", prompt_tokens=1, request_id="q")


@dataclass(frozen=True)
class Held:
    """What takes a text in pieces, and holds blanks until something else comes."""

    new: Callable[[], Callable[[str], object]]

    def run(self, text: str) -> None:
        take = self.new()
        for at in range(0, len(text), 64):
            take(text[at : at + 64])


def parser_takes() -> Callable[[str], object]:
    return FORMATS["hermes"][0].parser([], "").feed


def items_take() -> Callable[[str], object]:
    items = OutputItems("r")
    return lambda text: items.add([ContentDelta(text)])


def message_takes() -> Callable[[str], object]:
    writer = MessageWriter(HEAD)
    return lambda text: writer.events(DeltaEvent(0, (ContentDelta(text),)))


@pytest.mark.parametrize("new", [parser_takes, items_take, message_takes])
def test_blanks_that_are_held_are_not_gone_through_again(new: Callable[[], Callable[[str], object]]) -> None:
    short, long = (" " * (64 * count) + "x" for count in (1000, 1000 * FACTOR))
    assert any(one <= MOST_GROWTH for one in measured(Held(new), short, long, first=1))
