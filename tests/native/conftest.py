"""The compiled operators: the best variant that this CPU has, which stands for all, and that for rows of bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from diskprefix.native.compute_threads import use_threads
from diskprefix.native.library import Operators
from tests.closing import TESTED
from tests.native.variants import chosen, in_depth, name_of


@pytest.fixture(params=in_depth("8", "bf16"))
def operators(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Operators:
    operators = chosen(*request.param)
    record_property(TESTED, name_of(operators))
    return operators


@pytest.fixture(autouse=True)
def usual_threads() -> Iterator[None]:
    """What a test sets, the next one does not have."""
    yield
    use_threads(0)
