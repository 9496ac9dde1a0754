"""The hung-disk benchmark: are clients answered beside a disk that stops answering, and does `/health` say so?

The cache folder lies on a file system in user space (`bindfs`, a Debian package), whose process is stopped: from then
on every read, write and look at a file waits, as on a hung network mount or a failing drive. Eight clients hold
conversations meanwhile, whose state is only on the disk when it stops. The same conversations on a disk that answers
are measured first, in the same run.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console

from tools.measuring.answers import LiveServerError, streamed
from tools.measuring.live_server import LiveServer, num_tracebacks, step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import (
    at_most,
    machine,
    new_table,
    none_of,
    print_report,
    show_machine,
    verdict,
    verdict_table,
)
from tools.measuring.workspace import measuring

WAIT_GOAL_S = 10.0
"""The seconds that a hung disk may add to the longest wait of a request, besides the time to compute its prompt."""
WATCHDOG_S = 120.0
"""The limit of the service's watchdog (`WatchdogSec`)."""
STOP_GOAL_S = 90.0
"""The time that the service manager gives a stop (`TimeoutStopSec`)."""
NUM_TURNS, REPLY_TOKENS, THINK_S = 3, 8, 1.0
SYSTEM = " ".join(f"Rule {number}: answer briefly, and name the file and the line." for number in range(60))


class StoppableDisk:
    """A folder whose file system can stop answering."""

    def __init__(self, real: Path, mounted: Path) -> None:
        """Raises `LiveServerError` if it cannot be mounted."""
        self.mounted = mounted
        for folder in (real, mounted):
            folder.mkdir(mode=0o700)
        if shutil.which("bindfs") is None:
            raise LiveServerError("bindfs is not installed; Debian has it in the package bindfs")
        self._process = subprocess.Popen(
            ["bindfs", "-f", str(real), str(mounted)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 10
        while not os.path.ismount(mounted):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self._process.stderr.read() if self._process.poll() is not None and self._process.stderr else ""
                raise LiveServerError(f"bindfs does not mount a folder here: {said.strip()[:300]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.answer()
        subprocess.run(["fusermount", "-u", "-z", str(self.mounted)], check=False, capture_output=True)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()


def drop_cached_pages() -> None:
    """Has the kernel forget what it read, so that the disk is asked. Raises `LiveServerError` without the rights."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError as error:
        raise LiveServerError("the kernel's cached pages can be dropped by root alone; run this as root") from error


class Watchdog:
    """The service manager's end of `NOTIFY_SOCKET`: notes when the daemon said that it is alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.beats: list[float] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            if b"WATCHDOG=1" in self._socket.recv(4096):
                self.beats.append(time.monotonic())

    def longest_gap_s(self, since: float, until: float) -> float:
        times = [since, *(beat for beat in self.beats if since < beat < until), until]
        return max(after - before for before, after in pairwise(times))


@dataclass
class Phase:
    """The observations of the clients. Times are the client's seconds to the first token."""

    waits_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    restored: int = 0

    def figures(self) -> dict[str, Any]:
        waits = sorted(self.waits_s) or [0.0]
        return {
            "requests": len(self.waits_s),
            "failures": len(self.failures),
            "wait_median_s": round(waits[len(waits) // 2], 3),
            "wait_max_s": round(waits[-1], 3),
            "restored_tokens": self.restored,
        }


@dataclass
class Client:
    """One agent: a long system prompt of its own, a growing conversation, and a pause between turns."""

    number: int
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [
            {"role": "system", "content": f"You are agent {self.number}. {SYSTEM}"},
            {"role": "user", "content": "What does a.py print?"},
        ]

    def turn(self, server: LiveServer, client: httpx.Client, phase: Phase, scope: str) -> None:
        """Asks the next question. A failure is noted, and asked again."""
        try:
            body = {"messages": self.messages, "prefix_cache": {"scope": scope}}
            answer = streamed(client, f"http://127.0.0.1:{server.port}/v1/chat/completions", body, REPLY_TOKENS)
        except (LiveServerError, httpx.HTTPError) as error:
            phase.failures.append(str(error) or type(error).__name__)
            return
        phase.waits_s.append(answer.ttft_s)
        phase.restored += answer.restored
        self.messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"And b{len(self.messages)}.py?"},
        ]


def hold_conversations(
    server: LiveServer, clients: Sequence[Client], goes_on: Callable[[int], bool], scope: str = "full"
) -> Phase:
    """Has all clients talk at once: each asks its n-th question while `goes_on(n)`."""
    phase = Phase()

    def talk(caller: Client) -> None:
        turn = 0
        with httpx.Client(timeout=600.0) as client:
            while goes_on(turn):
                caller.turn(server, client, phase, scope)
                turn += 1
                time.sleep(THINK_S)

    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(talk, clients))
    return phase


@dataclass
class Health:
    """The answers of `/health`, one each second."""

    said: list[tuple[float, int, str]] = field(default_factory=list)

    def poll(self, server: LiveServer, is_over: threading.Event) -> None:
        with httpx.Client(timeout=30.0, headers=server.token) as client:
            while not is_over.wait(1.0):
                began = time.monotonic()
                answer = client.get(f"http://127.0.0.1:{server.port}/health")
                cache = answer.json().get("cache") or {}
                self.said.append((began, answer.status_code, str(cache.get("error"))))


@contextmanager
def polled(server: LiveServer) -> Iterator[Health]:
    health, is_over = Health(), threading.Event()
    thread = threading.Thread(target=health.poll, args=(server, is_over))
    thread.start()
    try:
        yield health
    finally:
        is_over.set()
        thread.join()


def restarted(server: LiveServer) -> None:
    """Kills the daemon and starts it again, with nothing of its file in memory."""
    server.wait_until_saved()
    server.kill()
    drop_cached_pages()
    server.start()


def stopped_beside(server: LiveServer, disk: StoppableDisk) -> tuple[float, int | None]:
    """Stops the daemon while the disk hangs. Returns the seconds until it said that it has stopped, and the exit code.

    The kernel lets no process end whose files lie on such a file system before that answers.
    """
    disk.stop()
    began, seconds = time.perf_counter(), 2 * STOP_GOAL_S
    os.kill(server.process_id, signal.SIGTERM)
    try:
        while time.perf_counter() - began < seconds:
            if server.log_path.read_text(encoding="utf-8", errors="replace").rstrip().endswith(" stopped"):
                seconds = time.perf_counter() - began
                break
            time.sleep(0.1)
    finally:
        disk.answer()
    return seconds, server.exit_code(STOP_GOAL_S)


def run_phases(
    server: LiveServer, disk: StoppableDisk, watchdog: Watchdog, num_clients: int, hung_s: float
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Returns the figures of each phase, and the verdicts."""
    phases = dict[str, Phase]()
    began = stopped = time.monotonic()
    clients = [Client(number) for number in range(num_clients)]
    hold_conversations(server, clients, lambda turn: turn < NUM_TURNS)
    restarted(server)
    with polled(server):
        deadline = time.monotonic() + hung_s
        phases["the disk answers"] = hold_conversations(server, clients, lambda _: time.monotonic() < deadline)
    # For comparison: clients for which nothing is restored, as if nothing could be read.
    phases["nothing is restored"] = hold_conversations(server, clients, lambda turn: turn < 1, "off")
    restarted(server)
    with polled(server) as health:
        began = time.monotonic()
        disk.stop()
        try:
            phases["it hangs"] = hold_conversations(server, clients, lambda _: time.monotonic() < began + hung_s)
        finally:
            disk.answer()
        stopped = time.monotonic()
        phases["it answers again"] = hold_conversations(server, clients, lambda turn: turn < NUM_TURNS)
        time.sleep(3.0)
    named = [at - began for at, _, error in health.said if str(disk.mounted) in error and at < stopped]
    last = health.said[-1]
    hung, alone = phases["it hangs"], phases["nothing is restored"]
    stop_s, code = stopped_beside(server, disk)
    added_s = max(hung.waits_s, default=0.0) - max(alone.waits_s, default=0.0)
    verdicts = [
        none_of("requests without an answer", len(hung.failures) + len(phases["it answers again"].failures)),
        at_most("the longest wait, more than where nothing is restored, s", added_s, WAIT_GOAL_S),
        verdict(
            "/health names the disk",
            f"after {named[0]:.0f} s" if named else "never",
            "before it answers",
            bool(named) and all(status == 200 for _, status, _ in health.said),
        ),
        verdict("/health afterwards", last[2], "None", last[2] == "None"),
        at_most("longest silence for the watchdog, s", watchdog.longest_gap_s(began, stopped), WATCHDOG_S),
        at_most("a stop while the disk hangs, s", stop_s, STOP_GOAL_S),
        verdict("its exit code", str(code), "0", code == 0),
    ]
    return {name: phase.figures() for name, phase in phases.items()}, verdicts


@click.command()
@click.option("--clients", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(20.0, 600.0),
    default=60.0,
    show_default=True,
    help="Seconds for which the disk hangs.",
)
@click.option("--model", help="A model to serve in place of the embedded one.")
@FOLDER
@JSON
def main(clients: int, seconds: float, model: str | None, folder: Path | None, as_json: bool) -> None:
    """Stop the disk of the cache for a minute beside clients in conversations.

    Needs root and bindfs. Exits with 1 if a goal is missed.
    """
    progress = Console(stderr=True)
    facts = machine()
    with measuring(folder, progress) as workspace:
        disk = StoppableDisk(workspace / "real", workspace / "mounted")
        try:
            watchdog = Watchdog(workspace / "notify")
            server = LiveServer(
                kv_cache_dir=disk.mounted / "kv",
                log_path=workspace / "server.log",
                flags=() if model is None else ("--model", model),
                environment={"NOTIFY_SOCKET": str(watchdog.path), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))},
            )
            with server, step(progress, f"{clients} clients, a disk that hangs for {seconds:.0f} s") as note:
                server.start(note)
                figures, verdicts = run_phases(server, disk, watchdog, clients, seconds)
            verdicts.append(none_of("tracebacks in the log", num_tracebacks(workspace / "server.log")))
        finally:
            disk.close()
    print_report({"machine": facts, "phases": figures, "verdicts": verdicts}, as_json, _show)
    sys.exit(0 if all(row["holds"] for row in verdicts) else 1)


def _show(report: dict[str, Any], console: Console) -> None:
    show_machine(report["machine"], console)
    table = new_table("Clients", left=("phase",), right=tuple(next(iter(report["phases"].values()))))
    for name, row in report["phases"].items():
        table.add_row(name, *map(str, row.values()))
    console.print(table)
    console.print(verdict_table("A disk that hangs", report["verdicts"]))


if __name__ == "__main__":
    main()
