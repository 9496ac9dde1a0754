"""Processes that start at once: forks of a process that has imported torch and transformers and done nothing else.

These imports take seconds, and many tests need a process of its own: to kill it, or to see what the next one finds. A
fork has no memory in common with any other process. Tests of the start itself use a fresh interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "transformers",
        "transformers.models.llama.modeling_llama",
        "diskprefix.daemon.app",
        "diskprefix.daemon.server.process.process",
    ]
)


def start(work: Callable[..., Any], *arguments: Any, errors: Path | None = None) -> BaseProcess:
    """Starts `work(*arguments)` in a fork, which ends with this process at the latest.

    What it writes to standard error goes to the file `errors` if one is given.
    """
    _start_server()
    process = _context.Process(target=_work, args=(work, arguments, errors), daemon=True)
    process.start()
    return process


@cache
def _start_server() -> None:
    """Starts the process that is forked. Its libraries read these variables when they are imported, not later."""
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _work(work: Callable[..., Any], arguments: tuple[Any, ...], errors: Path | None) -> None:
    if errors is not None:
        with errors.open("wb") as file:
            _write_errors_to(file.fileno())
    work(*arguments)


def _write_errors_to(descriptor: int) -> None:
    """Python's own object still writes to the standard error of the process that was forked."""
    os.dup2(descriptor, 2)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 (open to the end)


def run(work: Callable[..., Any], *arguments: Any, timeout_s: float = 300) -> int:
    process = start(work, *arguments)
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"{work.__qualname__} did not end within {timeout_s} s")
    return process.exitcode


class ForkedCommand:
    """`python -m MODULE` with arguments in a fork, with the part of the interface of `subprocess.Popen` that tests use.

    `stderr` gives what the command and its children write to it, until the last of them has ended.
    """

    def __init__(self, arguments: list[str], environment: Mapping[str, str], module: str = "diskprefix") -> None:
        reader, writer = _context.Pipe(duplex=False)
        self._process = start(_run_command, module, arguments, dict(environment), writer)
        writer.close()
        self.stderr: TextIO | None = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")
        reader.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("diskprefix", timeout_s or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_command(module: str, arguments: list[str], environment: dict[str, str], errors: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("default")
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    _write_errors_to(errors.fileno())
    errors.close()
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (open to the end)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
