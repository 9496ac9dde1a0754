"""The watching benchmark: what does a reply cost more while somebody looks at the daemon?

A request decodes while nobody watches, while the dashboard's stream of events is read, and while `diskprefix top` runs
in a terminal besides. The three take turns, round by round; watchers run on the same machine.
"""

from __future__ import annotations

import fcntl
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from transformers import AutoTokenizer

from tools.measuring.live_server import Answer, LiveServer, LiveServerError, step
from tools.measuring.options import FOLDER, JSON, MODEL
from tools.measuring.report import machine, new_table, print_report, say, show_machine
from tools.measuring.workspace import measuring, model_folder
from tools.programs.prefix import Prompts

WATCHERS = ("nobody", "dashboard", "dashboard and top")
CONTEXT, REPLY_TOKENS = 512, 128
_COLUMNS, _LINES = 140, 40
_SETTLED_S = 1.5
"""After a watcher has begun: what it imports is not what is measured."""
_DEADLINE_S = 60.0
_READ_EVENTS = """import sys, urllib.request
for line in urllib.request.urlopen(sys.argv[1]):
    if line.startswith(b"event:"): print(flush=True)
"""


@contextmanager
def dashboard(url: str) -> Iterator[None]:
    """Reads the stream of events, as the page does. Raises `LiveServerError` if none came."""
    with tempfile.TemporaryFile() as seen:
        reader = subprocess.Popen([sys.executable, "-c", _READ_EVENTS, f"{url}/dashboard/events"], stdout=seen)
        try:
            _wait(lambda: os.fstat(seen.fileno()).st_size > 0, "no event came")
            before = os.fstat(seen.fileno()).st_size
            yield
            if os.fstat(seen.fileno()).st_size == before:
                raise LiveServerError("no event came while the request ran")
        finally:
            reader.kill()
            reader.wait()


@contextmanager
def top(url: str) -> Iterator[None]:
    """Runs `diskprefix top` in a terminal that nobody reads. Raises `LiveServerError` if it shows nothing."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    shown = [0]

    def drain() -> None:
        with suppress(OSError):
            while read := os.read(ours, 65536):
                shown[0] += len(read)

    command = [sys.executable, "-m", "diskprefix", "top", "--url", url]
    terminal = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=os.environ | {"TERM": "xterm-256color"}, start_new_session=True
    )
    os.close(its)
    reader = threading.Thread(target=drain)
    reader.start()
    try:
        _wait(lambda: shown[0] > _LINES * _COLUMNS, "top shows nothing")
        before = shown[0]
        yield
        if shown[0] == before:
            raise LiveServerError("top did not change while the request ran")
    finally:
        terminal.terminate()
        terminal.wait()
        reader.join()
        os.close(ours)


def _wait(condition: Any, failure: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise LiveServerError(failure)
        time.sleep(0.05)


def watched(server: LiveServer, watcher: str, prompt: Sequence[int]) -> Answer:
    """Returns the reply of a request in memory while `watcher` looks."""
    url = f"http://127.0.0.1:{server.port}"
    with ExitStack() as stack:
        if watcher != "nobody":
            stack.enter_context(dashboard(url))
        if watcher == "dashboard and top":
            stack.enter_context(top(url))
        time.sleep(_SETTLED_S)
        return server.complete(prompt, max_tokens=REPLY_TOKENS, scope="full")


def speed(answer: Answer) -> float:
    """Returns the tokens of a reply a second, behind the first."""
    return (answer.completion_tokens - 1) / (answer.total_s - answer.ttft_s)


def measure(workspace: Path, model: str, folder: Path, rounds: int, console: Console) -> dict[str, Any]:
    """Returns the report as JSON values. Raises `LiveServerError`."""
    prompt = Prompts(AutoTokenizer.from_pretrained(folder)).prompt(CONTEXT, 0)
    flags = ("--model", str(folder))
    answers: dict[str, list[Answer]] = {watcher: [] for watcher in WATCHERS}
    with LiveServer(kv_cache_dir=workspace / "kv", log_path=workspace / "server.log", flags=flags) as server:
        with step(console, "server starting") as note:
            server.start(note)
        server.complete(prompt, max_tokens=REPLY_TOKENS, scope="full")
        for number in range(rounds):
            # Each comes first as often as the others.
            order = WATCHERS[number % len(WATCHERS) :] + WATCHERS[: number % len(WATCHERS)]
            with step(console, f"round {number + 1}: {', '.join(order)}"):
                for watcher in order:
                    answers[watcher].append(watched(server, watcher, prompt))
    return report_of(model, answers)


def report_of(model: str, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    speeds = {watcher: [speed(answer) for answer in replies] for watcher, replies in answers.items()}
    return {
        "benchmark": "watching",
        "model": model,
        "machine": machine(),
        "tokens_per_s": speeds,
        "ratios": {
            watcher: [one / alone for one, alone in zip(found, speeds["nobody"], strict=True)]
            for watcher, found in speeds.items()
        },
        "ttft_ms": {watcher: [answer.ttft_s * 1e3 for answer in replies] for watcher, replies in answers.items()},
        "texts_equal": len({answer.text for replies in answers.values() for answer in replies}) == 1,
    }


def show(report: dict[str, Any], console: Console) -> None:
    rounds = len(report["ratios"]["nobody"])
    title = f"{report['model']}: a reply of {REPLY_TOKENS} tokens after {CONTEXT}, medians of {rounds} rounds"
    table = new_table(title, left=("who watches",), right=("tok/s", "of nobody's", "range", "first token, ms"))
    for watcher in WATCHERS:
        ratios = report["ratios"][watcher]
        table.add_row(
            watcher,
            f"{statistics.median(report['tokens_per_s'][watcher]):.1f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f}–{max(ratios):.3f}",
            f"{statistics.median(report['ttft_ms'][watcher]):.1f}",
        )
    console.print(table)
    say(console, f"Texts: {'equal' if report['texts_equal'] else 'DIFFERENT'}.")
    show_machine(report["machine"], console)


@click.command()
@MODEL
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True, help="Figures are medians of them.")
@FOLDER
@JSON
def main(model: str, rounds: int, folder: Path | None, as_json: bool) -> None:
    """Measure what the dashboard and `diskprefix top` cost a reply that is decoded while they look.

    Exits with 1 if a text differs.
    """
    progress = Console(stderr=True)
    source = model_folder(model, progress)
    with measuring(folder, progress) as workspace:
        report = measure(workspace, model, source, rounds, progress)
    print_report(report, as_json, show)
    sys.exit(0 if report["texts_equal"] else 1)
