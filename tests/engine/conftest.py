"""The engines that tests of guesses compare. `engines` of a module: one that does not guess, and one that does."""

from __future__ import annotations

import pytest

from diskprefix.engine.loop import Engine
from tests.engine.driving import forget_idle


@pytest.fixture
def plain(engines: tuple[Engine, Engine]) -> Engine:
    forget_idle(engines[0].pool)
    return engines[0]


@pytest.fixture
def engine(engines: tuple[Engine, Engine]) -> Engine:
    forget_idle(engines[1].pool)
    if engines[1].drafter is not None:
        forget_idle(engines[1].drafter.model.pool)
    return engines[1]
