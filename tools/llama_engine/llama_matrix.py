"""The exactness matrix of the engine `llama`: each architecture of `.gguf` files, restored against cold, bit for bit.

The models are those of `tools/bench files`, and some more. For each, a process does what the daemon does before it
serves the file, the rehearsal. Then, with another prompt, one process computes it and a reply and saves pages, and
further processes go on from the pages. Logits of all rows and the state at the end must have the same bits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import msgspec
import numpy as np
from rich.console import Console

from diskprefix.errors import DiskPrefixError
from diskprefix.runtime.files.gguf.gguf_file import read_tensors
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.llama.llama_context import KV_KINDS, LlamaOptions
from diskprefix.runtime.llama.llama_rehearsal import Rehearsed
from diskprefix.runtime.llama.load_llama import cells_of
from tools.benchmarks.file_models import Case
from tools.benchmarks.files import LIMIT_S, converter, isolated, load_converter, make
from tools.llama_engine.llama_environment import BACKEND, environment_of, variables_of
from tools.llama_engine.llama_models import LLAMA_CASES
from tools.llama_engine.restored_run import CACHED, RESTORES, RunTask
from tools.measuring.options import JSON
from tools.measuring.report import new_table, print_report
from tools.models.real import print_report as tell

_DEVICE = """
from diskprefix.runtime.llama.devices import device_named
from diskprefix.runtime.llama.llama_library import open_library
device = device_named(open_library(), "auto")
print("CPU" if device is None else device.name)
"""
_ALL_LAYERS = 999


class ChildFailedError(DiskPrefixError):
    """A process did not end as it should; the message is one line."""


@dataclass(frozen=True)
class MatrixRow:
    """The result of a case. `detail` says why it is not exact, or that other things are unexpected."""

    name: str
    result: str
    detail: str
    seconds: float

    @property
    def is_wrong(self) -> bool:
        """A restore that changed bits, or a process that did not end as it should."""
        return self.result not in (*CACHED, "not cached", "refused")


def file_of(name: str, case: Case, folder: Path) -> Path:
    """Returns the file of a case, which is made on first use. Raises `ChildFailedError`."""
    of_case = folder / name.replace("/", "-")
    file = of_case / ("f32.gguf" if case.is_slow else "q8_0.gguf")
    if not file.exists():
        of_case.mkdir(parents=True, exist_ok=True)
        if fault := isolated(partial(make, case, of_case)):
            raise ChildFailedError(f"no file: {fault}")
    return file


def run_child(python: Path, variables: dict[str, str], *arguments: str) -> str:
    """Returns the last line that a process printed. Raises `ChildFailedError`."""
    command = [str(python), "-P", *arguments]
    try:
        ended = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ChildFailedError(f"hang: no end within {LIMIT_S} s") from error
    if ended.returncode < 0:
        raise ChildFailedError(f"crashed: {signal.Signals(-ended.returncode).name}")
    if ended.returncode:
        raise ChildFailedError(f"failed: {(ended.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return (ended.stdout.strip().splitlines() or [""])[-1]


def row_of(name: str, file: Path, options: LlamaOptions, python: Path, variables: dict[str, str]) -> MatrixRow:
    """Rehearses a file, and compares runs. Returns the row of the table."""
    began = time.monotonic()

    def row(result: str, detail: str = "") -> MatrixRow:
        return MatrixRow(name, result, detail, time.monotonic() - began)

    try:
        task = msgspec.json.encode({"path": str(file), "options": options}).decode()
        answer = run_child(python, variables, "-m", "diskprefix.runtime.llama.llama_rehearsal", task)
        rehearsal = msgspec.json.decode(answer, type=Rehearsed | str)
    except ChildFailedError as error:
        return row(*_parts(error, "in the rehearsal"))
    if isinstance(rehearsal, str):
        return row("refused", rehearsal)
    if rehearsal.form is None:
        return row("not cached", rehearsal.reason)
    result = ""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        cold, *restored = _runs(file, options, rehearsal, folder)
        for run in (cold, *restored):
            try:
                task = msgspec.json.encode(run).decode()
                result = run_child(python, variables, "-m", "tools.llama_engine.restored_run", task)
            except ChildFailedError as error:
                return row(*_parts(error, run.name))
        different = [f"{run.name}: {text}" for run in restored if (text := _difference(cold.results, run.results))]
    return row("WRONG", "; ".join(different)) if different else row(result)


def _parts(error: ChildFailedError, where: str) -> tuple[str, str]:
    what, _, reason = error.message.partition(": ")
    return what, f"{reason} {where}"


def _runs(file: Path, options: LlamaOptions, rehearsal: Rehearsed, folder: str) -> Iterator[RunTask]:
    cold = RunTask(str(file), options, rehearsal, folder)
    yield cold
    for start in RESTORES:
        yield msgspec.structs.replace(cold, start=start)
    yield msgspec.structs.replace(cold, start=RESTORES[-1], is_used=True)
    yield msgspec.structs.replace(cold, start=RESTORES[-1], is_larger=True)


def _difference(cold: Path, restored: Path) -> str:
    """Returns where the results of a restored run are not those of the cold run, "" if they are."""
    texts = []
    with np.load(cold) as expected, np.load(restored) as results:
        for name, part in results.items():
            rows, wanted = (array.view(np.uint8).reshape(len(array), -1) for array in (part, expected[name]))
            if len(differing := np.flatnonzero((rows != wanted).any(axis=1))):
                texts.append(f"{name}: {len(differing)} of {len(rows)} rows differ, the first is {differing[0]}")
    more = f" (and {len(texts) - 2} other parts)" if len(texts) > 2 else ""
    return ", ".join(texts[:2]) + more


def show(rows: list[MatrixRow], console: Console) -> None:
    table = new_table("", left=("architecture", "result"), right=("s",))
    table.add_column("")
    for row in rows:
        table.add_row(row.name, row.result, f"{row.seconds:.0f}", row.detail)
    # A narrow terminal cuts no reason.
    console.width = 240
    console.print(table, soft_wrap=True)
    counts = Counter(row.result for row in rows)
    console.print(f"{len(rows)} models: {', '.join(f'{count} {result}' for result, count in counts.most_common())}")


@click.command()
@BACKEND
@click.option("--only", multiple=True, metavar="NAME", help="An architecture, or one of its variants; repeatable.")
@click.option("--kv-type", type=click.Choice(list(KV_KINDS)), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="The threads of a run.")
@click.option(
    "--files",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the files in this folder, and take those that are there. By default they are made in a temporary one.",
)
@JSON
def matrix(
    backend: str | None, only: tuple[str, ...], kv_type: str, threads: int, files: Path | None, *, as_json: bool
) -> None:
    """Compare restored with cold runs, for each architecture of .gguf files.

    The result is `exact by block`, `exact, windows`, `exact with checkpoints`, `not cached` or `refused` with the
    reason, or `WRONG`. Takes about ten seconds a model, a quarter of an hour in all. Exits with 1 if one is WRONG,
    crashes or hangs.
    """
    known = {name.partition("/")[0] for name in LLAMA_CASES} | set(LLAMA_CASES)
    if unknown := [name for name in only if name not in known]:
        raise click.UsageError(f"--only: no such architecture: {', '.join(unknown)}")
    chosen = [name for name in LLAMA_CASES if not only or {name, name.partition("/")[0]} & set(only)]
    python, variables = environment_of(backend, tell), variables_of(backend)
    device = "CPU" if backend in (None, "cpu") else run_child(python, variables, "-c", _DEVICE)
    num_layers = 0 if device == "CPU" else _ALL_LAYERS
    options = LlamaOptions(kv_type=kv_type, num_threads=threads, num_layers=num_layers, device=device)
    load_converter(converter(tell))
    rows = []
    with tempfile.TemporaryDirectory(prefix="diskprefix-llama-") as temporary:
        for name in chosen:
            try:
                file = file_of(name, LLAMA_CASES[name], (files or Path(temporary)).resolve())
                least_cells, most_cells = cells_of(Metadata(*read_tensors([file])), None)
                sized = msgspec.structs.replace(options, least_cells=least_cells, most_cells=most_cells)
                row = row_of(name, file, sized, python, variables)
            except ChildFailedError as error:
                row = MatrixRow(name, "no file", error.message, 0.0)
            tell(f"{name}: {row.result} {row.detail}")
            rows.append(row)
    report = {"rows": [asdict(row) for row in rows]}
    print_report(report, as_json, lambda _, console: show(rows, console))
    sys.exit(any(row.is_wrong for row in rows))
