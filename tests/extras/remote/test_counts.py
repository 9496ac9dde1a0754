"""What a process knows of objects without asking."""

from __future__ import annotations

from diskprefix.extras.remote.counts import Counts
from tests.store.building import Clock


def test_what_was_there_a_day_ago_is_asked_for_again() -> None:
    clock = Clock()
    counts = Counts(clock)
    counts.add_known("a")
    clock.now += 86000.0
    assert counts.is_known("a")
    clock.now += 1000.0
    assert not counts.is_known("a")
    counts.add_known("a")
    assert counts.is_known("a")
