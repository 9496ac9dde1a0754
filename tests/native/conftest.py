"""The compiled operators, of each variant that this CPU has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from diskprefix.native import library
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
def threads() -> Iterator[None]:
    """What a test sets, the next one does not have."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
