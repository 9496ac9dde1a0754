"""The seeds of histories that failed once, and what each of them said: a line of `kept_seeds.txt` has the edition, the
seed and the words.

A seed decides in which order threads continue, so it stays the history that it was until code on its way stops threads
at other places. From then on it is one more random history, and the mutant of the same protection (`mutants.py`) is
what finds the fault again. New events would change all seeds at once, so each seed has the edition of the events
(`history.EDITION`) with which it failed.
"""

from __future__ import annotations

from pathlib import Path

from tests.faults.interleavings.history import EDITION

FILE = Path(__file__).with_name("kept_seeds.txt")
_WORDS = 100
"""So many characters of what a history said are kept."""


def line_of(seed: int, said: str) -> str:
    """Returns the line that keeps the seed of a history of this edition."""
    words = next(filter(None, said.strip().splitlines()[::-1]), "")
    return f"{EDITION} {seed} {words[:_WORDS].strip()}"


def keep(seed: int, said: str, file: Path = FILE) -> str:
    """Adds a seed that failed, unless it is kept already. Returns its line."""
    line = line_of(seed, said)
    if seed not in kept_in(file).get(EDITION, {}):
        with file.open("a", encoding="utf-8") as out:
            out.write(f"{line}\n")
    return line


def kept_in(file: Path) -> dict[int, dict[int, str]]:
    """Returns what each seed of each edition said."""
    kept: dict[int, dict[int, str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        edition, seed, said = line.split(" ", 2)
        kept.setdefault(int(edition), {})[int(seed)] = said
    return kept


KEPT_SEEDS = kept_in(FILE)
