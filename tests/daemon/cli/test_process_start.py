"""A process that somebody starts with files closed or signals blocked, or with variables of other programs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.daemon.server.daemon_process import START_TIMEOUT_S, clean_environment, free_port, serve_flags, wait_until

OPENS = """
import os, signal, socket, sys
from diskprefix.daemon.cli.process_start import begin
begin()
print("out", flush=True)
print("err", file=sys.stderr, flush=True)
with socket.socket() as opened:
    first = opened.fileno()
std = [os.get_inheritable(number) for number in (0, 1, 2)]
os.write({answer}, repr((first, sys.stdin.read(), std, sorted(map(int, signal.pthread_sigmask(0, []))))).encode())
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_files_that_are_closed_are_opened_before_a_socket_gets_their_number(closed: tuple[int, ...]) -> None:
    answer, written = os.pipe()

    def close() -> None:
        for number in closed:
            os.close(number)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})

    done = subprocess.run(
        [sys.executable, "-c", OPENS.format(answer=written)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        pass_fds=[written],
        preexec_fn=close,
        env=clean_environment(),
    )
    os.close(written)
    with os.fdopen(answer) as answers:
        said = answers.read()
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(r"\((\d+), '', \[True, True, True\], (\[.*\])\)", said)
    assert match is not None, said
    assert int(match[1]) > 2
    # Only what a command handles is unblocked.
    assert match[2] == str([int(signal.SIGUSR1)])
    assert done.stdout == (b"" if 1 in closed else b"out\n")
    assert done.stderr == (b"" if 2 in closed else b"err\n")


@pytest.mark.slow
def test_a_daemon_without_files_and_with_its_signals_blocked_serves_and_ends(chat_model: Path, tmp_path: Path) -> None:
    def prepare() -> None:
        for number in (0, 1, 2):
            os.close(number)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    port = free_port()
    flags = [*serve_flags(chat_model, tmp_path / "kv"), "--port", str(port)]
    command = [sys.executable, "-m", "diskprefix", "serve", *flags]
    process = subprocess.Popen(command, preexec_fn=prepare, env=clean_environment())

    def is_ready() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready, "the daemon is ready", START_TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()


def test_a_variable_that_asks_for_another_binding_of_lmdb_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diskprefix", "inspect", "--kv-cache-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(LMDB_FORCE_CFFI="1"))
    assert done.returncode == 2
    assert re.fullmatch(r"error: LMDB_FORCE_CFFI is set, for which \w*cffi is not installed; unset it\n", done.stderr)
