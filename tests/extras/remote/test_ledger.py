"""What a process knows of objects without asking."""

from __future__ import annotations

from diskprefix.extras.remote.ledger import Ledger
from tests.store.building import Clock


def test_what_was_there_a_day_ago_is_asked_for_again() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.record_object("a")
    clock.now += 86000.0
    assert ledger.is_known("a")
    clock.now += 1000.0
    assert not ledger.is_known("a")
    ledger.record_object("a")
    assert ledger.is_known("a")
