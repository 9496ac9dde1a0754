"""The compiled operators, of each variant that this CPU has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from diskprefix.native import library
from diskprefix.native.compute_threads import use_threads
from diskprefix.native.library import Operators
from tests.closing import TESTED
from tests.native.variants import of_this_cpu


@pytest.fixture(params=of_this_cpu())
def operators(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Operators:
    library.choose(request.param)
    record_property(TESTED, request.param)
    found = library.operators()
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def usual_threads() -> Iterator[None]:
    """What a test sets, the next one does not have."""
    yield
    use_threads(0)
