"""The prefix benchmark: real models at lengths for which other systems have published figures.

Cold, an exact repeat, and the nearest prefix: the same prompt with another end. What is restored is the first request
of a server that was killed and started again. Each text is compared with that of a run that restored nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tools.measuring.live_server import Answer, LiveServer, LiveServerError, step
from tools.measuring.options import FOLDER, JSON, codec_option, runs_option
from tools.measuring.prompts import TAIL_TOKENS, Prompts
from tools.measuring.report import machine, median, new_table, print_report, short, show_machine
from tools.measuring.workspace import measuring, model_folder
from tools.models import real

SIZES = {"gemma3-270m": (2_000, 20_000), "smollm2": (2_000, 7_900)}
MAX_TOKENS = 16
CASES = {"cold": "cold", "exact": "exact repeat", "nearest": "other end", "cold_nearest": "that one, cold"}
TIMES = ("lookup_ms", "restore_ms", "prefill_ms", "server_ttft_ms", "ttft_ms", "total_ms")
PUBLISHED = {
    2_000: {"cold": 0.73, "exact": 0.118, "nearest": 0.151},
    20_000: {"cold": 14.5, "exact": 0.353, "nearest": 1.17},
    100_000: {"cold": 269.0, "exact": 13.3, "nearest": 17.1},
}
"""Seconds, by prompt length: mlx-lm, a model of 0.6B in 4 bits, M1 Max."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request. Times in milliseconds, as `Answer.times_ms`."""

    model: str
    case: str
    tokens: int
    run: int
    restored: int
    text: str
    lookup_ms: float
    restore_ms: float
    prefill_ms: float
    server_ttft_ms: float
    ttft_ms: float
    total_ms: float


class PrefixBench:
    """Collects the samples of one model from one server that is killed and started again and again."""

    def __init__(self, model: str, server: LiveServer, prompts: Prompts, console: Console, runs: int) -> None:
        self.samples: list[Sample] = []
        self._model = model
        self._server = server
        self._prompts = prompts
        self._console = console
        self._runs = runs

    def run(self, run: int, tokens: int) -> None:
        prompt, other = self._prompts.prompt(tokens, run), self._prompts.other_end(tokens, run)
        with self._step(run, tokens, "cold"):
            self._ask("cold", run, prompt)
        with self._step(run, tokens, "restart, exact repeat"):
            self._server.restart()
            self._ask("exact", run, prompt)
        with self._step(run, tokens, "restart, another end"):
            self._server.restart()
            self._ask("nearest", run, other)
        with self._step(run, tokens, "that prompt without the cache, to compare"):
            self._ask("cold_nearest", run, other, scope="off")

    def _step(self, run: int, tokens: int, what: str) -> Any:
        return step(self._console, f"{self._model}, {tokens} tokens, run {run + 1} of {self._runs}: {what}")

    def _ask(self, case: str, run: int, prompt: Sequence[int], scope: str | None = None) -> None:
        answer = self._server.complete(prompt, max_tokens=MAX_TOKENS, scope=scope)
        if answer.prompt_tokens != len(prompt):
            raise LiveServerError(f"a prompt of {len(prompt)} tokens became {answer.prompt_tokens}")
        if bool(answer.restored) != (case in ("exact", "nearest")):
            raise LiveServerError(f"{case} of {len(prompt)} tokens restored {answer.restored}: {answer.cache}")
        self.samples.append(self._sample(case, run, answer))

    def _sample(self, case: str, run: int, answer: Answer) -> Sample:
        return Sample(
            model=self._model,
            case=case,
            tokens=answer.prompt_tokens,
            run=run,
            restored=answer.restored,
            text=answer.text,
            **answer.times_ms,
        )


def measure(
    workspace: Path,
    folders: dict[str, Path],
    sizes: Mapping[str, Sequence[int]],
    runs: int,
    codec: str,
    console: Console,
) -> dict[str, Any]:
    """Runs the benchmark. Returns the report as JSON values. Raises `LiveServerError`.

    `folders` and `sizes`: of each model, by its name. The server's log is `server.log` in `workspace`.
    """
    samples: list[Sample] = []
    for model, folder in folders.items():
        samples += _measure_model(workspace, model, folder, sizes[model], runs, codec, console)
    prompts = [_prompt_report(samples, model, tokens) for model in folders for tokens in sizes[model]]
    return {
        "benchmark": "prefix",
        "runs": runs,
        "codec": codec,
        "machine": machine(),
        "texts_equal": all(prompt["texts_equal"] for prompt in prompts),
        "prompts": prompts,
        "samples": [asdict(sample) for sample in samples],
    }


def _measure_model(
    workspace: Path, model: str, folder: Path, sizes: Sequence[int], runs: int, codec: str, console: Console
) -> list[Sample]:
    from transformers import AutoTokenizer

    flags = ("--model", str(folder), "--disk-prefix-cache", "full", "--kv-cache-codec", codec)
    prompts = Prompts(AutoTokenizer.from_pretrained(folder))
    kv_cache_dir, log_path = workspace / f"kv-{folder.name}", workspace / "server.log"
    with LiveServer(kv_cache_dir=kv_cache_dir, log_path=log_path, flags=flags) as server:
        bench = PrefixBench(model, server, prompts, console, runs)
        with step(console, f"{model}: server starting") as note:
            server.start(note)
        for tokens in sizes:
            for run in range(runs):
                bench.run(run, tokens)
    return bench.samples


def _prompt_report(samples: Sequence[Sample], model: str, tokens: int) -> dict[str, Any]:
    by_case = {
        case: [sample for sample in samples if (sample.model, sample.tokens, sample.case) == (model, tokens, case)]
        for case in CASES
    }
    ratios = {
        "exact": _comparison(by_case["cold"], by_case["exact"]),
        "nearest": _comparison(by_case["cold_nearest"], by_case["nearest"]),
    }
    return {
        "model": model,
        "tokens": tokens,
        "cases": {case: _medians(of_case) for case, of_case in by_case.items()},
        "ratios": ratios,
        "texts_equal": all(ratio["same_text"] for ratio in ratios.values()),
        "published_s": PUBLISHED.get(tokens),
    }


def _medians(samples: Sequence[Sample]) -> dict[str, float]:
    medians = {name: median(getattr(sample, name) for sample in samples) for name in TIMES}
    return medians | {"restored": samples[0].restored}


def _comparison(cold: Sequence[Sample], restored: Sequence[Sample]) -> dict[str, Any]:
    """Compares runs of the same prompts."""
    before, after = _medians(cold), _medians(restored)
    return {
        "ttft": round(before["ttft_ms"] / after["ttft_ms"], 1),
        "total": round(before["total_ms"] / after["total_ms"], 1),
        "same_text": [sample.text for sample in cold] == [sample.text for sample in restored],
    }


def show(report: dict[str, Any], console: Console) -> None:
    for model in dict.fromkeys(prompt["model"] for prompt in report["prompts"]):
        console.print(_table(model, report))
        console.print()
    console.print(
        f"Restored: the first request after kill -9; {MAX_TOKENS} tokens of reply. Other end: the last {TAIL_TOKENS} "
        f"tokens differ. mlx-lm's figures are published ones, of a 0.6B model in 4 bits on an M1 Max.",
        highlight=False,
        soft_wrap=True,
    )
    if not report["texts_equal"]:
        console.print("[red]a text differs from that of the cold run[/red]")
    show_machine(report["machine"], console)


def _table(model: str, report: dict[str, Any]) -> Table:
    title = f"{model}: time to first token and in all, ms, median of {report['runs']}"
    figures = ("restored", "TTFT", "total", "TTFT\nratio", "same\ntext", "mlx-lm\nms", "mlx-lm\nratio")
    table = new_table(title, left=("tokens", "case"), right=figures)
    for prompt in report["prompts"]:
        if prompt["model"] == model:
            for case, title in CASES.items():
                table.add_row(f"{prompt['tokens']}", title, *_figures(prompt, case))
    return table


def _figures(prompt: dict[str, Any], case: str) -> list[str]:
    figures, ratios = prompt["cases"][case], prompt["ratios"].get(case)
    published = prompt["published_s"] or {}
    row = [f"{figures['restored']}", short(figures["ttft_ms"]), short(figures["total_ms"])]
    row.append(f"{short(ratios['ttft'])}×" if ratios else "")
    row.append(("yes" if ratios["same_text"] else "NO") if ratios else "")
    row.append(short(published[case] * 1e3) if case in published else "")
    row.append(f"{short(published['cold'] / published[case])}×" if ratios and case in published else "")
    return row


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    default=tuple(SIZES),
    show_default=True,
    help=f"{', '.join(real.NAMES)} or a model's folder; may be given several times.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=512),
    multiple=True,
    help="Length of a prompt; may be given several times. [default: 2000 and 20000; 7900 for smollm2]",
)
@runs_option(3)
@codec_option("planes")
@FOLDER
@JSON
def main(
    models: tuple[str, ...], tokens: tuple[int, ...], runs: int, codec: str, folder: Path | None, as_json: bool
) -> None:
    """Measure what a long prompt costs: cold, exact repeat, another end; beside the published figures of mlx-lm.

    Every restored figure is the first request of a server that was killed and started again. Exits with 1 if a text
    differs from that of a run that restored nothing.
    """
    progress = Console(stderr=True)
    folders = {model: model_folder(model, progress) for model in models}
    sizes = {model: sorted(set(tokens)) or SIZES.get(model, (2_000, 20_000)) for model in models}
    with measuring(folder, progress) as workspace:
        report = measure(workspace, folders, sizes, runs, codec, progress)
    print_report(report, as_json, show)
    sys.exit(0 if report["texts_equal"] else 1)
