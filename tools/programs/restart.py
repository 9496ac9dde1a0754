"""The restart benchmark: what a prompt costs cold, repeated after a restart, and extended after a restart.

All ratios come from one run, whose cases are interleaved. Each text is compared with that of a request that restored
nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from tools.measuring.live_server import LiveServer, LiveServerError, step
from tools.measuring.options import FOLDER, JSON, MODEL, codec_option, runs_option
from tools.measuring.prompts import NEW_TOKENS, Prompts
from tools.measuring.report import machine, median, new_table, print_report, say, short, show_machine
from tools.measuring.workspace import measuring, model_folder

PROMPT_TOKENS = (2048, 4096, 7900)
MAX_TOKENS = 8
TIMES = ("lookup_ms", "restore_ms", "prefill_ms", "server_ttft_ms", "ttft_ms")
CASES = {
    "cold": "cold",
    "cold_off": "cold, off",
    "exact": "exact repeat",
    "nearest": f"+{NEW_TOKENS} tokens",
    "nearest_off": "that one, off",
}
COLD_OF = {"cold_off": "cold", "exact": "cold", "nearest": "nearest_off"}
"""The case whose texts a case must have."""


class RestartBench:
    """Collects samples from one server that is killed and started again and again."""

    def __init__(self, server: LiveServer, prompts: Prompts, console: Console, runs: int) -> None:
        self.samples: list[dict[str, Any]] = []
        """One of each request. Times are those of `Answer.times_ms`."""
        self.startups: list[dict[str, float]] = []
        self.bytes_per_token = 0
        self._server = server
        self._prompts = prompts
        self._console = console
        self._runs = runs

    def start(self, note: Callable[[str], None] = lambda _line: None) -> None:
        self._server.kill()
        ready_s = self._server.start(note)
        props = self._server.props()
        self.startups.append({"ready": ready_s, **props["startup_s"]})
        self.bytes_per_token = props["full_cache"]["state"]["bytes_per_token"]

    def run(self, run: int, sizes: Sequence[int]) -> None:
        for tokens in sizes:
            with self._step(run, tokens, "cold, with and without saving"):
                self._cold(tokens, run)
        for tokens in sizes:
            with self._step(run, tokens, "restart, exact repeat"):
                self.start()
                self._ask("exact", tokens, run, self._prompts.prompt(tokens, run))
                self._server.wait_until_saved()
        for tokens in sizes:
            with self._step(run, tokens, "restart, nearest prefix"):
                self.start()
                longer = self._prompts.longer(tokens, run)
                self._ask("nearest", tokens, run, longer)
                self._server.wait_until_saved()
                self._ask("nearest_off", tokens, run, longer, scope="off")

    def _step(self, run: int, tokens: int, what: str) -> Any:
        return step(self._console, f"run {run + 1} of {self._runs}, {tokens} tokens: {what}")

    def _cold(self, tokens: int, run: int) -> None:
        """Measures both cold cases, one right after the other. Which is first alternates, so that a drift cancels."""
        prompt = self._prompts.prompt(tokens, run)
        # Scope off neither restores nor saves, so it may go second with the prompt that was just saved.
        for case in ("cold", "cold_off") if saves_first(run) else ("cold_off", "cold"):
            self._ask(case, tokens, run, prompt, scope="off" if case == "cold_off" else None)
            self._server.wait_until_saved()

    def _ask(self, case: str, tokens: int, run: int, prompt: Sequence[int], scope: str | None = None) -> None:
        answer = self._server.complete(prompt, max_tokens=MAX_TOKENS, scope=scope)
        if answer.prompt_tokens != len(prompt):
            raise LiveServerError(f"a prompt of {len(prompt)} tokens became {answer.prompt_tokens}")
        if bool(answer.restored) != (case in ("exact", "nearest")):
            raise LiveServerError(f"{case} of {tokens} tokens restored {answer.restored}: {answer.cache}")
        sample = {"case": case, "tokens": tokens, "run": run, "prompt_tokens": answer.prompt_tokens}
        self.samples.append(sample | {"restored": answer.restored, "text": answer.text} | answer.times_ms)


def measure(
    workspace: Path, model: Path, sizes: Sequence[int], runs: int, codec: str, console: Console
) -> dict[str, Any]:
    """Runs the benchmark. Returns the report as JSON values. Raises `LiveServerError`."""
    prompts = Prompts(AutoTokenizer.from_pretrained(model))
    flags: tuple[str, ...] = ("--model", str(model), "--disk-prefix-cache", "full", "--kv-cache-budget", "64GiB")
    flags += ("--kv-cache-codec", codec)
    kv_cache_dir, log_path = workspace / "kv", workspace / "server.log"
    with LiveServer(kv_cache_dir=kv_cache_dir, log_path=log_path, flags=flags) as server:
        bench = RestartBench(server, prompts, console, runs)
        with step(console, "server starting") as note:
            bench.start(note)
        # The first start measures whether the model is exact, which later ones remember.
        bench.startups.clear()
        for run in range(runs):
            bench.run(run, sizes)
    return {
        "benchmark": "restart",
        "runs": runs,
        "codec": codec,
        "machine": machine(),
        "texts_equal": texts_equal(bench.samples),
        "prompts": [_prompt_report(bench, tokens) for tokens in sizes],
        "save_cost_percent": _save_cost_percent(bench.samples),
        "startup_s": {name: median(start[name] for start in bench.startups) for name in bench.startups[0]},
        "samples": bench.samples,
    }


def texts_equal(samples: Sequence[dict[str, Any]]) -> bool:
    texts = {(one["case"], one["tokens"], one["run"]): one["text"] for one in samples}
    return all(
        text == texts[COLD_OF[case], tokens, run] for (case, tokens, run), text in texts.items() if case in COLD_OF
    )


def _prompt_report(bench: RestartBench, tokens: int) -> dict[str, Any]:
    of_size = [sample for sample in bench.samples if sample["tokens"] == tokens]
    cases = {case: _case_report([sample for sample in of_size if sample["case"] == case]) for case in CASES}
    num_bytes = tokens * bench.bytes_per_token
    restore_gb_s = num_bytes / cases["exact"]["restore_ms"] / 1e6
    return {
        "tokens": tokens,
        "cases": cases,
        "exact_ratio": round(cases["cold"]["ttft_ms"] / cases["exact"]["ttft_ms"], 1),
        "nearest_ratio": round(cases["cold"]["ttft_ms"] / cases["nearest"]["ttft_ms"], 1),
        "restored_bytes": num_bytes,
        "restore_gb_s": round(restore_gb_s, 2),
        "save_cost_percent": _save_cost_percent(of_size),
    }


def _case_report(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    medians = {name: median(sample[name] for sample in samples) for name in TIMES}
    return medians | {name: samples[0][name] for name in ("prompt_tokens", "restored")}


def _save_cost_percent(samples: Sequence[dict[str, Any]]) -> float:
    """Returns how much longer the first token took with saving than without, in percent.

    The first of two equal requests is some percent slower or faster, so the medians of both orders are averaged.
    """
    with_saving, without = (
        {(sample["tokens"], sample["run"]): sample["ttft_ms"] for sample in samples if sample["case"] == case}
        for case in ("cold", "cold_off")
    )
    percents: dict[bool, list[float]] = {}
    for tokens, run in with_saving:
        percent = (with_saving[tokens, run] / without[tokens, run] - 1) * 100
        percents.setdefault(saves_first(run), []).append(percent)
    return round(statistics.fmean(statistics.median(of_one_order) for of_one_order in percents.values()), 2)


def saves_first(run: int) -> bool:
    """Returns whether a run measures with saving first."""
    return run % 2 == 1


def show(report: dict[str, Any], console: Console) -> None:
    for table in (_cases_table(report), _bandwidth_table(report), _startup_table(report)):
        console.print(table)
        console.print()
    say(console, f"Texts: {'equal to those that restored nothing' if report['texts_equal'] else 'DIFFERENT'}.")
    show_machine(report["machine"], console)


def _cases_table(report: dict[str, Any]) -> Table:
    title = f"Time to first token in ms, median of {report['runs']}; restored: first request after kill -9"
    figures_of = ("restored", "lookup", "restore", "prefill", "TTFT\nserver", "TTFT\nclient", "ratio")
    table = new_table(title, left=("prompt", "case"), right=figures_of)
    for prompt in report["prompts"]:
        for case, title in CASES.items():
            figures = prompt["cases"][case]
            ratio = prompt["cases"]["cold"]["ttft_ms"] / figures["ttft_ms"]
            table.add_row(
                f"{figures['prompt_tokens']}",
                title,
                f"{figures['restored']}",
                *(short(figures[name]) for name in TIMES),
                f"{short(ratio)}×",
            )
    return table


def _bandwidth_table(report: dict[str, Any]) -> Table:
    title = "Exact repeat: the speed of the restore; cold: the cost of saving"
    table = new_table(title, right=("prompt", "MB", "restore\nGB/s", "saving costs\n% of cold TTFT"))
    for prompt in report["prompts"]:
        table.add_row(
            f"{prompt['tokens']}",
            f"{prompt['restored_bytes'] / 1e6:.0f}",
            f"{prompt['restore_gb_s']:.1f}",
            f"{prompt['save_cost_percent']:+.1f}",
        )
    table.add_row("all", "", "", f"{report['save_cost_percent']:+.1f}")
    return table


def _startup_table(report: dict[str, Any]) -> Table:
    names = [name.replace("_", " ") for name in report["startup_s"]]
    table = new_table("From process start to ready, seconds", right=names)
    table.add_row(*(f"{seconds:.2f}" for seconds in report["startup_s"].values()))
    return table


@click.command()
@MODEL
@runs_option(4)
@click.option(
    "--tokens",
    type=click.IntRange(min=512),
    multiple=True,
    default=PROMPT_TOKENS,
    show_default=True,
    help="Length of a prompt; may be given several times.",
)
@codec_option("raw")
@FOLDER
@JSON
def main(model: str, runs: int, tokens: tuple[int, ...], codec: str, folder: Path | None, as_json: bool) -> None:
    """Measure what a restart costs: cold, exact repeat, nearest prefix.

    Every restored figure is the first request of a server that was killed with SIGKILL and started again. The operating
    system's page cache survives that, so this is a restarted process and not a rebooted machine. The cache folder grows
    by about 0.4 GB with each run. Best an even number of runs: saving is measured first in one and second in the next.
    Exits with 1 if a text differs from that of a request that restored nothing.
    """
    progress = Console(stderr=True)
    source = model_folder(model, progress)
    with measuring(folder, progress) as workspace:
        report = measure(workspace, source, sorted(set(tokens)), runs, codec, progress)
    print_report(report, as_json, show)
    sys.exit(0 if report["texts_equal"] else 1)
