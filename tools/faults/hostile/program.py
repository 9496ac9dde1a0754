"""The hostile benchmark: do well-behaved clients notice bad ones, and does the daemon end when told, with all saved?

Good clients, bad clients and the one that asks `/health` are processes of their own (`crowd.py`). This one starts them,
reads the daemon's memory, and counts.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console

from diskprefix.model.load.embedded import EMBEDDED
from tools.faults.hostile.crowd import Attacked, Turn, bad_key, good_key, run_bad, run_good, run_health
from tools.faults.hostile.report import health_figures, memory_figures, show, tracebacks, verdicts
from tools.faults.hostile.requests import CHAT, KINDS
from tools.faults.hostile.watch import Phase, Watch, figures
from tools.measuring.live_server import LiveServer, step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import machine, print_report, say
from tools.measuring.workspace import measuring

ALONE_SHARE = 1 / 3
"""Time of the good clients alone, as a share of the time with all."""
SETTLE_S, SETTLE_SHARE = 20.0, 1 / 4
"""Time in which the bad clients begin, at most this share of the time with all. It is not counted."""
BAD_PROCESSES = 2
SCOPE = "auto:30"
KV_MEMORY = 2 << 30
"""Bytes. The default depends on the machine, and so would the goal for the daemon's memory."""
BLOCK = 256
STOP_DEADLINE_S = LOAD_DEADLINE_S = 120.0
NAME = "served"
"""The model's name with `--several`."""
DRAIN_S = 2.0


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


def chosen_kinds(number: int, only: Sequence[str]) -> list[str]:
    """Returns the kind of each bad client: the kinds in turns."""
    return list(itertools.islice(itertools.cycle(only or KINDS), number))


def write_keys(path: Path, good: int, kinds: Sequence[str]) -> Path:
    """Writes a key for each good client and for each kind: all are tenants of their own."""
    keys = [good_key(client) for client in range(good)] + [bad_key(kind) for kind in dict.fromkeys(kinds)]
    path.touch(mode=0o600)
    path.write_text("".join(f"{key}\n" for key in keys), encoding="ascii")
    return path


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options of the command line."""

    minutes: float
    good: int
    kinds: list[str]
    think_s: float
    prompt_chars: int


def measure(server: LiveServer, run: Run, console: Console) -> dict[str, Any]:
    """Returns the report without its verdicts. Raises `LiveServerError`."""
    context = multiprocessing.get_context("spawn")
    seen, begin = context.Queue(), context.Event()
    # Clients of a kind share its body.
    by_process = [run.kinds[i::BAD_PROCESSES] for i in range(BAD_PROCESSES)]
    ready = [context.Event() for _ in by_process]
    settle_s = min(SETTLE_S, run.minutes * 60 * SETTLE_SHARE)
    bad = [
        (run_bad, (server.port, kinds, made, begin, settle_s, seen))
        for kinds, made in zip(by_process, ready, strict=True)
        if kinds
    ]
    good = (run_good, (server.port, run.good, run.think_s, run.prompt_chars, seen))
    watch = Watch(server, seen, lambda line: say(console, f"    {line}"))
    with processes([*bad, good, (run_health, (server.port, seen))]):
        is_made = [made for made, kinds in zip(ready, by_process, strict=True) if kinds]
        warm_until = time.monotonic() + 2 * run.think_s + settle_s
        # The first requests compute what the later ones restore.
        watch.until("first prompts", lambda: time.monotonic() > warm_until and all(one.is_set() for one in is_made))
        watch.health.clear()
        alone = watch.until("alone", _after(run.minutes * 60 * ALONE_SHARE))
        begin.set()
        watch.until("the bad ones begin", _after(settle_s), reload=True)
        beside = watch.until("all", _after(run.minutes * 60), reload=True)
        told = time.monotonic()
        stop_s, code = server.stop(STOP_DEADLINE_S)
        _drain(watch, beside, told)
    return {
        "benchmark": "hostile",
        "machine": machine(),
        "minutes": run.minutes,
        "good": run.good,
        "bad": dict(Counter(run.kinds)),
        "think_s": run.think_s,
        "alone": figures(alone),
        "beside": figures(beside),
        "kinds": {
            name: {"ends": dict(sorted(kind.ends.items())), "slowest_s": round(kind.slowest_s, 2)}
            for name, kind in sorted(watch.kinds.items())
        },
        "failed_answers": watch.num_failed_answers,
        "first_failed_answers": watch.failed_answers,
        "health": health_figures(watch.health, told),
        "memory": {"alone": memory_figures(alone.memory), "beside": memory_figures(beside.memory)},
        "memory_samples": beside.memory,
        "reloads": watch.reloads,
        "stop": {"seconds": round(stop_s, 2), "exit_code": code},
        "restored": asked_again(server, watch, console),
        "tracebacks": tracebacks(server.log_path),
    }


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _drain(watch: Watch, beside: Phase, told: float) -> None:
    """Reads the observations until SIGTERM at `told`, and the turns that were answered after it."""
    end = time.monotonic() + DRAIN_S
    while time.monotonic() < end:
        try:
            seen = watch.seen.get(timeout=0.1)
        except queue.Empty:
            continue
        if isinstance(seen, Turn) and seen.ended > told:
            if seen.started < told:
                # It waited at least until then.
                beside.ttft_s.append(min(told - seen.started, seen.ttft_s or math.inf))
            seen = replace(seen, started=0.0, failure="")
        if not isinstance(seen, Attacked) or seen.ended < told:
            watch.take(seen, beside, told)


def load(server: LiveServer) -> None:
    """Returns when the model is loaded: with several, the daemon is ready before."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {good_key(0)}"}
    httpx.post(f"http://127.0.0.1:{server.port}{CHAT}", json=body, headers=headers, timeout=LOAD_DEADLINE_S)


def asked_again(server: LiveServer, watch: Watch, console: Console) -> dict[str, Any]:
    """Starts the daemon again, sends the last prompts that it had saved, and counts the restored tokens."""
    with step(console, "starting the daemon again"):
        server.start()
        load(server)
    lost, turns = [], [turn for kept in watch.acknowledged.values() for turn in kept]
    url = f"http://127.0.0.1:{server.port}"
    with step(console, f"asking {len(turns)} prompts again"), httpx.Client(base_url=url, timeout=60.0) as client:
        for turn in turns:
            body = {"messages": turn.messages, "max_tokens": 1, "temperature": 0, "prefix_cache": {"save": False}}
            headers = {"Authorization": f"Bearer {good_key(turn.client)}"}
            answer = client.post(CHAT, json=body, headers=headers).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            # Within a prompt, a prefix is restored at the end of a block.
            whole = turn.kept_tokens == turn.prompt_tokens
            wanted = turn.kept_tokens if whole else turn.kept_tokens // BLOCK * BLOCK
            if cached < wanted:
                lost.append(
                    {"client": turn.client, "kept": turn.kept_tokens, "prompt": turn.prompt_tokens}
                    | answer["prefix_cache"]
                )
    return {"prompts": len(turns), "lost": lost}


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0.05), default=10.0, show_default=True, help="Time with all clients."
)
@click.option("--good", type=click.IntRange(min=1), default=8, show_default=True, help="Number of good clients.")
@click.option("--bad", type=click.IntRange(min=0), default=56, show_default=True, help="Number of bad clients.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(KINDS)), metavar="KIND", help="Only this kind; repeatable."
)
@click.option(
    "--think", default=7.0, show_default=True, metavar="SECONDS", help="Between two turns of a good client, on average."
)
@click.option("--prompt-chars", default=6000, show_default=True, help="Of a good client's system message.")
@click.option("--model", metavar="ID|PATH", help="Serve this model instead of the embedded one.")
@click.option("--standby", is_flag=True, help="Serve with a front and a spare process.")
@click.option("--several", is_flag=True, help="Serve the model by its name, as one of several behind a front.")
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
    standby: bool,
    several: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Send 56 bad clients to one daemon, and say whether eight good ones notice.

    First the good ones are alone, for a third of the time. The bad ones send what once stopped the daemon, read or
    write slowly, say nothing, or hang up; each kind has an API key of its own, and so has each good client. The daemon
    gets a SIGHUP every five seconds. In the middle of the load it gets a SIGTERM and is started again: what it had
    said it keeps of the good ones' prompts must be restored. Exits with 1 if a verdict does not hold.
    """
    console = Console(stderr=True)
    run = Run(minutes=minutes, good=good, kinds=chosen_kinds(bad, only), think_s=think, prompt_chars=prompt_chars)
    with measuring(folder, console) as workspace:
        keys = write_keys(workspace / "keys", good, run.kinds)
        flags = ["--disk-prefix-cache", SCOPE, "--kv-memory", str(KV_MEMORY), "--api-keys", str(keys)]
        flags += (["--model", model] if model and not several else []) + (["--standby"] if standby else [])
        if several:
            models = workspace / "models.toml"
            models.write_text(f"[{NAME}]\nmodel = {json.dumps(model or EMBEDDED.name)}\npin = true\n", encoding="utf-8")
            flags += ["--models-file", str(models)]
        with LiveServer(kv_cache_dir=workspace / "kv", log_path=workspace / "server.log", flags=tuple(flags)) as server:
            with step(console, "starting the daemon"):
                server.start()
                load(server)
            report = measure(server, run, console)
    report["verdicts"] = verdicts(report)
    print_report(report, as_json, show)
    sys.exit(0 if all(row["holds"] for row in report["verdicts"]) else 1)
