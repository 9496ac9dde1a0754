"""`tools/bench picture` draws what a terminal wrote, where and when it came."""

from __future__ import annotations

from xml.etree import ElementTree

from tools.programs.moving_picture import Piece, drawn, placed

SVG = "{http://www.w3.org/2000/svg}"


def test_a_piece_is_placed_behind_the_one_before_and_long_lines_are_folded() -> None:
    assert list(placed([(1.0, "$ ls"), (2.0, " -l\nx"), (3.0, "y" * 120)])) == [
        Piece(1.0, 0, 0, "$ ls"),
        Piece(2.0, 0, 4, " -l"),
        Piece(2.0, 1, 0, "x"),
        Piece(3.0, 1, 1, "y" * 115),
        Piece(3.0, 2, 0, "y" * 5),
    ]


def test_each_text_appears_when_it_came_and_stays_until_the_picture_begins_again() -> None:
    texts = ElementTree.fromstring(drawn(list(placed([(5.0, "$ a <b>\n"), (8.0, "first token after 3 s")])))).iter(
        f"{SVG}text"
    )
    found = {str(one.text): (one.get("class"), one[0].attrib) for one in texts}
    assert {text: kind for text, (kind, _) in found.items()} == {
        "$ a <b>": "typed",
        "first token after 3 s": "figures",
        **dict.fromkeys(("0 s", "1 s", "2 s", "3 s"), "clock"),
    }
    at = {text: [float(share) * 8 for share in timing["keyTimes"].split(";")] for text, (_, timing) in found.items()}
    assert at["first token after 3 s"] == [0, 3.01]
    assert {timing["dur"] for _, timing in found.values()} == {"8.00s"}
    assert [round(share, 2) for share in at["1 s"]] == [0, 1.01, 2.01]
