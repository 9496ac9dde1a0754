"""The hostile benchmark: do well-behaved clients notice bad ones, and does the daemon end when told, with all saved?

Good clients, bad clients and the one who looks at `/health` are processes of their own (`tools.measuring.crowd`). This
one starts them, reads the daemon's memory, and counts.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import queue
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
from rich.console import Console

from tools.measuring.bad_clients import CLOSED, CUT_OFF, HUNG_UP
from tools.measuring.crowd import Attacked, Health, Seen, Turn, bad_key, good_key, run_bad, run_good, run_health
from tools.measuring.hostile_requests import CHAT, KINDS, SLOW_READER
from tools.measuring.live_server import LiveServer, LiveServerError, step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import machine, new_table, print_report, say, show_machine
from tools.measuring.workspace import measuring

ALONE_SHARE = 1 / 3
"""The good clients are alone for this share of the time that they have company."""
SETTLE_S, SETTLE_SHARE = 20.0, 1 / 4
"""For the bad ones to begin, one after the other, at most this share of the time that they have. It is not counted."""
BAD_PROCESSES = 2
SCOPE = "auto:30"
KV_MEMORY = 2 << 30
"""Set, because its default depends on the machine, and so would the goal for the daemon's memory."""
RELOAD_EVERY_S, MEMORY_EVERY_S, TELL_EVERY_S = 5.0, 1.0, 10.0
BLOCK = 256
TTFT_GOAL, HEALTH_GOAL_S, STOP_GOAL_S = 1.5, 0.5, 10.0
FLAT_GOAL, FLAT_SLACK_BYTES = 1.05, 64 << 20
MEMORY_GOAL_BYTES = 4 << 30
STOP_DEADLINE_S = 120.0
DRAIN_S = 2.0
ASKED_AGAIN = 3
"""So many of the last prompts of each good client are sent again after the restart."""
_SHOWN_FAILURES = 20
_TRACEBACK_LINES = 8


@dataclass
class Kind:
    """What became of the connections of one kind of bad client."""

    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


@dataclass
class Phase:
    """What was seen from one moment to another. Times to the first token are in seconds, of the client."""

    ttft_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, float]] = field(default_factory=list)
    busy_s: float = 0.0
    """Of all processors, by the daemon."""
    seconds: float = 0.0


@dataclass
class Watch:
    """Reads what the clients saw, and the daemon's memory. Tells of it every ten seconds."""

    server: LiveServer
    seen: Any
    tell: Callable[[str], None]
    kinds: dict[str, Kind] = field(default_factory=dict)
    failed_answers: list[dict[str, Any]] = field(default_factory=list)
    num_failed_answers: int = 0
    health: list[Health] = field(default_factory=list)
    acknowledged: dict[int, list[Turn]] = field(default_factory=dict)
    """The last turns of each good client of which the daemon said that something is kept."""
    reloads: int = 0
    _next_memory: float = 0.0
    _next_reload: float = 0.0

    def until(self, name: str, done: Callable[[], bool], *, reload: bool = False) -> Phase:
        """Watches until `done`. Raises `LiveServerError` if the daemon ends."""
        phase, started, busy = Phase(), time.monotonic(), _busy_s(self.server.process_id)
        self._next_memory = self._next_reload = started
        next_told = started + TELL_EVERY_S
        while not done():
            self._look(phase, started, reload=reload)
            if time.monotonic() > next_told:
                next_told += TELL_EVERY_S
                self.tell(f"{name}, {time.monotonic() - started:.0f} s: {self._line(phase)}")
        phase.seconds = time.monotonic() - started
        phase.busy_s = _busy_s(self.server.process_id) - busy
        return phase

    def _look(self, phase: Phase, started: float, *, reload: bool) -> None:
        now = time.monotonic()
        if not self.server.is_running:
            raise LiveServerError("the daemon ended")
        if now >= self._next_memory:
            self._next_memory = now + MEMORY_EVERY_S
            phase.memory.append({"at": round(now - started, 1)} | _memory_of(self.server.process_id))
        if reload and now >= self._next_reload:
            self._next_reload = now + RELOAD_EVERY_S
            os.kill(self.server.process_id, signal.SIGHUP)
            self.reloads += 1
        with suppress(queue.Empty):
            self.take(self.seen.get(timeout=0.1), phase, started)

    def take(self, seen: Seen, phase: Phase, started: float) -> None:
        if isinstance(seen, Health):
            self.health.append(seen)
        elif isinstance(seen, Attacked):
            self._take_attacked(seen)
        else:
            if seen.kept_tokens:
                kept = self.acknowledged.setdefault(seen.client, [])
                self.acknowledged[seen.client] = [*kept, seen][-ASKED_AGAIN:]
            if seen.failure:
                phase.failures[seen.failure] += 1
            # What was begun before the phase is not of it.
            elif seen.started >= started and seen.ttft_s is not None:
                phase.ttft_s.append(seen.ttft_s)

    def _take_attacked(self, seen: Attacked) -> None:
        kind = self.kinds.setdefault(seen.kind, Kind())
        kind.ends[seen.end.how] += 1
        kind.slowest_s = max(kind.slowest_s, seen.seconds)
        if seen.end.is_failure:
            self.num_failed_answers += 1
            if len(self.failed_answers) < _SHOWN_FAILURES:
                answer = seen.end.answer.decode(errors="replace")
                self.failed_answers.append({"kind": seen.kind, "answer": answer})
                self.tell(f"{seen.kind} got a {seen.end.how}: {answer[-300:]}")

    def _line(self, phase: Phase) -> str:
        times = figures(phase)
        last = phase.memory[-1]
        return (
            f"good {times['requests']}, first token {times['ttft_p50_ms']:.0f} ms, p99 {times['ttft_p99_ms']:.0f} ms, "
            f"{sum(phase.failures.values())} failed; bad {sum(kind.ends.total() for kind in self.kinds.values())}, "
            f"{self.num_failed_answers} of 500; /health at most {self.slowest_health_s:.2f} s; "
            f"memory {last['own_mb']:.0f} MB, with files {last['resident_mb']:.0f} MB"
        )

    @property
    def slowest_health_s(self) -> float:
        return max((health.seconds for health in self.health), default=0.0)


def _processes(process_id: int) -> Iterator[int]:
    """Yields a process and those that it started."""
    yield process_id
    try:
        for task in Path(f"/proc/{process_id}/task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                yield from _processes(int(child))
    except OSError:
        return


def _memory_of(process_id: int) -> dict[str, float]:
    """Returns megabytes of all processes: `own` without what is a file's, such as the store's pages and the weights."""
    own = files = 0
    for process in _processes(process_id):
        try:
            lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        kilobytes = {
            name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name in _RSS
        }
        own += kilobytes.get("RssAnon", 0) + kilobytes.get("RssShmem", 0)
        files += kilobytes.get("RssFile", 0)
    return {"own_mb": round(own * 1024 / 1e6, 1), "resident_mb": round((own + files) * 1024 / 1e6, 1)}


_RSS = ("RssAnon", "RssShmem", "RssFile")


def _busy_s(process_id: int) -> float:
    ticks = 0
    for process in _processes(process_id):
        try:
            fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        # User and system time, of the process and of its children that ended.
        ticks += sum(int(number) for number in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def figures(phase: Phase) -> dict[str, Any]:
    quantiles = np.percentile(phase.ttft_s, [50, 99, 100]) * 1e3 if phase.ttft_s else (0.0, 0.0, 0.0)
    names = ("ttft_p50_ms", "ttft_p99_ms", "ttft_max_ms")
    return {
        "requests": len(phase.ttft_s),
        **{name: round(float(value), 1) for name, value in zip(names, quantiles, strict=True)},
        "failures": dict(phase.failures),
        "busy_processors": round(phase.busy_s / phase.seconds, 2) if phase.seconds else 0.0,
    }


def memory_figures(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the most, and the medians of the first and the last third."""
    own = [sample["own_mb"] for sample in samples]
    third = max(1, len(own) // 3)
    return {
        "max_mb": max(own),
        "resident_max_mb": max(sample["resident_mb"] for sample in samples),
        "first_third_mb": statistics.median(own[:third]),
        "last_third_mb": statistics.median(own[-third:]),
    }


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
    """What is asked for on the command line."""

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


def tracebacks(log: Path) -> list[str]:
    """Returns the ends of the tracebacks in a log: a failure in a stream comes after its 200."""
    _, *rests = log.read_text(encoding="utf-8", errors="replace").split("Traceback (most recent call last):\n")
    ends = []
    for rest in rests:
        # The error is the first line that is not indented.
        lines = rest.splitlines()
        last = next((i for i, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
        ends.append("\n".join(lines[max(0, last - _TRACEBACK_LINES) : last + 1]))
    return ends


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _drain(watch: Watch, beside: Phase, told: float) -> None:
    """Takes what was seen until the daemon was told to end at `told`, and turns that it went on to answer."""
    end = time.monotonic() + DRAIN_S
    while time.monotonic() < end:
        try:
            seen = watch.seen.get(timeout=0.1)
        except queue.Empty:
            continue
        if isinstance(seen, Turn) and seen.ended > told:
            if seen.started < told:
                # It waited at least so long.
                beside.ttft_s.append(min(told - seen.started, seen.ttft_s or math.inf))
            seen = replace(seen, started=0.0, failure="")
        if not isinstance(seen, Attacked) or seen.ended < told:
            watch.take(seen, beside, told)


def health_figures(health: Sequence[Health], told: float) -> dict[str, Any]:
    """Of what was answered before the daemon was told to end."""
    asked = [one for one in health if one.at + one.seconds < told]
    slow = [one for one in asked if one.seconds > HEALTH_GOAL_S]
    return {
        "requests": len(asked),
        "max_s": round(max((one.seconds for one in asked), default=0.0), 3),
        "p99_ms": round(float(np.percentile([one.seconds for one in asked], 99)) * 1e3, 1) if asked else 0.0,
        "slow": len(slow),
        "not_200": sum(one.status != 200 for one in asked),
        "late_max_s": round(max((one.late_s for one in asked), default=0.0), 3),
    }


def asked_again(server: LiveServer, watch: Watch, console: Console) -> dict[str, Any]:
    """Starts the daemon again, sends the last prompts that it had said it keeps, and looks how much is restored."""
    with step(console, "starting the daemon again"):
        server.start()
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


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what must hold, a row each."""
    alone, beside, health, memory = report["alone"], report["beside"], report["health"], report["memory"]["beside"]
    ratio = beside["ttft_p99_ms"] / alone["ttft_p99_ms"] if alone["ttft_p99_ms"] else float("inf")
    failed = sum(beside["failures"].values()) + sum(alone["failures"].values())
    cut_off = report["kinds"].get(SLOW_READER, {"ends": {}})["ends"].get(CUT_OFF, 0)
    flat_mb = memory["first_third_mb"] * FLAT_GOAL + FLAT_SLACK_BYTES / 1e6
    stop, restored = report["stop"], report["restored"]
    num_lost = len(restored["lost"])
    rows = [
        ("p99 of the first token, beside / alone", f"{ratio:.2f}", f"≤ {TTFT_GOAL}", 0 < ratio <= TTFT_GOAL),
        ("good requests that failed", str(failed), "0", failed == 0),
        ("answers with 500", str(report["failed_answers"]), "0", report["failed_answers"] == 0),
        ("tracebacks in the log", str(len(report["tracebacks"])), "0", not report["tracebacks"]),
        ("slowest /health, s", f"{health['max_s']:.2f}", f"≤ {HEALTH_GOAL_S}", health["max_s"] <= HEALTH_GOAL_S),
        ("answers of /health without 200", str(health["not_200"]), "0", health["not_200"] == 0),
        (
            "most memory, MB",
            f"{memory['max_mb']:.0f}",
            f"≤ {MEMORY_GOAL_BYTES / 1e6:.0f}",
            memory["max_mb"] <= MEMORY_GOAL_BYTES / 1e6,
        ),
        (
            "memory in the last third, median MB",
            f"{memory['last_third_mb']:.0f}",
            f"≤ {flat_mb:.0f}",
            memory["last_third_mb"] <= flat_mb,
        ),
        ("streams of slow readers that were cut off", str(cut_off), "0", cut_off == 0),
        (
            "from SIGTERM to the end, s",
            f"{stop['seconds']:.1f}",
            f"≤ {STOP_GOAL_S:.0f}",
            stop["seconds"] <= STOP_GOAL_S,
        ),
        ("exit code", str(stop["exit_code"]), "0", stop["exit_code"] == 0),
        (
            "saved prompts that are not restored",
            f"{num_lost} of {restored['prompts']}",
            "0",
            not num_lost and restored["prompts"] > 0,
        ),
    ]
    return [{"what": what, "figure": figure, "goal": goal, "holds": holds} for what, figure, goal, holds in rows]


def columns_of(ends: dict[str, int]) -> dict[str, int]:
    """Returns the ends of a kind by the columns of the table."""
    columns = dict.fromkeys(COLUMNS, 0)
    for end, number in ends.items():
        columns[end if end in columns else f"{end[0]}xx"] += number
    return columns


COLUMNS = ("2xx", "4xx", "429", "503", "5xx", HUNG_UP, CLOSED, CUT_OFF)


def show(report: dict[str, Any], console: Console) -> None:
    show_machine(report["machine"], console)
    table = new_table(
        "First token of the good clients",
        left=("",),
        right=("requests", "median ms", "p99 ms", "most ms", "failed", "busy processors"),
    )
    for name in ("alone", "beside"):
        seen = report[name]
        times = (seen["ttft_p50_ms"], seen["ttft_p99_ms"], seen["ttft_max_ms"])
        failed = sum(seen["failures"].values())
        row = (seen["requests"], *times, failed, seen["busy_processors"])
        table.add_row(name, *map(str, row))
    console.print(table)
    say(console, f"What became of the bad ones in {report['minutes']:g} minutes")
    table = new_table("", left=("",), right=("times", *(name.replace(" ", "\n") for name in COLUMNS), "most\ns"))
    for name, kind in report["kinds"].items():
        columns = columns_of(kind["ends"])
        numbers = [str(number or "") for number in columns.values()]
        table.add_row(name, str(sum(columns.values())), *numbers, f"{kind['slowest_s']:.1f}")
    console.print(table)
    for failed in report["first_failed_answers"]:
        say(console, f"{failed['kind']}: {failed['answer'].splitlines()[0]} … {failed['answer'][-300:]}")
    for failure, number in (report["alone"]["failures"] | report["beside"]["failures"]).items():
        say(console, f"a good client, {number} times: {failure}")
    for lost in report["restored"]["lost"]:
        say(console, f"not restored: {json.dumps(lost)}")
    for trace in report["tracebacks"][:_SHOWN_FAILURES]:
        say(console, f"a traceback:\n{trace}")
    for name, memory in report["memory"].items():
        figures_of = ", ".join(f"{key} {value:.0f}" for key, value in memory.items())
        say(console, f"memory {name}: {figures_of}")
    health = report["health"]
    say(
        console,
        f"/health: {health['requests']} requests, p99 {health['p99_ms']} ms, {health['slow']} above the goal; "
        f"its process was late by at most {health['late_max_s']:.2f} s",
    )
    table = new_table(f"Verdicts ({report['reloads']} reloads)", left=("",), right=("measured", "goal", ""))
    for row in report["verdicts"]:
        table.add_row(row["what"], row["figure"], row["goal"], "✓" if row["holds"] else "✗")
    console.print(table)


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
    """Send 56 bad clients to one daemon, and say whether eight good ones notice.

    First the good ones are alone, for a third of the time. The bad ones send what once stopped the daemon, read or
    write slowly, say nothing, or hang up; each kind has an API key of its own, and so has each good client. The daemon
    is told to reload every five seconds. In the middle of it all, it is told to end, and started again: what it had
    said it keeps of the good ones' prompts must be restored. Exits with 1 if a verdict does not hold.
    """
    console = Console(stderr=True)
    run = Run(minutes=minutes, good=good, kinds=chosen_kinds(bad, only), think_s=think, prompt_chars=prompt_chars)
    with measuring(folder, console) as workspace:
        keys = write_keys(workspace / "keys", good, run.kinds)
        flags = ["--disk-prefix-cache", SCOPE, "--kv-memory", str(KV_MEMORY), "--api-keys", str(keys)]
        flags += ["--model", model] if model else []
        with LiveServer(kv_cache_dir=workspace / "kv", log_path=workspace / "server.log", flags=tuple(flags)) as server:
            with step(console, "starting the daemon"):
                server.start()
            report = measure(server, run, console)
    report["verdicts"] = verdicts(report)
    print_report(report, as_json, show)
    sys.exit(0 if all(row["holds"] for row in report["verdicts"]) else 1)
