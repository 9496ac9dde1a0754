"""The other side of `trial.py`: the server that forks, and a trial. It imports no torch."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from diskprefix.engine.constraint_grammar import explained, lark_of, reason_against
from diskprefix.engine.request import Constraint
from diskprefix.errors import InvalidRequest

MOST_CPU_S, _EXPLAINING_CPU_S = 3, 1
"""Processor time for a compilation, and for finding the place of an error."""
_MOST_WALL_S = 20
"""For both, however busy the machine is."""
MOST_BYTES = 512 << 20
_LENGTH_BYTES = 8


def send_tokenizer(control: socket.socket, text: str, num_tokens: int, eos: list[int] | None) -> None:
    """Sends what the server makes its tokenizer of."""
    data = json.dumps([text, num_tokens, eos]).encode()
    control.sendall(len(data).to_bytes(_LENGTH_BYTES) + data)


def serve(control_fd: int) -> None:
    """Forks for each socket that comes, until the other side is gone."""
    # The engine goes first: see `server.threads`.
    with suppress(OSError):
        os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nobody waits for a trial's exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=control_fd) as control:
        num_bytes = int.from_bytes(_received(control, _LENGTH_BYTES))
        text, num_tokens, eos = json.loads(_received(control, num_bytes))
        tokenizer = LLTokenizer(text, n_vocab=num_tokens, eos_token=eos)
        while True:
            _, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not fds:
                return
            if os.fork() == 0:
                control.close()
                _try_alone(tokenizer, fds[0])
            os.close(fds[0])


def _received(control: socket.socket, num_bytes: int) -> bytes:
    data = control.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise SystemExit
    return data


def _try_alone(tokenizer: LLTokenizer, fd: int) -> None:
    """Runs one trial, and ends the process."""
    try:
        # What Rust says when it gives up concerns nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_REAL, _MOST_WALL_S)
        _limit_memory()
        with socket.socket(fileno=fd) as channel, channel.makefile("rwb") as stream:
            # Without a line, there is no server.
            _tell(stream, {})
            try:
                _try(tokenizer, json.loads(stream.read()), stream)
            except MemoryError:
                pass
            except Exception as error:  # noqa: BLE001 (the other side tells it)
                _tell(stream, {"failed": repr(error)})
    finally:
        os._exit(0)


def _tell(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


def _limit_memory() -> None:
    """Has allocations fail beyond `MOST_BYTES` from now on. On systems without /proc there is no limit."""
    with suppress(OSError):
        own_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own_bytes + MOST_BYTES,) * 2)


def _limit_cpu(seconds: int) -> None:
    """Has the kernel end this process when it has computed for so long from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, hard))


def _try(tokenizer: LLTokenizer, question: dict[str, Any], stream: Any) -> None:
    constraint, param = Constraint(kind=question["kind"], source=question["source"]), question["param"]
    _limit_cpu(MOST_CPU_S)
    try:
        if not (reason := reason_against(tokenizer, constraint, param)):
            _tell(stream, {"grammar": lark_of(constraint)})
            return
        # This is the answer, unless a better one is found in time.
        _tell(stream, {"error": f"{param}: {reason}", "param": param})
        _limit_cpu(_EXPLAINING_CPU_S)
        for path, schema in question["parts"].items():
            part = Constraint(kind="json_schema", source=schema)
            if of_part := reason_against(tokenizer, part, path):
                raise explained(part, path, of_part)
        raise explained(constraint, param, reason)
    except InvalidRequest as error:
        _tell(stream, {"error": error.message, "param": error.param})
