"""Whether a constraint can be compiled within limits of time and memory: tried in a process that the kernel ends.

llguidance has bounds of its own for each step, but none for what a schema costs to be compiled: patterns whose
disjointness is proven, say, or an `allOf` of them. Such a call cannot be interrupted, and a thread cannot be killed.
So it is made in another process first, and here only if it went well there. A small server holds the tokenizer and
forks for each trial; a trial that exceeds its limits ends alone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from diskprefix.engine.request import Constraint
from diskprefix.engine.trial_process import MOST_BYTES, MOST_CPU_S, send_tokenizer
from diskprefix.errors import DiskPrefixError, InvalidRequest

log = logging.getLogger("diskprefix")

_SERVER = "import sys; from diskprefix.engine.trial_process import serve; serve(int(sys.argv[1]))"
_ATTEMPTS = 2
_DYING_S = 5.0
_PATIENCE_S = 60.0
"""For a server that starts. A trial ends itself much sooner."""


class TokenizerText(NamedTuple):
    """What an `LLTokenizer` is made of: the text of a `tokenizer.json`, the number of tokens, and those that end."""

    text: str
    num_tokens: int
    eos: list[int] | None


class Trials:
    """Tries constraints. The server starts with the first one. For any thread; `close` ends what still runs."""

    def __init__(self, tokenizer: Callable[[], TokenizerText]) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def run(self, constraint: Constraint, param: str, parts: Mapping[str, str]) -> str | None:
        """Returns the grammar in Lark if the constraint had another syntax, else None.

        Raises `InvalidRequest`, with a path below `param`, for what cannot be compiled, or not within the limits. If it
        is one of the schemas in `parts`, the path is below its key. Raises `DiskPrefixError` if nothing can be tried.
        """
        question = {"kind": constraint.kind, "source": constraint.source, "param": param, "parts": dict(parts)}
        answers = self._ask(json.dumps(question).encode())
        if not answers:
            raise DiskPrefixError("the process that compiles constraints did not answer; the daemon's log may say why")
        last = json.loads(answers[-1])
        if "error" in last:
            raise InvalidRequest(last["error"], param=last["param"])
        if "failed" in last:
            raise DiskPrefixError(f"the constraint could not be tried: {last['failed']}")
        if "grammar" not in last:
            raise InvalidRequest(
                f"{param}: is too complex to be compiled: it takes more than {MOST_CPU_S} s or {MOST_BYTES >> 20} MiB",
                param=param,
                code="constraint_too_complex",
            )
        grammar: str | None = last["grammar"]
        return grammar

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
                # What does not arrive whole is not answered.
                with suppress(OSError):
                    ours.sendall(question)
                    ours.shutdown(socket.SHUT_WR)
                if answer := _received(ours):
                    return answer.splitlines()
            self._wait_for_death()
        return []

    def _wait_for_death(self) -> None:
        """Returns when a server that has closed its sockets has ended, so that another is started."""
        with self._lock, suppress(subprocess.TimeoutExpired):
            if self._server is not None:
                self._server.wait(_DYING_S)

    def _hand_over(self, theirs: socket.socket) -> bool:
        """Gives a socket to the server, which is started if there is none. Returns whether it took it."""
        with self._lock:
            if self._is_closed:
                return False
            if self._server is None or self._server.poll() is not None:
                self._end_server()
                self._start_server()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"t"], [theirs.fileno()])
            except OSError:
                self._end_server()
                return False
            return True

    def _start_server(self) -> None:
        tokenizer = self._tokenizer()
        self._control, theirs = socket.socketpair()
        # `close` waits for the lock that is held here.
        self._control.settimeout(_PATIENCE_S)
        with theirs:
            # A group of its own, so that its trials end with it.
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        with suppress(OSError):
            send_tokenizer(self._control, *tokenizer)

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if server is None:
            return
        if server.poll() is not None and not self._is_closed:
            log.warning("[engine] the process that compiles constraints ended with code %s", server.returncode)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _received(channel: socket.socket) -> bytes:
    data = bytearray()
    with suppress(OSError):
        while piece := channel.recv(1 << 16):
            data += piece
    return bytes(data)
