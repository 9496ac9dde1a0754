"""The names of files, of what is in them, and of threads that the pages mention: they exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from diskprefix.nouns import ACCEPTED, SCOPE_WORDS
from diskprefix.server.threads import Kind
from tests.test_project import PAGES, ROOT, text_files

CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]*\w\.(py|md|cpp|h|js|service|socket|timer)")
NAME = re.compile(r"([A-Za-z_]\w*\.)*(?P<last>[A-Z]\w*[a-z]\w*|[A-Z][A-Z0-9_]{3,})(\(\))?")
"""A class, perhaps with its module, or a constant."""
IN_FILE = re.compile(r"`([A-Za-z_]\w*)`(?: and `([A-Za-z_]\w*)`)? in\s+`([\w./-]+\.py)`")
THREAD_IN_SOURCE = re.compile(r"""(?:Thread\(.*name=f?|thread_name_prefix=)"([a-z-]+?)-?["{]""")
COMMAND_THREADS = {"verify", "kv-loader", "kv-saver", "remote-prefetch"}
"""Threads of commands and of vLLM's processes, which the daemon has not."""

NAMES_SCOPES = [
    "",
    "README.md",
    "policies/README.md",
    "systemd/diskprefix.env",
    *(
        f"diskprefix/{name}"
        for name in (
            *("TOUR.md", "server/README.md", "cache/README.md", "extras/vllm/README.md", "settings.py"),
            *("api/fields.py", "extras/warm/warm_command.py", "extras/simulate/simulate_command.py"),
        )
    ),
]
"""The places that say which scopes there are; "" is the error message."""


@cache
def sources() -> dict[str, str]:
    """Returns the text of each file but the pages, by its path from the project's root."""
    return {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8", errors="replace")
        for file in text_files()
        if file.suffix != ".md" and file.stat().st_size < 1 << 20
    }


@cache
def words() -> frozenset[str]:
    return frozenset(word for text in sources().values() for word in re.findall(r"\w+", text))


def files_named(name: str, page: Path) -> list[Path]:
    """Returns the files that a page may mean by `name`: a path from the page's folder, or the end of any path."""
    beside = (page.parent / name).resolve()
    paths = [*map(ROOT.joinpath, sources()), *PAGES]
    return [path for path in paths if path == beside or f"/{path}".endswith(f"/{name.removeprefix('../')}")]


def wrong_names(page: Path) -> Iterator[str]:
    """Yields the names on a page that nothing has."""
    text = page.read_text(encoding="utf-8")
    for code in CODE.findall(text):
        if FILE.fullmatch(code):
            if not files_named(code, page):
                yield code
        elif (name := NAME.fullmatch(code)) and name["last"] not in words():
            yield code
    for first, second, file in IN_FILE.findall(text):
        held = {word for path in files_named(file, page) for word in re.findall(r"\w+", path.read_text("utf-8"))}
        yield from (f"{name} in {file}" for name in (first, second) if name and name not in held)


def threads() -> set[str]:
    """Returns the names of the daemon's threads, without their numbers."""
    found = {
        name
        for path, text in sources().items()
        if path.startswith("diskprefix/")
        for name in THREAD_IN_SOURCE.findall(text)
    }
    return (found | set(get_args(Kind))) - COMMAND_THREADS


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_file_class_and_constant_that_a_page_names_exists(page: Path) -> None:
    assert list(wrong_names(page)) == []


@pytest.mark.parametrize("path", NAMES_SCOPES)
def test_each_scope_word_is_named_where_users_look(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8") if path else ACCEPTED
    # To warm a prompt with the scope off would do nothing.
    wanted = {word.text.format("N") for word in SCOPE_WORDS.values()} - ({"off"} if "warm" in path else set())
    quote = "`" if path.endswith(".md") else ""
    patterns = {word: r"(?<!:)\bN\b" if word == "N" else rf"{quote}\b{word}\b{quote}" for word in wanted}
    assert [word for word, pattern in patterns.items() if not re.search(pattern, text)] == []


def test_the_page_on_threads_lists_those_of_the_daemon() -> None:
    page = (ROOT / "diskprefix/README.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\| thread \| .*\n\| --- .*\n((?:\|.*\n)+)", page)
    listed = {name for row in table.splitlines() for name in CODE.findall(row.split("|")[1])}
    assert listed == threads()
