from __future__ import annotations

import subprocess
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.faults.seeds import _FRESH, NO_COMMIT, SAMPLE, commit_of, fresh_seed, part_of, seed_of_run, seeds_of
from tools.measuring.options import seed_option


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_sample_has_other_seeds_at_each_commit_and_the_same_ones_in_every_run() -> None:
    one, other = (seeds_of("histories", 20, seed=seed) for seed in ("a" * 8, "b" * 8))
    assert one == seeds_of("histories", 20, seed="a" * 8)
    assert not set(one) & set(other)
    assert not set(one) & set(seeds_of("files", 20, seed="a" * 8))
    assert len(one) == 20


def test_each_row_of_a_matrix_is_in_the_part_of_some_commit() -> None:
    parts = [part_of("files", "abcdefg", 3, seed=str(number)) for number in range(60)]
    assert {"".join(part) for part in parts} == {"abc", "bcd", "cde", "def", "efg", "fga", "gab"}
    assert part_of("files", "abcdefg", seed="7") == part_of("files", "abcdefg", 3, seed="7")[:1]


def test_seeds_fit_32_bits() -> None:
    firsts = [seeds_of("histories", 100, seed=str(number)) for number in range(1_000)]
    assert all(seeds[0] >= 0 and seeds[-1] < 2**31 for seeds in firsts)


def test_the_commit_is_that_of_the_checkout_and_a_copy_without_one_has_fixed_seeds(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == NO_COMMIT
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    git(checkout, "init", "--quiet")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "first")
    assert commit_of(checkout) == git(checkout, "rev-parse", "HEAD")
    copy = checkout / "copy"
    copy.mkdir()
    assert commit_of(copy) == NO_COMMIT


@pytest.mark.parametrize(
    ("variable", "value", "is_fresh"),
    [("LANG", "C", True), ("CI", "true", False), ("DISKPREFIX_TEST_MISSING", "", False), (SAMPLE, "cafe", False)],
)
def test_simulators_try_others_in_each_run_but_in_ci_and_where_a_seed_is_given(
    variable: str, value: str, is_fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "DISKPREFIX_TEST_MISSING", SAMPLE, _FRESH):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(time, "time_ns", lambda: 0xABCDEF12 * 1000)
    assert fresh_seed() == fresh_seed() == ("abcdef12" if is_fresh else seed_of_run())
    assert seeds_of("histories", 3) == seeds_of("histories", 3, seed=fresh_seed())
    assert part_of("files", "abcdefg") == part_of("files", "abcdefg", seed=seed_of_run())
    if variable == SAMPLE:
        assert fresh_seed() == "cafe"


def test_a_tool_says_which_seed_it_drew_and_takes_the_one_that_is_given() -> None:
    seeds = list[int]()

    @click.command()
    @seed_option("histories", "The first.")
    def tool(seed: int) -> None:
        seeds.append(seed)

    drawn = CliRunner().invoke(tool, [])
    given = CliRunner().invoke(tool, ["--seed", "7"])
    assert seeds == [seeds_of("histories", 1)[0], 7]
    assert (drawn.stderr, given.stderr) == (f"--seed {seeds[0]}\n", "")
