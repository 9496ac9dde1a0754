"""ThreadSanitizer over the compiled operators: `races.cpp` calls them all from several threads at once, each call on a
team of threads.

It is a program of its own, because torch's threads are not compiled for the sanitizer. Each variant that the CPU has is
compiled whole, with the program.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from diskprefix.native import build
from tools.measuring.live_server import step
from tools.measuring.options import JSON
from tools.measuring.report import machine, new_table, print_report, say, show_machine
from tools.measuring.workspace import measuring

_DRIVER = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", "-ffp-contract=off", "-w")
_RACES = 66
"""The exit code that the sanitizer gives, and that of the program on a CPU without the variant."""
_NOT_FOR_THIS_CPU = 2
_SPARE_S = 600
"""Seconds that a run may take beside those that it was asked for: ended late, it hangs."""


@dataclass(frozen=True)
class Outcome:
    """One run: calls of operators, those with another result than one thread alone gives, and the places of races."""

    calls: int
    wrong: int
    races: tuple[str, ...]
    failure: str = ""

    @property
    def is_clean(self) -> bool:
        return self.calls > 0 and not (self.wrong or self.races or self.failure)


def variants() -> dict[str, tuple[str, ...]]:
    """Returns the variants that the compiler knows, with their flags. Raises `build.BuildError`."""
    return {**build._VARIANTS.get(build._target(build._compiler()), {}), "baseline": ()}


def compiled(folder: Path, variant: str) -> Path:
    """Compiles the program into `folder`. Raises `build.BuildError`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(build.SOURCES, folder)
    shutil.copy(_DRIVER, folder)
    program = folder / "races"
    defined = [f"-DVARIANT={variant}", f"-DVARIANTS=V({variant})", '-DSOURCE=""', '-DCOMPILER=""']
    flags = [*_FLAGS, *variants()[variant], *defined, "-I", str(folder)]
    build._run([*build._compiler(), *flags, str(folder / _DRIVER.name), "-o", str(program)])
    return program


def run(program: Path, seconds: float) -> Outcome | None:
    """Runs a program that was compiled; None if this CPU cannot compute the variant."""
    options = f"exitcode={_RACES}:halt_on_error=0"
    try:
        done = subprocess.run(
            [str(program), str(seconds)],
            env=os.environ | {"TSAN_OPTIONS": options},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + _SPARE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(0, 0, (), "it hangs")
    if done.returncode == _NOT_FOR_THIS_CPU:
        return None
    found = re.findall(r"^SUMMARY: ThreadSanitizer: (.*)$", done.stderr, re.MULTILINE)
    races = tuple(dict.fromkeys(re.sub(r"/\S*/", "", line) for line in found))
    calls, wrong = (int(number) for number in done.stdout.split()) if done.stdout else (0, 0)
    if done.returncode not in (0, _RACES) or not (done.stdout or races):
        last = done.stderr.strip().rpartition("\n")[2]
        return Outcome(calls, wrong, races, f"exit code {done.returncode}: {last}")
    return Outcome(calls, wrong, races)


def of_all_variants(folder: Path, seconds: float, note: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for variant in variants():
        note(variant)
        if outcome := run(compiled(folder / variant, variant), seconds):
            rows.append({"name": variant, **asdict(outcome), "holds": outcome.is_clean})
    return rows


def show(report: dict[str, Any], console: Console) -> None:
    title = f"All operators, {report['seconds']:g} s each"
    table = new_table(title, left=("", "race"), right=("calls", "wrong", ""))
    for row in report["rows"]:
        mark = "✓" if row["holds"] else "✗"
        table.add_row(row["name"], (row["races"] or [""])[0], f"{row['calls']:,}", f"{row['wrong']:,}", mark)
    console.print(table)
    for row in report["rows"]:
        for race in row["races"]:
            say(console, f"{row['name']}: {race}")
        if row["failure"]:
            say(console, f"{row['name']}: {row['failure']}")
    show_machine(report["machine"], console)


@click.command()
@click.option("--seconds", type=click.FloatRange(min=0), default=60.0, show_default=True, help="For each variant.")
@JSON
def main(seconds: float, as_json: bool) -> None:
    """Call all operators from several threads at once, under ThreadSanitizer.

    Needs a compiler with its library. Exits with 1 if there is a race, or if a result differs from that of one thread.
    """
    progress = Console(stderr=True)
    try:
        with measuring(None, progress) as folder, step(progress, "ThreadSanitizer") as note:
            rows = of_all_variants(folder, seconds, note)
    except build.BuildError as error:
        raise click.ClickException(str(error)) from error
    report = {"benchmark": "races", "seconds": seconds, "machine": machine(), "rows": rows}
    print_report(report, as_json, show)
    sys.exit(0 if all(row["holds"] for row in rows) else 1)
