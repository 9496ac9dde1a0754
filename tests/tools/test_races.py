"""`tools/bench races`: what it takes away is there, and is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.native import build
from tests.examples import thorough
from tools.programs import races
from tools.programs.races import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_is_taken_away_is_in_the_sources(mutant: Mutant) -> None:
    assert mutant.before in (build.SOURCES / mutant.file).read_text(encoding="utf-8")


@thorough
def test_the_operators_have_no_race_and_without_an_order_they_have_one(tmp_path: Path) -> None:
    for mutant in (None, MUTANTS[0]):
        outcome = races.run(races.compiled(tmp_path / "made", "baseline", mutant), seconds=5)
        assert outcome is not None
        assert outcome.is_clean is (mutant is None), outcome
