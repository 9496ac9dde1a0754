"""Kills processes while they write packed weights, and flips a bit of each matrix: with what does the next start
compute?

A start is right if all weights that it has in memory, when its first step may begin, have the bits of a start without
the file.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from rich.console import Console

from diskprefix.daemon.settings import Settings
from diskprefix.runtime.fetch.embedded import embedded_file
from diskprefix.runtime.files import packed_file
from diskprefix.runtime.load import packed_weights
from diskprefix.runtime.load.loader import LoadedModel, load_model
from diskprefix.runtime.load.packed_weights import PackedFiles
from diskprefix.tokens import content_digest
from tools.measuring.options import FOLDER, JSON, seed_option
from tools.measuring.report import machine, median, new_table, show_machine


class Start(NamedTuple):
    """A start: the file that it mapped, if any, the seconds until all weights were in memory and until it said what it
    found wrong (None if nothing), and a digest of each weight."""

    loaded: LoadedModel
    file: Path | None
    seconds: float
    found_s: float | None
    weights: dict[str, bytes]


class _Said(logging.Handler):
    """Notes when the log first said that something is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.found_s = time.perf_counter(), None

    began: float
    found_s: float | None

    def emit(self, record: logging.LogRecord) -> None:
        if self.found_s is None and "anew" in record.getMessage():
            self.found_s = time.perf_counter() - self.began


def start(model: Path, folder: Path) -> Start:
    """Loads a model as a daemon does, until its first step may begin."""
    log, said = logging.getLogger("diskprefix"), _Said()
    log.addHandler(said)
    log.setLevel(logging.INFO)
    try:
        loaded = load_model(Settings(model=str(model), packed_weights=str(folder)), lambda _line: None)
        seconds = time.perf_counter() - said.began
    finally:
        log.removeHandler(said)
    assert loaded.weights is not None
    weights = {name: content_digest(np.ascontiguousarray(of).data.cast("B")) for name, of in loaded.weights.named()}
    return Start(loaded, _mapped_file(folder), seconds, said.found_s, weights)


def _mapped_file(folder: Path) -> Path | None:
    names = (
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line
    )
    return next((Path(name) for name in names if not name.endswith("(deleted)")), None)


def keep(loaded: LoadedModel) -> float:
    """Writes the file of a start. Returns the seconds that it took."""
    began = time.perf_counter()
    for _ in loaded.keep_weights():
        pass
    return time.perf_counter() - began


def kill_at(loaded: LoadedModel, seconds: float) -> None:
    """Writes the file in a fork, which is killed after so many seconds."""
    if not (child := os.fork()):
        # Nothing of this process may run in the fork, also not at its end.
        try:
            keep(loaded)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


class Kill(NamedTuple):
    moment_s: float
    is_kept: bool
    """Whether the file had its name."""
    partial_bytes: int
    is_right: bool


def kills(model: Path, folder: Path, count: int, seed: int) -> Iterator[Kill]:
    """Yields what a start finds after each kill. The file is written anew each time."""
    files = PackedFiles(folder)
    first = start(model, folder)
    whole_s = keep(first.loaded)
    for moment in np.random.default_rng(seed).uniform(0, 1.1 * whole_s, count).tolist():
        for path, _ in files.all():
            path.unlink()
        kill_at(first.loaded, moment)
        is_kept = bool(files.all())
        partial_bytes = sum(path.stat().st_size for path in folder.iterdir()) if not is_kept else 0
        after = start(model, folder)
        is_right = after.weights == first.weights and (after.file is not None) == is_kept and after.found_s is None
        yield Kill(
            moment, is_kept, partial_bytes, is_right and {*folder.iterdir()} == {path for path, _ in files.all()}
        )


class Flip(NamedTuple):
    num_bytes: int
    found_s: float | None
    start_s: float
    is_right: bool


def flips(model: Path, folder: Path, seed: int) -> Iterator[Flip]:
    """Yields what a start does with each matrix that has a flipped bit."""
    first = start(model, folder)
    keep(first.loaded)
    start(model, folder)
    ((path, _),) = PackedFiles(folder).all()
    with path.open("rb") as file:
        contents, _ = packed_file._read_contents(file)
    rng = np.random.default_rng(seed)
    for place in contents.places.values():
        at, bit = place.offset + int(rng.integers(place.num_bytes)), 1 << int(rng.integers(8))
        # A copy: earlier starts have mapped the file, and see what is written into it.
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= bit
        new = path.with_name("new")
        new.write_bytes(damaged)
        new.chmod(0o600)
        new.replace(path)
        after = start(model, folder)
        is_right = after.weights == first.weights and after.found_s is not None
        yield Flip(place.num_bytes, after.found_s, after.seconds, is_right)
        damaged[at] ^= bit
        new.write_bytes(damaged)
        new.chmod(0o600)
        new.replace(path)


@click.command()
@click.option("--kills", "num_kills", default=100, show_default=True, type=click.IntRange(min=0))
@click.option("--flips/--no-flips", "are_flipped", default=True, show_default=True, help="Flip a bit of each matrix.")
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="A .gguf file; the embedded model.")
@seed_option("packed", "Of the moments and the bits.")
@FOLDER
@JSON
def main(
    num_kills: int, *, are_flipped: bool, model: Path | None, seed: int, folder: Path | None, as_json: bool
) -> None:
    """Kill processes at random moments of writing packed weights, flip a bit of each matrix, and start after each.

    Exits with 1 if a start computes with a wrong weight, does not say what it found, or leaves what was not finished.
    """
    console = Console(stderr=True)
    show_machine(machine(), console)
    packed_weights.LEAST_BYTES = 0
    model = model or embedded_file(lambda line: console.print(line, highlight=False))
    with tempfile.TemporaryDirectory(prefix="diskprefix-packed-", dir=folder) as work:
        killed = list(kills(model, Path(work) / "kills", num_kills, seed))
        flipped = list(flips(model, Path(work) / "flips", seed)) if are_flipped else []
    num_wrong = sum(not kill.is_right for kill in killed) + sum(not flip.is_right for flip in flipped)
    if as_json:
        click.echo(
            json.dumps({"kills": [kill._asdict() for kill in killed], "flips": [flip._asdict() for flip in flipped]})
        )
    else:
        _show(model, killed, flipped)
    sys.exit(1 if num_wrong else 0)


def _show(model: Path, killed: list[Kill], flipped: list[Flip]) -> None:
    table = new_table(f"Packed weights of {model.name}", left=("what",), right=("cases", "wrong", "more"))
    if killed:
        kept, most = sum(kill.is_kept for kill in killed), max(kill.partial_bytes for kill in killed)
        more = f"{kept} after the rename; at most {most / 1e6:.0f} MB were left, and removed"
        table.add_row("killed while it is written", str(len(killed)), _wrong(killed), more)
    if flipped:
        seconds = [flip.found_s for flip in flipped if flip.found_s is not None]
        start_s = median([flip.start_s for flip in flipped])
        more = f"found after {median(seconds):.2f} s, at most {max(seconds):.2f}; weights in memory after {start_s:.2f}"
        table.add_row("a bit of each matrix", str(len(flipped)), _wrong(flipped), more)
    Console().print(table)


def _wrong(cases: list[Kill] | list[Flip]) -> str:
    return str(sum(not case.is_right for case in cases))
