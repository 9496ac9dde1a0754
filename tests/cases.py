"""The mark `cases(count)`: of a test whose many cases take long together, so many run always, the others with
`tools/test --all`. Which ones turns with the commit (`tests/faults/seeds.py`): five dozen run nearly all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256

import pytest

from tests.faults.seeds import SAMPLE, fresh_seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", metavar="SEED", help="what samples are drawn from, in place of the commit")
    parser.addoption("--since", metavar="COMMIT", help="run what the changes since this commit reach, nearest first")


def take_seed(config: pytest.Config) -> None:
    """Notes the seeds of a run, for this process and all that it starts."""
    if config.option.sample:
        os.environ[SAMPLE] = config.option.sample
    fresh_seed()


def mark_as_slow(items: Sequence[pytest.Item], seed: str) -> None:
    """Marks the cases that run only with `--all` as slow. `seed` decides which ones these are."""
    counts: dict[str, int] = {}
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("cases")
        if mark and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            (counts[test],) = mark.args
            of_test.setdefault(test, []).append(item)
    for test, cases in of_test.items():
        chosen = chosen_of([item.nodeid for item in cases], counts[test], seed)
        for item in cases:
            if item.nodeid not in chosen:
                item.add_marker("slow")


def chosen_of(cases: Sequence[str], count: int, seed: str) -> set[str]:
    """Returns the names of the `count` cases of a test that this seed chooses."""
    # In no order, so that they differ in every parameter. The order by a checksum would favour some cases at each seed:
    # another seed changes the same bits of all their numbers.
    return set(sorted(cases, key=lambda name: sha256(f"{seed} {name}".encode()).digest())[:count])
