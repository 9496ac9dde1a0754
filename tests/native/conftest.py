"""The compiled operators, made if they are out of date: without a compiler these tests fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diskprefix.native import build, library


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    if not build.is_current():
        build.build()
        library._loaded.cache_clear()


@pytest.fixture(autouse=True)
def chosen_again() -> Iterator[None]:
    """What a test chose, the next one does not have."""
    before = library._chosen
    yield
    library._chosen = before
