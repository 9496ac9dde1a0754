"""A plugin of pytest: the same examples in every run, and no verdict that depends on how busy the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("repeatable")
