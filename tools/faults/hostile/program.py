"""The hostile benchmark: are well-behaved clients served beside bad ones, and does the daemon end when told, with all
saved? Good clients may wait, and nobody is locked out.

Good clients, bad clients and the one that asks `/health` are processes of their own (`crowd.py`). This one starts them,
reads the daemon's memory, and counts.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
from rich.console import Console

from tests.daemon.server.hostile_requests import CHAT, chat
from tools.faults.hostile.bad_clients import CUT_OFF, Caller
from tools.faults.hostile.crowd import Attacked, Health, Seen, Turn, bad_key, good_key, run_bad, run_good, run_health
from tools.faults.hostile.requests import KINDS, SLOW_READER
from tools.measuring.answers import LiveServerError
from tools.measuring.live_server import LiveServer, num_tracebacks, step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.processes import family, status_bytes
from tools.measuring.report import (
    at_most,
    machine,
    new_table,
    none_of,
    print_report,
    say,
    show_machine,
    verdict,
    verdict_table,
)
from tools.measuring.workspace import measuring

STOP_GOAL_S, MEMORY_GOAL_BYTES = 10.0, 4 << 30
TTFT_GOAL = 2.0
"""The most that a good client's first token may take, as a multiple of the time without bad ones."""
ALONE_SHARE, SETTLE_S = 1 / 3, 20.0
"""Time of the good clients alone, as a share of the time with all; time in which the bad ones begin."""
RELOAD_EVERY_S, MEMORY_EVERY_S, STOP_DEADLINE_S, DRAIN_S = 5.0, 1.0, 120.0, 2.0
BAD_PROCESSES, NUM_LAST_TURNS, NUM_SHOWN = 2, 3, 20
KV_MEMORY = 2 << 30
"""Bytes. The default depends on the machine, and so would the goal for the daemon's memory."""
BLOCK = 256


@dataclass
class Phase:
    """The observations of a span of time. Times to the first token are in seconds, of the client."""

    ttft_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    """Bytes of all processes of the daemon, without pages of files."""

    def figures(self) -> dict[str, Any]:
        quantiles = np.percentile(self.ttft_s, [50, 99, 100]) * 1e3 if self.ttft_s else (0.0, 0.0, 0.0)
        names = ("ttft_p50_ms", "ttft_p99_ms", "ttft_max_ms")
        times = {name: round(float(value), 1) for name, value in zip(names, quantiles, strict=True)}
        return {
            "requests": len(self.ttft_s),
            **times,
            "failures": dict(self.failures),
            "memory_bytes": max(self.memory, default=0),
        }


@dataclass
class Watch:
    """Reads the observations of the clients and the daemon's memory."""

    server: LiveServer
    seen: Any
    tell: Callable[[str], None]
    ends: dict[str, Counter[str]] = field(default_factory=dict)
    """Of the connections of each kind of bad client."""
    failed_answers: list[str] = field(default_factory=list)
    health: list[Health] = field(default_factory=list)
    acknowledged: dict[int, list[Turn]] = field(default_factory=dict)
    """The last turns of each good client that the daemon has saved, as it says."""

    def until(self, name: str, done: Callable[[], bool], *, reload: bool = False) -> Phase:
        """Watches until `done`. Raises `LiveServerError` if the daemon ends."""
        phase, started = Phase(), time.monotonic()
        next_memory = next_reload = started
        while not done():
            if not self.server.is_running:
                raise LiveServerError("the daemon ended")
            now = time.monotonic()
            if now >= next_memory:
                next_memory = now + MEMORY_EVERY_S
                pids = family(self.server.process_id)
                phase.memory.append(sum(status_bytes(pid, "RssAnon", "RssShmem") for pid in pids))
            if reload and now >= next_reload:
                next_reload = now + RELOAD_EVERY_S
                os.kill(self.server.process_id, signal.SIGHUP)
            with suppress(queue.Empty):
                self.take(self.seen.get(timeout=0.1), phase, started)
        self.tell(f"{name}: {phase.figures()}")
        return phase

    def take(self, seen: Seen, phase: Phase, started: float) -> None:
        if isinstance(seen, Health):
            self.health.append(seen)
        elif isinstance(seen, Attacked):
            self.ends.setdefault(seen.kind, Counter())[seen.end.how] += 1
            if seen.end.is_failure:
                self.failed_answers.append(f"{seen.kind}: {seen.end.how} {seen.end.answer.decode(errors='replace')}")
        else:
            if seen.kept_tokens:
                turns = self.acknowledged.setdefault(seen.client, [])
                self.acknowledged[seen.client] = [*turns, seen][-NUM_LAST_TURNS:]
            if seen.failure:
                phase.failures[seen.failure] += 1
            # What was begun before the phase is not of it.
            elif seen.started >= started and seen.ttft_s is not None:
                phase.ttft_s.append(seen.ttft_s)

    def drain(self, phase: Phase, sigterm_at: float) -> None:
        """Reads the observations until SIGTERM at `sigterm_at`, and the turns that were answered after it."""
        end = time.monotonic() + DRAIN_S
        while time.monotonic() < end:
            with suppress(queue.Empty):
                seen = self.seen.get(timeout=0.1)
                if (isinstance(seen, Turn) and (not seen.failure or seen.ended < sigterm_at)) or (
                    isinstance(seen, Health) and seen.ended < sigterm_at
                ):
                    self.take(seen, phase, 0.0)


@contextmanager
def processes(calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[None]:
    """Runs functions in new processes, and ends these."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=function, args=values, daemon=True) for function, values in calls]
    try:
        for process in started:
            process.start()
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def write_keys(path: Path, good: int, kinds: Sequence[str]) -> Path:
    """Writes a key for each good client and for each kind: all are tenants of their own."""
    keys = [good_key(client) for client in range(good)] + [bad_key(kind) for kind in dict.fromkeys(kinds)]
    path.touch(mode=0o600)
    path.write_text("".join(f"{key}\n" for key in keys), encoding="ascii")
    return path


def measure(
    server: LiveServer, minutes: float, good: int, kinds: list[str], think_s: float, prompt_chars: int, console: Console
) -> dict[str, Any]:
    """Returns the report without its verdicts. Raises `LiveServerError`."""
    context = multiprocessing.get_context("spawn")
    seen, begin = context.Queue(), context.Event()
    settle_s = min(SETTLE_S, minutes * 15)
    # Clients of a kind share its body.
    parts = [(part, context.Event()) for i in range(BAD_PROCESSES) if (part := kinds[i::BAD_PROCESSES])]
    bad = [(run_bad, (server.port, part, ready, begin, settle_s, seen)) for part, ready in parts]
    good_ones = (run_good, (server.port, good, think_s, prompt_chars, seen))
    watch = Watch(server, seen, lambda line: say(console, f"    {line}"))
    with processes([*bad, good_ones, (run_health, (server.port, seen))]):
        # The first requests compute what the later ones restore.
        warm = _after(2 * think_s + settle_s)
        watch.until("first prompts", lambda: warm() and all(ready.is_set() for _, ready in parts))
        watch.health.clear()
        alone = watch.until("alone", _after(minutes * 60 * ALONE_SHARE))
        begin.set()
        watch.until("the bad ones begin", _after(settle_s), reload=True)
        beside = watch.until("all", _after(minutes * 60), reload=True)
        sigterm_at = time.monotonic()
        stop_s, code = server.stop(STOP_DEADLINE_S)
        watch.drain(beside, sigterm_at)
    return {
        "benchmark": "hostile",
        "machine": machine(),
        "alone": alone.figures(),
        "beside": beside.figures(),
        "kinds": {kind: dict(ends) for kind, ends in sorted(watch.ends.items())},
        "failed_answers": watch.failed_answers,
        "health": {
            "max_s": max((answer.seconds for answer in watch.health), default=0.0),
            "not_200": sum(answer.status != 200 for answer in watch.health),
        },
        "stop": {"seconds": stop_s, "exit_code": code},
        "restored": _asked_again(server, watch, console),
        "tracebacks": num_tracebacks(server.log_path),
    }


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _asked_again(server: LiveServer, watch: Watch, console: Console) -> dict[str, Any]:
    """Starts the daemon again, sends the last prompts that it had saved, and counts the restored tokens."""
    with step(console, "starting the daemon again"):
        server.start()
    lost, turns = [], [turn for of_client in watch.acknowledged.values() for turn in of_client]
    url = f"http://127.0.0.1:{server.port}"
    with step(console, f"asking {len(turns)} prompts again"), httpx.Client(base_url=url, timeout=60.0) as client:
        for turn in turns:
            body = {"messages": turn.messages, "max_tokens": 1, "temperature": 0, "prefix_cache": {"save": False}}
            headers = {"Authorization": f"Bearer {good_key(turn.client)}"}
            answer = client.post(CHAT, json=body, headers=headers).json()
            # Of a whole prompt, the last token is computed again: `auto` keeps no logits. Within a prompt, a prefix is
            # restored at the end of a block.
            whole = turn.kept_tokens == turn.prompt_tokens
            wanted = turn.kept_tokens - 1 if whole else turn.kept_tokens // BLOCK * BLOCK
            if answer["usage"]["prompt_tokens_details"]["cached_tokens"] < wanted:
                lost.append({"client": turn.client, "kept": turn.kept_tokens} | answer["prefix_cache"])
    return {"prompts": len(turns), "lost": lost}


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    alone, beside, stop, restored = (report[name] for name in ("alone", "beside", "stop", "restored"))
    return [
        verdict("requests of good clients", str(beside["requests"]), "≥ 1", beside["requests"] > 0),
        none_of("good requests that failed", sum((Counter(alone["failures"]) + Counter(beside["failures"])).values())),
        at_most("median first token, × alone", beside["ttft_p50_ms"] / max(1.0, alone["ttft_p50_ms"]), TTFT_GOAL),
        none_of("answers with 500", len(report["failed_answers"])),
        none_of("tracebacks in the log", report["tracebacks"]),
        none_of("answers of /health without 200", report["health"]["not_200"]),
        at_most("most memory, MB", beside["memory_bytes"] / 1e6, MEMORY_GOAL_BYTES / 1e6),
        none_of("streams of slow readers that were cut off", report["kinds"].get(SLOW_READER, {}).get(CUT_OFF, 0)),
        at_most("from SIGTERM to the end, s", stop["seconds"], STOP_GOAL_S),
        verdict("exit code", str(stop["exit_code"]), "0", stop["exit_code"] == 0),
        verdict("saved prompts", f"{restored['prompts']}", "≥ 1", restored["prompts"] > 0),
        none_of("saved prompts that are not restored", len(restored["lost"])),
    ]


def show(report: dict[str, Any], console: Console) -> None:
    times = ("ttft_p50_ms", "ttft_p99_ms", "ttft_max_ms")
    table = new_table(
        "First token of the good clients", left=("",), right=("requests", "median ms", "p99 ms", "most ms")
    )
    for name in ("alone", "beside"):
        table.add_row(name, *(str(report[name][key]) for key in ("requests", *times)))
    console.print(table)
    table = new_table("What became of the bad ones", left=("", "ends"))
    for kind, ends in report["kinds"].items():
        table.add_row(kind, ", ".join(f"{number} × {how}" for how, number in sorted(ends.items())))
    console.print(table)
    for line in [*report["failed_answers"][:NUM_SHOWN], *report["restored"]["lost"]]:
        say(console, str(line)[:600])
    for failure, number in (report["alone"]["failures"] | report["beside"]["failures"]).items():
        say(console, f"a good client, {number} times: {failure}")
    console.print(verdict_table("Verdicts", report["verdicts"]))
    show_machine(report["machine"], console)


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0.05), default=10.0, show_default=True, help="Minutes with all clients."
)
@click.option("--good", type=click.IntRange(min=1), default=8, show_default=True, help="Number of good clients.")
@click.option("--bad", type=click.IntRange(min=0), default=56, show_default=True, help="Number of bad clients.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(KINDS)), metavar="KIND", help="Only this kind; repeatable."
)
@click.option(
    "--think",
    default=7.0,
    show_default=True,
    metavar="SECONDS",
    help="Mean seconds between two turns of a good client.",
)
@click.option(
    "--prompt-chars",
    default=6000,
    show_default=True,
    help="The length of a good client's system message in characters.",
)
@click.option("--model", metavar="ID|PATH", help="Serve this model instead of the embedded one.")
@FOLDER
@JSON
def main(
    minutes: float,
    good: int,
    bad: int,
    only: tuple[str, ...],
    think: float,
    prompt_chars: int,
    model: str | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Send 56 bad clients to one daemon, and say whether eight good ones are served.

    First the good ones are alone, for a third of the time. The bad ones send what once stopped the daemon, read or
    write slowly, say nothing, or hang up; each kind has an API key of its own, and so has each good client. The daemon
    gets a SIGHUP every five seconds. In the middle of the load it gets a SIGTERM and is started again: the good
    clients' prompts that it reported as saved must be restored. Exits with 1 if a verdict does not hold.
    """
    console, kinds = Console(stderr=True), list(itertools.islice(itertools.cycle(only or KINDS), bad))
    with measuring(folder, console) as workspace:
        keys = write_keys(workspace / "keys", good, kinds)
        # With a router, so that a request may try to have the model unloaded.
        flags = ["--disk-prefix-cache", "auto:30", "--kv-memory", str(KV_MEMORY), "--api-keys", str(keys)]
        flags += ["--idle-unload", "1h"]
        flags += ["--model", model] if model else []
        with LiveServer(kv_cache_dir=workspace / "kv", log_path=workspace / "server.log", flags=tuple(flags)) as server:
            with step(console, "starting the daemon"):
                server.start()
                # The first request loads the model.
                caller = Caller(server.port, good_key(0))
                asyncio.run(caller.ask(caller.request(CHAT, chat())))
            report = measure(server, minutes, good, kinds, think, prompt_chars, console)
    report["verdicts"] = verdicts(report)
    print_report(report, as_json, show)
    sys.exit(0 if all(row["holds"] for row in report["verdicts"]) else 1)
