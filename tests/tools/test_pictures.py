"""Every picture of the pages is made by `tools/bench screenshots`, shows what there is now, and shows it at once."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from tests.test_project import PAGES, text_files
from tools.pictures import session_drawing, words_drawing
from tools.pictures.session import COMMANDS, PROMPT, Piece, Session, placed
from tools.screenshots import DRAWN, MADE, OF_THE_PAGE, RECORDED, SOURCES, digest_of_page

SVG = "{http://www.w3.org/2000/svg}"
KINDS = {".png", ".svg", ".gif", ".jpg", ".jpeg", ".webp", ".avif", ".mp4"}
AGAIN = "run tools/bench screenshots, look at the pictures, and commit them"
GLANCE_S = 2.0
"""A picture must show its point within this time."""
SHOWN = re.compile(r"!\[([^\]]+)\]\(([^)]+)\)|<img src=\"([^\"]+)\"[^>]* alt=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def session() -> Session:
    return msgspec.json.decode(RECORDED.read_bytes(), type=Session)


def test_each_picture_in_the_project_is_made_by_the_tool() -> None:
    assert {file for file in text_files() if file.suffix in KINDS} == MADE


def test_each_picture_is_on_a_page_with_words_for_who_does_not_see_it() -> None:
    shown: set[Path] = set()
    for page in PAGES:
        for text, target, source, alternative in SHOWN.findall(page.read_text(encoding="utf-8")):
            shown.add((page.parent / (target or source)).resolve())
            assert len(text or alternative) > 20
    assert shown == MADE


def test_the_drawn_pictures_are_what_the_tool_draws_now(session: Session) -> None:
    assert (DRAWN / "words.svg").read_text(encoding="utf-8") == words_drawing.drawn(), AGAIN
    assert (DRAWN / "restart.svg").read_text(encoding="utf-8") == session_drawing.drawn(session), AGAIN


def chunks_of(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the kind and the content of each part of a PNG."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at = 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += length + 12


@pytest.mark.parametrize("file", OF_THE_PAGE, ids=lambda file: file.name)
def test_a_photograph_shows_the_page_that_there_is_now(file: Path) -> None:
    parts = dict(chunks_of(file.read_bytes()))
    assert struct.unpack_from(">I", parts[b"IHDR"]) == (OF_THE_PAGE[file].width,)
    assert file.stat().st_size < 100_000
    key, _, digest = parts[b"tEXt"].partition(b"\0")
    assert (key.decode(), digest.decode()) == (SOURCES, digest_of_page()), AGAIN


# The moving picture.


def animated_texts(svg: str) -> Iterator[tuple[ElementTree.Element, list[tuple[float, int]]]]:
    """Yields each text of an SVG, with the seconds at which it appears (1) or disappears (0)."""
    for text in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        steps: list[tuple[float, int]] = []
        for animation in text.iter(f"{SVG}animate"):
            whole = float(animation.attrib["dur"].removesuffix("s"))
            times = [float(time) * whole for time in animation.attrib["keyTimes"].split(";")]
            steps = list(zip(times, map(int, animation.attrib["values"].split(";")), strict=True))
        yield text, steps


def test_the_moving_picture_shows_its_last_frame_first_and_at_rest(session: Session) -> None:
    svg = session_drawing.drawn(session)
    at_rest = {str(text.text) for text, _ in animated_texts(svg) if text.get("opacity") != "0"}
    first = {
        str(text.text)
        for text, steps in animated_texts(svg)
        if not steps or [value for at, value in steps if at <= GLANCE_S][-1]
    }
    last = {str(text.text) for text, steps in animated_texts(svg) if not steps or steps[-1][1]}
    assert at_rest == first == last
    assert {piece.text for piece in session.pieces if piece.text.strip()} < last


def test_the_moving_picture_says_its_point_in_words_that_do_not_move(session: Session) -> None:
    still = [str(text.text) for text, steps in animated_texts(session_drawing.drawn(session)) if not steps]
    (tokens, cold_s, cold), (again, warm_s, warm) = session.figures()
    assert tokens == again
    assert cold_s > 10 * warm_s
    assert {cold, warm} <= set(still)
    assert f"{tokens:,} tokens" in still[0]


def test_each_text_appears_when_it_came() -> None:
    said = "9 tokens computed, none restored (new) · first token after 3.0 s"
    pieces = placed([(5.0, "$ a <b>\n"), (6.0, f"{said}\n"), (7.0, said.replace("3.0", "0.5"))])
    svg = session_drawing.drawn(Session("2026-01-02", "1.0", list(pieces)))
    steps = {str(text.text): steps for text, steps in animated_texts(svg) if steps}
    first = session_drawing.FIRST_S
    assert [round(at, 1) for at, _ in steps["$ a <b>"]] == [0, first, first]
    assert [round(at, 1) for at, _ in steps[said]] == [0, first, first + 1]
    assert [value for _, value in steps[said]] == [1, 0, 1]
    assert [(round(at, 1), value) for at, value in steps["0 s"]] == [(0, 0), (first, 1), (first + 1, 0)]


def test_a_piece_is_placed_after_the_one_before_and_long_lines_are_folded() -> None:
    assert list(placed([(1.0, "$ ls"), (2.0, " -l\nx"), (3.0, "y" * 120)])) == [
        Piece(0.0, 0, 0, "$ ls"),
        Piece(1.0, 0, 4, " -l"),
        Piece(1.0, 1, 0, "x"),
        Piece(2.0, 1, 1, "y" * 115),
        Piece(2.0, 2, 0, "y" * 5),
    ]


def test_a_session_is_read_as_it_was_written(session: Session) -> None:
    assert session.encoded() == RECORDED.read_bytes()
    assert session.lines()[0] == f"{PROMPT}{COMMANDS[0]}"
