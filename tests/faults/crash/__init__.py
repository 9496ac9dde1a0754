"""Processes that are killed in the middle of what they do to a store, and what must hold afterwards.

`tools/bench crash` runs all of it at full length, `tests/test_crash.py` a little of it.
"""
