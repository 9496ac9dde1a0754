"""Compares a real daemon with the simulator, request by request, on one workload.

The daemon serves the embedded model with `--disk-prefix-cache auto:30`, and is killed and started again in the middle.
The workload is made up from a seed: conversations that take turns, questions about documents, and prompts that nobody
repeats, as token ids. It is simulated twice: as it was sent, and from what the daemon recorded of it (`--record`).

The simulator is not restarted. What a daemon reads back from its history is what it knew, so nothing may differ as long
as the history holds all prompts (4 million tokens). What waits to be written is lost, so that is waited for.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from diskprefix.errors import DiskPrefixError
from diskprefix.extras.simulate.formats import read_trace
from diskprefix.extras.simulate.geometry import SLICEABLE, Geometry
from diskprefix.extras.simulate.simulator import Policy, Simulator
from diskprefix.extras.simulate.synthetic import interleaved, one_off, retrieval
from diskprefix.extras.simulate.trace import TraceRequest
from diskprefix.nouns import Scope
from diskprefix.settings import Settings
from tools.measuring.live_server import POLL_S, LiveServer, LiveServerError, log_tail, step
from tools.measuring.options import JSON
from tools.measuring.report import machine, new_table, print_report, show_machine

SCOPE = Scope("auto", 30)
BUDGET = "16GiB"
RECORDED_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Fate:
    """What happened to one request: tokens restored, tokens kept, and why."""

    restored: int
    boundary: int
    reason: str


def workload(num_requests: int, seed: int) -> list[TraceRequest]:
    """Returns three fifths turns of conversations, a quarter questions about documents, and prompts that come once.

    They are sent as raw prompts, which have no system part.
    """
    num_questions, num_others = num_requests // 4, num_requests * 3 // 20
    num_turns = num_requests - num_questions - num_others
    parts = (
        interleaved(
            seed, num_turns, system=(600, 600), user=(30, 200), reply=(20, 150), conversations=5, turns=(3, 10)
        ),
        retrieval(
            seed + 1, num_questions, system=(300, 300), document=(100, 400), question=(20, 60), documents=8, found=3
        ),
        one_off(seed + 2, num_others, system=(100, 600), user=(100, 1200)),
    )
    requests = sorted(chain.from_iterable(parts), key=lambda request: request.when)
    return [replace(request, prompt=replace(request.prompt, system_end=0)) for request in requests]


def run(
    requests: Sequence[TraceRequest], folder: Path, recording: Path, on_step: Callable[[str], None]
) -> tuple[list[Fate], float]:
    """Sends the requests to a daemon that is killed in the middle. Returns what it did, and the seconds."""
    flags = ("--disk-prefix-cache", str(SCOPE), "--kv-cache-gate", "off", "--kv-cache-budget", BUDGET)
    log_path = folder / "server.log"
    log_path.touch()
    fates = []
    with LiveServer(
        kv_cache_dir=folder / "kv", log_path=log_path, flags=(*flags, "--record", str(recording))
    ) as server:
        started = time.perf_counter()
        server.start(on_step)
        for number, request in enumerate(requests):
            if number == len(requests) // 2:
                on_step("kill -9")
                _wait_for_lines(recording, number)
                server.restart()
            cache = server.complete(request.prompt.token_ids.tolist(), max_tokens=1).cache
            server.wait_until_saved()
            fates.append(Fate(cache["restored"], cache["boundary"], cache["boundary_reason"]))
            on_step(f"{number + 1} of {len(requests)}")
        _wait_for_lines(recording, len(requests))
        return fates, time.perf_counter() - started


def _wait_for_lines(recording: Path, count: int) -> None:
    """The recording is written beside the requests."""
    deadline = time.monotonic() + RECORDED_DEADLINE_S
    while recording.read_bytes().count(b"\n") < count:
        if time.monotonic() > deadline:
            raise LiveServerError(f"{recording.name} has fewer than {count} lines after {RECORDED_DEADLINE_S:.0f} s")
        time.sleep(POLL_S)


def predict(requests: Iterable[TraceRequest], geometry: Geometry) -> list[Fate]:
    """Returns what the simulator predicts for a daemon with default settings."""
    defaults = Settings()
    policy = Policy(
        scope=SCOPE,
        block_size=defaults.block_size,
        min_tokens=defaults.kv_cache_min_tokens,
        interval=defaults.kv_cache_interval,
        cold_max=defaults.kv_cache_cold_max,
    )
    simulator = Simulator(policy, geometry)
    fates = []
    for request in requests:
        restored, selection, _ = simulator.step(request)
        fates.append(Fate(restored, selection.kept, selection.reason))
    return fates


def compare(requests: Sequence[TraceRequest], actual: list[Fate], predicted: dict[str, list[Fate]]) -> dict[str, Any]:
    """Returns totals, and each request for which a prediction was wrong."""
    mismatches = [
        {"from": source, "request": number, "actual": asdict(was), "predicted": asdict(said)}
        for source, fates in predicted.items()
        for number, (was, said) in enumerate(zip(actual, fates, strict=True))
        if was != said
    ]
    prompt_tokens = sum(len(request.prompt.token_ids) for request in requests)
    return {
        "requests": len(requests),
        "prompt_tokens": prompt_tokens,
        "hits": sum(fate.restored > 0 for fate in actual),
        "restored_tokens": sum(fate.restored for fate in actual),
        "predicted_tokens": {source: sum(fate.restored for fate in fates) for source, fates in predicted.items()},
        "reasons": {reason: [f.reason for f in actual].count(reason) for reason in sorted({f.reason for f in actual})},
        "mismatches": mismatches,
    }


def show(report: dict[str, Any], console: Console) -> None:
    title = f"{report['requests']} requests of {report['prompt_tokens']} tokens, killed once, {report['seconds']:.0f} s"
    figures = ("tokens", "share of\nprompts", "requests\nthat differ")
    table = new_table(title, left=("restored by",), right=figures)
    share = report["restored_tokens"] / report["prompt_tokens"]
    table.add_row("the daemon", f"{report['restored_tokens']}", f"{share:.2%}", "")
    for source, tokens in report["predicted_tokens"].items():
        differing = sum(mismatch["from"] == source for mismatch in report["mismatches"])
        share = tokens / report["prompt_tokens"]
        table.add_row(f"the simulator, {source}", f"{tokens}", f"{share:.2%}", f"{differing}")
    console.print(table)
    reasons = ", ".join(f"{reason} {count}" for reason, count in report["reasons"].items())
    console.print(f"{report['hits']} hits; what was kept, and why: {reasons}", highlight=False, soft_wrap=True)
    for mismatch in report["mismatches"][:20]:
        text = f"request {mismatch['request']}, {mismatch['from']}: {mismatch['predicted']} is {mismatch['actual']}"
        console.print(text, highlight=False, soft_wrap=True)
    show_machine(report["machine"], console)


@click.command()
@click.option("--requests", "num_requests", type=click.IntRange(min=8), default=200, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the workload.")
@JSON
def main(num_requests: int, seed: int, as_json: bool) -> None:
    """Compare what a real daemon and the simulator restore for each request.

    Exits with 1 if the simulator is wrong about a single one. Takes some minutes.
    """
    console = Console(stderr=True)
    requests = workload(num_requests, seed)
    with tempfile.TemporaryDirectory(prefix="diskprefix-agreement-") as workspace:
        folder = Path(workspace)
        recording = folder / "recording.jsonl"
        try:
            with step(console, f"{num_requests} requests to a real daemon") as note:
                actual, seconds = run(requests, folder, recording, note if console.is_terminal else lambda _line: None)
            recorded = read_trace(recording)
            assert recorded.daemon is not None
            geometry = recorded.daemon.geometry or SLICEABLE
            predicted = {
                "of what was sent": predict(requests, geometry),
                "of what was recorded": predict(recorded, geometry),
            }
        except (LiveServerError, DiskPrefixError) as error:
            raise click.ClickException(f"{error}\n{log_tail(folder / 'server.log')}") from error
    report = compare(requests, actual, predicted) | {"seconds": round(seconds, 1), "machine": machine()}
    print_report(report, as_json, show)
    sys.exit(1 if report["mismatches"] else 0)
