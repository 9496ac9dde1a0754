"""Kills processes with SIGKILL while they change a store, and checks the store afterwards.

`tools/bench crash` runs the whole matrix, `tests/faults/test_crash.py` a short one.
"""
