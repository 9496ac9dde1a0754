"""The soak benchmark writes ten times its budget to one store and watches the file, the latency and the memory.

`tools.benchmarks.churn` is the load.
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from diskprefix.errors import CacheError
from diskprefix.store.codec.codec import Codec
from diskprefix.units import format_size, parse_size
from tests.store.building import Clock
from tools.benchmarks.churn import Soak, WatchedStore, Write, failures
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON, codec_option
from tools.measuring.report import at_most, machine, new_table, none_of, print_report, verdict, verdict_table

PARTS = 10
FILE_GOAL = 1.15
LATENCY_GOAL = 1.3
MEMORY_GOAL = 1.05
MEMORY_SLACK_BYTES = 32 << 20
LIVE_GOAL = 0.8
LOST_GOAL = 0.005


def measure(folder: Path, *, budget_bytes: int, churn: float, codec: str) -> dict[str, Any]:
    """Runs the soak. Returns the report as JSON values. Raises `CacheError`."""
    torch.set_num_threads(1)
    clock = Clock()
    store = WatchedStore(folder, budget_bytes=budget_bytes, clock=clock)
    store.writes = []
    store.codec = Codec[codec.upper()]
    soak = Soak(store, clock, churn)
    started = time.perf_counter()
    try:
        soak.run()
        seconds = time.perf_counter() - started
        dropped = soak.writer.dropped
    finally:
        soak.close()
    parts = _parts(store.writes, budget_bytes)
    report = {
        "benchmark": "soak",
        "machine": machine(),
        "budget_bytes": budget_bytes,
        "codec": codec,
        "seconds": round(seconds, 1),
        "simulated_s": round(clock.now - Clock().now, 1),
        "written_raw_bytes": sum(write.raw_bytes for write in store.writes),
        "written_bytes": sum(write.stored_bytes for write in store.writes),
        "file_bytes": max(write.file_bytes for write in store.writes),
        "evicted": sum(write.evicted for write in store.writes),
        "publications": len(store.writes),
        "failures": failures(store.writes),
        "dropped": dropped,
        "counts": asdict(soak.counts),
        "parts": parts,
        "verify": _verify(folder),
    }
    return report | {"verdicts": _verdicts(report)}


def _parts(writes: Sequence[Write], budget_bytes: int) -> list[dict[str, float]]:
    """Returns the run cut into `PARTS` parts of equally many bytes."""
    written = np.cumsum([write.stored_bytes for write in writes])
    edges = np.searchsorted(written, written[-1] * np.arange(1, PARTS) / PARTS).tolist()
    parts = (writes[start:end] for start, end in pairwise([0, *edges, len(writes)]))
    return [_part(part, budget_bytes) for part in parts if any(write.raw_bytes for write in part)]


def _part(writes: Sequence[Write], budget_bytes: int) -> dict[str, float]:
    seconds, megabytes = sum(write.seconds for write in writes), sum(write.raw_bytes for write in writes) / 1e6
    return {
        "publications": len(writes),
        "ms_per_mb": round(seconds * 1e3 / megabytes, 3),
        "p50_ms": round(statistics.median(write.seconds for write in writes) * 1e3, 1),
        "p99_ms": round(float(np.percentile([write.seconds for write in writes], 99)) * 1e3, 1),
        "evicted": sum(write.evicted for write in writes),
        "file_share": round(max(write.file_bytes for write in writes) / budget_bytes, 4),
        "live_share": round(statistics.median(write.used_bytes for write in writes) / budget_bytes, 4),
        "memory_mb": round(max(write.memory_bytes for write in writes) / 1e6, 1),
        "failed": sum(write.failed is not None for write in writes),
    }


def _verify(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "diskprefix", "verify", "--json", "--kv-cache-dir", str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(answer.stdout)
    except json.JSONDecodeError:
        return {"clean": False, "error": answer.stderr.strip()[-500:]}
    return {key: found[key] for key in ("clean", "blocks", "entries", "payload_bytes")}


def _verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    parts = report["parts"]
    # The first part of the run only fills the store.
    early = statistics.median(part["ms_per_mb"] for part in parts[2:5])
    late = statistics.median(part["ms_per_mb"] for part in parts[-3:])
    file_share = report["file_bytes"] / report["budget_bytes"]
    live_share = statistics.median(part["live_share"] for part in parts[2:])
    memory = parts[-1]["memory_mb"]
    memory_goal = parts[2]["memory_mb"] * MEMORY_GOAL + MEMORY_SLACK_BYTES / 1e6
    counts, lost = report["counts"], report["dropped"] / report["publications"]
    return [
        at_most("largest file / budget", file_share, FILE_GOAL),
        verdict("live data / budget, once full", f"{live_share:.2f}", f"≥ {LIVE_GOAL}", live_share >= LIVE_GOAL),
        at_most("ms per MB, end / beginning", late / early, LATENCY_GOAL),
        at_most("memory in the end, MB", memory, memory_goal),
        verdict("publications lost", f"{lost:.2%}", f"≤ {LOST_GOAL:.1%}", lost <= LOST_GOAL),
        none_of(f"restores of {counts['compared']} that differ", counts["wrong"]),
        verdict("verify", "clean" if report["verify"]["clean"] else "not clean", "clean", report["verify"]["clean"]),
    ]


def show(report: dict[str, Any], console: Console) -> None:
    counts = report["counts"]
    console.print(
        f"{format_size(report['written_bytes'])} written ({format_size(report['written_raw_bytes'])} of KV, codec "
        f"{report['codec']}) into a budget of {format_size(report['budget_bytes'])}, in {report['seconds']:.0f} s: "
        f"{report['publications']} publications, {report['evicted']} blocks evicted, {counts['expired']} expired; "
        f"{counts['hits']} hits of {counts['prompts']} prompts, {counts['restored_tokens']} of "
        f"{counts['prompt_tokens']} tokens restored; waited for the writer {counts['waits']} times",
        highlight=False,
        soft_wrap=True,
    )
    for failure, number in report["failures"].items():
        console.print(f"{number} × {failure}", highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(_parts_table(report))
    console.print()
    console.print(verdict_table("Verdicts", report["verdicts"]))


def _parts_table(report: dict[str, Any]) -> Table:
    titles = {
        "publications": "writes",
        "ms_per_mb": "ms per\nMB",
        "p50_ms": "median\nms",
        "p99_ms": "p99\nms",
        "evicted": "evicted",
        "file_share": "file /\nbudget",
        "live_share": "live /\nbudget",
        "memory_mb": "memory\nMB",
        "failed": "failed",
    }
    table = new_table("By tenths of what was written", right=titles.values())
    for part in report["parts"]:
        table.add_row(*(f"{part[name]:g}" for name in titles))
    return table


@click.command()
@click.option("--budget", default="1GiB", show_default=True, metavar="SIZE", help="Budget of the store.")
@click.option("--churn", type=float, default=10.0, show_default=True, help="How many times the budget to write.")
@codec_option("planes")
@FOLDER
@JSON
def main(budget: str, churn: float, codec: str, folder: Path | None, as_json: bool) -> None:
    """Write ten times its budget through one store, and say whether it stayed in bounds.

    Exits with 1 if a verdict does not hold.
    """
    console = Console(stderr=True)
    budget_bytes = parse_size(budget, param="--budget")
    # Each lost publication is a line of the log; they are counted here.
    logging.getLogger("diskprefix").setLevel(logging.ERROR)
    title = f"writing {churn:g} times {format_size(budget_bytes)}"
    with tempfile.TemporaryDirectory(prefix="diskprefix-soak-", dir=folder) as workspace, step(console, title):
        folder = Path(workspace) / "kv"
        try:
            report = measure(folder, budget_bytes=budget_bytes, churn=churn, codec=codec)
        except CacheError as error:
            raise click.ClickException(str(error)) from error
    print_report(report, as_json, show)
    sys.exit(0 if all(row["holds"] for row in report["verdicts"]) else 1)
