"""Replies in a terminal break at words, however their pieces are cut, and only there."""

from __future__ import annotations

import random
import textwrap

import pytest
from rich.cells import cell_len

from diskprefix.desk.talk.wrapped_text import WrappedText

TEXT = (
    "The first astronauts who walked on the Moon, and all who followed them, left footprints behind.\n\n"
    "* a list\n  with an indented line that is longer than the screen is wide\n"
    "averylongwordwithoutaplacetobreakthatiswiderthanthescreen and more\n"
)


def printed(pieces: list[str], width: int) -> str:
    parts: list[str] = []
    text = WrappedText(lambda: width, parts.append)
    for piece in pieces:
        text.add(piece)
    text.end()
    return "".join(parts)


def pieces(text: str, seed: int) -> list[str]:
    cuts = random.Random(seed).sample(range(1, len(text)), len(text) // 4)
    return [text[start:end] for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True)]


@pytest.mark.parametrize("width", [20, 33, 80])
@pytest.mark.parametrize("seed", range(3))
def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken(width: int, seed: int) -> None:
    shown = printed(pieces(TEXT, seed), width)
    assert shown == printed([TEXT], width)
    assert shown.split() == TEXT.split()
    wide = [line for line in shown.split("\n") if cell_len(line) > width]
    assert [line for line in wide if len(line.split()[0]) <= width] == [], "but for a word that is wider"


def test_a_paragraph_is_wrapped_as_the_standard_library_wraps_it() -> None:
    [paragraph, *_] = TEXT.split("\n")
    for width in range(12, 70):
        assert printed(pieces(paragraph, width), width) == textwrap.fill(paragraph, width)


def test_lines_that_fit_stay_as_they_are() -> None:
    text = "  indented\tand  spaced \n\n end "
    assert printed(pieces(text, 1), 80) == text


def test_code_between_fences_can_be_copied() -> None:
    code = "```python\nx = 'a line of code that is much wider than the terminal'\n```\n"
    shown = printed(pieces(f"{code}and words after it that are wrapped", 2), 20)
    assert shown.startswith(code)
    assert shown.removeprefix(code) == "and words after it\nthat are wrapped"


def test_chinese_text_breaks_between_characters_and_is_not_held_back() -> None:
    parts: list[str] = []
    text = WrappedText(lambda: 10, parts.append)
    text.add("月亮是地球的卫星")
    assert "".join(parts) == "月亮是地球\n的卫星"
