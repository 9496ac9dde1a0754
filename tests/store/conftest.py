"""A store in an empty folder, and the clock that it goes by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from diskprefix.store.store import Store
from tests.store.building import Clock, open_store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = open_store(tmp_path, clock=clock)
    yield store
    store.close()
