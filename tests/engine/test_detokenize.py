from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.engine.detokenize import TextStream
from tests.engine.tiny import tokenizer

_tokenizer: Any = tokenizer()


def ids(text: str) -> list[int]:
    encoded: list[int] = _tokenizer(text, add_special_tokens=False)["input_ids"]
    return encoded


def stream(text: str, *stop: str) -> tuple[str, bool]:
    """The text of a reply that stops where a stop string is complete."""
    out = TextStream(_tokenizer, stop)
    pieces = []
    for token in ids(text):
        pieces.append(out.push(token))
        if out.stopped:
            return "".join(pieces), True
    return "".join(pieces) + out.finish(), False


@given(st.text(alphabet="ab é€😀\n", max_size=20))
def test_pieces_join_to_the_whole_text(text: str) -> None:
    assert stream(text) == (text, False)


def test_a_character_of_several_tokens_is_never_shown_in_part() -> None:
    out = TextStream(_tokenizer, ())
    tokens = ids("😀")
    assert len(tokens) == 4
    assert [out.push(token) for token in tokens] == ["", "", "", "😀"]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), ("one ", True)),
        ("one EN two", ("END",), ("one EN two", False)),
        ("one EN", ("END",), ("one EN", False)),
        ("a, b\n\nc", ("\n\n", ","), ("a", True)),
        ("aab", ("ab",), ("a", True)),
        ("ENEND", ("END",), ("EN", True)),
        ("stop", ("stop",), ("", True)),
    ],
)
def test_stop_strings_end_the_text_before_them(text: str, stop: tuple[str, ...], expected: tuple[str, bool]) -> None:
    assert stream(text, *stop) == expected


@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3))
def test_stopping_equals_cutting_the_whole_text(text: str, stops: list[str]) -> None:
    """Token by token the earliest complete stop string wins; its text never appears."""
    shown, stopped = stream(text, *stops)
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)


def test_special_tokens_have_no_text() -> None:
    out = TextStream(_tokenizer, ())
    assert out.push(_tokenizer.eos_token_id) == ""
    assert out.finish() == ""
