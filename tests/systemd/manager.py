"""A stand-in for systemd's manager: it holds a port, starts the daemon with it, hears what the daemon says, kills it
when the watchdog is not served, and starts it again."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from diskprefix.cli import main
from tests import forked
from tests.server.daemon_process import clean_environment, wait_until

READY = "READY=1"


class Manager:
    """One service with socket activation, `Type=notify`, `WatchdogSec=` and `Restart=on-failure`.

    `prepare` is called in each process of the service before the command runs.
    """

    def __init__(
        self, arguments: list[str], folder: Path, watchdog_s: float, prepare: Callable[..., None], *values: Path
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self.exit_codes: list[int] = []
        self.log_path = folder / "log"
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._arguments = arguments
        self._prepare, self._values = prepare, values
        self._watchdog_s = watchdog_s
        self._heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._heard.bind(str(folder / "notify"))
        self._heard.settimeout(0.05)
        self._environment = clean_environment(
            NOTIFY_SOCKET=str(folder / "notify"), WATCHDOG_USEC=str(int(watchdog_s * 1e6)), LISTEN_FDS="1"
        )
        self._is_stopping = False
        self._fed_at: float | None = None
        self.process = self._start()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def said(self, name: str) -> list[str]:
        """The values of an assignment, in the order in which they came."""
        return [message[name] for message in self.messages if name in message]

    def wait_for(self, name: str, value: str = "1", count: int = 1) -> None:
        wait_until(lambda: self.said(name).count(value) >= count, f"{name}={value}")

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def reload(self) -> None:
        """As `ExecReload=`."""
        self._signal(signal.SIGHUP)

    def stop(self) -> int:
        """Returns the exit code of the last process."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.close()
        return self.exit_codes[-1]

    def close(self) -> None:
        self._is_stopping = True
        if self.process.is_alive():
            self.process.kill()
        self._thread.join(60)
        self._heard.close()
        self.listener.close()

    def _signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def _start(self) -> BaseProcess:
        return forked.start(
            _serve, self._arguments, self._environment, self.listener, self._prepare, self._values, errors=self.log_path
        )

    def _watch(self) -> None:
        while True:
            self._hear()
            if self._fed_at is not None and time.monotonic() - self._fed_at > self._watchdog_s:
                self._fed_at = None
                self._signal(signal.SIGABRT)
            if self.process.exitcode is not None:
                self.exit_codes.append(self.process.exitcode)
                self._fed_at = None
                if self._is_stopping or self.process.exitcode == 0:
                    self._hear()
                    return
                self.process = self._start()

    def _hear(self) -> None:
        try:
            text = self._heard.recv(65536).decode()
        except TimeoutError:
            return
        message = dict(line.split("=", 1) for line in text.split("\n"))
        self.messages.append(message)
        # systemd waits for the watchdog once the service is ready.
        if "WATCHDOG" in message and READY.partition("=")[0] in {name for past in self.messages for name in past}:
            self._fed_at = time.monotonic()


def _serve(
    arguments: list[str],
    environment: dict[str, str],
    listener: socket.socket,
    prepare: Callable[..., None],
    values: tuple[Path, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment, LISTEN_PID=str(os.getpid()))
    # The first descriptor that systemd passes.
    if listener.fileno() != 3:
        os.dup2(listener.fileno(), 3)
        listener.close()
    else:
        listener.detach()
    prepare(*values)
    main(arguments)
