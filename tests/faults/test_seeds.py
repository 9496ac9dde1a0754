from __future__ import annotations

import subprocess
from pathlib import Path

from tests.faults.seeds import NO_COMMIT, commit_of, part_of, seeds_of


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
