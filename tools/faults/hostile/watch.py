"""The observations while good and bad clients use a daemon: theirs, and the memory and time of its processes."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.faults.hostile.crowd import Attacked, Health, Seen, Turn
from tools.measuring.live_server import LiveServer, LiveServerError
from tools.measuring.processes import status_bytes

RELOAD_EVERY_S, MEMORY_EVERY_S, TELL_EVERY_S = 5.0, 1.0, 10.0
NUM_LAST_TURNS = 3
"""Turns of each good client that are kept, to ask them again after the restart."""
NUM_SHOWN_FAILURES = 20


@dataclass
class Kind:
    """The ends of the connections of one kind of bad client."""

    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


@dataclass
class Phase:
    """The observations of a span of time. Times to the first token are in seconds, of the client."""

    ttft_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, float]] = field(default_factory=list)
    busy_s: float = 0.0
    """Seconds of all processors that the daemon used."""
    seconds: float = 0.0


@dataclass
class Watch:
    """Reads the observations of the clients and the daemon's memory, and prints a line every ten seconds."""

    server: LiveServer
    seen: Any
    tell: Callable[[str], None]
    kinds: dict[str, Kind] = field(default_factory=dict)
    failed_answers: list[dict[str, Any]] = field(default_factory=list)
    num_failed_answers: int = 0
    health: list[Health] = field(default_factory=list)
    acknowledged: dict[int, list[Turn]] = field(default_factory=dict)
    """The last turns of each good client that the daemon has saved, as it says."""
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
                self.acknowledged[seen.client] = [*kept, seen][-NUM_LAST_TURNS:]
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
            if len(self.failed_answers) < NUM_SHOWN_FAILURES:
                answer = seen.end.answer.decode(errors="replace")
                self.failed_answers.append({"kind": seen.kind, "answer": answer})
                self.tell(f"{seen.kind} got a {seen.end.how}: {answer[-300:]}")

    def _line(self, phase: Phase) -> str:
        times = figures(phase)
        last, slowest_s = phase.memory[-1], max((one.seconds for one in self.health), default=0.0)
        return (
            f"good {times['requests']}, first token {times['ttft_p50_ms']:.0f} ms, p99 {times['ttft_p99_ms']:.0f} ms, "
            f"{sum(phase.failures.values())} failed; bad {sum(kind.ends.total() for kind in self.kinds.values())}, "
            f"{self.num_failed_answers} of 500; /health at most {slowest_s:.2f} s; "
            f"memory {last['own_mb']:.0f} MB, with files {last['resident_mb']:.0f} MB"
        )


def figures(phase: Phase) -> dict[str, Any]:
    quantiles = np.percentile(phase.ttft_s, [50, 99, 100]) * 1e3 if phase.ttft_s else (0.0, 0.0, 0.0)
    names = ("ttft_p50_ms", "ttft_p99_ms", "ttft_max_ms")
    return {
        "requests": len(phase.ttft_s),
        **{name: round(float(value), 1) for name, value in zip(names, quantiles, strict=True)},
        "failures": dict(phase.failures),
        "busy_processors": round(phase.busy_s / phase.seconds, 2) if phase.seconds else 0.0,
    }


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
    """Returns megabytes of all processes: `own` leaves out pages of files, such as the store and the weights."""
    processes = list(_processes(process_id))
    own = sum(status_bytes(process, "RssAnon", "RssShmem") for process in processes)
    files = sum(status_bytes(process, "RssFile") for process in processes)
    return {"own_mb": round(own / 1e6, 1), "resident_mb": round((own + files) / 1e6, 1)}


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
