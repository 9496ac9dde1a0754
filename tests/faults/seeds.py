"""What the samples of a run are drawn from: each commit tries others, and every run of one commit tries the same.
Simulators try others in every run, but in CI, which has no time to look at what it finds by chance.

`--sample SEED` of pytest gives a seed in place of both, as to try again what failed at another commit.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

_Item = TypeVar("_Item")
ROOT = Path(__file__).parents[2]
NO_COMMIT = "00000000"
"""What seeds are drawn from outside a checkout, where each run tries the same ones."""
SAMPLE = "DISKPREFIX_TEST_SAMPLE"
"""The variable with the seed that was given, for all processes of a run."""
_FRESH = "DISKPREFIX_TEST_FRESH"
"""The variable with the seed of this run's simulators, for all its processes."""
_LAST = 2**31
"""Fits a signed 32-bit integer, with room for a sample behind it."""


@cache
def commit_of(root: Path = ROOT) -> str:
    """Returns the id of the commit that the checkout `root` is at, or `NO_COMMIT` if it is no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--show-prefix", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return NO_COMMIT
    prefix, commit = done.stdout.split("\n")[:2]
    # A copy of the files may lie inside the checkout of something else.
    return NO_COMMIT if prefix else commit


def seed_of_run() -> str:
    """Returns what the samples of this run are drawn from: the seed that was given, or the first digits of the
    commit."""
    return os.environ.get(SAMPLE) or commit_of()[:8]


def is_ci() -> bool:
    return "CI" in os.environ or "DISKPREFIX_TEST_MISSING" in os.environ


def fresh_seed() -> str:
    """Returns what the simulators of this run draw from: in CI and where a seed was given what all samples are drawn
    from, else the clock when it was first asked."""
    if SAMPLE in os.environ or is_ci():
        return seed_of_run()
    return os.environ.setdefault(_FRESH, f"{time.time_ns() // 1000 % 2**32:08x}")


def line_of_run() -> str:
    """Returns the line that says what the samples were drawn from."""
    given = os.environ.get(SAMPLE)
    origin = "given" if given else "no commit here" if commit_of() == NO_COMMIT else "of the commit"
    sample, fresh = seed_of_run(), fresh_seed()
    simulators = f", simulators {fresh} (of the clock)" if fresh != sample else ""
    return f"sample {sample} ({origin}){simulators}: `tools/test --sample SEED` tries one again"


def seeds_of(sample: str, count: int, *, seed: str | None = None) -> range:
    """Returns `count` seeds from 0 to 2**31 of a simulator, one behind the other. A failed seed must be in the message
    of its failure: the next run does not try it again."""
    drawn = hashlib.sha256(f"{sample} {seed or fresh_seed()}".encode()).digest()
    first = int.from_bytes(drawn[:8], "big") % (_LAST - count)
    return range(first, first + count)


def part_of(sample: str, items: Sequence[_Item], count: int = 1, *, seed: str | None = None) -> list[_Item]:
    """Returns `count` of the rows of a matrix, one behind the other and from the last to the first, for the sample of
    this name."""
    first = seeds_of(sample, 1, seed=seed or seed_of_run())[0]
    return [items[(first + i) % len(items)] for i in range(count)]
