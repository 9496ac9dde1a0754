"""The words of the code: one noun has one meaning, names say what they are, docstrings are plain English."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tests.source_files import TESTS, modules_in

ROOT = TESTS.parent
MODULES = modules_in(".")
OF_NUMBERS = {*modules_in("runtime/plan", "runtime/files", "runtime/fetch", "runtime/load", "native")}
CODE = [*MODULES, *modules_in("tools", below=ROOT)]
NAMED_WELL = modules_in("daemon/server", "daemon/api", "daemon/chat", below=TESTS)
"""The tests whose names are short."""


@cache
def tree_of(path: Path) -> ast.Module:
    """Parses a module once, and not yet when the tests are collected."""
    return ast.parse(path.read_text(encoding="utf-8"))


def breaches(paths: list[Path], rule: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Returns what breaks a rule, by file."""
    return {str(path.relative_to(ROOT)): broken for path in paths if (broken := rule(path))}


# Nouns.


def doubled(names: list[str]) -> list[str]:
    return sorted(name for name, number in Counter(names).items() if number > 1)


def test_no_two_classes_have_one_name() -> None:
    nodes = [node for path in MODULES for node in ast.walk(tree_of(path))]
    assert doubled([node.name for node in nodes if isinstance(node, ast.ClassDef)]) == []


def test_no_two_files_have_one_name() -> None:
    assert doubled([path.stem for path in MODULES if path.stem != "__init__"]) == []


# Docstrings and comments.

QUESTIONS = {"What", "Which", "Whether", "How", "Why", "Who", "Where", "When"}
TRANSLATED = re.compile(
    r"\b(behind (so many|the (first|reply|prompt|layers|end)|it|them|other text|a long)"
    r"|so many (tokens|bytes|columns|words|of)|of whom|of which nobody|so many\b[^.]*\bso long"
    r"|(is|are) told|what is (found|said|stored of it)|has of (a|its|the)|where it (finds|has) fault|nobody's)\b"
)
"""Words of translated syntax: say after the first n tokens, transposed, interleaved, `num_bytes`, and the noun."""
TRANSLATED_OF_NUMBERS = re.compile(r"\b(behind|turned|that of|of which|of whom)\b")
"""The same, where nothing stands behind anything: in `OF_NUMBERS`."""


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the docstrings of a module, those below constants too, and its comments, each as one line."""
    with path.open("rb") as content:
        for token in tokenize.tokenize(content.readline):
            if token.type == tokenize.COMMENT or token.string.startswith('"""'):
                yield token.start[0], " ".join(token.string.strip('"# ').split())


def translated_words(path: Path) -> list[str]:
    pattern = TRANSLATED_OF_NUMBERS if path in OF_NUMBERS else TRANSLATED
    return [f"{line}: {match[0]}" for line, text in sentences(path) for match in pattern.finditer(text)]


def questions(tree: ast.Module) -> list[str]:
    """Returns the docstrings that begin as a question does, instead of what something does or is."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for text in texts if text and text.split()[0] in QUESTIONS]


def test_docstrings_say_what_something_does_or_is() -> None:
    assert breaches(CODE, lambda path: questions(tree_of(path))) == {}


def test_sentences_have_the_words_of_the_field() -> None:
    assert breaches(CODE, translated_words) == {}


def test_the_rules_find_questions_and_translated_words_alone() -> None:
    assert questions(ast.parse('"""What a page shows."""\ndef f():\n    "Returns what a page shows."'))
    assert not questions(ast.parse('"""A page."""'))
    wrong = ["The name behind the first blocks.", "Rows of so many columns.", "The caller, who is told of it."]
    assert all(map(TRANSLATED.search, wrong))
    assert not any(map(TRANSLATED.search, ["The name after the first blocks.", "An agent behind a proxy."]))
    assert TRANSLATED_OF_NUMBERS.search("Levels behind the first, of which there are few.")
    assert not TRANSLATED_OF_NUMBERS.search("Levels after the first, as they are stored.")


# Names.


def names_that_say_nothing(tree: ast.Module) -> list[str]:
    """Returns the variables, parameters and functions called `found` or `one`, with their lines."""
    named = [(node.lineno, node.id) for node in ast.walk(tree) if isinstance(node, ast.Name)]
    named += [(node.lineno, node.arg) for node in ast.walk(tree) if isinstance(node, ast.arg)]
    bound = ast.ExceptHandler | ast.MatchAs | ast.FunctionDef
    named += [(node.lineno, node.name) for node in ast.walk(tree) if isinstance(node, bound) and node.name]
    return [f"{line} {name}" for line, name in sorted(named) if name in ("found", "one")]


def test_a_local_name_says_what_it_is() -> None:
    assert breaches(CODE, lambda path: names_that_say_nothing(tree_of(path))) == {}


def test_the_rule_finds_names_that_say_nothing() -> None:
    tree = ast.parse("def f(one):\n    found = [x for one in one]")
    assert names_that_say_nothing(tree) == ["1 one", "2 found", "2 one", "2 one"]
    tree = ast.parse("try: pass\nexcept OSError as found:\n    def one(): pass\nmatch 1:\n    case [] as one: pass")
    assert names_that_say_nothing(tree) == ["2 found", "3 one", "5 one"]


MOST_CHARS = 70
"""The length of a test's name."""


def hard_names(tree: ast.Module) -> list[str]:
    """Returns the names of tests that are long, or begin with "what" in place of a subject."""
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [name for name in names if name.startswith("test_")]
    return [name for name in tests if len(name) > MOST_CHARS or name.startswith("test_what")]


def test_a_name_of_a_test_is_short_and_has_a_subject() -> None:
    assert breaches(NAMED_WELL, lambda path: hard_names(tree_of(path))) == {}


def test_the_rule_finds_hard_names() -> None:
    assert hard_names(ast.parse("def test_what_is(): pass")) == ["test_what_is"]
    assert hard_names(ast.parse(f"def test_{'x' * 65}(): pass\ndef test_{'x' * 66}(): pass")) == [f"test_{'x' * 66}"]
