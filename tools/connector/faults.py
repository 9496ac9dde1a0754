"""Faults of a store under vLLM. Every answer must be the right one."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from diskprefix.progress import Report
from tools.connector.server import Reply, Server, running
from tools.measuring.answers import LiveServerError
from tools.measuring.options import FOLDER
from tools.measuring.prompts import prompt_text
from tools.measuring.workspace import measuring, model_folder

_TOKENS = 700
_DTYPE = "float32"
"""A prompt that is restored is computed in other steps than a cold one, so its numbers are rounded differently. In
float32 that changes no token here."""
_PROMPTS = tuple(prompt_text(_TOKENS, run) for run in range(4))
_LONG_REPLY = 200
_CLOSE = 0.02
"""The difference of log-probabilities that rounding explains."""


@dataclass
class Verdicts:
    """The counts of questions and answers."""

    right: int = 0
    wrong: int = 0
    restored: int = 0
    problems: list[str] = field(default_factory=list)

    def judge(self, reply: Reply, wanted: Reply) -> None:
        near = all(abs(a - b) < _CLOSE for a, b in zip(reply.logprobs, wanted.logprobs, strict=True))
        self.right += reply.tokens == wanted.tokens and near
        self.wrong += not (reply.tokens == wanted.tokens and near)
        self.restored += reply.restored > 0

    def fail(self, problem: str) -> None:
        self.problems.append(problem)


@dataclass(frozen=True)
class Check:
    """One part: vLLMs, one after the other, with one store in `folder`. `wanted` are the replies to `_PROMPTS`."""

    model: Path
    folder: Path
    wanted: Sequence[Reply]
    verdicts: Verdicts
    report: Report

    @property
    def store(self) -> Path:
        return self.folder / "kv"

    def server(self, *arguments: str, dtype: str = _DTYPE, **config: Any) -> AbstractContextManager[Server]:
        """vLLM's own cache is off, so that each prompt asks the store."""
        off = ("--no-enable-prefix-caching", *arguments)
        return running(Server(self.model, self.folder, self.report, dtype=dtype, arguments=off, **config))

    def ask_all(self, server: Server, what: str) -> int:
        """Returns for how many prompts something was restored."""
        before = self.verdicts.restored
        for prompt, reply in zip(_PROMPTS, self.wanted, strict=True):
            self.verdicts.judge(server.ask(prompt), reply)
        restored = self.verdicts.restored - before
        self.report(f"{what}: {restored} of {len(_PROMPTS)} restored; {server.metrics()}")
        return restored

    def expect(self, restored: int, wanted: int, what: str) -> None:
        if restored != wanted:
            self.verdicts.fail(f"{what}: {restored} restored instead of {wanted}")

    def save_all(self) -> None:
        """Fills a new store with all prompts."""
        with self.server() as server:
            self.expect(self.ask_all(server, "new"), 0, "a new store")
            server.settle()


def _deleted(check: Check) -> None:
    """The commands beside it; the store purged, and deleted."""
    record = check.folder / "requests.jsonl"
    with check.server(record=str(record)) as server:
        check.expect(check.ask_all(server, "new"), 0, "a new store")
        server.settle()
        check.expect(check.ask_all(server, "again"), len(_PROMPTS), "the same prompts again")
        _commands(server.store, record, check.verdicts)
        check.expect(check.ask_all(server, "purged beside it"), 0, "after a purge")
        server.settle()
        check.expect(check.ask_all(server, "and saved again"), len(_PROMPTS), "what was saved after a purge")
        shutil.rmtree(server.store)
        check.ask_all(server, "store deleted under it")
        time.sleep(3)
        check.ask_all(server, "a new one in its place")
        server.settle()
        check.expect(check.ask_all(server, "and restored from it"), len(_PROMPTS), "after the store was deleted")


def _other(check: Check) -> None:
    """Another dtype, and other pages."""
    check.save_all()
    with check.server(dtype="bfloat16") as server:
        check.expect(server.ask(_PROMPTS[0]).restored, 0, "another dtype")
        _tells_why(server, "another dtype", check.verdicts)
    with check.server("--block-size", "64") as server:
        check.expect(check.ask_all(server, "other pages"), 0, "other pages")
        _tells_why(server, "other pages", check.verdicts)


def _damaged(check: Check) -> None:
    """Payloads damaged between two vLLMs."""
    check.save_all()
    _flip_bits(check.store / "data.mdb")
    with check.server() as server:
        check.ask_all(server, "damaged payloads")
        if not server.metrics().get("load_errors"):
            check.verdicts.fail("damaged payloads: no load failed")
        server.settle()
        check.expect(check.ask_all(server, "saved anew"), len(_PROMPTS), "what was saved in place of the damaged")
    if found := damage(check.store):
        check.verdicts.fail(f"the store after the damaged was removed: {found}")


def _preempted(check: Check) -> None:
    """So little memory that requests preempt each other, beside requests whose clients hang up."""
    check.save_all()
    with check.server("--num-gpu-blocks-override", "20", "--max-num-seqs", "4") as server:
        with ThreadPoolExecutor(2 * len(_PROMPTS)) as clients:
            leaving = [clients.submit(_hang_up, server, number) for number in range(len(_PROMPTS))]
            asking = [clients.submit(server.ask, prompt, _LONG_REPLY) for prompt in _PROMPTS]
            for reply, expected in zip(asking, check.wanted, strict=True):
                check.verdicts.judge(reply.result().head(len(expected.tokens)), expected)
            for one in leaving:
                one.result()
        preemptions = server.preemptions()
        if not preemptions:
            check.verdicts.fail("no request was preempted")
        check.ask_all(server, f"after {preemptions} preemptions and {len(_PROMPTS)} aborts")


_PARTS = {"deleted": _deleted, "other": _other, "damaged": _damaged, "preempted": _preempted}


@click.command()
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(list(_PARTS)), default=list(_PARTS), show_default=True
)
@FOLDER
def faults(parts: tuple[str, ...], folder: Path | None) -> None:
    """The store deleted, damaged, of another dtype or block size, while and before vLLM uses it; requests that preempt
    each other and whose clients hang up. Each part has a store of its own. Ends with 1 if an answer was wrong."""
    progress, verdicts = Console(stderr=True, highlight=False), Verdicts()
    model = model_folder("smollm2", progress)
    with measuring(folder, progress) as workspace:
        wanted = _wanted(model, workspace, progress.print)
        for part in parts:
            (workspace / part).mkdir()
            _PARTS[part](Check(model, workspace / part, wanted, verdicts, progress.print))
    _end(verdicts)


def _tells_why(server: Server, what: str, verdicts: Verdicts) -> None:
    if not server.metrics().get("misses:other_numbers"):
        verdicts.fail(f"{what}: a miss without its reason")


def _hang_up(server: Server, number: int) -> None:
    """Asks, and hangs up before the reply."""
    with suppress(LiveServerError):
        server.ask(prompt_text(_TOKENS, 50 + number), patience_s=0.2 + 0.5 * number)


def _wanted(model: Path, workspace: Path, report: Report) -> list[Reply]:
    """Returns the replies of vLLM without a connector."""
    plain = workspace / "plain"
    plain.mkdir()
    with running(Server(model, plain, report, "none", dtype=_DTYPE)) as server:
        return [server.ask(prompt) for prompt in _PROMPTS]


def damage(store: Path) -> str:
    """Returns the faults that `diskprefix verify` finds in a store; empty if it is clean."""
    ended = _diskprefix("verify", "--kv-cache-dir", str(store))
    return "" if ended.returncode == 0 else (ended.stdout + ended.stderr).strip()


def _commands(store: Path, record: Path, verdicts: Verdicts) -> None:
    """Runs the commands while vLLM has the store open. The last one removes all."""
    folder = ("--kv-cache-dir", str(store))
    for command in (
        ("inspect", *folder),
        ("verify", *folder),
        ("simulate", str(record)),
        ("purge", "--all", "--yes", *folder),
    ):
        ended = _diskprefix(*command)
        if ended.returncode:
            verdicts.fail(f"diskprefix {command[0]}: {(ended.stdout + ended.stderr).strip()}")


def _diskprefix(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-P", "-m", "diskprefix", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def _flip_bits(file: Path) -> None:
    """Damages payloads: each is far longer than the other records, so random places lie in them."""
    choose = random.Random(3)
    with file.open("r+b") as data:
        size = file.stat().st_size
        for _ in range(20):
            place = choose.randrange(size // 2, size)
            data.seek(place)
            byte = data.read(1)
            data.seek(place)
            data.write(bytes([byte[0] ^ 4]) if byte else b"")


def _end(verdicts: Verdicts) -> None:
    print(verdicts)
    sys.exit(bool(verdicts.wrong or verdicts.problems))
