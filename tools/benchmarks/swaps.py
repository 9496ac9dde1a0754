"""Measures two models behind one port with memory for one: the first token of the one that is not loaded, and of one
whose worker was killed.

    tools/bench swaps
    tools/bench swaps --model 3b --size 1000
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console

from tools.benchmarks.results import Plan, model_named
from tools.measuring.answers import Answer, LiveServerError, streamed
from tools.measuring.live_server import POLL_S, LiveServer
from tools.measuring.options import FOLDER, JSON
from tools.measuring.processes import wait_quiet
from tools.measuring.prompts import extended, prompt_text
from tools.measuring.report import machine, median, new_table, print_report, show_machine
from tools.measuring.workspace import measuring

_NAMES = ("one", "other")
_IDLE_WORK_S = 120.0
_PAUSE_S = 5.0
"""The time between two questions, in which what belongs to the first one ends."""
_KINDS = {
    "same prompt": "swap: same prompt, s",
    "next turn": "swap: next turn, s",
    "killed": "after kill -9 of the worker: same prompt, s",
}


class _Front:
    """A router of two models with memory for one."""

    def __init__(self, workspace: Path, models: Path, limit_bytes: int | None) -> None:
        limit = () if limit_bytes is None else ("--memory-limit", str(limit_bytes))
        flags = ("--models-dir", str(models), "--disk-prefix-cache", "full", *limit)
        self.server = LiveServer(kv_cache_dir=workspace / "kv", log_path=workspace / "server.log", flags=flags)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}", timeout=600.0)

    def ask(self, model: str, prompt: str) -> Answer:
        return streamed(self._client, "/v1/completions", {"model": model, "prompt": prompt}, 2)

    def needed_bytes(self) -> int:
        """Returns the memory that one of the models needs."""
        while "needs_bytes" not in (card := self._client.get("/v1/models").raise_for_status().json()["data"][0]):
            # The files are read after the start.
            time.sleep(POLL_S)
        return int(card["needs_bytes"])

    def worker(self) -> int:
        """Returns the process that serves now."""
        lines = self.server.log_path.read_text(encoding="utf-8").splitlines()
        return int(next(line for line in reversed(lines) if " runs in process " in line).rsplit(maxsplit=1)[1])

    def pause(self) -> None:
        wait_quiet(lambda: [self.server.process_id, self.worker()], _IDLE_WORK_S)
        time.sleep(_PAUSE_S)


def _measured(front: _Front, size: int, rounds: int) -> dict[str, list[float]]:
    prompts = {name: prompt_text(size, number) for number, name in enumerate(_NAMES)}
    for name in _NAMES * 2:
        # The first time computes, and what later starts map is written after it.
        front.ask(name, prompts[name])
        front.pause()
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for _ in range(rounds):
        for name, other in (_NAMES, _NAMES[::-1]):
            for kind, prompt in (("same prompt", prompts[name]), ("next turn", extended(prompts[name]))):
                front.ask(other, "A short question.")
                front.pause()
                seconds[kind].append(_restored(front.ask(name, prompt)))
                front.pause()
    for name in _NAMES:
        # Once each: a worker that dies again soon is started later and later.
        front.ask(name, prompts[name])
        front.pause()
        os.kill(front.worker(), signal.SIGKILL)
        seconds["killed"].append(_restored(front.ask(name, prompts[name])))
        front.pause()
    return seconds


def _restored(answer: Answer) -> float:
    if not answer.restored:
        raise LiveServerError("nothing was restored")
    return answer.ttft_s


def _show(report: dict[str, Any], console: Console) -> None:
    table = new_table(f"{report['model']}, {report['size']} tokens", left=("",), right=("median", "lowest", "highest"))
    for kind, title in _KINDS.items():
        seconds = report["seconds"][kind]
        table.add_row(title, *(f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))))
    console.print(table)
    show_machine(report["machine"], console)


@click.command()
@click.option("--model", default="qwen2.5-coder-0.5b", show_default=True, help="A real model, a shape or a .gguf file.")
@click.option("--size", type=click.IntRange(min=64), default=1000, show_default=True, help="Words of a prompt.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@FOLDER
@JSON
def main(model: str, size: int, rounds: int, *, folder: Path | None, as_json: bool) -> None:
    """Measure how soon a model answers for which another one must go.

    Two models of one shape are behind one port, with memory for one of them. Each question is for the one that is not
    loaded, about a prompt that was asked before; at the end, the worker of each is killed once. Takes two
    minutes, and one more for each further round of a small model.
    """
    progress = Console(stderr=True)
    plan = Plan(("diskprefix",), (model,), rounds, 0.0, 1, None, as_markdown=False, folder=folder)
    file = model_named(model, size + 512, plan, progress).file
    with measuring(folder, progress) as workspace:
        models = workspace / "models"
        models.mkdir()
        (models / f"{_NAMES[0]}.gguf").symlink_to(file.resolve())
        twin = models / f"{_NAMES[1]}.gguf"
        shutil.copyfile(file, twin)
        # Another model has another digest: a bit of its last weight differs.
        with twin.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            last = stream.read(1)[0]
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([last ^ 1]))
        front = _Front(workspace, models, None)
        with front.server:
            front.server.start()
            limit_bytes = front.needed_bytes()
        front = _Front(workspace, models, limit_bytes)
        with front.server:
            front.server.start()
            report = {"model": model, "size": size, "seconds": _measured(front, size, rounds), "machine": machine()}
    print_report(report, as_json, _show)
