"""The company benchmark: several requests at once, against one after another.

Three questions: how much more five requests get done together; how soon a short request gets its first token in the
middle of a long prefill, and what that costs the long one; and how long a reply waits for its tokens while the prompt
of another request is computed, against how much later the first token of that one comes, for several values of
`--inter-token-latency`. Replies are compared with those of the same requests alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from transformers import AutoTokenizer

from tools.measuring.live_server import Answer, LiveServer, step
from tools.measuring.options import FOLDER, JSON, MODEL
from tools.measuring.prompts import Prompts
from tools.measuring.report import machine, new_table, print_report, say, show_machine
from tools.measuring.workspace import measuring, model_folder

NUM_REQUESTS = 5
REPLY_TOKENS = 64
CONTEXTS = (512, 4000)
LONG, SHORT = 6000, 300
BESIDE, DECODING_CONTEXT, DECODED = 4000, 512, 400
"""The tokens of a prompt that comes beside a reply; those before that reply, and its own at most."""
LATENCIES = ("0", "50ms", "100ms", "200ms")

Prompt = Sequence[int]


class CompanyBench:
    """Asks one server, whose cache is empty. `number` tells the prompts of rounds apart."""

    def __init__(self, server: LiveServer, prompts: Prompts, console: Console) -> None:
        self._server = server
        self._prompts = prompts
        self._console = console
        self._num_prompts = 0

    def together(self, context: int, *, is_cold: bool) -> dict[str, Any]:
        """Measures five requests one after another, then the same at once. Contexts are in memory, unless `is_cold`."""
        prompts = [self._fresh(context) for _ in range(NUM_REQUESTS)]
        scope = "off" if is_cold else "full"
        if not is_cold:
            for prompt in prompts:
                self._server.complete(prompt, max_tokens=1, scope=scope)

        def ask(prompt: Prompt) -> Answer:
            return self._server.complete(prompt, max_tokens=REPLY_TOKENS, scope=scope)

        with step(self._console, f"{NUM_REQUESTS} requests, {context} tokens{', cold' if is_cold else ''}"):
            alone, alone_s = _timed(lambda: [ask(prompt) for prompt in prompts])
            with ThreadPoolExecutor(NUM_REQUESTS) as clients:
                both, both_s = _timed(lambda: list(clients.map(ask, prompts)))
        return {
            "context": context,
            "cold": is_cold,
            "alone_s": alone_s,
            "together_s": both_s,
            "ratio": alone_s / both_s,
            "texts_equal": [answer.text for answer in alone] == [answer.text for answer in both],
        }

    def overtake(self) -> dict[str, Any]:
        """Measures a short request in the middle of a long prefill."""
        long, short = self._fresh(LONG), self._fresh(SHORT)

        def ask(prompt: Prompt) -> Answer:
            return self._server.complete(prompt, max_tokens=8, scope="off")

        with step(self._console, f"{SHORT} tokens in the middle of {LONG}"):
            long_alone, short_alone = ask(long), ask(short)
            with ThreadPoolExecutor(1) as client:
                began = time.perf_counter()
                running = client.submit(ask, long)
                time.sleep(long_alone.ttft_s / 2)
                left_s = long_alone.ttft_s - (time.perf_counter() - began)
                overtaking = ask(short)
                overtaken = running.result()
        own_s = short_alone.ttft_s
        return {
            "long_alone_s": long_alone.ttft_s,
            "short_alone_s": own_s,
            "short_s": overtaking.ttft_s,
            "share_of_what_is_left": overtaking.ttft_s / left_s,
            "long_later_s": overtaken.ttft_s - long_alone.ttft_s,
            "later_by_own_cost": (overtaken.ttft_s - long_alone.ttft_s) / short_alone.total_s,
            "texts_equal": (overtaken.text, overtaking.text) == (long_alone.text, short_alone.text),
        }

    def beside(self) -> dict[str, Any]:
        """Measures a prompt that comes while another request decodes."""
        decoded, prompt = self._fresh(DECODING_CONTEXT), self._fresh(BESIDE)

        def decode() -> Answer:
            return self._server.complete(decoded, max_tokens=DECODED, scope="off")

        with step(self._console, f"{BESIDE} tokens beside a reply"):
            alone = self._server.complete(prompt, max_tokens=8, scope="off")
            plain = decode()
            with ThreadPoolExecutor(1) as client:
                running = client.submit(decode)
                time.sleep(plain.ttft_s + 1.0)
                came = self._server.complete(prompt, max_tokens=8, scope="off")
                reply = running.result()
        began = came.sent_at - reply.sent_at
        times = [moment for moment in reply.text_s if began <= moment <= began + came.ttft_s]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return {
            "gap_alone_s": statistics.median(later - earlier for earlier, later in pairwise(plain.text_s)),
            "gaps_s": gaps,
            "gap_s": statistics.median(gaps),
            "gap_p95_s": statistics.quantiles(gaps, n=20)[-1],
            "first_alone_s": alone.ttft_s,
            "first_s": came.ttft_s,
            "later": came.ttft_s / alone.ttft_s,
            "texts_equal": (came.text, reply.text) == (alone.text, plain.text),
        }

    def _fresh(self, num_tokens: int) -> list[int]:
        self._num_prompts += 1
        return self._prompts.prompt(num_tokens, self._num_prompts)


def _timed(work: Callable[[], list[Answer]]) -> tuple[list[Answer], float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def measure(workspace: Path, model: str, folder: Path, rounds: int, console: Console) -> dict[str, Any]:
    """Returns the report as JSON values. The server's log is `server.log` in `workspace`. Raises `LiveServerError`."""
    prompts = Prompts(AutoTokenizer.from_pretrained(folder))
    flags = ("--model", str(folder))
    samples: dict[str, list[dict[str, Any]]] = {"together": [], "overtake": []}
    log_path = workspace / "server.log"
    beside: dict[str, list[dict[str, Any]]] = {latency: [] for latency in LATENCIES}
    for latency, of_latency in beside.items():
        paced = (*flags, "--inter-token-latency", latency)
        with LiveServer(kv_cache_dir=workspace / "kv", log_path=log_path, flags=paced) as server:
            with step(console, f"server starting with --inter-token-latency {latency}") as note:
                server.start(note)
            bench = CompanyBench(server, prompts, console)
            of_latency += [bench.beside() for _ in range(rounds)]
    with LiveServer(kv_cache_dir=workspace / "kv", log_path=log_path, flags=flags) as server:
        with step(console, "server starting") as note:
            server.start(note)
        bench = CompanyBench(server, prompts, console)
        for _ in range(rounds):
            for context in CONTEXTS:
                samples["together"] += [bench.together(context, is_cold=is_cold) for is_cold in (False, True)]
            samples["overtake"].append(bench.overtake())
    everything = [sample for of_kind in [*samples.values(), *beside.values()] for sample in of_kind]
    return {
        "benchmark": "company",
        "model": model,
        "rounds": rounds,
        "machine": machine(),
        "texts_equal": all(sample["texts_equal"] for sample in everything),
        "samples": samples,
        "beside": beside,
    }


def show(report: dict[str, Any], console: Console) -> None:
    samples = report["samples"]
    title = f"{report['model']}: {NUM_REQUESTS} requests of {REPLY_TOKENS} tokens, medians of {report['rounds']}"
    table = new_table(title, left=("context",), right=("one by one, s", "together, s", "ratio"))
    for context in CONTEXTS:
        for is_cold in (False, True):
            chosen = [one for one in samples["together"] if (one["context"], one["cold"]) == (context, is_cold)]
            figures = [_median(chosen, name) for name in ("alone_s", "together_s", "ratio")]
            table.add_row(f"{context}, {'cold' if is_cold else 'in memory'}", *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    console.print()
    overtake = samples["overtake"]
    say(
        console,
        f"{SHORT} tokens in the middle of a prefill of {LONG}: first token after {_median(overtake, 'short_s'):.2f} s "
        f"(alone {_median(overtake, 'short_alone_s'):.2f} s), {_median(overtake, 'share_of_what_is_left'):.3f} of what "
        f"is left; the long one is {_median(overtake, 'long_later_s'):.2f} s later, "
        f"{_median(overtake, 'later_by_own_cost'):.2f} of what the short one costs alone.",
    )
    title = f"a prompt of {BESIDE} tokens beside a reply, medians of {report['rounds']}"
    columns = ("between tokens, ms", "95th percentile, ms", "alone, ms", "first token, s", "alone, s", "ratio")
    table = new_table(title, left=("--inter-token-latency",), right=columns)
    for latency, chosen in report["beside"].items():
        gaps = [f"{_median(chosen, name) * 1e3:.0f}" for name in ("gap_s", "gap_p95_s", "gap_alone_s")]
        table.add_row(
            latency, *gaps, *(f"{_median(chosen, name):.2f}" for name in ("first_s", "first_alone_s", "later"))
        )
    console.print(table)
    console.print()
    say(console, f"Texts: {'equal to those alone' if report['texts_equal'] else 'DIFFER from those alone'}.")
    show_machine(report["machine"], console)


def _median(samples: Sequence[dict[str, Any]], name: str) -> float:
    return float(statistics.median(sample[name] for sample in samples))


@click.command()
@MODEL
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Figures are medians of them.")
@FOLDER
@JSON
def main(model: str, rounds: int, folder: Path | None, as_json: bool) -> None:
    """Measure several requests at once: throughput, overtaking, and a prompt beside a reply.

    Exits with 1 if a text differs from that of the same request alone.
    """
    progress = Console(stderr=True)
    source = model_folder(model, progress)
    with measuring(folder, progress) as workspace:
        report = measure(workspace, model, source, rounds, progress)
    print_report(report, as_json, show)
    sys.exit(0 if report["texts_equal"] else 1)
