"""A store in an empty folder, and the clock that it goes by. What a test opens is closed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.writer import Writer
from tests.prefixstore.store.building import Clock, open_store


@pytest.fixture(autouse=True)
def closes_stores() -> Iterator[None]:
    """A test need not close its stores. It does to open the folder again."""
    opened, init = list[Store](), Store.__init__

    def noted(self: Store, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "__init__", noted)
        yield
    for store in opened:
        store.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Store:
    return open_store(tmp_path, clock=clock)


@pytest.fixture
def writer(store: Store) -> Iterator[Writer]:
    """With room for whatever a test submits. All of it is written at the end."""
    writer = Writer(store, buffer_bytes=1 << 30)
    yield writer
    assert writer.close(30)
