"""Everyday questions, sampled as each program samples where a request says nothing: the right answers counted.

The two reasons why a program answers a question otherwise with the same file are its prompt and its sampling.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from tools.benchmarks.engines import HttpEngine, Model, made
from tools.measuring.live_server import ROOT, step
from tools.measuring.options import FOLDER, JSON, known_engines
from tools.measuring.report import new_table, print_report
from tools.models import real

QUESTIONS = Path(ROOT) / "tests" / "tools" / "everyday_questions.json"
_TOKENS, _CONTEXT = 96, 4096
_OF_95 = 1.96
"""The standard deviations on each side that have 95 % of a normal distribution."""


@dataclass(frozen=True)
class Question:
    """`right` is the pattern of right answers, in any case; `yes` and `no` are a right and a wrong one."""

    text: str
    right: str
    yes: str
    no: str

    def is_right(self, answer: str) -> bool:
        return re.search(self.right, answer, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Count:
    """The right answers of `runs` to one question."""

    model: str
    engine: str
    question: str
    right: int
    runs: int

    @property
    def share(self) -> float:
        return self.right / self.runs

    @property
    def variance(self) -> float:
        """The variance of the share, if the question is asked `runs` times again; at least two runs."""
        return self.share * (1 - self.share) / (self.runs - 1)


def read_questions(file: Path = QUESTIONS) -> list[Question]:
    return [Question(**row) for row in json.loads(file.read_text(encoding="utf-8"))]


def difference(ours: Sequence[Count], theirs: Sequence[Count]) -> tuple[float, float, float]:
    """Returns how many more answers in 100 are right in the first counts, and the ends of the interval that has the
    true difference with 95 %. Both have the same questions in the same order."""
    pairs = list(zip(ours, theirs, strict=True))
    mean = sum(own.share - other.share for own, other in pairs) / len(pairs)
    deviation = math.sqrt(sum(own.variance + other.variance for own, other in pairs)) / len(pairs)
    return 100 * mean, 100 * (mean - _OF_95 * deviation), 100 * (mean + _OF_95 * deviation)


def ask(engine: HttpEngine, questions: Iterable[Question], runs: int, names: tuple[str, str]) -> list[Count]:
    """Asks each question `runs` times, without a word about sampling. `names` are the model's and the engine's."""
    counts = []
    for question in questions:
        right = sum(question.is_right(engine.say(question.text, _TOKENS)) for _ in range(runs))
        counts.append(Count(*names, question.text, right, runs))
    return counts


def show(report: dict[str, Any], console: Console) -> None:
    """Prints a row for each model and engine, and for all models together."""
    counts = [Count(**row) for row in report["counts"]]
    engines, models = (list(dict.fromkeys(getattr(count, name) for count in counts)) for name in ("engine", "model"))
    table = new_table("right answers", left=("model", "engine"), right=("right", "the first has more", "95 %"))
    groups = [[model] for model in models] + ([models] if len(models) > 1 else [])
    for group in groups:
        of_first, *of_others = (
            [count for count in counts if count.engine == engine and count.model in group] for engine in engines
        )
        named = " and ".join(group)
        table.add_row(named, engines[0], _right_of(of_first))
        for engine, theirs in zip(engines[1:], of_others, strict=True):
            mean, low, high = difference(of_first, theirs)
            table.add_row(named, engine, _right_of(theirs), f"{mean:+.1f} points", f"{low:+.1f} to {high:+.1f}")
    console.print(table)


def _right_of(counts: Sequence[Count]) -> str:
    return f"{sum(count.right for count in counts)} of {sum(count.runs for count in counts)}"


@click.command()
@click.option(
    "--engine",
    "engines",
    multiple=True,
    default=("diskprefix", "llama-server"),
    show_default=True,
    callback=known_engines(("diskprefix", "llama-server", "ik_llama.cpp")),
    help="A program, and more arguments of its own. Repeatable: the first one is compared with the others.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(real.NAMES),
    default=(real.DEFAULT, real.QWEN2_CODER.name),
    show_default=True,
    help="A model of `tools/bench models`.",
)
@click.option("--runs", default=5, show_default=True, type=click.IntRange(2), help="Times that each question is asked.")
@FOLDER
@JSON
def main(engines: tuple[str, ...], models: tuple[str, ...], runs: int, folder: Path | None, as_json: bool) -> None:
    """Ask 20 everyday questions without a word about sampling, and count the right answers.

    The interval is about these questions: what other runs of them would give. Two models, two engines and five runs
    take some minutes on two cores. `llama-server` is compiled at its first use, which takes ten minutes or more.

    Exit codes: 0 done; 1 an engine or a model cannot be had, or a server failed; 2 wrong usage.
    """
    counts: list[Count] = []
    console = Console(stderr=True)
    for name in models:
        model = Model(name, real.gguf_file(name, real.print_report), None, _CONTEXT)
        for wanted in engines:
            with TemporaryDirectory(dir=folder) as workspace, step(console, f"{name}, {wanted}"):
                engine = made(wanted, model, Path(workspace), real.print_report)
                assert isinstance(engine, HttpEngine), "the engines of --engine have chats"
                try:
                    engine.start()
                    counts += ask(engine, read_questions(), runs, (name, wanted))
                finally:
                    engine.process.kill()
    print_report({"benchmark": "questions", "runs": runs, "counts": [asdict(count) for count in counts]}, as_json, show)
