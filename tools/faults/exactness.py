"""The exactness matrix: for every architecture, compares a restored run with a cold run, bit for bit.

One process computes the answers cold and saves a prompt, and dies of SIGKILL. Another one, with the same weights,
restores that prompt, one that continues it, one that branches off, and shorter ones. Next-token logits, greedy text and
the logits after each of its tokens must be the same bits, and everything that can be restored must be restored.

With `--form several`, real daemons are asked over HTTP: one for each model alone, and one daemon with six models, of
which one fits into memory at a time (`tests/exactness/forms.py`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import click
from rich.console import Console

from diskprefix.control_groups import num_cpus
from diskprefix.daemon.catalogue.verified import installed_versions
from diskprefix.printable import first_line
from tests.exactness.architectures import ARCHITECTURES, SCALED, WITH_DRAFT_LAYER
from tests.exactness.forms import SeveralRow, several_rows
from tests.exactness.jobs import Job, Lengths
from tests.exactness.pictures import LENGTHS, PICTURED
from tests.exactness.rows import DTYPES, Row, Tell, run_jobs
from tools.measuring.live_server import step
from tools.measuring.report import new_table
from tools.models.real import real_model

SHORT_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

REAL: dict[str, tuple[tuple[str, ...], Lengths]] = {
    "smollm2": ((*DTYPES, "q8"), Lengths.scaled(7900, block=256)),
    "qwen2.5-coder-0.5b": (("bfloat16", "q8"), Lengths.scaled(8000, block=256)),
    "gemma3-270m": (("bfloat16", "q8"), Lengths.scaled(20_500, block=256)),
}
"""The dtypes and the lengths of the prompts: the first has 8 192 positions."""
Rows: TypeAlias = list[SeveralRow]
_TOGETHER = 6
"""The number of models in one daemon."""


def tiny_jobs(names: list[str], dtypes: tuple[str, ...], folder: Path, reply: int) -> list[Job]:
    jobs = [
        Job(name=name, dtype=dtype, folder=str(folder / f"{name}-{dtype}"), reply=reply)
        for name in names
        for dtype in dtypes
    ]
    return [replace(job, lengths=LENGTHS) if job.name in PICTURED else job for job in jobs]


def real_jobs(names: list[str], dtypes: tuple[str, ...], folder: Path, console: Console) -> list[Job]:
    """Returns the jobs of the real models that are there, and prints which ones are not."""
    jobs = []
    for name in names:
        model = real_model(name, lambda line: console.print(f"  {line}", highlight=False, markup=False))
        if model is None:
            console.print(f"  {name} is left out: it is not there", highlight=False, markup=False)
            continue
        known, lengths = REAL[name]
        job = Job(name=name, dtype="", folder="", model=str(model), lengths=lengths, threads=num_cpus())
        chosen = [dtype for dtype in known if dtype in dtypes]
        jobs += [replace(job, dtype=dtype, folder=str(folder / f"{name}-{dtype}")) for dtype in chosen]
    return jobs


def several_models(names: list[str], dtypes: Sequence[str], folder: Path, lanes: int, reply: int, tell: Tell) -> Rows:
    """Returns a row for each architecture in each dtype. `lanes` routers run at a time."""

    def rows_of(dtype: str, chosen: list[str]) -> Rows:
        with tempfile.TemporaryDirectory(dir=folder) as workspace:
            try:
                rows = several_rows(chosen, dtype, Path(workspace), Lengths(), reply)
            except Exception as error:  # noqa: BLE001 - the rows tell it
                reason = f"{type(error).__name__}: {first_line(error)}"
                if len(chosen) > 1:
                    tell(f"{dtype}, one by one after {reason}: {', '.join(chosen)}")
                    return [row for name in chosen for row in rows_of(dtype, [name])]
                rows = [SeveralRow(chosen[0], dtype, 0, [reason], {})]
        compared, different = sum(row.comparisons for row in rows), sum(len(row.different) for row in rows)
        tell(f"{dtype}, {compared} comparisons, {different} different: {', '.join(chosen)}")
        for row in rows:
            if row.different:
                tell(f"{row.architecture}, {dtype}: {row.different[0]}")
        return rows

    groups = [(dtype, names[i : i + _TOGETHER]) for dtype in dtypes for i in range(0, len(names), _TOGETHER)]
    with ThreadPoolExecutor(lanes) as pool:
        return [row for rows in pool.map(lambda group: rows_of(*group), groups) for row in rows]


def show_several(rows: Rows, seconds: float, console: Console) -> None:
    table = new_table("Several models in one daemon, against each alone", left=("architecture", "dtype"))
    for name in ("comparisons", "restored"):
        table.add_column(name, justify="right")
    table.add_column("different")
    for row in rows:
        restored = " ".join(map(str, row.restored.values()))
        table.add_row(row.architecture, row.dtype, str(row.comparisons), restored, "; ".join(row.different))
    console.print(table)
    compared, different = sum(row.comparisons for row in rows), sum(len(row.different) for row in rows)
    console.print(f"{len(rows)} rows, {compared} comparisons, {different} different; {seconds:.0f} s", highlight=False)


def verified_table(rows: list[Row]) -> dict[str, Any]:
    """Returns what `diskprefix list --architectures` shows of each: its layers, the dtypes in which it was exact, and
    why it is not so at every token."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.architecture, []).append(row)
    return installed_versions() | {
        "architectures": {name: _verified(named) for name, named in sorted(by_name.items()) if name in ARCHITECTURES},
        "real_models": {name: _verified(named) for name, named in sorted(by_name.items()) if name in REAL},
    }


def joined(earlier: dict[str, Any], latest: dict[str, Any]) -> dict[str, Any]:
    """Returns an earlier table, updated with the rows of the latest one. Raises `click.UsageError` if the earlier table
    was written with other versions."""
    if any(earlier[name] != latest[name] for name in installed_versions()):
        raise click.UsageError("--only: the table was written with other versions; write it whole")
    both = ("architectures", "real_models")
    return latest | {name: dict(sorted((earlier[name] | latest[name]).items())) for name in both}


def table_text(table: dict[str, Any]) -> str:
    """Returns the table as JSON, with one architecture on each line."""
    parts = []
    for key, value in table.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            lines = (f"    {json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}" for name, row in value.items())
            text = "{\n" + ",\n".join(lines) + "\n  }"
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _verified(rows: list[Row]) -> dict[str, Any]:
    first = rows[0]
    reasons = list(dict.fromkeys(row.reason or row.grid_reason for row in rows if row.reason or row.grid_reason))
    record: dict[str, Any] = {
        "model_class": first.model_class,
        "model_type": first.model_type,
        "layers": first.layers,
        "kind": first.kind,
        "dtypes": [row.dtype for row in rows if row.bitwise],
        "exact_at_tokens": [row.dtype for row in rows if row.bitwise and row.exact_at == "token"],
        "reason": "; ".join(reasons) or None,
    }
    if first.architecture in REAL:
        record["prompt_tokens"] = REAL[first.architecture][1].prompt
    return record


def show(rows: list[Row], seconds: float, console: Console) -> None:
    columns = ("architecture", "restored", "dtype", "bitwise", "exact at")
    table = new_table("Restored in another process, against a cold run", left=columns)
    for name in ("layers", "reason"):
        table.add_column(name)
    for row in rows:
        mark = "yes" if row.bitwise else "no" if row.is_as_it_should_be else "[bold red]no[/]"
        where = {"cut": "anywhere", "checkpoint": "checkpoints", "unsupported": "never"}
        exact_at = row.exact_at if row.bitwise else ""
        table.add_row(row.architecture, where[row.kind], row.dtype, mark, exact_at, row.layers, row.reason or "")
    console.print(table)
    for line in summary(rows):
        console.print(line, highlight=False)
    console.print(f"{seconds:.0f} s", highlight=False)


def summary(rows: list[Row]) -> list[str]:
    lines = []
    for dtype in sorted({row.dtype for row in rows}):
        of_dtype = [row for row in rows if row.dtype == dtype]
        kinds = Counter(row.kind for row in of_dtype)
        exact = sum(row.bitwise for row in of_dtype)
        at_tokens = sum(row.bitwise and row.exact_at == "token" for row in of_dtype)
        counted = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        lines.append(f"{dtype}: {exact} of {len(of_dtype)} bitwise ({counted}), {at_tokens} exact at every token")
    return lines


def chosen_names(only: str | None, *, real: bool) -> tuple[list[str], list[str]]:
    """Returns the names of tiny and of real models that were asked for. Raises `click.UsageError` for others."""
    tiny = [*ARCHITECTURES, *PICTURED, *WITH_DRAFT_LAYER, *SCALED]
    if only is None:
        return tiny, list(REAL) if real else []
    names = list(dict.fromkeys(name.strip() for name in only.split(",") if name.strip()))
    if unknown := [name for name in names if name not in tiny and name not in REAL]:
        raise click.UsageError(f"no such architecture: {', '.join(unknown)}; real models are {', '.join(REAL)}")
    return [name for name in names if name in tiny], [name for name in names if name in REAL]


@click.command()
@click.option(
    "--form",
    type=click.Choice(["one", "several"]),
    default="one",
    show_default=True,
    help="One model in a process, or six tiny ones in one daemon that are swapped, unloaded and killed.",
)
@click.option("--only", metavar="NAMES", help="Comma-separated architectures or real models instead of all.")
@click.option(
    "--dtype",
    type=click.Choice([*SHORT_DTYPES, *DTYPES, "q8"]),
    multiple=True,
    help="The dtype; repeatable. q8 is bfloat16 with keys and values in 8 bits.  [default: both of torch]",
)
@click.option("--real", is_flag=True, help="The real models too, at real lengths: about fifteen minutes more.")
@click.option("--reply", type=click.IntRange(min=1), default=64, show_default=True, help="Greedy tokens per prompt.")
@click.option("--jobs", type=click.IntRange(min=1), default=num_cpus(), help="Tiny models at the same time.")
@click.option(
    "--write-table",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what was verified, for `diskprefix list --architectures`: daemon/catalogue/verified_models.json. With "
    "--only, other rows stay.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of rows to stdout instead of a table.")
def main(
    form: str,
    only: str | None,
    dtype: tuple[str, ...],
    real: bool,
    reply: int,
    jobs: int,
    write_table: Path | None,
    as_json: bool,
) -> None:
    """Check for every architecture that a restore after a restart is what a cold run computes, bit for bit.

    Exits with 1 if a row is not exact, except for the few architectures that cannot be cached. Takes about ten minutes
    on two cores; with --form several, an hour.
    """
    if write_table is not None and dtype:
        raise click.UsageError("--write-table writes what is verified in all dtypes: leave --dtype out")
    dtypes = tuple(dict.fromkeys(SHORT_DTYPES.get(name, name) for name in dtype)) or DTYPES
    tiny, real_names = chosen_names(only, real=real)
    console, started = Console(stderr=True), time.monotonic()
    if form == "several":
        if real_names or write_table is not None or "q8" in dtypes:
            raise click.UsageError("--form several is for tiny models in the dtypes of torch, and writes no table")
        several = [name for name in tiny if name in ARCHITECTURES]
        _compare_several(several, dtypes, jobs, reply, console, as_json=as_json)
    with tempfile.TemporaryDirectory(prefix="diskprefix-exactness-") as workspace:
        folder = Path(workspace)
        long = real_jobs(real_names, dtypes, folder, console)
        rows = []
        for title, chosen, lanes in (
            ("tiny models", tiny_jobs(tiny, dtypes, folder, reply), jobs),
            # Each of them takes all cores.
            ("real models", [replace(job, reply=reply) for job in long], 1),
        ):
            if chosen:
                with step(console, f"{title}: {len(chosen)} rows") as note:
                    rows += run_jobs(chosen, folder, lanes, note if console.is_terminal else _quiet)
    if write_table is not None:
        table = verified_table(rows)
        if only is not None:
            table = joined(json.loads(write_table.read_text(encoding="utf-8")), table)
        write_table.write_text(table_text(table), encoding="utf-8")
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2, ensure_ascii=False))
    else:
        show(rows, time.monotonic() - started, Console())
    sys.exit(0 if rows and all(row.is_as_it_should_be for row in rows) else 1)


def _compare_several(
    names: list[str], dtypes: Sequence[str], lanes: int, reply: int, console: Console, *, as_json: bool
) -> NoReturn:
    """Runs the other form, shows its rows, and exits."""
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="diskprefix-exactness-") as workspace,
        step(console, f"several models: {len(names) * len(dtypes)} rows"),
    ):
        tell = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        rows = several_models(names, dtypes, Path(workspace), lanes, reply, lambda line: tell(f"    {line}"))
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
    else:
        show_several(rows, time.monotonic() - started, Console())
    sys.exit(0 if rows and not any(row.different for row in rows) else 1)


def _quiet(_line: str) -> None:
    """Drops a line of progress: a log has no use for one per job."""
