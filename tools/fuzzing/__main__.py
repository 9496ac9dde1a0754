"""The entry point of `tools/fuzz`."""

from __future__ import annotations

import base64
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from diskprefix.errors import DiskPrefixError
from tools.fuzzing import corpus, running
from tools.fuzzing.running import Fuzzed, Outcome
from tools.measuring.live_server import step
from tools.measuring.options import JSON
from tools.measuring.report import machine, new_table, print_report, say, show_machine

_JOBS = 2
_SHOWN_BYTES = 3000


def show(report: dict[str, Any], console: Console) -> None:
    title = f"{len(report['targets'])} targets, {report['minutes']:g} minutes each"
    table = new_table(title, left=("target", ""), right=("executions", "edges", "inputs", "found"))
    for row in report["targets"]:
        num_findings = str(int(bool(row["finding"])))
        table.add_row(
            row["target"],
            row["language"],
            f"{row['executions']:,}",
            f"{row['edges']:,}",
            f"{row['inputs']:,}",
            num_findings,
        )
    table.add_row(
        "all", "", f"{sum(row['executions'] for row in report['targets']):,}", "", "", str(len(report["findings"]))
    )
    console.print(table)
    for row in report["findings"]:
        say(console, f"{row['target']}: {row['finding']}")
        say(console, f"    again: tools/fuzz {row['target']} --input {row['input']}")
        if row["input"] and len(content := Path(row["input"]).read_bytes()) <= _SHOWN_BYTES:
            say(console, f"    which has, in base64: {base64.b64encode(content).decode()}")
    show_machine(report["machine"], console)


def fuzzed(targets: list[Fuzzed], minutes: float, jobs: int, workspace: Path, progress: Console) -> list[Outcome]:
    """Runs each target for `minutes`, `jobs` of them side by side."""

    def fuzz_target(target: Fuzzed) -> Outcome:
        outcome = running.run(target, 60 * minutes, workspace)
        said = outcome.finding or f"{outcome.executions:,} executions, {outcome.edges:,} edges"
        progress.print(f"{time.strftime('%H:%M:%S')} {target.name}: {said}", highlight=False, markup=False)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(fuzz_target, targets))


@click.command()
@click.argument("names", nargs=-1, metavar="[TARGET]...")
@click.option(
    "--minutes", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="Minutes for each target."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=_JOBS, show_default=True, help="Targets that run at the same time."
)
@click.option(
    "--input",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run one target once with this input.",
)
@click.option("--races", is_flag=True, help="Only the operators, with their parts in threads, under ThreadSanitizer.")
@click.option("--keep", is_flag=True, help="Rewrite the corpus in git from the inputs of all runs.")
@JSON
def main(
    names: tuple[str, ...],
    minutes: float,
    jobs: int,
    path: Path | None,
    races: bool,
    keep: bool,
    as_json: bool,
) -> None:
    """Fuzz the readers of foreign bytes, and the operators in C++, under ASan and UBSan.

    Needs a clang with libFuzzer (Debian: clang-19, libclang-rt-19-dev). Atheris is installed on first use. Exits with
    1 if something is found.
    """
    progress = Console(stderr=True)
    try:
        with tempfile.TemporaryDirectory(prefix="diskprefix-fuzz-") as folder:
            workspace = Path(folder)
            with step(progress, "compiling"):
                targets = running.targets(names, races=races)
            if keep:
                sizes = {target.name: corpus.keep(target.name, running.merged(target, workspace)) for target in targets}
                print_report({"bytes": sizes}, True, show)
                sys.exit(0)
            if path is not None:
                outcomes = [running.replay(target, path, workspace) for target in targets]
            else:
                outcomes = fuzzed(targets, minutes, jobs, workspace, progress)
    except DiskPrefixError as error:
        print(f"tools/fuzz: {error}", file=sys.stderr)
        sys.exit(1)
    rows = [asdict(outcome) for outcome in outcomes]
    report = {
        "minutes": minutes,
        "machine": machine(),
        "targets": rows,
        "findings": [row for row in rows if row["finding"]],
    }
    print_report(report, as_json, show)
    sys.exit(1 if report["findings"] else 0)


if __name__ == "__main__":
    main(prog_name="tools/fuzz")
