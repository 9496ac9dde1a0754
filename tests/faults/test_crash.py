"""SIGKILL of daemons while they answer, save and evict."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.examples import examples, thorough
from tests.faults.crash.servers import ServerPhase, SeveralPhase, StandbyPhase


@thorough
@pytest.mark.slow
@pytest.mark.parametrize("phase", [ServerPhase, StandbyPhase, SeveralPhase])
def test_daemons_that_are_killed_while_they_save_and_evict_say_what_a_cold_one_says(
    phase: type[ServerPhase], tmp_path: Path
) -> None:
    kills = examples(3)
    rounds = list(phase(tmp_path / "phase", random.Random(7)).rounds(kills))
    assert [done.failures for done in rounds] == [[]] * kills
    assert sum(done.restored for done in rounds) > 0
