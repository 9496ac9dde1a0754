from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diskprefix.printable import escaped, printable_only, shown

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=300)


@given(ANY_TEXT)
def test_whatever_comes_in_what_goes_out_is_printable(text: str) -> None:
    assert escaped(text).isprintable()
    assert printable_only(text).isprintable()
    assert shown(text, 20).isprintable()
    assert len(shown(text, 20)) <= 20


def test_text_that_is_printable_and_short_stays_as_it_is() -> None:
    text = "Größe 🦀 · 流れ"
    assert escaped(text) == printable_only(text) == shown(text) == text


def test_control_characters_are_written_as_python_writes_them() -> None:
    assert escaped("a\nb\x1b[31m\x9b\u2028\u202e\ud800") == r"a\nb\x1b[31m\x9b\u2028\u202e\ud800"


def test_what_is_cut_says_so() -> None:
    assert shown("x" * 101) == "x" * 99 + "…"
    assert shown("x" * 100) == "x" * 100


def test_blanks_of_any_kind_become_one_space() -> None:
    assert printable_only(" a\t\n b\u3000c\x1b[2Jd ") == "a b c[2Jd"
