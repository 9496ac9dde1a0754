"""Tries constraints: compiles each constraint in another process first, within limits of time and memory.

llguidance limits the time of each mask, but not the time of a compilation, for example if it must prove that patterns
are disjoint. A compilation cannot be interrupted, and a thread cannot be killed. So the engine compiles a constraint
only after a trial has succeeded. A small server holds the tokenizer and forks for each trial. The kernel ends a trial
that exceeds its limits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diskprefix.daemon.engine.constraints.constraint_grammar import excess_of, explained, loosened, reason_against
from diskprefix.daemon.engine.constraints.kept_schema import Loosened
from diskprefix.daemon.engine.request import Constraint
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.fair_cache import FairCache
from diskprefix.values import NO_ASKER, Asker, Tenant

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("diskprefix")

_MAX_CPU_S, _EXPLAINING_CPU_S = 3, 1
"""The limits for the processor seconds of a compilation, and of finding the place of an error."""
_MAX_WALL_S = 20
"""The limit for the seconds of both together, even on a busy machine."""
_MAX_BYTES = 512 << 20
"""The bytes of memory that a trial may allocate."""
_MAX_KNOWN = 32
"""The maximum number of answers that are remembered."""
_LENGTH_BYTES = 8
_SERVER = "import sys; from diskprefix.daemon.engine.constraints.trial import serve; serve(int(sys.argv[1]))"
_ATTEMPTS = 2
_DYING_S = 5.0
_IDLE_S = 60.0
"""The server, which takes 150 MB of memory, ends after this many seconds without a trial."""
_PATIENCE_S = 60.0
"""The limit for the seconds that the server takes to start. A trial ends much sooner."""


class TokenizerText(NamedTuple):
    """The arguments of an `LLTokenizer`: the text of a `tokenizer.json`, the number of tokens, and the end tokens."""

    text: str
    num_tokens: int
    eos: list[int] | None


class Trials:
    """Tries constraints. The server starts with the first trial. For any thread. `close` ends running trials."""

    def __init__(self, tokenizer: Callable[[], TokenizerText]) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._known = FairCache[tuple[Tenant, bytes], dict[str, Any]](_MAX_KNOWN)
        """The answers by tenant and digest of the question. They are not shared between tenants, because the time of an
        answer would show that another tenant has asked the same question."""

    def run(
        self,
        constraint: Constraint,
        param: str,
        parts: Mapping[str, str],
        strict: Collection[str],
        asker: Asker = NO_ASKER,
    ) -> dict[str, Loosened]:
        """Tries a constraint that is made of the schemas in `parts`. Returns {} if it can be compiled. If some of the
        schemas cannot be compiled, returns loosened forms of these by their keys, so that the caller can make another
        constraint.

        Raises `InvalidRequest` for a constraint that cannot be compiled within the limits. The error names a path below
        `param` or, if the part at fault is among `strict`, below the key of this part. Raises `DiskPrefixError` if no
        trial is possible.
        """
        question = {"kind": constraint.kind, "source": constraint.source, "param": param, "parts": dict(parts)}
        question["strict"] = list(strict)
        asked = json.dumps(question).encode()
        key = asker.tenant, hashlib.blake2b(asked).digest()
        began, last = time.monotonic(), self._known.get(key)
        if last is None:
            if not (answers := self._ask(asked)):
                message = "the process that compiles constraints did not answer; the daemon's log may say why"
                raise DiskPrefixError(message)
            last = json.loads(answers[-1])
        if "failed" not in last and time.monotonic() - began < _MAX_WALL_S:
            # An agent sends its tools again and again. An answer that took the whole time is not kept: the next trial
            # may succeed when the machine is less busy.
            self._known.put(key, last, asker.share)
        if "error" in last:
            raise InvalidRequest(last["error"], param=last["param"])
        if "failed" in last:
            raise DiskPrefixError(f"the constraint could not be tried: {last['failed']}")
        if "compiled" not in last:
            message = f"is too complex to be compiled: it takes more than {_MAX_CPU_S} s or {_MAX_BYTES >> 20} MiB"
            raise InvalidRequest(f"{param}: {message}", param=param, code="constraint_too_complex")
        return {path: Loosened(*fields) for path, fields in last["compiled"].items()}

    def start(self) -> None:
        """Starts the server unless it is running. The server ends after a minute without a trial."""
        with self._lock:
            if not self._is_closed and (self._server is None or self._server.poll() is not None):
                self._end_server()
                self._start_server()

    def close(self) -> None:
        """Ends the server and its trials."""
        with self._lock:
            self._is_closed = True
            self._end_server()

    def _ask(self, question: bytes) -> list[bytes]:
        """Returns the lines of the answer; [] if there is none."""
        for _ in range(_ATTEMPTS):
            ours, theirs = socket.socketpair()
            with ours:
                ours.settimeout(_PATIENCE_S)
                with theirs:
                    if not self._hand_over(theirs):
                        continue
                # The server does not answer an incomplete question.
                with suppress(OSError):
                    ours.sendall(question)
                    ours.shutdown(socket.SHUT_WR)
                answer = bytearray()
                with suppress(OSError):
                    # Bound: the time and the memory of a trial.
                    while piece := ours.recv(1 << 16):
                        answer += piece
                if answer:
                    return bytes(answer).splitlines()
            # A server that has closed its sockets is about to end. The next attempt starts another one.
            with self._lock, suppress(subprocess.TimeoutExpired):
                if self._server is not None:
                    self._server.wait(_DYING_S)
        return []

    def _hand_over(self, theirs: socket.socket) -> bool:
        """Passes a socket to the server, which is started if it is not running. Returns True if the server took the
        socket."""
        self.start()
        with self._lock:
            if self._control is None:
                return False
            try:
                socket.send_fds(self._control, [b"t"], [theirs.fileno()])
            except OSError:
                self._end_server()
                return False
            return True

    def _start_server(self) -> None:
        tokenizer = self._tokenizer()
        self._control, theirs = socket.socketpair()
        # A time limit, because `close` waits for the lock that is held here.
        self._control.settimeout(_PATIENCE_S)
        with theirs:
            # The server has its own process group, so that its trials end with it.
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        data = json.dumps(tokenizer).encode()
        with suppress(OSError):
            self._control.sendall(len(data).to_bytes(_LENGTH_BYTES) + data)

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if server is None:
            return
        if server.poll() and not self._is_closed:
            log.warning("[engine] the process that compiles constraints ended with code %s", server.returncode)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


# The process of the server, and a trial in a fork of it.


def serve(control_fd: int) -> None:
    """Forks a trial for each socket that arrives, until the other side is closed or no socket has come for a minute."""
    from llguidance import LLTokenizer

    # The engine has priority: see `server.threads`.
    with suppress(OSError):
        os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The exit codes of trials are not used.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=control_fd) as control:
        num_bytes = int.from_bytes(_receive_exactly(control, _LENGTH_BYTES))
        text, num_tokens, eos = json.loads(_receive_exactly(control, num_bytes))
        tokenizer = LLTokenizer(text, n_vocab=num_tokens, eos_token=eos)
        control.settimeout(_IDLE_S)
        # Bound: the life of the daemon. Its end of the socket closes with it.
        while True:
            try:
                _, fds, _, _ = socket.recv_fds(control, 1, 1)
            except TimeoutError:
                return
            if not fds:
                return
            if os.fork() == 0:
                control.close()
                _try_alone(tokenizer, fds[0])
            os.close(fds[0])


def _receive_exactly(control: socket.socket, num_bytes: int) -> bytes:
    data = control.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise SystemExit
    return data


def _try_alone(tokenizer: LLTokenizer, fd: int) -> None:
    """Runs one trial, and ends the process."""
    try:
        # Hides the message of a Rust panic.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_REAL, _MAX_WALL_S)
        _limit_memory()
        with socket.socket(fileno=fd) as channel, channel.makefile("rwb") as stream:
            # A first line, because an answer without any line means that there is no server.
            _send(stream, {})
            try:
                _try(tokenizer, json.loads(stream.read()), stream)
            except MemoryError:
                pass
            except Exception as error:  # noqa: BLE001 (the other side raises it)
                _send(stream, {"failed": repr(error)})
    finally:
        os._exit(0)


def _send(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


def _limit_memory() -> None:
    """Makes allocations fail beyond `_MAX_BYTES` from now on. Without /proc there is no limit."""
    with suppress(OSError):
        own_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own_bytes + _MAX_BYTES,) * 2)


def _limit_cpu(seconds: int) -> None:
    """Has the kernel, which counts whole seconds, end this process after `seconds` of processor time from now on, or up
    to one more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + seconds, hard))


def _try(tokenizer: LLTokenizer, question: dict[str, Any], stream: Any) -> None:
    constraint, param = Constraint(kind=question["kind"], source=question["source"]), question["param"]
    _limit_cpu(_MAX_CPU_S)
    try:
        for path in question["strict"]:
            part = Constraint(kind="json_schema", source=question["parts"][path])
            if reason := reason_against(tokenizer, part, path):
                raise explained(tokenizer, part, path, reason)
        parts = question["parts"].items()
        # Such a schema is not compiled: that would take too long, or the grammar would not guarantee the schema.
        reason = next((excess for _, schema in parts if (excess := excess_of(schema))), "")
        if not (reason or (reason := reason_against(tokenizer, constraint, param))):
            _send(stream, {"compiled": {}})
            return
        # The last line counts: a better answer may follow within the time limit.
        _send(stream, {"error": f"{param}: {reason}", "param": param})
        _limit_cpu(_EXPLAINING_CPU_S)
        schemas = {path: loosened(tokenizer, schema) for path, schema in parts}
        if not (changed := {path: schema for path, schema in schemas.items() if schema.left_out}):
            raise explained(tokenizer, constraint, param, reason)
        _send(stream, {"compiled": changed})
    except InvalidRequest as error:
        _send(stream, {"error": error.message, "param": error.param})
