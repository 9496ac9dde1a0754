"""`tools/bench census` counts lines by what they hold, and finds names that stand for two things."""

from __future__ import annotations

from tools.programs.census import doubled, lines_of

SOURCE = '''\
"""A page
of two lines."""

# why
LIMIT = 3  # a comment beside code
"""What the constant is."""
TEXT = """
a string that is code
"""
'''


def test_each_line_is_of_one_kind() -> None:
    assert lines_of(SOURCE) == {"lines": 9, "code": 4, "docstring": 3, "comment": 1, "blank": 1}


def test_a_name_with_two_files_is_doubled() -> None:
    assert doubled([("Slot", "a.py"), ("Place", "a.py"), ("Slot", "b.py")]) == {"Slot": ["a.py", "b.py"]}
