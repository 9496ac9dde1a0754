"""The common parts of the benchmarks of engines: options, engines in turn, figures in one file, a table with ratios."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Timer
from typing import Any, TypeVar

import click
from rich.console import Console

from diskprefix.errors import DiskPrefixError
from tools.benchmarks.engines import ENGINES, Engine, Model, made
from tools.benchmarks.shapes import SHAPES, shape_file
from tools.measuring.answers import LiveServerError
from tools.measuring.environments import NotInstalled
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, known_engines
from tools.measuring.processes import drop_cached
from tools.measuring.report import machine, new_table, say, short, show_machine
from tools.measuring.workspace import model_folder
from tools.models import real

Command = TypeVar("Command", bound=Callable[..., Any])
_MORE_IS_BETTER = ("prefill", "rate", "bandwidth", "together", "edits", "chat", "cold_gb_s", "warm_gb_s", "of_copy")


class UnreadableResults(DiskPrefixError):
    """The file of results is not one that this tool wrote."""


@dataclass(frozen=True)
class Figure:
    """One number. `case` is a key of a scenario's `TITLES`; `size` is the prompt's length in words, about as many
    tokens, or 0."""

    case: str
    value: float
    size: int = 0


@dataclass(frozen=True)
class Sample:
    model: str
    engine: str
    round: int
    case: str
    size: int
    value: float

    @property
    def cell(self) -> tuple[str, int]:
        return self.case, self.size


@dataclass
class Results:
    """All samples, and why an engine has none. With a path, the samples that earlier runs wrote there are included."""

    benchmark: str
    path: Path | None
    samples: list[Sample] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """The last reason, by model and engine."""

    def read(self) -> None:
        """Raises `UnreadableResults`."""
        if self.path is None or not self.path.exists():
            return
        try:
            report = json.loads(self.path.read_text(encoding="utf-8"))
            self.samples, self.left_out = [Sample(**sample) for sample in report["samples"]], report["left_out"]
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableResults(f"{self.path} is not a file of results: {error!r}") from error

    def has(self, model: str, engine: str, round_: int) -> bool:
        wanted = (model, engine, round_)
        return any((sample.model, sample.engine, sample.round) == wanted for sample in self.samples)

    def add(self, model: str, engine: str, round_: int, figures: Iterable[Figure]) -> None:
        self.samples += [Sample(model, engine, round_, sample.case, sample.size, sample.value) for sample in figures]
        self.left_out.pop(f"{model}: {engine}", None)
        self.save()

    def leave_out(self, model: str, engine: str, reason: str) -> None:
        self.left_out[f"{model}: {engine}"] = reason
        self.save()

    def save(self) -> None:
        if self.path is not None:
            work = self.path.with_name(f"{self.path.name}.partial")
            report = {"benchmark": self.benchmark, "machine": machine(), "left_out": self.left_out}
            work.write_text(
                json.dumps(report | {"samples": [asdict(sample) for sample in self.samples]}, indent=1), "utf-8"
            )
            work.replace(self.path)

    def show(self, titles: Mapping[str, str], console: Console, *, as_markdown: bool) -> None:
        """Prints a table for each model: medians, and how many times better the first engine is."""
        for model in dict.fromkeys(sample.model for sample in self.samples):
            (first, *others), rows = self._medians(model, titles)
            if as_markdown:
                lines = [["", first, *others], ["---"] * (len(others) + 2)]
                lines += [
                    [title, *(f"{value} ({ratio} ×)" if ratio else value for value, ratio in row)]
                    for title, row in rows
                ]
                print(f"{model}; in brackets, how many times better {first} is\n")
                for line in lines:
                    print(*(f"| {cell}" if cell else "|" for cell in line), "|")
                print()
                continue
            columns = [first, *(column for other in others for column in (other, "×"))]
            table = new_table(f"{model}: medians; ×: how many times better {first} is", left=("",), right=columns)
            for title, ((value, _), *of_others) in rows:
                table.add_row(title, value, *(cell for pair in of_others for cell in pair))
            console.print(table)
        for who, reason in self.left_out.items():
            say(console, f"{who} was left out: {reason}")
        show_machine(machine(), console)

    def _medians(
        self, model: str, titles: Mapping[str, str]
    ) -> tuple[list[str], list[tuple[str, list[tuple[str, str]]]]]:
        """Returns the engines, and for each figure its title, and each engine's median and ratio to the first one's."""
        values: dict[tuple[str, int], dict[str, list[float]]] = {}
        for sample in self.samples:
            if sample.model == model:
                values.setdefault(sample.cell, {}).setdefault(sample.engine, []).append(sample.value)
        engines = list(dict.fromkeys(sample.engine for sample in self.samples if sample.model == model))
        rows = []
        for case, size in sorted(values, key=lambda cell: (list(titles).index(cell[0]), cell[1])):
            medians = {engine: statistics.median(of_engine) for engine, of_engine in values[case, size].items()}
            first = medians.get(engines[0])
            row = [(_shown(first), "")]
            row += [(_shown(medians.get(other)), _ratio(case, first, medians.get(other))) for other in engines[1:]]
            rows.append((f"{titles[case]}{f', {size}' if size else ''}", row))
        return engines, rows


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return short(value) if value >= 10 else f"{value:.3g}"


def _ratio(case: str, first: float | None, other: float | None) -> str:
    if not first or not other:
        return ""
    return f"{first / other if case in _MORE_IS_BETTER else other / first:.2f}"


@dataclass(frozen=True)
class Plan:
    """The options that all benchmarks of engines have."""

    engines: tuple[str, ...]
    models: tuple[str, ...]
    rounds: int
    limit_s: float
    scale: int
    results: Path | None
    as_markdown: bool
    folder: Path | None


def plan_options(*, rounds: int, model: str = real.DEFAULT) -> Callable[[Command], Command]:
    """Adds the options of a `Plan` to a command."""
    options = [
        click.option(
            "--engine",
            "engines",
            multiple=True,
            default=("diskprefix",),
            show_default=True,
            callback=known_engines(ENGINES),
            help=f"One of {', '.join(ENGINES)}, with more arguments of its own if there are any, such as "
            "'diskprefix --speculative off'; repeatable. Ratios are to the first.",
        ),
        click.option(
            "--model",
            "models",
            multiple=True,
            default=(model,),
            show_default=True,
            help=f"A real model ({', '.join(real.NAMES)}), a shape with random numbers ({', '.join(SHAPES)}), a .gguf "
            "file or a folder; repeatable.",
        ),
        click.option(
            "--rounds",
            type=click.IntRange(min=0),
            default=rounds,
            show_default=True,
            help="The number of rounds; 0 only shows the results.",
        ),
        click.option(
            "--limit", "limit_s", default=7200.0, show_default=True, help="The most seconds of an engine in a round."
        ),
        click.option(
            "--scale",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            help="Divide the layers of shapes by this number.",
        ),
        click.option(
            "--json",
            "results",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write every sample to this file. Samples that it has already are shown, and not measured again.",
        ),
        click.option("--markdown", "as_markdown", is_flag=True, help="Print the tables as the pages have them."),
        FOLDER,
    ]

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def compare(
    benchmark: str,
    plan: Plan,
    titles: Mapping[str, str],
    context: int,
    measured: Callable[[Engine, Path, int], Iterable[Figure]],
) -> None:
    """Measures each engine with each model in turn, round by round; prints the table, and ends the process: with 1 if
    one was left out. `measured` gets an engine, a folder for it, and the round."""
    progress, results = Console(stderr=True), Results(benchmark, plan.results)
    results.read()
    for model in [model_named(name, context, plan, progress) for name in (plan.models if plan.rounds else ())]:
        for round_ in range(plan.rounds):
            for name in plan.engines:
                if results.has(model.name, name, round_):
                    continue
                with (
                    step(progress, f"{model.name}, round {round_ + 1} of {plan.rounds}: {name}") as note,
                    TemporaryDirectory(prefix="diskprefix-bench-", dir=plan.folder) as workspace,
                ):
                    try:
                        engine = made(name, model, Path(workspace), note)
                        if model.file.is_file():
                            drop_cached(model.file)
                        with _limited(engine, plan.limit_s):
                            figures = list(_reported(measured(engine, Path(workspace), round_), note))
                    except (LiveServerError, NotInstalled) as error:
                        results.leave_out(model.name, name, str(error))
                        note(f"left out: {error}")
                    else:
                        results.add(model.name, name, round_, figures)
    results.show(titles, Console(), as_markdown=plan.as_markdown)
    sys.exit(1 if results.left_out else 0)


def model_named(name: str, context: int, plan: Plan, progress: Console) -> Model:
    """Returns a real model, which is fetched if need be, a shape, which is made if need be, or a file or folder."""
    if name in SHAPES:
        with step(progress, f"the file of {SHAPES[name].what}") as note:
            tokenizer = real.gguf_file("qwen2.5-coder-0.5b", note)
            return Model(
                f"{name}, random numbers", shape_file(name, plan.folder, tokenizer, plan.scale, note), None, context
            )
    if name not in real.NAMES and Path(name).suffix == ".gguf" and Path(name).is_file():
        return Model(Path(name).stem, Path(name), None, context)
    folder = model_folder(name, progress)
    if name not in real.NAMES:
        return Model(folder.name, folder, folder, context)
    with step(progress, f"the GGUF file of {name}") as note:
        return Model(name, real.gguf_file(name, note), folder, context)


@contextmanager
def _limited(engine: Engine, seconds: float) -> Iterator[None]:
    """Ends the engine when it takes longer, and when all is done."""
    is_late = Event()

    def end() -> None:
        is_late.set()
        engine.process.end()

    timer = Timer(seconds, end)
    timer.start()
    try:
        yield
    except (LiveServerError, OSError, ValueError) as error:
        raise LiveServerError(f"not done after {seconds:.0f} s" if is_late.is_set() else str(error)) from error
    finally:
        timer.cancel()
        # Not as `Engine.kill`, which waits until all is saved.
        engine.process.kill()


def _reported(figures: Iterable[Figure], note: Callable[[str], None]) -> Iterator[Figure]:
    """Passes figures on, and says when each is there."""
    began = time.perf_counter()
    for figure in figures:
        size = f" {figure.size}" if figure.size else ""
        note(f"{time.perf_counter() - began:4.0f} s: {figure.case}{size} {_shown(figure.value)}")
        yield figure
