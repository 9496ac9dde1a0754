"""The load benchmark: do well-behaved clients notice bad ones? Slow readers and writers, silent connections, reloads.

Phases with the good clients alone and phases with all of them take turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
from rich.console import Console

from tests.server.chat_model import write_chat_model
from tools.measuring.bad_clients import BadClients
from tools.measuring.live_server import LiveServer, step
from tools.measuring.options import JSON
from tools.measuring.report import machine, new_table, print_report, say, show_machine

NUM_GOOD = 8
MIX = {
    "slow reader": 20,
    "reader that stops": 8,
    "slow writer of a head": 8,
    "slow writer of a body": 8,
    "silent connection": 6,
    "half a head, then silence": 6,
}
"""The bad clients: with the good ones, 64."""
ROUNDS = 3
QUIET_S = 20.0
"""Of the good clients alone, in each round."""
SETTLE_S = 20.0
"""For the bad ones to begin, one after the other: a crowd does not ask in step."""
RELOAD_EVERY_S = 5.0
TTFT_GOAL = 1.5
MEMORY_GOAL = 1.05
MEMORY_SLACK_BYTES = 16 << 20
_PAUSE_S = 0.25
_CHAT = "/v1/chat/completions"


@dataclass
class Phase:
    """What the good clients saw. Times are in seconds, of the client, to the first token."""

    ttft_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


def body_of(text: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    # No end before the last token.
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "logit_bias": {"2": -100}}


async def good_client(client: httpx.AsyncClient, number: int, phase: Phase) -> None:
    """Asks again and again, and checks that each reply is whole."""
    body = body_of(f"Client {number}: name three rivers and where each begins. " * 4, 16) | {"stream": True}
    while True:
        started, first, last = time.perf_counter(), None, ""
        try:
            async with client.stream("POST", _CHAT, json=body) as answer:
                async for line in answer.aiter_lines():
                    if first is None and '"content"' in line and json.loads(line[6:])["choices"][0]["delta"]:
                        first = time.perf_counter() - started
                    last = line or last
            ended = "" if last == "data: [DONE]" and answer.status_code == 200 else f"{answer.status_code} {last[:80]}"
        except httpx.HTTPError as error:
            ended = f"{type(error).__name__}: {error}"
        if ended or first is None:
            phase.failures[ended or "no token"] += 1
        else:
            phase.ttft_s.append(first)
        await asyncio.sleep(_PAUSE_S)


@asynccontextmanager
async def running(*calls: Any) -> AsyncIterator[None]:
    """Runs coroutines beside what is in the context, and cancels them at its end."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def begin(after_s: float, call: Awaitable[None]) -> None:
    await asyncio.sleep(after_s)
    await call


async def reload(process_id: int, count: list[int]) -> None:
    while True:
        await asyncio.sleep(RELOAD_EVERY_S)
        os.kill(process_id, signal.SIGHUP)
        count[0] += 1


async def run_rounds(server: LiveServer, process_id: int, loaded_s: float) -> dict[str, Any]:
    alone, beside, reloads, memory = Phase(), Phase(), [0], []
    # A reply that the engine takes a moment for, and a slow reader a minute.
    bad = BadClients(server.port, body_of("Tell me of a river. " * 4, 24))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        # The first requests compute what the later ones restore.
        async with running(*(good_client(client, number, Phase()) for number in range(NUM_GOOD))):
            await asyncio.sleep(5)
        for _ in range(ROUNDS):
            async with running(*(good_client(client, number, alone) for number in range(NUM_GOOD))):
                await asyncio.sleep(QUIET_S)
            kinds = [kind for kind, number in MIX.items() for _ in range(number)]
            random.Random(0).shuffle(kinds)
            bad_ones = [begin(i * SETTLE_S / len(kinds), bad.run(kind)) for i, kind in enumerate(kinds)]
            async with running(*bad_ones, reload(process_id, reloads)):
                # All are there when the good ones are measured.
                await asyncio.sleep(SETTLE_S)
                async with running(*(good_client(client, number, beside) for number in range(NUM_GOOD))):
                    for _ in range(4):
                        await asyncio.sleep(loaded_s / ROUNDS / 4)
                        memory.append(resident_bytes(process_id))
        health = (await client.get("/health")).json()
    return {
        "benchmark": "load",
        "machine": machine(),
        "clients": {"good": NUM_GOOD, **MIX},
        "seconds": loaded_s,
        "alone": figures(alone),
        "beside": figures(beside),
        "reloads": reloads[0],
        "ends": dict(sorted(bad.ends.items())),
        "memory_bytes": memory,
        "health": health["status"],
    }


def resident_bytes(process_id: int) -> int:
    fields = Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def figures(phase: Phase) -> dict[str, Any]:
    quantiles = np.percentile(phase.ttft_s, [50, 99]) * 1e3 if phase.ttft_s else (0.0, 0.0)
    return {
        "requests": len(phase.ttft_s),
        "ttft_p50_ms": round(float(quantiles[0]), 1),
        "ttft_p99_ms": round(float(quantiles[1]), 1),
        "failures": dict(phase.failures),
    }


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what must hold, a row each."""
    alone, beside, memory = report["alone"], report["beside"], report["memory_bytes"]
    ratio = beside["ttft_p99_ms"] / alone["ttft_p99_ms"] if alone["ttft_p99_ms"] else float("inf")
    failed = sum(beside["failures"].values()) + sum(alone["failures"].values())
    most = memory[0] * MEMORY_GOAL + MEMORY_SLACK_BYTES
    cut_off = sum(number for end, number in report["ends"].items() if "cut off" in end or "broken" in end)
    rows = [
        ("p99 of the first token, beside / alone", f"{ratio:.2f}", f"≤ {TTFT_GOAL}", ratio <= TTFT_GOAL),
        ("good requests that failed", str(failed), "0", failed == 0),
        ("streams that were cut off", str(cut_off), "0", cut_off == 0),
        ("memory at the end, MB", f"{memory[-1] / 1e6:.0f}", f"≤ {most / 1e6:.0f}", memory[-1] <= most),
        ("the daemon in the end", report["health"], "ok", report["health"] == "ok"),
    ]
    return [{"what": what, "figure": figure, "goal": goal, "holds": holds} for what, figure, goal, holds in rows]


def show(report: dict[str, Any], console: Console) -> None:
    show_machine(report["machine"], console)
    table = new_table(
        "First token of the good clients", left=("",), right=("requests", "median ms", "p99 ms", "failed")
    )
    for name in ("alone", "beside"):
        seen = report[name]
        failed = sum(seen["failures"].values())
        table.add_row(name, str(seen["requests"]), f"{seen['ttft_p50_ms']}", f"{seen['ttft_p99_ms']}", str(failed))
    console.print(table)
    # A title is as wide as its table, and few seconds may have no rows.
    say(console, f"What became of the bad ones in {report['seconds']:.0f} s")
    ends = new_table("", left=("",), right=("times",))
    for end, number in report["ends"].items():
        ends.add_row(end, str(number))
    console.print(ends)
    table = new_table(f"Verdicts ({report['reloads']} reloads)", left=("",), right=("measured", "goal", ""))
    for row in report["verdicts"]:
        table.add_row(row["what"], row["figure"], row["goal"], "✓" if row["holds"] else "✗")
    console.print(table)


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Time with all clients."
)
@click.option("--real", is_flag=True, help="Serve SmolLM2 instead of a tiny random model.")
@JSON
def main(minutes: float, real: bool, as_json: bool) -> None:
    """Send 64 clients to one daemon, 56 of them bad, and say whether the 8 good ones notice.

    The daemon is told to reload every five seconds meanwhile. Exits with 1 if a verdict does not hold.
    """
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="diskprefix-load-") as workspace:
        folder = Path(workspace)
        model = () if real else ("--model", str(write_chat_model(folder / "model")))
        with LiveServer(kv_cache_dir=folder / "kv", log_path=folder / "log", flags=model) as server:
            with step(console, "starting the daemon"):
                server.start()
            with step(console, f"{minutes:g} minutes with all clients, and {ROUNDS} times {QUIET_S:.0f} s without"):
                report = asyncio.run(run_rounds(server, server.process_id, minutes * 60))
    report["verdicts"] = verdicts(report)
    print_report(report, as_json, show)
    sys.exit(0 if all(row["holds"] for row in report["verdicts"]) else 1)
