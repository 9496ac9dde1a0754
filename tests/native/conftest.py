"""The compiled operators, made if they are out of date: without a compiler these tests fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from diskprefix.native import build, library
from diskprefix.native.library import Operators


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


@pytest.fixture(params=library.VARIANTS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Those of each variant that this CPU has."""
    try:
        library.choose(request.param)
    except library.Unavailable as reason:
        pytest.skip(str(reason))
    found = library.operators()
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """What a test sets, the next one does not have."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
