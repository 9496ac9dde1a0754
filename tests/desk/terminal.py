"""A command at a terminal of its own, as a person sits at it."""

from __future__ import annotations

import os
import pty
import select
import sys
import time

_SILENT_S = 120.0


class Terminal:
    """Runs `diskprefix` with a pseudo-terminal as its input, output and errors. `shown`: what it printed until now."""

    def __init__(self, *args: str) -> None:
        self.shown = ""
        self._exit_code: int | None = None
        self._pid, self._fd = pty.fork()
        if not self._pid:
            environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
            os.execve(sys.executable, [sys.executable, "-m", "diskprefix", *args], environment)

    def wait_for(self, text: str) -> None:
        """Until `text` is on the screen; fails if the command ends without it, or shows other text for too long."""
        deadline = time.monotonic() + _SILENT_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} does not come:\n{self.shown}"
            assert self._read(), f"it ended without {text!r}:\n{self.shown}"

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def interrupt(self) -> int:
        """Ctrl-C, again until it ends: Python misses a signal that comes after a prompt and before the reading of the
        answer. Answers its exit code."""
        while True:
            self.type("\x03")
            while select.select([self._fd], [], [], 0.5)[0]:
                if not self._read():
                    return self._ended()

    def wait(self) -> int:
        """Until it ends. Answers its exit code."""
        while self._read():
            pass
        return self._ended()

    def _ended(self) -> int:
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self) -> bool:
        assert select.select([self._fd], [], [], _SILENT_S)[0], f"nothing more is shown:\n{self.shown}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:
            # The other end is closed: this is how a pseudo-terminal says it.
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)
